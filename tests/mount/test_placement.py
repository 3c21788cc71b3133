import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.errors import BusyError
from snapshotter.kernel_view import syscalls
from snapshotter.service import placement
from snapshotter.service.control import MountRecord
from tests.support.fake_daemon import make_record
from tests.support.mounts import detach_all, mounts_below

pytestmark = pytest.mark.mount


@pytest.fixture
def placed(tmp_path: Path) -> Iterator[MountRecord]:
    view = syscalls.make_mount("tmpfs", [])
    target = placement.check_target(str(tmp_path))
    placement.place(view, target)
    os.close(view)
    try:
        yield make_record(target=target, device=tmp_path.stat().st_dev)
    finally:
        detach_all(tmp_path)


def test_a_placed_view_is_removed_once(placed: MountRecord, tmp_path: Path) -> None:
    assert [mount.target for mount in mounts_below(tmp_path)] == [str(tmp_path)]
    placement.remove(placed)
    assert mounts_below(tmp_path) == []
    placement.remove(placed)  # the bare directory is left alone


def test_a_view_in_use_names_its_users(placed: MountRecord, tmp_path: Path) -> None:
    with (tmp_path / "held").open("w") as held:
        with pytest.raises(BusyError, match=rf"pid {os.getpid()}: {tmp_path}/held"):
            placement.remove(placed)
        placement.remove(placed, lazy=True)
        assert mounts_below(tmp_path) == []
        held.write("its user can finish")


def test_another_mount_on_top_is_not_taken_away(placed: MountRecord, tmp_path: Path) -> None:
    syscalls.mount("tmpfs", tmp_path, "tmpfs")
    placement.remove(placed)
    assert len(mounts_below(tmp_path)) == 2


def test_a_view_is_restricted_before_anybody_sees_it(tmp_path: Path) -> None:
    view = syscalls.make_mount("tmpfs", [])
    try:
        placement.restrict(view, nosuid=False, nodev=False)
        assert not os.fstatvfs(view).f_flag & (os.ST_NOSUID | os.ST_NODEV)
        placement.restrict(view, nosuid=True, nodev=True)
        placement.place(view, str(tmp_path))
        flags = os.statvfs(tmp_path).f_flag
        assert flags & os.ST_NOSUID
        assert flags & os.ST_NODEV
    finally:
        os.close(view)
        detach_all(tmp_path)
