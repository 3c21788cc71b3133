"""Our overlay against the kernel's: the same operations, the same answers, the same trees."""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.compare_trees import compare_scans, scan_tree
from tests.support.native_paths import NativePaths
from tests.support.overlay_trees import (
    LONG_AGO_NS,
    kernel_overlay,
    make_lowers,
    merged,
    new_upper,
    without_clock,
)
from tests.support.scratch import scratch_directory
from tests.support.vfs_paths import VfsPaths, scan_file_system

pytestmark = pytest.mark.mount

_names = st.sampled_from([b"a", b"b", b"c", b"d"])
_paths = st.lists(_names, min_size=1, max_size=3).map(b"/".join)
_modes = st.sampled_from([0o600, 0o755, 0o4755, 0o2775, 0o000])
_ids = st.integers(0, 3)
_data = st.binary(max_size=30)
_sizes = st.integers(0, 6000)
_flags = st.sampled_from([0, 0, 0, 1, 2])
_xattrs = st.sampled_from([b"trusted.x", b"trusted.overlay.opaque", b"trusted.overlay.overlay.x"])
_open_flags = st.sampled_from([0, os.O_TRUNC, os.O_APPEND])
_KEEP_SIZE, _PUNCH_HOLE = 1, 2

OPERATIONS = st.one_of(
    st.tuples(st.just("create"), _paths, _modes, _data),
    st.tuples(st.just("mkdir"), _paths, _modes),
    st.tuples(st.just("symlink"), _paths, st.just(b"nowhere")),
    st.tuples(st.just("mknod"), _paths, st.just(stat.S_IFIFO | 0o644), st.just(0)),
    st.tuples(st.just("link"), _paths, _paths),
    st.tuples(st.just("unlink"), _paths),
    st.tuples(st.just("unlink"), _paths),
    st.tuples(st.just("rmdir"), _paths),
    st.tuples(st.just("rename"), _paths, _paths, _flags),
    st.tuples(st.just("rename"), _paths, _paths, _flags),
    st.tuples(st.just("rename"), _paths, _paths, _flags),
    st.tuples(st.just("write"), _paths, _data, _sizes, _open_flags),
    st.tuples(st.just("truncate"), _paths, _sizes),
    st.tuples(st.just("allocate"), _paths, st.sampled_from([0, 1, 3]), _sizes, st.just(100)),
    st.tuples(st.just("chmod"), _paths, _modes),
    st.tuples(st.just("chown"), _paths, _ids, _ids),
    st.tuples(st.just("utime"), _paths, st.just(LONG_AGO_NS + 1)),
    st.tuples(st.just("setxattr"), _paths, _xattrs, _data),
    st.tuples(st.just("removexattr"), _paths, _xattrs),
    st.tuples(st.just("read"), _paths),
    st.tuples(st.just("listdir"), _paths),
)
_ON_CONTENT = ("read", "write", "truncate", "allocate")


@pytest.fixture(scope="module")
def scratch():
    with scratch_directory() as base:
        make_lowers(base)
        yield base


_numbers = itertools.count()


def outcome(side: Any, operation: tuple[Any, ...]) -> Any:
    """What an operation returns, or its errno. Opening a fifo would wait: it is left out."""
    name, path, *rest = operation
    try:
        mode = side.lstat(path).st_mode if isinstance(side, NativePaths) else side.lstat(path).mode
        if name in _ON_CONTENT and not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            return "not opened"
        if name == "chmod" and stat.S_ISLNK(mode):
            return "left alone"
    except OSError:
        pass
    try:
        return getattr(side, name)(path, *rest)
    except OSError as error:
        return os.strerror(error.errno or 0)


@settings(max_examples=120)
@given(st.lists(OPERATIONS, min_size=1, max_size=40))
def test_same_operations_same_results(scratch: Path, operations: list[tuple[Any, ...]]) -> None:
    base = scratch / f"run{next(_numbers)}"
    lowers = [scratch / "above", scratch / "below"]
    theirs, ours = new_upper(base, "theirs"), new_upper(base, "ours")
    with (
        kernel_overlay(lowers, *theirs, base / "kernel") as mounted,
        merged(lowers, *ours) as fs,
    ):
        native, vfs = NativePaths(mounted), VfsPaths(fs)
        for operation in operations:
            assert outcome(vfs, operation) == outcome(native, operation), operation
        tree = without_clock(scan_file_system(fs))
        assert compare_scans(without_clock(scan_tree(mounted)), tree) == []
    with kernel_overlay(lowers, *ours, base / "kernel") as mounted:
        assert compare_scans(tree, without_clock(scan_tree(mounted))) == []
    with merged(lowers, *theirs) as fs:
        assert compare_scans(tree, without_clock(scan_file_system(fs))) == []
