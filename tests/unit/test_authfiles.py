from pathlib import Path

import pytest

from snapshotter.authfiles import chosen_authfile


@pytest.mark.parametrize(
    ("given", "environ", "chosen"),
    [
        (None, {}, None),
        (None, {"DOCKER_CONFIG": ""}, None),
        ("a.json", {"REGISTRY_AUTH_FILE": "/r"}, "/here/a.json"),
        (Path("/abs.json"), {}, "/abs.json"),
        (None, {"REGISTRY_AUTH_FILE": "r", "DOCKER_CONFIG": "/d"}, "/here/r"),
        (None, {"DOCKER_CONFIG": "/d"}, "/d/config.json"),
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
