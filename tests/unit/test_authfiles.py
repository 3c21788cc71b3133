from pathlib import Path

import pytest

from snapshotter.authfiles import chosen_authfile, usual_authfiles


@pytest.mark.parametrize(
    ("given", "environ", "chosen"),
    [
        (None, {}, None),
        (None, {"DOCKER_CONFIG": ""}, None),
        ("a.json", {"REGISTRY_AUTH_FILE": "/r"}, "/here/a.json"),
        (Path("/abs.json"), {}, "/abs.json"),
        (None, {"REGISTRY_AUTH_FILE": "r", "DOCKER_CONFIG": "/d"}, "/here/r"),
        (None, {"DOCKER_CONFIG": "/nowhere"}, None),
    ],
)
def test_option_comes_before_environment(
    monkeypatch: pytest.MonkeyPatch,
    given: str | Path | None,
    environ: dict[str, str],
    chosen: str | None,
) -> None:
    monkeypatch.setattr("os.getcwd", lambda: "/here")
    assert chosen_authfile(given, environ) == chosen


def test_config_of_docker_is_chosen_if_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    environ = {"DOCKER_CONFIG": str(tmp_path), "HOME": "/h", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert chosen_authfile(None, environ) == f"{tmp_path}/config.json"
    assert usual_authfiles(environ) == [
        f"{tmp_path}/config.json",
        "/run/user/7/containers/auth.json",
        "/h/.config/containers/auth.json",
        "/h/.docker/config.json",
    ]
