from pathlib import Path

import pytest

from snapshotter.api.open_sandbox import parse_settings
from snapshotter.api.options import SandboxOptions
from snapshotter.errors import InvalidInputError, NotFoundError
from snapshotter.service.sandbox_spec import Volume


def test_volumes_may_be_words_or_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = [f"{tmp_path}:/a:ro", Volume(".", "//b/")]
    settings = parse_settings({"volumes": given, "env": {"A": "b"}, "user": "7"})
    assert settings.volumes == [Volume(str(tmp_path), "/a", True), Volume(str(tmp_path), "/b")]
    assert (settings.environment, settings.user) == ({"A": "b"}, "7")


@pytest.mark.parametrize(
    "options",
    [
        {"volumes": [Volume("/", "relative")]},
        {"volumes": ["/:/proc"]},
        {"user": "a b"},
        {"cwd": "relative"},
        {"hostname": "-"},
        {"env": {"A=B": "x"}},
        {"env": {"A": "x\0"}},
        {"env": {"": "x"}},
    ],
)
def test_settings_that_can_never_work_are_refused(options: SandboxOptions) -> None:
    with pytest.raises(InvalidInputError):
        parse_settings(options)


def test_a_volume_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="missing"):
        parse_settings({"volumes": [f"{tmp_path}/missing:/x"]})
