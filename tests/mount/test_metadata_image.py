"""The kernel's EROFS and overlayfs read our metadata images as we mean them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from snapshotter.digest import sha256
from snapshotter.names import ContentName
from snapshotter.projection.image_reader import ImageReader
from snapshotter.projection.image_writer import write_image
from snapshotter.projection.tree import Inode, walk
from tests.support import apply_layers, trees
from tests.support.image_mounts import Mounts
from tests.support.trees import describe, directory, regular

pytestmark = pytest.mark.mount


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    made = Mounts(tmp_path)
    yield made
    made.close()


def shown_by_erofs(tree: Inode) -> dict[bytes, object]:
    """What the kernel should show of an image of ``tree``: overlayfs's xattrs are plain there."""
    shown = trees.copied(tree)
    for inode in {id(inode): inode for _, inode in walk(shown)}.values():
        inode.xattrs = {
            name.replace(b"trusted.overlay.", b"trusted.overlay.overlay.", 1): value
            for name, value in inode.xattrs.items()
        }
        if inode.content_name is not None:
            inode.xattrs[b"trusted.overlay.metacopy"] = b""
            inode.xattrs[b"trusted.overlay.redirect"] = f"/{inode.content_name}".encode()
        inode.content = b""
    return dict(describe(shown))


@pytest.fixture(scope="module")
def shared_mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounts]:
    made = Mounts(tmp_path_factory.mktemp("images"))
    yield made
    made.close()


@settings(max_examples=40)
@given(tree=trees.trees())
def test_kernel_shows_any_tree(shared_mounts: Mounts, tree: Inode) -> None:
    target = os.fsencode(shared_mounts.erofs(tree))
    assert describe(apply_layers.read_tree(target)) == shown_by_erofs(tree)


def test_link_counts_and_inode_numbers(mounts: Mounts) -> None:
    file = regular()
    tree = directory(a=directory(b=directory(), f=file), g=file, h=regular())
    target = mounts.erofs(tree)
    expected = {"": 3, "a": 3, "a/b": 2, "a/f": 2, "g": 2, "h": 1}
    found = {path: (target / path).stat() for path in expected}
    assert {path: status.st_nlink for path, status in found.items()} == expected
    assert found["a/f"].st_ino == found["g"].st_ino
    assert len({status.st_ino for status in found.values()}) == 5
    reader = ImageReader(write_image(tree))
    assert found[""].st_ino == reader.root


def test_reading_past_the_redirect_is_an_error_never_zeros(mounts: Mounts) -> None:
    sizes = [1, 4096, 5000, 1 << 20, (1 << 20) + 1, (1 << 40) + 7, 1 << 43]
    target = mounts.erofs(directory(**{f"f{size}": regular(size) for size in sizes}))
    for size in sizes:
        descriptor = os.open(target / f"f{size}", os.O_RDONLY)
        try:
            for offset in (0, size - 1):
                with pytest.raises(OSError, match="Input/output error"):
                    os.pread(descriptor, 1, offset)
        finally:
            os.close(descriptor)
    assert mounts.erofs(directory(empty=regular(0))).joinpath("empty").read_bytes() == b""


def test_large_directory(mounts: Mounts) -> None:
    tree = directory(big=directory())
    assert tree.children is not None
    names = [b"entry-%d" % n for n in range(100_000)]
    shared = regular(0, uid=77)
    tree.children[b"big"].children = dict.fromkeys(names, shared)
    big = os.fsencode(mounts.erofs(tree) / "big")
    assert sorted(os.listdir(big)) == sorted(names)
    for name in names[::997]:
        assert os.lstat(big + b"/" + name).st_uid == 77
    for name in (b"entry-", b"entry-100000", b"a", b"z", b"entry-5x"):
        with pytest.raises(FileNotFoundError):
            os.lstat(big + b"/" + name)
    assert os.lstat(big + b"/entry-5").st_nlink == 100_000


def test_longest_targets_and_largest_xattrs(mounts: Mounts) -> None:
    many = {b"user.%d" % n: b"v" * 60_000 for n in range(4)}
    tree = directory(
        long=Inode(stat.S_IFLNK | 0o777, target=b"t" * 4095),
        loaded=Inode(stat.S_IFLNK | 0o777, target=b"t" * 99, xattrs={b"trusted.x": b"v" * 65_535}),
        file=regular(9, xattrs=many),
        empty=regular(0, xattrs=many),
        fifo=Inode(stat.S_IFIFO, xattrs={b"trusted." + b"n" * 247: b""}),
        dir=Inode(stat.S_IFDIR | 0o755, xattrs=many),
    )
    assert tree.children is not None
    tree.children[b"dir"].children = {bytes([65 + n]) * 255: regular() for n in range(40)}
    target = os.fsencode(mounts.erofs(tree))
    assert describe(apply_layers.read_tree(target)) == shown_by_erofs(tree)
    with pytest.raises(OSError, match="Input/output error"):
        Path(os.fsdecode(target), "file").read_bytes()


def test_acls(mounts: Mounts) -> None:
    # struct posix_acl_xattr: version 2, then (tag, permissions, id): the owner, user 1000, the
    # group, the mask, the others.
    acl = bytes.fromhex(
        "02000000 0100 0600 ffffffff 0200 0400 e8030000 0400 0000 ffffffff"
        "1000 0400 ffffffff 2000 0000 ffffffff"
    )
    access, default = b"system.posix_acl_access", b"system.posix_acl_default"
    tree = directory(f=regular(mode=0o640, xattrs={access: acl}))
    tree.xattrs = {access: acl, default: acl}
    target = mounts.erofs(tree)
    assert os.getxattr(target / "f", access) == acl
    assert os.getxattr(target, default) == acl
    assert set(os.listxattr(target)) == {access.decode(), default.decode()}


def test_view_by_overlayfs(mounts: Mounts, tmp_path: Path) -> None:
    content = b"hello"
    file = regular(
        5,
        content=sha256(content),
        xattrs={
            b"trusted.overlay.redirect": b"mine",
            b"user.overlay.opaque": b"y",
            b"user.a": b"1",
        },
    )
    hidden = Inode(stat.S_IFCHR)
    inner = directory(f=file, gone=hidden)
    inner.xattrs = {b"trusted.overlay.opaque": b"y"}
    tree = directory(d=inner, gone=hidden, link=file, cold=regular(7), real=Inode(stat.S_IFBLK))
    objects = tmp_path / "objects"
    name = ContentName(sha256(content), 5)
    (objects / name.directory).mkdir(parents=True)
    (objects / name.path).write_bytes(content)

    view = mounts.overlay(mounts.erofs(tree), objects)
    assert (view / "d/f").read_bytes() == (view / "link").read_bytes() == content
    assert {n: os.getxattr(view / "d/f", n) for n in os.listxattr(view / "d/f")} == {
        os.fsdecode(n): value for n, value in file.xattrs.items()
    }
    assert os.getxattr(view / "d", "trusted.overlay.opaque") == b"y"
    # A 0/0 character device in "d" would be listed, as a name that cannot be looked up.
    assert sorted(os.listdir(view)) == ["cold", "d", "link", "real"]
    assert os.listdir(view / "d") == ["f"]
    assert not (view / "gone").exists()
    with pytest.raises(FileNotFoundError):
        (view / "cold").read_bytes()
