from __future__ import annotations

import hashlib
import stat

import pytest

from snapshotter.errors import InvalidInputError
from snapshotter.projection import erofs
from snapshotter.projection.image_reader import ImageReader
from snapshotter.projection.image_writer import METADATA_GENERATION, write_image
from snapshotter.projection.tree import Inode
from tests.support.trees import directory, regular


def tiny() -> bytearray:
    file = regular(5, uid=1, gid=2, mtime_ns=-1, content=bytes(range(32)), xattrs={b"user.a": b"v"})
    link = Inode(stat.S_IFLNK | 0o777, target=b"f")
    return write_image(directory(f=file, s=link))


def at(image: bytearray, offset: int, expected: str) -> bool:
    raw = bytes.fromhex(expected)
    return image[offset : offset + len(raw)] == raw


def test_golden_superblock_and_root() -> None:
    image = tiny()
    assert METADATA_GENERATION == 1
    assert len(image) == 4096
    assert image[:1024] == bytes(1024)
    superblock = erofs.Superblock.unpack(image[1024:1152])
    assert at(image, 1024, "e2e1f5e0" + superblock.checksum.to_bytes(4, "little").hex())
    assert at(image, 1032, "01000000 0c 00 2400 0300000000000000 0000000000000000 00000000")
    assert at(image, 1060, "01000000 00000000 00000000" + superblock.uuid.hex())
    assert at(image, 1088, "00" * 16 + "04000000" + "00" * 44)
    assert at(image, 1152, "0500 0000 ed41 0000 3500000000000000 ffffffff 01000000")
    assert at(image, 1176, "00000000 00000000 0000000000000000 00000000 02000000" + "00" * 16)
    assert at(image, 1216, "2400000000000000 3000 02 00 2400000000000000 3100 02 00")
    assert at(image, 1240, "2800000000000000 3300 01 00 2f00000000000000 3400 07 00")
    assert image[1264:1280] == b"...fs" + bytes(11)


def test_golden_files() -> None:
    image = tiny()
    xattrs = (
        bytes(12)
        + b"\x10\x04\x00\x00overlay.metacopy"
        + b"\x10\x04\x44\x00overlay.redirect/00/"
        + bytes(range(1, 32)).hex().encode()
        + b".5\x01\x01\x01\x00av\x00\x00"
    )
    assert at(image, 1280, "0900 1e00 a481 0000 0500000000000000 00000000 02000000 01000000")
    assert at(image, 1308, "02000000 ffffffffffffffff ffc99a3b 01000000" + "00" * 16)
    assert at(image, 1344, xattrs.hex() + "feffffff")
    assert at(image, 1504, "0500 0000 ffa1 0000 0100000000000000 ffffffff 03000000 00000000")
    assert at(image, 1532, "00000000 0000000000000000 00000000 01000000" + "00" * 16)
    assert image[1568:] == b"f" + bytes(4096 - 1569)


def test_uuid_is_the_digest_of_the_rest() -> None:
    image = tiny()
    superblock = erofs.Superblock.unpack(image[1024:1152])
    bare = bytearray(image)
    bare[1028:1032] = bytes(4)
    bare[1072:1088] = bytes(16)
    assert superblock.uuid == hashlib.sha256(bare).digest()[:16]
    other = erofs.Superblock.unpack(write_image(directory(f=regular(6)))[1024:1152])
    assert other.uuid != superblock.uuid


def test_own_overlay_xattrs_are_escaped() -> None:
    own = {b"trusted.overlay.redirect": b"/evil", b"trusted.overlay.overlay.x": b"y"}
    image = write_image(directory(f=regular(xattrs=own), d=Inode(stat.S_IFDIR, xattrs=own)))
    assert image.count(b"overlay.overlay.redirect/evil") == 2
    assert image.count(b"overlay.overlay.overlay.xy") == 2
    assert image.count(b"/evil") == 2


