"""Writer and reader together: what goes into an image comes out of it."""

from __future__ import annotations

import copy
import random
import stat
from typing import TypeVar

from hypothesis import given, settings

from snapshotter.projection.image_reader import ImageReader
from snapshotter.projection.image_writer import write_image
from snapshotter.projection.tree import Inode
from tests.support import trees
from tests.support.trees import describe, directory, regular

V = TypeVar("V")


@settings(max_examples=80)
@given(trees.trees())
def test_round_trip(tree: Inode) -> None:
    assert describe(ImageReader(write_image(tree)).to_tree()) == describe(tree)


@settings(max_examples=50)
@given(trees.trees(), trees.st.randoms(use_true_random=False))
def test_bytes_depend_on_the_tree_alone(tree: Inode, shuffle: random.Random) -> None:
    image = write_image(tree)
    other = copy.deepcopy(tree)
    stack = [other]
    while stack:
        inode = stack.pop()
        inode.xattrs = _shuffled(inode.xattrs, shuffle)
        if inode.children is not None:
            inode.children = _shuffled(inode.children, shuffle)
            stack.extend(inode.children.values())
    assert write_image(other) == image == write_image(ImageReader(image).to_tree())


def _shuffled(values: dict[bytes, V], shuffle: random.Random) -> dict[bytes, V]:
    items = list(values.items())
    shuffle.shuffle(items)
    return dict(items)


def test_directory_of_many_blocks_is_found_again() -> None:
    made = {
        b"%05d" % (n * 7919 % 20_000): Inode(stat.S_IFREG | 0o644, uid=n) for n in range(20_000)
    }
    tree = directory(big=directory())
    (tree.children or {})[b"big"].children = made
    reader = ImageReader(write_image(tree))
    big = reader.lookup(reader.root, b"big")
    assert big is not None
    for name in [b"00000", b"00001", b"10000", b"19998", b"19999"]:
        nid = reader.lookup(big, name)
        assert nid is not None
        assert reader.inode(nid).uid == made[name].uid
    for name in [b"!", b"0", b"000000", b"10000x", b"2", b"\xff"]:
        assert reader.lookup(big, name) is None
    listed = list(reader.entries(big))
    assert [entry.name for entry in listed] == sorted(made)
    for start in (0, 1, 337, 338, 19_998, 19_999):
        rest = reader.entries(big, listed[start].next_offset)
        assert [entry.name for entry in rest] == sorted(made)[start + 1 :]


def test_names_sort_around_the_dots() -> None:
    names = [b"!", b"-", b".-", b"..-", b"...", b".a", b"0", b"\xff"]
    tree = directory()
    tree.children = {name: regular(0) for name in names}
    reader = ImageReader(write_image(tree))
    assert [entry.name for entry in reader.entries(reader.root)] == sorted(names)
    assert all(reader.lookup(reader.root, name) is not None for name in names)
    assert reader.lookup(reader.root, b".") == reader.lookup(reader.root, b"..") == reader.root


def test_deep_trees() -> None:
    tree = inner = directory()
    for _ in range(3000):
        inner.children = {b"d": directory()}
        inner = inner.children[b"d"]
    reader = ImageReader(write_image(tree))
    assert sum(1 for _ in reader.walk()) == 3001
    assert describe(reader.to_tree()) == describe(tree)


def test_long_names_targets_and_xattrs() -> None:
    tree = directory(
        long=Inode(stat.S_IFLNK | 0o777, target=b"t" * 4095),
        fits=Inode(stat.S_IFLNK | 0o777, target=b"t" * 4032),
        tight=Inode(stat.S_IFLNK | 0o777, target=b"t" * 4033),
        loaded=Inode(stat.S_IFLNK | 0o777, target=b"t", xattrs={b"trusted.x": b"v" * 65_535}),
        file=regular(1 << 43, xattrs={b"user.%d" % n: b"v" * 50_000 for n in range(5)}),
        dir=Inode(stat.S_IFDIR, xattrs={b"user." + b"n" * 250: b"v" * 5000}),
    )
    (tree.children or {})[b"dir"].children = {bytes([65 + n]) * 255: regular() for n in range(40)}
    assert describe(ImageReader(write_image(tree)).to_tree()) == describe(tree)


def test_link_counts() -> None:
    file = regular()
    tree = directory(a=directory(b=directory(), c=directory(), f=file), g=file)
    reader = ImageReader(write_image(tree))
    counts = {path: inode.nlink for path, inode in reader.walk()}
    assert counts == {b"": 3, b"a": 4, b"a/b": 2, b"a/c": 2, b"a/f": 2, b"g": 2}


def test_whiteout_devices_are_left_out() -> None:
    whiteout = Inode(stat.S_IFCHR)
    tree = directory(a=whiteout, b=whiteout, c=regular(), d=Inode(stat.S_IFBLK))
    reader = ImageReader(write_image(tree))
    assert [entry.name for entry in reader.entries(reader.root)] == [b"c", b"d"]
    assert reader.superblock.inode_count == 3


def test_names_that_linux_has_no_place_for_are_left_out() -> None:
    foreign = {b"com.apple.provenance": b"1", b"system.nfs4_acl": b"2", b"user.a": b"3"}
    only_foreign = {b"com.apple.provenance": b"1"}
    tree = directory(a=regular(xattrs=foreign), b=Inode(stat.S_IFIFO, xattrs=only_foreign))
    shown = ImageReader(write_image(tree)).to_tree().children
    assert shown is not None
    assert (shown[b"a"].xattrs, shown[b"b"].xattrs) == ({b"user.a": b"3"}, {})
