from __future__ import annotations

import mmap
import random
import stat
import tempfile
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotter.errors import CorruptError
from snapshotter.names import ContentName
from snapshotter.projection import erofs
from snapshotter.projection.image_reader import ImageReader
from snapshotter.projection.image_writer import write_image
from snapshotter.projection.tree import Inode
from tests.support.trees import directory, regular


def sample() -> bytearray:
    file = regular(5, uid=1, gid=70_000, mtime_ns=-1, xattrs={b"user.a": b"v"})
    many = directory()
    many.children = {b"name%03d" % n: regular(n) for n in range(300)}
    return write_image(
        directory(
            f=file,
            h=file,
            s=Inode(stat.S_IFLNK | 0o777, target=b"/x", xattrs={b"trusted.overlay.x": b"y"}),
            c=Inode(stat.S_IFCHR | 0o600, rdev=0x12345),
            long=Inode(stat.S_IFLNK | 0o777, target=b"l" * 4090),
            many=many,
        )
    )


SAMPLE = bytes(sample())


@pytest.fixture
def reader() -> ImageReader:
    return ImageReader(SAMPLE)


def find(reader: ImageReader, name: bytes) -> int:
    nid = reader.lookup(reader.root, name)
    assert nid is not None
    return nid


def test_inode(reader: ImageReader) -> None:
    inode = reader.inode(find(reader, b"f"))
    assert (inode.mode, inode.uid, inode.gid, inode.mtime_ns) == (0o100644, 1, 70_000, -1)
    assert (inode.size, inode.nlink, inode.rdev, inode.is_directory) == (5, 2, 0, False)
    assert reader.inode(find(reader, b"c")).rdev == 0x12345
    assert reader.inode(reader.root).is_directory


def test_content_and_xattrs(reader: ImageReader) -> None:
    nid = find(reader, b"f")
    assert reader.content(nid) == ContentName(b"\xab" * 32, 5)
    assert reader.xattrs(nid) == {b"user.a": b"v"}
    assert reader.xattrs(find(reader, b"s")) == {b"trusted.overlay.x": b"y"}
    for name in (b"s", b"c", b"many"):
        assert reader.content(find(reader, name)) is None


@pytest.mark.parametrize("size", [1, 9, 10, 99, 100, 1 << 20, erofs.MAX_CHUNKED_SIZE])
@pytest.mark.parametrize("name_size", [0, 48, 53, 57])
def test_content_ends_where_its_length_says(size: int, name_size: int) -> None:
    # What follows a redirect may look like more digits of its size: a name's length does.
    xattrs = {b"user." + b"n" * name_size: b"v"} if name_size else {}
    reader = ImageReader(write_image(directory(f=regular(size, xattrs=xattrs))))
    assert reader.content(find(reader, b"f")) == ContentName(b"\xab" * 32, size)


def test_readlink(reader: ImageReader) -> None:
    assert reader.readlink(find(reader, b"s")) == b"/x"
    assert reader.readlink(find(reader, b"long")) == b"l" * 4090


def test_entries_say_the_type(reader: ImageReader) -> None:
    kinds = {entry.name: entry.type_bits for entry in reader.entries(reader.root)}
    assert kinds[b"f"] == kinds[b"h"] == stat.S_IFREG
    assert kinds[b"many"] == stat.S_IFDIR
    assert (kinds[b"s"], kinds[b"c"]) == (stat.S_IFLNK, stat.S_IFCHR)


def test_reads_a_mapping_and_lets_it_go() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(SAMPLE)
        file.flush()
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        reader = ImageReader(mapping)
        assert reader.lookup(reader.root, b"f") is not None
        reader.close()
        mapping.close()


@pytest.mark.parametrize("name", [b"f", b"c", b"s"])
def test_operations_on_the_wrong_type(reader: ImageReader, name: bytes) -> None:
    nid = find(reader, name)
    with pytest.raises(CorruptError, match="no directory"):
        reader.lookup(nid, b"x")
    with pytest.raises(CorruptError, match="no directory"):
        list(reader.entries(nid))
    with pytest.raises(CorruptError, match="no symbolic link"):
        reader.readlink(reader.root)


