"""The FUSE wire format, protocol 7.31 to 7.45: answers and notifications to bytes. No I/O.

``wire`` is the other direction, with the source of the layouts. Payloads are what follows a
reply's header.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from snapshotter.fuse.wire import MAJOR
from snapshotter.vfs import Attr

_NANOSECONDS = 1_000_000_000
_REPLY = struct.Struct("=IiQ")
REPLY_HEADER_SIZE = _REPLY.size


class Notify(IntEnum):
    """What the server tells the kernel unasked."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3
    DELETE = 6
    RESEND = 7


def encode_reply(unique: int, payload_size: int) -> bytes:
    """The head of a successful reply, to be followed by that many bytes."""
    return _REPLY.pack(REPLY_HEADER_SIZE + payload_size, 0, unique)


def encode_error(unique: int, errno: int) -> bytes:
    """A whole reply that fails the request with a positive ``errno``."""
    return _REPLY.pack(REPLY_HEADER_SIZE, -errno, unique)


def unique_of(head: bytes | memoryview) -> int:
    """The request that a reply with this head answers."""
    return int(_REPLY.unpack_from(head)[2])


BLOCK_SIZE = 4096
"""Told as st_blksize: what programs read at once at least."""

_ATTR_LAYOUT = "QQQqqqIIIIIIIIII"
_ATTR = struct.Struct("=QI4x" + _ATTR_LAYOUT)
_ENTRY = struct.Struct("=QQQQII" + _ATTR_LAYOUT)
ENTRY_SIZE = _ENTRY.size
NO_ENTRY = bytes(ENTRY_SIZE)
"""Stands for no node: in READDIRPLUS before a name that is not looked up."""


def encode_entry(
    nodeid: int, attr: Attr, *, entry_timeout_ns: int, attr_timeout_ns: int, generation: int = 0
) -> bytes:
    """The payload that answers LOOKUP: a node, and how long its name and attributes hold."""
    entry_s, entry_ns = divmod(entry_timeout_ns, _NANOSECONDS)
    attr_s, attr_ns = divmod(attr_timeout_ns, _NANOSECONDS)
    mtime_s, mtime_ns = divmod(attr.mtime_ns, _NANOSECONDS)
    atime_s, atime_ns = divmod(attr.atime_ns, _NANOSECONDS)
    ctime_s, ctime_ns = divmod(attr.ctime_ns, _NANOSECONDS)
    return _ENTRY.pack(
        nodeid, generation, entry_s, attr_s, entry_ns, attr_ns,
        attr.ino, attr.size, attr.blocks, atime_s, mtime_s, ctime_s, atime_ns, mtime_ns, ctime_ns,
        attr.mode, attr.nlink, attr.uid, attr.gid, attr.rdev, BLOCK_SIZE, 0,
    )  # fmt: skip


def encode_absence(timeout_ns: int) -> bytes:
    """The payload that answers LOOKUP of a name that is not there, and how long that holds."""
    seconds, nanoseconds = divmod(timeout_ns, _NANOSECONDS)
    return struct.pack("=QQQQII", 0, 0, seconds, 0, nanoseconds, 0) + bytes(ENTRY_SIZE - 40)


def encode_attr(attr: Attr, *, timeout_ns: int) -> bytes:
    """The payload that answers GETATTR."""
    seconds, nanoseconds = divmod(timeout_ns, _NANOSECONDS)
    mtime_s, mtime_ns = divmod(attr.mtime_ns, _NANOSECONDS)
    atime_s, atime_ns = divmod(attr.atime_ns, _NANOSECONDS)
    ctime_s, ctime_ns = divmod(attr.ctime_ns, _NANOSECONDS)
    return _ATTR.pack(
        seconds, nanoseconds,
        attr.ino, attr.size, attr.blocks, atime_s, mtime_s, ctime_s, atime_ns, mtime_ns, ctime_ns,
        attr.mode, attr.nlink, attr.uid, attr.gid, attr.rdev, BLOCK_SIZE, 0,
    )  # fmt: skip


