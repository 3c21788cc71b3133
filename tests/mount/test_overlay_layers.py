"""What layers of kernel overlayfs can hold besides what our own overlay writes, and the reverse."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotter.errors import InvalidInputError
from snapshotter.kernel_view import syscalls
from snapshotter.overlay.directory_lower import DirectoryLower
from snapshotter.overlay.merged import Merged
from snapshotter.overlay.upper import Upper
from snapshotter.overlay.whiteouts import USER
from tests.support.compare_trees import compare_scans, scan_tree
from tests.support.overlay_trees import (
    kernel_overlay,
    make_lowers,
    merged,
    new_upper,
    without_clock,
)
from tests.support.scratch import scratch_directory
from tests.support.vfs_paths import VfsPaths, scan_file_system

pytestmark = pytest.mark.mount

_SOMEBODY = 12345
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_PR_SET_DUMPABLE = 4


@pytest.fixture
def base() -> Iterator[Path]:
    with scratch_directory() as made:
        yield made


def test_empty_files_that_are_whiteouts(base: Path) -> None:
    lowers = make_lowers(base)
    for path in ("b/a", "b/b", "b/new"):
        (base / "above" / path).parent.mkdir(exist_ok=True)
        if not (base / "above" / path).exists():
            (base / "above" / path).touch()
    for path in ("b/b", "b/new"):
        os.setxattr(base / "above" / path, "trusted.overlay.whiteout", b"")
    os.setxattr(base / "above" / "b", "trusted.overlay.opaque", b"x")
    (base / "above" / "b" / "empty").touch()
    (base / "above" / "b" / "full").write_bytes(b"no whiteout")
    os.setxattr(base / "above" / "b" / "full", "trusted.overlay.whiteout", b"")
    with (
        kernel_overlay(lowers, *new_upper(base, "theirs"), base / "kernel") as mounted,
        merged(lowers, *new_upper(base, "ours")) as fs,
    ):
        shown = scan_file_system(fs)
        assert b"b/full" in shown
        assert b"b/empty" in shown
        assert b"b/b" not in shown
        assert b"b/d" in shown
        assert compare_scans(scan_tree(mounted), shown) == []
        VfsPaths(fs).create(b"b/b", 0o644, b"made over it")
        assert VfsPaths(fs).read(b"b/b") == b"made over it"


def test_marks_that_are_a_files_own(base: Path) -> None:
    """What a program in the mount sets of that name is kept below ``overlay.overlay.``."""
    lowers = make_lowers(base)
    top = new_upper(base, "top")
    with kernel_overlay(lowers, *top, base / "kernel") as mounted:
        os.setxattr(mounted / "a", "trusted.overlay.opaque", b"y")
        os.setxattr(mounted / "a" / "c", "trusted.overlay.redirect", b"/b")
        os.setxattr(mounted / "c", "trusted.overlay.overlay.metacopy", b"")
        seen = without_clock(scan_tree(mounted))
    assert os.getxattr(top[0] / "a" / "c", "trusted.overlay.overlay.redirect") == b"/b"
    for layers in (lowers, [top[0], *lowers]):
        upper = top if layers is lowers else new_upper(base, "other")
        with merged(layers, *upper) as fs:
            assert fs.getxattr(VfsPaths(fs).find(b"a/c"), b"trusted.overlay.redirect") == b"/b"
            assert compare_scans(seen, without_clock(scan_file_system(fs))) == []


def test_a_volatile_upper_is_not_taken_for_a_complete_one(base: Path) -> None:
    lowers = make_lowers(base)
    upper, work = new_upper(base, "kernel's")
    with kernel_overlay(lowers, upper, work, base / "kernel", volatile=True):
        pass
    with pytest.raises(InvalidInputError, match=r"'volatile'.*remove .*/work/work/incompat"):
        Upper(upper, work)
    upper, work = new_upper(base, "ours")
    top = Upper(upper, work, volatile=True)
    lower = DirectoryLower(lowers[1], immutable=True)
    fs = Merged([lower], top)
    VfsPaths(fs).write(b"c", b"new", 0, 0)
    file = fs.open(VfsPaths(fs).find(b"c"), os.O_RDWR)
    file.fsync()
    file.close()
    top.close()
    lower.close()
    with pytest.raises(InvalidInputError, match="volatile"):
        Upper(upper, work, volatile=True)
    with (
        pytest.raises(subprocess.CalledProcessError),
        kernel_overlay(lowers, upper, work, base / "kernel"),
    ):
        pass
    subprocess.run(["rm", "-r", work / "work" / "incompat" / "volatile"], check=True)
    Upper(upper, work).close()


def test_an_ordinary_user(base: Path) -> None:
    """Our overlay as somebody else, then the kernel's in a user namespace over the same layers."""
    base.chmod(0o755)
    home = base / "home"
    home.mkdir()
    os.chown(home, _SOMEBODY, _SOMEBODY)
    child = os.fork()
    if not child:
        try:
            _as_somebody(home)
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _as_somebody(home: Path) -> None:
    os.setgroups([])
    os.setresgid(_SOMEBODY, _SOMEBODY, _SOMEBODY)
    os.setresuid(_SOMEBODY, _SOMEBODY, _SOMEBODY)
    lower = home / "lower"
    for path in ("dir/sub", "emptied", "replaced"):
        (lower / path).mkdir(parents=True)
    for path in ("dir/file", "dir/sub/deep", "emptied/file", "replaced/below", "file"):
        (lower / path).write_bytes(path.encode())
    os.setxattr(lower / "file", "user.overlay.overlay.own", b"escaped")
    layers = new_upper(home, "top")
    opened = DirectoryLower(lower, immutable=True, xattrs=USER)
    top = Upper(*layers, xattrs=USER)
    fs = Merged([opened], top)
    paths = VfsPaths(fs, uid=_SOMEBODY)
    for operation in (
        ("write", b"dir/sub/deep", b"NEW", 0, 0), ("unlink", b"emptied/file"),
        ("rmdir", b"emptied"), ("unlink", b"replaced/below"), ("rmdir", b"replaced"),
        ("mkdir", b"replaced", 0o700), ("create", b"dir/new", 0o640, b"new"),
        ("chmod", b"file", 0o600), ("rename", b"file", b"dir/moved", 0),
        ("setxattr", b"dir/new", b"user.overlay.opaque", b"a file's own"),
        ("link", b"dir/new", b"second"),
    ):  # fmt: skip
        getattr(paths, str(operation[0]))(*operation[1:])
    with pytest.raises(OSError, match="cross-device"):
        raise _error_of(paths.rename, b"dir", b"elsewhere", 0)
    ours = _as_root_sees(scan_file_system(fs))
    top.close()
    _enter_namespace()
    target = home / "mounted"
    target.mkdir()
    data = f"lowerdir={lower},upperdir={layers[0]},workdir={layers[1]},userxattr"
    syscalls.mount("overlay", target, "overlay", 0, data)
    differences = compare_scans(_as_root_sees(scan_tree(target)), ours)
    assert differences == []
    (target / "dir/new").unlink()
    (target / "dir/moved").rename(target / "file")
    theirs = _as_root_sees(scan_tree(target))
    subprocess.run(["umount", target], check=True)
    top = Upper(*layers, xattrs=USER)
    assert compare_scans(theirs, _as_root_sees(scan_file_system(Merged([opened], top)))) == []


def _error_of(call: Any, *arguments: Any) -> OSError:
    try:
        call(*arguments)
    except OSError as error:
        return OSError(error.errno, os.strerror(error.errno or 0).lower())
    raise AssertionError("it was done")


def _as_root_sees(scan: dict[bytes, Any]) -> dict[bytes, Any]:
    """Somebody is root in the namespace."""
    return {
        path: dataclasses.replace(node, uid=0, gid=0) for path, node in without_clock(scan).items()
    }


def _enter_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {_SOMEBODY} 1")
    Path("/proc/self/gid_map").write_text(f"0 {_SOMEBODY} 1")
