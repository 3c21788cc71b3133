import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotter.cli import main as cli
from snapshotter.service import control
from tests.support.fake_daemon import FakeDaemon, make_image, make_record

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path / "run/control.sock") as running:
        yield running


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SNAPSHOTTER_ROOT", str(tmp_path))

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["snapshotter", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out, said.err

    return call


def test_pull_makes_paths_absolute_and_says_what_it_got(
    daemon: FakeDaemon, run: Run, tmp_path: Path
) -> None:
    daemon.answers[control.Pull] = control.Image(image=make_image())
    options = ("--platform", "linux/arm/v7", "--no-refresh", "--authfile", "auth.json")
    status, out, err = run("pull", "oci:layout:1", *options)
    assert (status, err) == (0, "")
    assert out == "docker.io/library/demo:1  abababababab  12 files, 3.0 MiB\n"
    assert daemon.requests == [
        control.Pull(
            image=f"oci:{tmp_path}/layout:1",
            architecture="arm/v7",
            refresh=False,
            authfile=f"{tmp_path}/auth.json",
        )
    ]


def test_mount_and_run_take_credentials_from_where_the_environment_says(
    daemon: FakeDaemon, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answers[control.Mount] = control.Failed(code="busy", message="enough seen")
    (tmp_path / "at").mkdir()
    run("mount", "i", "at", "--authfile", "mine.json")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").touch()
    run("run", "i", "true")
    asked = [request.authfile for request in daemon.requests if isinstance(request, control.Mount)]
    assert asked == [f"{tmp_path}/mine.json", f"{tmp_path}/config.json"]


def test_json_is_one_document_with_the_config_in_it(daemon: FakeDaemon, run: Run) -> None:
    daemon.answers[control.Inspect] = control.Image(image=make_image(config='{"os": "linux"}'))
    for words in (("--json", "inspect", "1"), ("inspect", "1", "--json")):
        status, out, _ = run(*words)
        assert status == 0
        assert json.loads(out)["prepared"]["config"] == {"os": "linux"}


def test_lists_are_tables(daemon: FakeDaemon, run: Run) -> None:
    daemon.answers[control.ListImages] = control.Images(images=[make_image()])
    daemon.answers[control.ListMounts] = control.Mounts(
        mounts=[make_record(target="/mnt"), make_record(owner_pid=9, degraded="mount it anew")]
    )
    assert "demo:1  abababababab  amd64  12     3.0 MiB" in run("images")[1]
    out = run("ps")[1]
    assert re.search(r"kernel +/mnt +private", out)
    assert "sandbox of process 9" in out
    assert out.endswith("\n0123456789ab: mount it anew\n")


def test_failures_have_the_exit_status_of_their_class(daemon: FakeDaemon, run: Run) -> None:
    daemon.answers[control.Inspect] = control.Failed(code="not_found", message="no image x")
    assert run("inspect", "x") == (3, "", "snapshotter: no image x\n")
    status, out, err = run("inspect", "x", "--json")
    assert (status, out) == (3, "")
    assert json.loads(err) == {"error": {"code": "not_found", "message": "no image x"}}


def test_bad_usage_is_told_and_has_its_own_status(daemon: FakeDaemon, run: Run) -> None:
    status, _, err = run("pull")
    assert status == 2
    assert "Missing argument" in err
    status, _, err = run("pull", "--json", "--bad", "x")
    assert (status, json.loads(err)["error"]["code"]) == (2, "invalid_request")
    assert run("run", "--bad", "x")[0] == 125
    assert daemon.requests == []


@pytest.mark.parametrize(
    "words",
    [
        ("-v", "x:y", "i"),
        ("-v", "/nowhere/at/all:/x", "i"),
        ("-e", "=1", "i"),
        ("-u", "a:", "i"),
        ("-w", "rel", "i"),
        ("--hostname", "-", "i"),
        ("--view", "best", "i"),
        ("--upper", "u", "--read-only", "i"),
        ("--platform", "windows/amd64", "i"),
    ],
)
def test_bad_settings_of_a_sandbox_reach_no_daemon(
    daemon: FakeDaemon, run: Run, words: tuple[str, ...]
) -> None:
    status, _, err = run("run", *words)
    assert (status, daemon.requests) == (125, [])
    assert err.startswith("snapshotter: ")


def test_a_bad_target_is_refused_before_anything_is_mounted(daemon: FakeDaemon, run: Run) -> None:
    assert run("mount", "i", "gone")[0] == 3
    assert run("mount", "i", "/")[0] == 2
    assert daemon.requests == []


def test_a_mount_that_cannot_be_placed_or_told_is_taken_back(
    daemon: FakeDaemon, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "mnt").mkdir()
    daemon.view = lambda: os.open("/dev/null", os.O_RDONLY)  # no mount at all
    daemon.answers[control.Mount] = control.Mounted(
        mount=make_record(), image=make_image(), reason=""
    )
    status, _, err = run("mount", "i", "mnt")
    assert (status, f"mount on {tmp_path}/mnt" in err) == (1, True)
    assert daemon.requests[-1] == control.Unmounted(id=make_record().id)


def test_umount_of_what_is_gone_drops_the_record(
    daemon: FakeDaemon, run: Run, tmp_path: Path
) -> None:
    record = make_record(target=str(tmp_path / "gone"))
    daemon.answers[control.ListMounts] = control.Mounts(mounts=[record])
    assert run("umount", "gone")[:2] == (0, f"{record.id}\n")
    assert daemon.asked(control.Unmounted) == [control.Unmounted(id=record.id)]


def test_doctor_says_what_to_do(daemon: FakeDaemon, run: Run) -> None:
    bad = control.Fact(name="erofs", ok=False, detail="missing", remedy="modprobe erofs")
    view = control.Fact(name="kernel", ok=True, detail="works")
    daemon.answers[control.Facts] = control.HostFacts(views=[view], facts=[bad])
    status, out, _ = run("doctor")
    assert status == 0
    assert "ok  kernel: works" in out
    assert "NO  erofs: missing\n      modprobe erofs" in out
    daemon.answers[control.Facts] = control.HostFacts(views=[bad], facts=[])
    assert run("doctor")[0] == 8


def test_status_and_stop_do_not_start_a_daemon(run: Run, tmp_path: Path) -> None:
    assert run("daemon", "status")[0] == 5
    assert run("daemon", "stop") == (0, "the daemon is not running\n", "")
    assert not (tmp_path / "run").exists()


def test_status_shows_processes_and_counters(daemon: FakeDaemon, run: Run) -> None:
    daemon.answers[control.Status] = control.Running(
        version="1",
        pid=42,
        root="/r",
        run="/u",
        processes={"store": 43, "keeper": None},
        counters={"faults": 7},
    )
    out = run("daemon", "status")[1]
    assert re.search(r"Process keeper: +not up", out)
    assert re.search(r"faults: +7", out)
    assert "daemon 42 runs" in run("daemon", "start")[1]


def test_every_command_explains_itself(run: Run) -> None:
    for command in ("pull", "mount", "umount", "run", "ps", "images", "inspect", "doctor"):
        status, out, _ = run(command, "--help")
        assert status == 0
        assert f"snapshotter {command}" in out
    assert "--root" in run("--help")[1]
    assert run("--version")[:2] == (0, "snapshotter 0.1.0\n")


def test_a_command_starts_without_event_loops_logs_or_tables() -> None:
    code = (
        "import sys, snapshotter.cli.main, snapshotter.service.sandbox;"
        "print(sorted({m.split('.')[0] for m in sys.modules}"
        " & {'trio', 'httpx', 'anyio', 'structlog', 'rich', 'asyncio'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "offered"),
    [("ima", "images"), ("images ", "rm"), ("cache purge --older", "--older-than")],
)
def test_the_shell_can_complete_commands_and_options(words: str, offered: str) -> None:
    """As the function that --show-completion prints asks for it."""
    line = f"snapshotter {words}"
    code = "import sys; sys.argv = ['snapshotter']; from snapshotter.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "_SNAPSHOTTER_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
            "PYTHONPATH": str(Path(__file__).parents[3]),
        },
        capture_output=True,
        text=True,
    )
    assert offered in done.stdout.split(), done.stderr
