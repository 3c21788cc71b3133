from pathlib import Path

import pytest

from snapshotter.kernel_view import syscalls
from snapshotter.paths import Paths
from snapshotter.service.leftovers import clear_leftovers
from tests.support.mounts import detach_all, mounts_below

pytestmark = pytest.mark.mount


def test_mounts_for_a_moments_use_are_ended(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "root", tmp_path / "run")
    places = [paths.run / ".view-a", paths.root / ".probe-b/merged", paths.root / "gate"]
    try:
        for place in places:
            place.mkdir(parents=True)
            syscalls.mount("tmpfs", place, "tmpfs")
            (place / "file").write_bytes(b"x")
        clear_leftovers(paths)
        assert [mount.target for mount in mounts_below(tmp_path)] == [str(places[2])]
        assert not places[0].exists()
        assert not places[1].parent.exists()
    finally:
        detach_all(tmp_path)
