from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.names import ContentName
from snapshotter.projection.content_tree import ContentTree
from snapshotter.projection.image_lower import ObjectDirectory
from snapshotter.vfs import Pending

DATA = b"some content"
NAME = ContentName(hashlib.sha256(DATA).digest(), len(DATA))


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[ContentTree]:
    contents = ObjectDirectory(tmp_path)
    yield ContentTree(contents)
    contents.close()


def find(tree: ContentTree, name: ContentName):
    directory = tree.lookup(tree.root, name.directory.encode())
    assert not list(tree.opendir(directory.node).entries())
    return tree.lookup(directory.node, name.file.encode())


def test_a_name_says_all_before_its_content_is_here(tree: ContentTree, tmp_path: Path) -> None:
    found = find(tree, NAME)
    assert (found.attr.mode, found.attr.size, found.attr.blocks) == (0o100444, len(DATA), 1)
    with pytest.raises(Pending) as caught:
        tree.open(found.node, os.O_RDONLY)
    assert caught.value.content == NAME
    (tmp_path / NAME.directory).mkdir()
    (tmp_path / NAME.path).write_bytes(DATA)
    file = tree.open(found.node, os.O_RDONLY)
    assert file.read(100, 0) == DATA
    file.close()


@pytest.mark.parametrize("name", [b"a", b"abc", b"AB", b"0x", b"..", b"", b"a\xff"])
def test_other_names_are_not_there(tree: ContentTree, name: bytes) -> None:
    with pytest.raises(FileNotFoundError):
        tree.lookup(tree.root, name)


@pytest.mark.parametrize(
    "name", [b"x" * 62 + b".1", b"a" * 62, b"a" * 62 + b".0", b"a" * 61 + b".1"]
)
def test_other_files_are_not_there(tree: ContentTree, name: bytes) -> None:
    directory = tree.lookup(tree.root, b"ab").node
    with pytest.raises(FileNotFoundError):
        tree.lookup(directory, name)


def test_what_is_refused(tree: ContentTree) -> None:
    node = find(tree, NAME).node
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC):
        with pytest.raises(OSError, match="never changes") as caught:
            tree.open(node, flags)
        assert caught.value.errno == errno.EROFS
    with pytest.raises(OSError, match="directory") as caught:
        tree.open(tree.root, os.O_RDONLY)
    assert caught.value.errno == errno.EISDIR
    for call in (tree.opendir, lambda found: tree.lookup(found, b"x")):
        with pytest.raises(NotADirectoryError):
            call(node)
    with pytest.raises(OSError, match="no symbolic link"):
        tree.readlink(node)


def test_inode_numbers_tell_all_apart(tree: ContentTree) -> None:
    other = ContentName(hashlib.sha256(b"other").digest(), 5)
    numbers = {tree.getattr(tree.root).ino}
    numbers |= {tree.lookup(tree.root, b"%02x" % byte).attr.ino for byte in range(256)}
    numbers |= {find(tree, NAME).attr.ino, find(tree, other).attr.ino}
    assert len(numbers) == 1 + 256 + 2
    assert all(0 < number < 1 << 63 for number in numbers)
