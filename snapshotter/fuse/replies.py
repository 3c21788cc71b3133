"""The FUSE wire format, protocol 7.31 to 7.45: answers and notifications to bytes. No I/O.

``wire`` is the other direction, with the source of the layouts. Payloads are what follows a
reply's header.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from snapshotter.fuse.wire import MAJOR

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


class Attr(NamedTuple):
    """The attributes of a node, times in nanoseconds since 1970."""

    ino: int
    mode: int
    size: int = 0
    nlink: int = 1
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    block_size: int = 4096


_ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("=QQQQII")
_ATTR_TIMEOUT = struct.Struct("=QI4x")


def _encode_attr(attr: Attr) -> bytes:
    atime_s, atime_ns = divmod(attr.atime_ns, _NANOSECONDS)
    mtime_s, mtime_ns = divmod(attr.mtime_ns, _NANOSECONDS)
    ctime_s, ctime_ns = divmod(attr.ctime_ns, _NANOSECONDS)
    mask = (1 << 64) - 1  # times before 1970 travel as two's complement
    return _ATTR.pack(
        attr.ino,
        attr.size,
        -(-attr.size // 512),
        atime_s & mask,
        mtime_s & mask,
        ctime_s & mask,
        atime_ns,
        mtime_ns,
        ctime_ns,
        attr.mode,
        attr.nlink,
        attr.uid,
        attr.gid,
        attr.rdev,
        attr.block_size,
        0,
    )


def encode_entry(
    nodeid: int, attr: Attr, *, entry_timeout_ns: int, attr_timeout_ns: int, generation: int = 0
) -> bytes:
    """The payload that answers LOOKUP: a node, and how long its name and attributes hold."""
    entry_s, entry_ns = divmod(entry_timeout_ns, _NANOSECONDS)
    attr_s, attr_ns = divmod(attr_timeout_ns, _NANOSECONDS)
    return _ENTRY.pack(nodeid, generation, entry_s, attr_s, entry_ns, attr_ns) + _encode_attr(attr)


def encode_attr(attr: Attr, *, timeout_ns: int) -> bytes:
    """The payload that answers GETATTR."""
    return _ATTR_TIMEOUT.pack(*divmod(timeout_ns, _NANOSECONDS)) + _encode_attr(attr)


_OPEN_OUT = struct.Struct("=QI4x")
_STATFS = struct.Struct("=QQQQQIII4x24x")
_XATTR_SIZE = struct.Struct("=I4x")
_DIRENT = struct.Struct("=QQII")
_NOTIFY_INODE = struct.Struct("=Qqq")
_NOTIFY_ENTRY = struct.Struct("=QII")


def encode_open(fh: int, open_flags: int) -> bytes:
    """The payload that answers OPEN and OPENDIR."""
    return _OPEN_OUT.pack(fh, open_flags)


def encode_statfs(*, blocks: int, free: int, files: int, block_size: int = 4096) -> bytes:
    """The payload that answers STATFS."""
    return _STATFS.pack(blocks, free, free, files, 0, block_size, 255, block_size)


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
