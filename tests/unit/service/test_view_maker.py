from pathlib import Path

import pytest

from snapshotter.config import Config
from snapshotter.errors import UnsupportedError
from snapshotter.kernel_view.probe import Abilities, Finding
from snapshotter.paths import Paths
from snapshotter.service import fuse_views
from snapshotter.service.view_maker import ViewMaker

OLD = Finding(name="overlay", ok=False, detail="no data-only lowers", remedy="use Linux 6.5")


def maker(*findings: Finding) -> ViewMaker:
    abilities = Abilities(mount_api=True, detached_layers=True, erofs_file=True, findings=findings)
    return ViewMaker(Paths(Path("/none"), Path("/none")), abilities, Config())


@pytest.fixture(params=["", "/dev/fuse: No such device"])
def lacking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(fuse_views, "missing", lambda: request.param)
    return str(request.param)


def test_auto_takes_the_kernel_view_where_it_can(lacking: str) -> None:
    assert maker().choose("auto")[0] == "kernel"
    assert maker().choose("kernel") == ("kernel", "kernel was asked for")


def test_else_auto_takes_the_fuse_view_and_says_why(lacking: str) -> None:
    if lacking:
        with pytest.raises(UnsupportedError, match=r"no data-only lowers.*/dev/fuse"):
            maker(OLD).choose("auto")
    else:
        view, reason = maker(OLD).choose("auto")
        assert view == "fuse"
        assert "no data-only lowers. use Linux 6.5" in reason


def test_a_view_that_was_named_is_never_replaced(lacking: str) -> None:
    with pytest.raises(UnsupportedError, match=r"use Linux 6\.5"):
        maker(OLD).choose("kernel")
    if lacking:
        with pytest.raises(UnsupportedError, match="/dev/fuse"):
            maker().choose("fuse")
    else:
        assert maker().choose("fuse")[0] == "fuse"
    assert maker().choose("virtiofs")[0] == "virtiofs"
