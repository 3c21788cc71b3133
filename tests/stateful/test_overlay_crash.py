"""A crash at any step leaves an upper that kernel overlayfs and we mount, to the same tree.

A child process does one operation and ends, without any cleaning up, just before its n-th system
call that changes something on disk; for every n until the operation gets through.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotter.overlay import syscalls
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

_CRASHED = 17
_CHANGING = [
    "mkdir", "mknod", "symlink", "link", "unlink", "rmdir", "chown", "chmod", "utime", "setxattr",
    "removexattr", "open", "ftruncate", "copy_file_range", "fsync",
]  # fmt: skip

OPERATIONS: dict[str, list[tuple[Any, ...]]] = {
    "copy-up": [("write", b"a/b", b"new", 2, 0), ("write", b"a/c/a", b"new", 2, 0)],
    "truncating open": [("write", b"a/c/a", b"short", 0, os.O_TRUNC)],
    "create over whiteout": [("create", b"a/a", 0o640, b"")],
    "mkdir over whiteout": [("unlink", b"c"), ("mkdir", b"c", 0o755)],
    "unlink": [("unlink", b"a/b"), ("create", b"a/b", 0o600, b""), ("unlink", b"a/b")],
    "rmdir": [
        ("unlink", b"a/c/a"), ("mkdir", b"a/c/b", 0o755), ("rmdir", b"a/c/b"), ("rmdir", b"a/c"),
    ],
    "rename file": [("rename", b"c", b"b/e", 0), ("rename", b"b/e", b"a/b", 0)],
    "rename directory": [("rename", b"a/c", b"a/e", 0), ("rename", b"a/e", b"b/e", 0)],
    "directory over whiteout": [("rename", b"a/c", b"d", 0), ("rename", b"d", b"b/e", 0)],
    "directory over directory": [
        ("unlink", b"a/c/a"), ("mkdir", b"x", 0o700), ("rename", b"x", b"a/c", 0),
    ],
    "exchange": [("rename", b"a/c", b"b/a", 2), ("rename", b"c", b"a", 2)],
    "link": [("link", b"c", b"a/a"), ("chmod", b"c", 0o600)],
}  # fmt: skip


@pytest.fixture(scope="module")
def lowers() -> Iterator[list[Path]]:
    with scratch_directory() as base:
        yield make_lowers(base)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_crash_at_any_step(name: str, lowers: list[Path], tmp_path: Path) -> None:
    allowed = _trees_between(OPERATIONS[name], lowers, tmp_path)
    assert threading.active_count() == 1
    for step in range(200):
        upper, work = new_upper(tmp_path, f"step{step}")
        has_crashed = crash_before(step, OPERATIONS[name], lowers, upper, work)
        with kernel_overlay(lowers, upper, work, tmp_path / "kernel") as mounted:
            theirs = without_clock(scan_tree(mounted))
        with merged(lowers, upper, work) as fs:
            assert compare_scans(theirs, without_clock(scan_file_system(fs))) == [], step
        # The time of a directory that something was copied up into is put back one step later.
        directories = frozenset(path for path, node in theirs.items() if node.mode[0] == "d")
        differences = [compare_scans(tree, theirs, ignore_mtime_of=directories) for tree in allowed]
        assert [] in differences, step
        assert os.listdir(work / "work") == []
        if not has_crashed:
            return
    pytest.fail("the operation never got through")


def _trees_between(operations: list[tuple[Any, ...]], lowers: list[Path], base: Path) -> list[Any]:
    """The tree before the operations and after each of them."""
    with merged(lowers, *new_upper(base, "allowed")) as fs:
        trees = [without_clock(scan_file_system(fs))]
        for operation in operations:
            _do(fs, operation)
            trees.append(without_clock(scan_file_system(fs)))
            if operation[0] in ("create", "write"):  # content is a step of its own
                trees += _without_content(trees[-1], trees[-2], operation)
    return trees


def _without_content(tree: Any, before: Any, operation: tuple[Any, ...]) -> list[Any]:
    """A file that was made, copied up or truncated, before anything was written to it."""
    path = operation[1]
    if operation[0] == "write" and not operation[4] & os.O_TRUNC:
        return []
    empty = next(node for node in before.values() if node.size == 0 and node.sha256 and before)
    written = tree[path]
    emptied = type(written)(
        written.mode, written.uid, written.gid, written.mtime_ns, 0, written.rdev, written.xattrs,
        written.target, written.links, written.nlink, empty.sha256,
    )  # fmt: skip
    same_time = type(written)(
        emptied.mode, emptied.uid, emptied.gid, before.get(path, written).mtime_ns, 0,
        emptied.rdev, emptied.xattrs, emptied.target, emptied.links, emptied.nlink, emptied.sha256,
    )  # fmt: skip
    return [{**tree, path: emptied}, {**tree, path: same_time}]


def _do(fs: Any, operation: tuple[Any, ...]) -> None:
    try:
        getattr(VfsPaths(fs), operation[0])(*operation[1:])
    except OSError as error:
        pytest.fail(f"{operation}: {error}")


def crash_before(
    step: int, operations: list[tuple[Any, ...]], lowers: list[Path], upper: Path, work: Path
) -> bool:
    """Does the operations in a child that ends before its ``step``-th change; whether it did."""
    child = os.fork()
    if not child:
        try:
            with merged(lowers, upper, work) as fs:
                _count_down(step)
                for operation in operations:
                    getattr(VfsPaths(fs), operation[0])(*operation[1:])
                os._exit(0)
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, _CRASHED)
    return status == _CRASHED


def _count_down(step: int) -> None:
    left = [step]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            if not left[0]:
                os._exit(_CRASHED)
            left[0] -= 1
            return call(*arguments, **options)

        return counting

    for name in _CHANGING:
        setattr(os, name, counted(getattr(os, name)))
    syscalls.rename = counted(syscalls.rename)
