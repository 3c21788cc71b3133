"""The EROFS on-disk structures that a metadata image uses. Little endian; no I/O.

Source: the kernel's fs/erofs/erofs_fs.h and erofs.docs.kernel.org (core on-disk format). Our
profile of it is described in docs/formats/metadata-image.md.
"""

from __future__ import annotations

import stat
import struct

import msgspec

BLOCK_BITS = 12
BLOCK_SIZE = 1 << BLOCK_BITS
SUPERBLOCK_OFFSET = 1024
SUPERBLOCK_SIZE = 128
MAGIC = 0xE0F5E1E2
COMPAT_SUPERBLOCK_CHECKSUM = 0x1
INCOMPAT_CHUNKED_FILE = 0x4

SLOT_SIZE = 32
"""An inode lies at ``meta_blkaddr`` blocks + nid * SLOT_SIZE."""

LAYOUT_PLAIN = 0
"""The data is consecutive blocks from ``start``."""
LAYOUT_INLINE = 2
"""As plain, but the last, partial block follows the inode's xattrs, within one block."""
LAYOUT_CHUNKED = 4
"""A table of u32 block addresses follows the inode's xattrs, one for each chunk."""

NO_BLOCK = 0xFFFF_FFFF
"""``start`` of an inode that has no block of its own."""
OUTSIDE = 0xFFFF_FFFE
"""A block address past the end of any image: reading there is EIO (0xffffffff reads as zeros)."""

MAX_CHUNK_BITS = 31
MAX_CHUNKED_SIZE = 1 << (BLOCK_BITS + MAX_CHUNK_BITS)
"""The largest file that one chunk covers: 8 TiB."""

MAX_LINK_TARGET = 4095
"""Bytes in a symbolic link: Linux's PATH_MAX less its NUL."""

INODE = struct.Struct("<HHHHQIIIIqII16x")
"""format, xattr count, mode, 0, size, start, serial, uid, gid, mtime in s, its ns, nlink.

The extended form. format is 1 | layout << 1; for the xattr count see ``xattr_area_size``; start is
a block address, a device number or, of a chunked file, ``chunk_bits``.
"""
INODE_SIZE = 64
INODE_EXTENDED = 1
INODE_START_OFFSET = 16
INODE_NLINK_OFFSET = 44

DIRENT = struct.Struct("<QHBB")
"""nid, offset of the name in the block, file type, 0. Names follow the last dirent, unseparated."""
DIRENT_SIZE = 12

XATTR_HEADER = struct.Struct("<IB7x")
"""name filter (unused without its feature bit), number of shared xattrs."""
XATTR_HEADER_SIZE = 12
XATTR_ENTRY = struct.Struct("<BBH")
"""length of the name after its prefix, prefix index, length of the value; name and value follow,
padded to a multiple of 4."""
XATTR_ENTRY_SIZE = 4
MAX_XATTR_VALUE = 0xFFFF
MAX_XATTR_AREA = XATTR_HEADER_SIZE + 4 * 0xFFFE

XATTR_PREFIXES = {1: b"user.", 4: b"trusted.", 6: b"security."}
XATTR_ACL_NAMES = {2: b"system.posix_acl_access", 3: b"system.posix_acl_default"}
"""Prefixes that are the whole name; the value is what getxattr shows."""

FILE_TYPES = {
    stat.S_IFREG: 1,
    stat.S_IFDIR: 2,
    stat.S_IFCHR: 3,
    stat.S_IFBLK: 4,
    stat.S_IFIFO: 5,
    stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}
"""The type bits of a mode to a dirent's file type (include/linux/fs_types.h)."""

_SUPERBLOCK = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")


class Superblock(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are not constant in our profile, and those that a reader must check."""

    root_nid: int
    inode_count: int
    block_count: int
    meta_block: int = 0
    uuid: bytes = bytes(16)
    checksum: int = 0
    magic: int = MAGIC
    block_bits: int = BLOCK_BITS
    compat: int = COMPAT_SUPERBLOCK_CHECKSUM
    incompat: int = INCOMPAT_CHUNKED_FILE

    def pack(self) -> bytes:
        """The 128 bytes."""
        return _SUPERBLOCK.pack(
            self.magic, self.checksum, self.compat, self.block_bits, 0, self.root_nid,
            self.inode_count, 0, 0, self.block_count, self.meta_block, 0,
            self.uuid, bytes(16), self.incompat, 0, 0, 0, 0, 0, 0, 0, 0,
        )  # fmt: skip

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> Superblock:
        """From 128 bytes, unchecked."""
        (magic, checksum, compat, block_bits, _, root_nid, inode_count, _, _, block_count,
         meta_block, _, uuid, _, incompat, *_) = _SUPERBLOCK.unpack(raw)  # fmt: skip
        return cls(
            root_nid=root_nid,
            inode_count=inode_count,
            block_count=block_count,
            meta_block=meta_block,
            uuid=uuid,
            checksum=checksum,
            magic=magic,
            block_bits=block_bits,
            compat=compat,
            incompat=incompat,
        )


def superblock_checksum(first_block: bytes | bytearray | memoryview) -> int:
    """CRC-32C of the first block from the superblock on, its checksum field taken as zero.

    The kernel starts from ~0 and does not invert the result.
    """
    data = bytearray(first_block[SUPERBLOCK_OFFSET:BLOCK_SIZE])
    data[4:8] = bytes(4)
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc


def _crc32c_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F6_3B78 if value & 1 else 0)  # noqa: PLW2901
        table.append(value)
    return table


_CRC32C = _crc32c_table()


def xattr_count(area_size: int) -> int:
    """An inode's xattr count field for an xattr area of ``area_size`` bytes."""
    return (area_size - XATTR_HEADER_SIZE) // 4 + 1 if area_size else 0


def xattr_area_size(count: int) -> int:
    """Bytes of xattrs behind an inode: none, or the header and 4 for each count after the first."""
    return XATTR_HEADER_SIZE + 4 * (count - 1) if count else 0


def chunk_bits(size: int) -> int:
    """The chunk format field with which one chunk covers ``size`` bytes."""
    return max(0, (size - 1).bit_length() - BLOCK_BITS)