_OPEN_OUT = struct.Struct("=QIi")
_STATFS = struct.Struct("=QQQQQIII4x24x")
_WRITTEN = struct.Struct("=I4x")
_OFFSET = struct.Struct("=q")
_XATTR_SIZE = struct.Struct("=I4x")
_DIRENT = struct.Struct("=QQII")
_NOTIFY_INODE = struct.Struct("=Qqq")
_NOTIFY_ENTRY = struct.Struct("=QII")


class OpenFlag(IntEnum):
    """How the kernel is to treat an open file or directory: bits, to be joined as numbers."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    CACHE_DIR = 1 << 3
    NOFLUSH = 1 << 5
    PARALLEL_DIRECT_WRITES = 1 << 6
    PASSTHROUGH = 1 << 7


def encode_open(fh: int, open_flags: int, backing_id: int = 0) -> bytes:
    """The payload that answers OPEN and OPENDIR, and with an entry before it CREATE."""
    return _OPEN_OUT.pack(fh, open_flags, backing_id)


def encode_written(size: int) -> bytes:
    """The payload that answers WRITE and COPY_FILE_RANGE: how many bytes it were."""
    return _WRITTEN.pack(size)


def encode_offset(offset: int) -> bytes:
    """The payload that answers LSEEK and COPY_FILE_RANGE_64."""
    return _OFFSET.pack(offset)


def encode_statfs(
    *, blocks: int, free: int, files: int, available: int | None = None, free_files: int = 0,
    block_size: int = BLOCK_SIZE, name_max: int = 255, fragment_size: int | None = None,
) -> bytes:  # fmt: skip
    """The payload that answers STATFS; what is not given is as much as its neighbour."""
    return _STATFS.pack(
        blocks,
        free,
        free if available is None else available,
        files,
        free_files,
        block_size,
        name_max,
        block_size if fragment_size is None else fragment_size,
    )


def encode_xattr_size(size: int) -> bytes:
    """The payload that answers GETXATTR and LISTXATTR asked with size 0."""
    return _XATTR_SIZE.pack(size)


def encode_dirent(ino: int, next_offset: int, file_type: int, name: bytes) -> bytes:
    """One entry of a READDIR payload (DT_ type); put after an ENTRY it makes one of READDIRPLUS."""
    padding = -len(name) % 8
    return _DIRENT.pack(ino, next_offset, len(name), file_type) + name + bytes(padding)


def encode_notify(code: Notify, body: bytes = b"") -> bytes:
    """A whole notification: RESEND has no body."""
    return _REPLY.pack(REPLY_HEADER_SIZE + len(body), code, 0) + body


def encode_inval_inode(nodeid: int, offset: int, length: int) -> bytes:
    """A notification that drops cached attributes, and pages of a range (length 0: to the end)."""
    return encode_notify(Notify.INVAL_INODE, _NOTIFY_INODE.pack(nodeid, offset, length))


def encode_inval_entry(parent: int, name: bytes) -> bytes:
    """A notification that drops one cached name of a directory."""
    body = _NOTIFY_ENTRY.pack(parent, len(name), 0) + name + b"\0"
    return encode_notify(Notify.INVAL_ENTRY, body)


_INIT_OUT = struct.Struct("=IIIIHHIIHHIIH22x")


class InitReply(NamedTuple):
    """What a server settles on; sizes in bytes, ``max_pages`` in pages of 4 KiB."""

    minor: int
    max_readahead: int
    flags: int
    max_background: int
    congestion_threshold: int
    max_write: int
    max_pages: int
    max_stack_depth: int = 0


def encode_init(reply: InitReply) -> bytes:
    """The payload that answers INIT (times have a granularity of 1 ns, no request timeout)."""
    return _INIT_OUT.pack(
        MAJOR,
        reply.minor,
        reply.max_readahead,
        reply.flags & 0xFFFFFFFF,
        reply.max_background,
        reply.congestion_threshold,
        reply.max_write,
        1,
        reply.max_pages,
        0,
        reply.flags >> 32,
        reply.max_stack_depth,
        0,
    )
