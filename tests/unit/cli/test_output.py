import pytest

from snapshotter.cli import output
from snapshotter.service.control import Progress


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 << 20, "3.0 MiB"),
        (5 << 40, "5.0 TiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_sizes(size_bytes: int, text: str) -> None:
    assert output.size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("age_s", "text"), [(-5, "0s"), (59, "59s"), (60, "1m"), (7200, "2h"), (86_400 * 3, "3d")]
)
def test_ages(age_s: int, text: str) -> None:
    assert output.age_text(1000, now_s=1000 + age_s) == text


def test_a_table_in_a_pipe_is_plain_and_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("ID", "IMAGE"), [("1", "[b]x"), ("22", "")])
    assert capsys.readouterr().out == "ID  IMAGE\n1   [b]x\n22\n"


def test_a_table_on_a_terminal_takes_markup_literally(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    output.print_table(("ID",), [("[b]x[/b]",)])
    assert "[b]x[/b]" in capsys.readouterr().out


def test_progress_is_silent_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with output.pull_progress() as show:
        assert show is None
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal_shows_each_layer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with output.pull_progress() as show:
        assert show is not None
        show(Progress(phase="download", layer="sha256:" + "ab" * 32, done_bytes=5, total_bytes=10))
        show(Progress(phase="merge"))
    assert "download abababababab" in capsys.readouterr().err
