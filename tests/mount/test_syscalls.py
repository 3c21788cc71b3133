import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.kernel_view import syscalls

pytestmark = pytest.mark.mount


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """A directory that a test may mount on; nothing stays mounted there."""
    directory = tmp_path / "target"
    directory.mkdir()
    yield directory
    while os.path.ismount(directory):
        syscalls.umount(directory, syscalls.MNT_DETACH)


def test_mount_and_umount_a_tmpfs(target: Path) -> None:
    syscalls.mount("none", target, "tmpfs", syscalls.MS_NODEV, "size=64k")
    assert syscalls.fs_magic(target) == syscalls.TMPFS_MAGIC
    syscalls.umount(target)
    assert not os.path.ismount(target)


def test_device_of_what_is_mounted_is_told(target: Path) -> None:
    before = syscalls.device_at(target)
    assert before == target.stat().st_dev
    syscalls.mount("none", target, "tmpfs", 0, "size=64k")
    assert syscalls.device_at(target) == target.stat().st_dev != before
    with pytest.raises(FileNotFoundError):
        syscalls.device_at(target / "missing")


def test_errors_name_the_target_and_carry_the_errno(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(OSError, match="missing") as caught:
        syscalls.mount("none", missing, "tmpfs")
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(OSError, match=str(tmp_path)) as caught:
        syscalls.umount(tmp_path)
    assert caught.value.errno == errno.EINVAL


def test_detached_mount_is_placed_and_found_by_its_id(target: Path) -> None:
    descriptor = syscalls.make_mount("tmpfs", [("size", "64k")])
    try:
        Path(f"/proc/self/fd/{descriptor}/seen").write_text("here")
        before = syscalls.mount_id(descriptor)
        assert before != syscalls.mount_id(target)
        syscalls.move_mount(descriptor, target)
    finally:
        os.close(descriptor)
    assert (target / "seen").read_text() == "here"
    assert os.path.ismount(target)


def test_kernel_says_why_a_context_was_refused() -> None:
    with pytest.raises(OSError, match=r"redirect_dir=bogus.*\(.*redirect_dir.*\)") as caught:
        syscalls.make_mount("overlay", [("redirect_dir", "bogus")])
    assert caught.value.errno == errno.EINVAL


def test_reconfigure_applies_flags(target: Path) -> None:
    syscalls.mount("none", target, "tmpfs")
    syscalls.reconfigure(target, ["ro"])
    assert os.statvfs(target).f_flag & os.ST_RDONLY
    descriptor = os.open(target, os.O_PATH)
    try:
        syscalls.reconfigure("", ["rw"], descriptor)
    finally:
        os.close(descriptor)
    assert not os.statvfs(target).f_flag & os.ST_RDONLY


def test_clone_of_a_mount_outlives_it(target: Path) -> None:
    syscalls.mount("none", target, "tmpfs")
    (target / "seen").write_text("here")
    clone = syscalls.open_tree(target)
    try:
        syscalls.mount_setattr(clone, set_attributes=syscalls.MOUNT_ATTR_RDONLY)
        syscalls.umount(target)
        with pytest.raises(OSError, match="Read-only"):
            Path(f"/proc/self/fd/{clone}/new").write_text("x")
        assert Path(f"/proc/self/fd/{clone}/seen").read_text() == "here"
    finally:
        os.close(clone)


def test_unshare_setns_and_syncfs(tmp_path: Path, target: Path) -> None:
    child = os.fork()
    if child == 0:  # own process: the namespace must not be this one's
        try:
            home = os.open("/proc/self/ns/mnt", os.O_RDONLY)
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.mount("none", "/", None, syscalls.MS_PRIVATE | syscalls.MS_REC)
            syscalls.mount("none", target, "tmpfs")
            inside = os.path.ismount(target)
            syscalls.setns(home, syscalls.CLONE_NEWNS)
            os._exit(0 if inside and not os.path.ismount(target) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    descriptor = os.open(tmp_path, os.O_RDONLY)
    syscalls.syncfs(descriptor)
    os.close(descriptor)
    with pytest.raises(OSError, match="syncfs"):
        syscalls.syncfs(descriptor)


def test_pivot_root(target: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)
            syscalls.mount("none", "/", None, syscalls.MS_PRIVATE | syscalls.MS_REC)
            syscalls.mount("none", target, "tmpfs")
            (target / "seen").write_text("here")
            os.chdir(target)
            syscalls.pivot_root(".", ".")
            syscalls.umount(".", syscalls.MNT_DETACH)
            os._exit(0 if os.listdir("/") == ["seen"] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
