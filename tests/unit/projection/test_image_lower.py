from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path

import pytest

from snapshotter.projection import erofs
from snapshotter.projection.image_lower import ImageLower, ObjectDirectory
from snapshotter.projection.image_reader import ImageReader
from snapshotter.projection.image_writer import write_image
from snapshotter.projection.tree import Inode
from snapshotter.vfs import Pending
from tests.support.trees import directory, regular


@pytest.fixture
def contents(tmp_path: Path):
    made = ObjectDirectory(tmp_path)
    yield made
    made.close()


def test_nothing_is_kept_for_an_entry(contents: ObjectDirectory) -> None:
    root = directory()
    empty = [directory() for _ in range(100)]
    for number, below in enumerate(empty):
        below.children = {b"name%04d" % n: Inode(stat.S_IFREG | 0o644) for n in range(1000)}
        assert root.children is not None
        root.children[b"dir%02d" % number] = below
    image = bytes(write_image(root))
    del root, empty
    lower = ImageLower(ImageReader(image), contents)
    before = sys.getallocatedblocks()
    count = 0
    for entry in lower.opendir(lower.root).entries():
        node = lower.lookup(lower.root, entry.name).node
        for name in lower.opendir(node).entries():
            count += 1
            if count % 10 == 0:
                assert lower.lookup(node, name.name).attr.ino == name.ino
    assert count == 100_000
    assert sys.getallocatedblocks() - before < 1000


def test_missing_content_is_pending_until_it_is_there(
    contents: ObjectDirectory, tmp_path: Path
) -> None:
    lower = ImageLower(ImageReader(write_image(directory(f=regular(5)))), contents)
    node = lower.lookup(lower.root, b"f").node
    with pytest.raises(Pending) as caught:
        lower.open(node, os.O_RDONLY)
    assert (caught.value.offset, caught.value.size) == (0, 5)
    path = tmp_path / caught.value.content.path
    path.parent.mkdir()
    path.write_bytes(b"12345")
    file = lower.open(node, os.O_RDONLY)
    assert file.read(10, 0) == b"12345"
    file.close()


def test_a_damaged_image_is_an_error_and_never_empty(contents: ObjectDirectory) -> None:
    good = write_image(directory(**{f"f{number:03}": regular(5) for number in range(100)}))
    reader = ImageReader(bytes(good))
    nid = reader.lookup(reader.root, b"f099")
    assert nid is not None
    begin = nid * erofs.SLOT_SIZE
    assert begin >= erofs.BLOCK_SIZE  # the first block has a checksum
    good[begin : begin + erofs.INODE_SIZE] = b"\xff" * erofs.INODE_SIZE
    lower = ImageLower(ImageReader(bytes(good)), contents)
    for call in (
        lambda: lower.lookup(lower.root, b"f099"),
        lambda: lower.getattr(nid),
        lambda: lower.listxattr(nid),
        lambda: lower.opendir(nid),
        lambda: lower.getattr(1 << 40),
    ):
        with pytest.raises(OSError, match="metadata image") as caught:
            call()
        assert caught.value.errno == errno.EIO


def test_an_image_is_never_written_to(contents: ObjectDirectory) -> None:
    lower = ImageLower(ImageReader(write_image(directory(f=regular(5)))), contents)
    node = lower.lookup(lower.root, b"f").node
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_TRUNC):
        with pytest.raises(OSError, match="image") as caught:
            lower.open(node, flags)
        assert caught.value.errno == errno.EROFS


def test_statfs_tells_of_a_full_read_only_file_system(contents: ObjectDirectory) -> None:
    image = write_image(directory(f=regular(5)))
    found = ImageLower(ImageReader(image), contents).statfs()
    assert found.f_blocks * found.f_frsize == len(image)
    assert (found.f_bfree, found.f_ffree, found.f_flag & os.ST_RDONLY) == (0, 0, os.ST_RDONLY)