@pytest.mark.parametrize("nid", [-1, 0, 31, len(SAMPLE) // 32 - 1, len(SAMPLE) // 32, 1 << 70])
def test_nids_outside(reader: ImageReader, nid: int) -> None:
    with pytest.raises(CorruptError):
        reader.inode(nid)


@pytest.mark.parametrize("size", [0, 1, 1024, 1152, 4095, 4096, 4097, len(SAMPLE) - 4096])
def test_truncated_images_do_not_open(size: int) -> None:
    with pytest.raises(CorruptError):
        ImageReader(SAMPLE[:size])


@pytest.mark.parametrize("offset", [1024, 1028, 1032, 1036, 1038, 1060, 1072, 1104, 4000])
def test_damage_in_the_first_block_is_seen(offset: int) -> None:
    damaged = bytearray(SAMPLE)
    damaged[offset] ^= 1
    with pytest.raises(CorruptError, match="superblock"):
        ImageReader(damaged)


# Hostile images: a right superblock over anything ------------------------------------------------


def resealed(image: bytearray) -> bytearray:
    image[1028:1032] = erofs.superblock_checksum(image).to_bytes(4, "little")
    return image


def read_all(image: bytes | bytearray) -> None:
    """Every operation on everything; CorruptError may come from any."""
    reader = ImageReader(image)
    for path, inode in reader.walk():
        reader.xattrs(inode.nid)
        reader.content(inode.nid)
        if stat.S_ISLNK(inode.mode):
            reader.readlink(inode.nid)
        if inode.is_directory:
            reader.lookup(inode.nid, path.rpartition(b"/")[2])
            reader.lookup(inode.nid, b"name150")
    reader.to_tree()


def read_hostile(image: bytearray) -> None:
    try:
        read_all(resealed(image))
    except CorruptError:
        pass


@settings(max_examples=300)
@given(
    st.lists(
        st.tuples(st.integers(1152, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=6
    )
)
def test_flipped_bytes_give_only_corrupt_errors(changes: list[tuple[int, int]]) -> None:
    image = bytearray(SAMPLE)
    for offset, value in changes:
        image[offset] = value
    read_hostile(image)


def test_flipped_bytes_where_the_structures_are() -> None:
    small = write_image(directory(d=directory(f=regular()), s=Inode(0o120777, target=b"t")))
    for offset in range(1152, 1152 + 520):
        for value in (0, 0xFF):
            image = bytearray(small)
            image[offset] = value
            read_hostile(image)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 8))
def test_blocks_in_disorder_give_only_corrupt_errors(order: random.Random, count: int) -> None:
    image = bytearray(SAMPLE)
    for _ in range(count):
        source, target = (order.randrange(1, len(image) // 32 - 2) * 32 for _ in range(2))
        if target >= 1152:
            image[target : target + 64] = image[source : source + 64]
    read_hostile(image)


def patched(change: Callable[[bytearray], None]) -> bytearray:
    image = write_image(
        directory(
            a=directory(),
            f=regular(xattrs={b"user.x": b"v"}),
            s=Inode(stat.S_IFLNK | 0o777, target=b"target"),
        )
    )
    change(image)
    return resealed(image)


def put(offset: int, value: bytes) -> Callable[[bytearray], None]:
    def change(image: bytearray) -> None:
        image[offset : offset + len(value)] = value

    return change


def replace(old: bytes, new: bytes) -> Callable[[bytearray], None]:
    def change(image: bytearray) -> None:
        assert image.count(old) == 1
        image[:] = image.replace(old, new)

    return change


DIRENTS = 1152 + 64
"""Of the root: ".", "..", "a", "f", "s"."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(DIRENTS + 24, (36).to_bytes(8, "little")), "a loop"),
        (put(DIRENTS + 24, (1 << 60).to_bytes(8, "little")), "lies outside"),
        (put(DIRENTS + 24 + 10, b"\x01"), "two types"),
        (put(DIRENTS + 24 + 10, b"\x09"), "malformed"),
        (put(DIRENTS + 8, b"\x00\x00"), "malformed"),
        (put(DIRENTS + 8, b"\x0d\x00"), "malformed"),
        (put(DIRENTS + 8, b"\xff\xff"), "malformed"),
        (put(DIRENTS + 24 + 8, b"\xff\xff"), "malformed"),
        (put(DIRENTS + 60, b"...f/s"), "malformed"),
        (put(DIRENTS + 60, b"...zfs"), "out of order"),
        (put(DIRENTS + 60, b"...ffs"), "out of order"),
        (put(1152, b"\x01"), "lies outside"),
        (put(1152, b"\x0b"), "no inode of ours"),
        (put(1154, b"\xff\xff"), "reach outside"),
        (put(1160, bytes([0, 0, 0, 0, 0, 0, 0, 1])), "no inode of ours"),
        (replace(b"overlay.metacopy", b"overlay.metaxxxx"), "overlayfs itself"),
        (replace(b"\x04\x00\x00overlay.metacopy", b"\x01\x00\x00overlay.metacopy"), "no redirect"),
        (replace(b"\x04\x44\x00overlay.redirect", b"\x01\x44\x00overlay.redirect"), "no redirect"),
        (replace(b"overlay.redirect/ab/", b"overlay.redirectxab/"), "not absolute"),
        (replace(b".5", b".6"), "names ab/"),
        (replace(b".5", b".x"), "not an object name"),
        (replace(b".5", b".0"), "not an object name"),
        (replace(b".5", b".+"), "not an object name"),
        (replace(b"/ab/a", b"/aB/a"), "not an object name"),
        (replace(b"/ab/a", b"/ab/ "), "not an object name"),
        (replace(b"\x01\x01\x01\x00x", b"\xff\x01\x01\x00x"), "reaches beyond"),
        (replace(b"\x01\x01\x01\x00x", b"\x01\x05\x01\x00x"), "prefix 5"),
        (replace(b"target", b"tar\0et"), "NUL"),
    ],
)
def test_what_is_wrong_is_said(change: Callable[[bytearray], None], message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        read_all(patched(change))