def test_acls_have_their_own_prefix() -> None:
    acls = {b"system.posix_acl_access": b"ACCESS", b"system.posix_acl_default": b"DEFAULT"}
    image = write_image(Inode(stat.S_IFDIR, xattrs=acls))
    assert b"\x00\x02\x06\x00ACCESS\x00\x00\x00\x03\x07\x00DEFAULT\x00" in image


def test_one_chunk_covers_any_size() -> None:
    for size, bits in [
        (1, 0),
        (4096, 0),
        (4097, 1),
        (1 << 20, 8),
        ((1 << 20) + 1, 9),
        (1 << 43, 31),
    ]:
        assert erofs.chunk_bits(size) == bits


@pytest.mark.parametrize(
    ("inode", "message"),
    [
        (regular(1 << 44), "limit"),
        (regular(-1), "limit"),
        (regular(5, content=b"short"), "content id"),
        (regular(uid=-1), "out of range"),
        (regular(gid=1 << 32), "out of range"),
        (regular(mode=0o1000000), "out of range"),
        (regular(mtime_ns=1 << 100), "out of range"),
        (Inode(0o644), "unknown type"),
        (Inode(stat.S_IFLNK, target=b""), "link target of 0 bytes"),
        (Inode(stat.S_IFLNK, target=b"x" * 4096), "link target of 4096 bytes"),
        (Inode(stat.S_IFLNK, target=b"a\0b"), "NUL"),
        (regular(xattrs={b"user.": b""}), "xattr name of 5 bytes"),
        (regular(xattrs={b"user." + b"n" * 251: b""}), "xattr name of 256 bytes"),
        (regular(xattrs={b"trusted.overlay." + b"n" * 232: b""}), "xattr name of 256 bytes"),
        (regular(xattrs={b"user.a\0": b""}), "NUL"),
        (regular(xattrs={b"user.a": bytes(65_536)}), "65535 is the limit"),
        (regular(xattrs={b"user.%d" % n: bytes(65_535) for n in range(4)}), "262148 is the limit"),
        (Inode(stat.S_IFDIR, xattrs={b"user.a": bytes(65_536)}), "65535 is the limit"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_path(inode: Inode, message: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"b'/sub/bad': .*{message}"):
        write_image(directory(sub=directory(bad=inode)))


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0", b"n" * 256])
def test_bad_names_are_refused(name: bytes) -> None:
    tree = directory(sub=directory())
    (tree.children or {})[b"sub"].children = {b"good": regular(), name: regular()}
    with pytest.raises(InvalidInputError, match=r"/sub.: .*file name"):
        write_image(tree)


def test_a_directory_has_one_place() -> None:
    shared = directory(x=regular())
    with pytest.raises(InvalidInputError, match=r"b'/b': a directory has two places"):
        write_image(directory(a=shared, b=shared))
    loop = directory()
    loop.children = {b"self": loop}
    with pytest.raises(InvalidInputError, match=r"b'/self': a directory has two places"):
        write_image(loop)


def test_root_must_be_a_directory() -> None:
    with pytest.raises(InvalidInputError, match="root is not a directory"):
        write_image(regular())


@pytest.mark.parametrize(
    "root", [Inode(stat.S_IFDIR, uid=-1), Inode(0o40755, xattrs={b"user.": b""})]
)
def test_bad_roots_are_refused(root: Inode) -> None:
    with pytest.raises(InvalidInputError, match=r"metadata image: b'/': "):
        write_image(root)


@pytest.mark.parametrize("count", [0, 100, 160, 200, 240, 300, 1000])
def test_root_is_found_however_many_names_it_holds(count: int) -> None:
    """A root whose last names need most of a block begins in the block after the superblock's."""
    root = Inode(stat.S_IFDIR | 0o755)
    assert root.children is not None
    names = [b"name%04d" % number for number in range(count)]
    root.children.update((name, Inode(stat.S_IFREG | 0o644)) for name in names)
    reader = ImageReader(write_image(root))
    assert [entry.name for entry in reader.entries(reader.root)] == names
    assert reader.lookup(reader.root, b"..") == reader.root
