"""Uppers that kernel overlayfs wrote with ``metacopy=on``, as in the kernel view, opened by us."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotter.vfs import AttrChange
from tests.stateful.test_overlay_crash import crash_before
from tests.stateful.test_overlay_kernel import outcome
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
from tests.support.vfs_paths import VfsPaths, find, scan_file_system

pytestmark = pytest.mark.mount

_paths = st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=3).map(b"/".join)
_attributes = st.one_of(
    st.tuples(st.just("chmod"), _paths, st.sampled_from([0o600, 0o4711])),
    st.tuples(st.just("chown"), _paths, st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("utime"), _paths, st.just(LONG_AGO_NS + 1)),
)
_moves = st.one_of(
    st.tuples(st.just("rename"), _paths, _paths, st.sampled_from([0, 2])),
    st.tuples(st.just("link"), _paths, _paths),
    st.tuples(st.just("unlink"), _paths),
)
_contents = st.one_of(
    st.tuples(st.just("write"), _paths, st.binary(max_size=9), st.integers(0, 6000), st.just(0)),
    st.tuples(st.just("write"), _paths, st.just(b"new"), st.just(0), st.just(os.O_TRUNC)),
    st.tuples(st.just("truncate"), _paths, st.integers(0, 6000)),
    st.tuples(st.just("read"), _paths),
)
_by_kernel = st.lists(st.one_of(_attributes, _attributes, _moves), min_size=1, max_size=15)
_by_us = st.lists(st.one_of(_contents, _contents, _attributes, _moves), max_size=15)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    with scratch_directory() as base:
        make_lowers(base)
        yield base


@settings(max_examples=80)
@given(_by_kernel, _by_us)
def test_metacopies_of_the_kernel_open_and_are_completed(
    scratch: Path, by_kernel: list[tuple[Any, ...]], by_us: list[tuple[Any, ...]]
) -> None:
    base = scratch / f"run{next(_numbers)}"
    lowers = [scratch / "above", scratch / "below"]
    top, other = new_upper(base, "top"), new_upper(base, "other")
    sides = ((top, base / "kernel"), (other, base / "kernel2"))
    for layers, target in sides:  # two uppers of the same: one for us to go on with
        with kernel_overlay(lowers, *layers, target, metacopy=True) as mounted:
            for operation in by_kernel:
                outcome(NativePaths(mounted), operation)
    with (
        kernel_overlay(lowers, *other, base / "kernel", metacopy=True) as mounted,
        merged(lowers, *top) as fs,
    ):
        assert compare_scans(_scan(mounted), without_clock(scan_file_system(fs))) == []
        native, vfs = NativePaths(mounted), VfsPaths(fs)
        for operation in by_us:
            assert outcome(vfs, operation) == outcome(native, operation), operation
        tree = without_clock(scan_file_system(fs))
        assert compare_scans(_scan(mounted), tree) == []
    with kernel_overlay(lowers, *top, base / "kernel", metacopy=True) as mounted:
        assert compare_scans(tree, _scan(mounted)) == []
    # The same upper as a lower.
    stacked = [other[0], *lowers]
    with (
        kernel_overlay(
            stacked, *new_upper(base, "third"), base / "kernel", metacopy=True
        ) as mounted,
        merged(stacked, *new_upper(base, "fourth")) as fs,
    ):
        assert compare_scans(_scan(mounted), without_clock(scan_file_system(fs))) == []


def _scan(mounted: Path) -> Any:
    return without_clock(scan_tree(mounted))


def test_a_metacopy_keeps_what_writing_takes(scratch: Path) -> None:
    """Set-id bits, capabilities and times are as before, and it is a file of its own then."""
    base = scratch / "kept"
    lowers, top = [scratch / "above", scratch / "below"], new_upper(base, "top")
    capability = bytes.fromhex("0100000200040000000000000000000000000000")
    with kernel_overlay(lowers, *top, base / "kernel", metacopy=True) as mounted:
        (mounted / "c").chmod(0o4755)
        os.setxattr(mounted / "c", "security.capability", capability)
        os.utime(mounted / "c", ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert os.getxattr(top[0] / "c", "trusted.overlay.metacopy") == b""
    with merged(lowers, *top) as fs:
        node = find(fs, b"c")
        assert fs.getattr(node).blocks == 1
        opened_before = fs.open(node, os.O_RDONLY)
        fs.open(node, os.O_RDWR).close()
        attr = fs.getattr(node)
        assert (attr.mode & 0o7777, attr.mtime_ns, attr.size) == (0o4755, LONG_AGO_NS, 7)
        assert fs.getxattr(node, b"security.capability") == capability
        VfsPaths(fs).write(b"c", b"C", 0, 0)
        assert opened_before.read(100, 0) == b"Celow c"
        opened_before.close()
    assert "trusted.overlay.metacopy" not in os.listxattr(top[0] / "c")
    assert (top[0] / "c").read_bytes() == b"Celow c"


def test_a_removed_metacopy_that_is_held_has_its_content(scratch: Path) -> None:
    base = scratch / "removed"
    lowers, top = [scratch / "above", scratch / "below"], new_upper(base, "top")
    with kernel_overlay(lowers, *top, base / "kernel", metacopy=True) as mounted:
        (mounted / "c").chmod(0o600)
        (mounted / "c").rename(mounted / "b" / "z")
    with merged(lowers, *top) as fs:
        node = find(fs, b"b/z")
        VfsPaths(fs).unlink(b"b/z")
        file = fs.open(node, os.O_RDONLY)
        assert file.read(100, 0) == b"below c"
        file.close()
        assert fs.setattr(node, AttrChange(size=3)).size == 3
        file = fs.open(node, os.O_RDONLY)
        assert file.read(100, 0) == b"bel"
        file.close()


_WRITES: dict[str, tuple[Any, ...]] = {
    "open": ("write", b"c", b"B", 0, 0),
    "truncating open": ("write", b"c", b"short", 0, os.O_TRUNC),
    "rename": ("rename", b"c", b"b/z", 0),
    "link": ("link", b"c", b"b/z"),
}


@pytest.mark.parametrize("name", _WRITES)
def test_a_crash_while_a_metacopy_gets_its_content(scratch: Path, name: str) -> None:
    lowers = [scratch / "above", scratch / "below"]
    for step in range(100):
        base = scratch / f"{name} {step}"
        top = new_upper(base, "top")
        with kernel_overlay(lowers, *top, base / "kernel", metacopy=True) as mounted:
            (mounted / "c").chmod(0o600)
        has_crashed = crash_before(step, [_WRITES[name]], lowers, *top)
        with merged(lowers, *top) as fs:
            ours = without_clock(scan_file_system(fs))
            contents = {path: VfsPaths(fs).read(path) for path in (b"c", b"b/z") if path in ours}
        assert set(contents.values()) <= {b"below c", b"Below c", b"", b"short"}
        with kernel_overlay(lowers, *top, base / "kernel", metacopy=True) as mounted:
            theirs = _scan(mounted)
        if name == "truncating open":  # shortened and not ended: the kernel reads on in the lower
            ours[b"c"], theirs[b"c"] = (
                dataclasses.replace(tree[b"c"], sha256="") for tree in (ours, theirs)
            )
        assert compare_scans(theirs, ours) == []
        if not has_crashed:
            return
    pytest.fail("the operation never got through")
