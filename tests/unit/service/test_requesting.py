from pathlib import Path

import pytest

from snapshotter.errors import InvalidInputError
from snapshotter.service import control
from snapshotter.service.requesting import architecture_of, image_here, mount_request


def test_a_request_has_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("kept")
    request = mount_request(
        "oci:layout:v1",
        platform="linux/arm64",
        authfile="auth.json",
        view="kernel",
        upper="link",
        read_only=False,
    )
    assert request == control.Mount(
        image=f"oci:{tmp_path}/layout:v1",
        architecture="arm64",
        authfile=f"{tmp_path}/auth.json",
        view="kernel",
        upper=f"{tmp_path}/kept",
    )
    assert image_here("debian:12") == "debian:12"
    assert architecture_of(None) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"view": "zfs"}, "choose one of auto, kernel"),
        ({"upper": "/u", "read_only": True}, "writes nothing"),
        ({"platform": "linux/"}, "platform"),
    ],
)
def test_words_that_make_no_sense_are_refused(words: dict[str, object], said: str) -> None:
    usual = {"platform": None, "authfile": None, "view": "auto", "upper": None, "read_only": False}
    with pytest.raises(InvalidInputError, match=said):
        mount_request("i", **{**usual, **words})  # type: ignore[arg-type]
