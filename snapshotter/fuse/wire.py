"""The FUSE wire format, protocol 7.31 to 7.45: request bytes to messages. No I/O.

``replies`` is the other direction, ``wire_changes`` has the requests that change something. Used
by ``fuse.server`` and the transports. Layouts, flags and numbers are those of the kernel's public
header include/uapi/linux/fuse.h; integers are in host byte order. One row of ``DECODERS``
describes one request, so that a server of further requests adds rows, not code. Names stay bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple

from snapshotter.errors import InvalidInputError

MAJOR = 7
MIN_MINOR = 31
MAX_MINOR = 45
ROOT_NODEID = 1
RESENT = 1 << 63
"""Bit of ``unique`` that marks a request repeated after RESEND; a reply must keep it."""


class Opcode(IntEnum):
    """What a request asks for."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    IOCTL = 39
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    COPY_FILE_RANGE_64 = 53


class InitFlag(IntFlag):
    """Features negotiated at INIT; bits from 32 on travel in ``flags2``."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    DONT_MASK = 1 << 6
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    ASYNC_DIO = 1 << 15
    NO_OPEN_SUPPORT = 1 << 17
    PARALLEL_DIROPS = 1 << 18
    POSIX_ACL = 1 << 20
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    NO_OPENDIR_SUPPORT = 1 << 24
    EXPLICIT_INVAL_DATA = 1 << 25
    HANDLE_KILLPRIV_V2 = 1 << 28
    SETXATTR_EXT = 1 << 29
    INIT_EXT = 1 << 30
    DIRECT_IO_ALLOW_MMAP = 1 << 36
    PASSTHROUGH = 1 << 37
    HAS_RESEND = 1 << 39
    REQUEST_TIMEOUT = 1 << 42


class Header(NamedTuple):
    """The head of every request. ``pid`` is the asking thread's id, 0 if it cannot be named."""

    length: int
    opcode: int
    unique: int
    nodeid: int
    uid: int
    gid: int
    pid: int
    extension_words: int


class Init(NamedTuple):
    """What the kernel offers for this connection; ``flags`` are both words as one."""

    major: int
    minor: int
    max_readahead: int
    flags: int


class Lookup(NamedTuple):
    """A name in the directory ``nodeid``."""

    name: bytes


class Forget(NamedTuple):
    """The kernel drops ``lookups`` references of one node."""

    lookups: int


class BatchForget(NamedTuple):
    """Many forgets at once: pairs of nodeid and lookups."""

    forgets: tuple[tuple[int, int], ...]


class GetAttr(NamedTuple):
    """Attributes of a node; ``flags`` bit 0 says that ``fh`` is given."""

    flags: int
    fh: int


class Open(NamedTuple):
    """OPEN and OPENDIR: ``flags`` as of open(2)."""

    flags: int
    open_flags: int


class Read(NamedTuple):
    """READ, READDIR and READDIRPLUS: at most ``size`` bytes from ``offset``."""

    fh: int
    offset: int
    size: int
    read_flags: int
    lock_owner: int
    flags: int


class Release(NamedTuple):
    """RELEASE and RELEASEDIR."""

    fh: int
    flags: int
    release_flags: int
    lock_owner: int


class Flush(NamedTuple):
    """A descriptor was closed."""

    fh: int
    lock_owner: int


class Access(NamedTuple):
    """May the asker do what ``mask`` (as of access(2)) says?"""

    mask: int


class GetXattr(NamedTuple):
    """One extended attribute; ``size`` 0 asks for its length."""

    size: int
    name: bytes


class ListXattr(NamedTuple):
    """The names of all extended attributes; ``size`` 0 asks for their length."""

    size: int


class Interrupt(NamedTuple):
    """The asker of request ``unique`` has a signal to handle."""

    unique: int


class Ioctl(NamedTuple):
    """An ioctl(2) on an open file."""

    fh: int
    flags: int
    command: int
    argument: int
    in_size: int
    out_size: int


class Nothing(NamedTuple):
    """A request without a body."""


Decoder = Callable[[memoryview], Any]


def fixed(message: Callable[..., Any], layout: str) -> Decoder:
    """Reads the fields of ``layout``; what follows them is passed over."""
    packed = struct.Struct("=" + layout)

    def decode(body: memoryview) -> Any:
        if len(body) < packed.size:
            raise InvalidInputError(f"FUSE request body of {len(body)} bytes, not {packed.size}")
        return message(*packed.unpack_from(body))

    return decode


def named(message: Callable[..., Any], layout: str) -> Decoder:
    """Reads the fields of ``layout`` and one name, which is the message's last field."""
    packed = struct.Struct("=" + layout)

    def decode(body: memoryview) -> Any:
        raw = bytes(body)
        # Exactly one NUL, and it is the last byte: a name cannot be empty or be followed by more.
        if len(raw) < packed.size + 2 or raw.find(b"\0", packed.size) != len(raw) - 1:
            raise InvalidInputError("FUSE request without a proper name")
        return message(*packed.unpack_from(raw), raw[packed.size : -1])

    return decode


_INIT_FIRST = struct.Struct("=IIII")
_INIT_MORE = struct.Struct("=I")


def _decode_init(body: memoryview) -> Init:
    if len(body) < _INIT_FIRST.size:
        raise InvalidInputError(f"FUSE INIT of {len(body)} bytes")
    major, minor, max_readahead, flags = _INIT_FIRST.unpack_from(body)
    if flags & InitFlag.INIT_EXT and len(body) >= _INIT_FIRST.size + _INIT_MORE.size:
        flags |= _INIT_MORE.unpack_from(body, _INIT_FIRST.size)[0] << 32
    return Init(major, minor, max_readahead, flags)


_BATCH = struct.Struct("=I4x")
_FORGET_ONE = struct.Struct("=QQ")


def _decode_batch_forget(body: memoryview) -> BatchForget:
    if len(body) < _BATCH.size:
        raise InvalidInputError(f"FUSE BATCH_FORGET of {len(body)} bytes")
    (count,) = _BATCH.unpack_from(body)
    end = _BATCH.size + count * _FORGET_ONE.size
    if len(body) < end:
        raise InvalidInputError(f"FUSE BATCH_FORGET of {count} nodes in {len(body)} bytes")
    return BatchForget(tuple(_FORGET_ONE.iter_unpack(body[_BATCH.size : end])))


def _decode_nothing(_body: memoryview) -> Nothing:
    return Nothing()


_OPEN: Decoder = fixed(Open, "II")
_READ: Decoder = fixed(Read, "QQIIQI4x")
_RELEASE: Decoder = fixed(Release, "QIIQ")

DECODERS: dict[int, Decoder] = {
    Opcode.LOOKUP: named(Lookup, ""),
    Opcode.FORGET: fixed(Forget, "Q"),
    Opcode.GETATTR: fixed(GetAttr, "I4xQ"),
    Opcode.READLINK: _decode_nothing,
    Opcode.OPEN: _OPEN,
    Opcode.READ: _READ,
    Opcode.STATFS: _decode_nothing,
    Opcode.RELEASE: _RELEASE,
    Opcode.GETXATTR: named(GetXattr, "I4x"),
    Opcode.LISTXATTR: fixed(ListXattr, "I4x"),
    Opcode.FLUSH: fixed(Flush, "Q8xQ"),
    Opcode.INIT: _decode_init,
    Opcode.OPENDIR: _OPEN,
    Opcode.READDIR: _READ,
    Opcode.RELEASEDIR: _RELEASE,
    Opcode.ACCESS: fixed(Access, "I4x"),
    Opcode.INTERRUPT: fixed(Interrupt, "Q"),
    Opcode.DESTROY: _decode_nothing,
    Opcode.IOCTL: fixed(Ioctl, "QIIQII"),
    Opcode.BATCH_FORGET: _decode_batch_forget,
    Opcode.READDIRPLUS: _READ,
}
"""How the body of each request is read; what is not here, a server cannot have been made for."""

UNANSWERED = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT})
"""Requests that the kernel awaits no reply to."""

_HEADER = struct.Struct("=IIQQIIIHxx")
HEADER_SIZE = _HEADER.size


def decode_header(request: memoryview, more_bytes: int = 0) -> Header:
    """The header of a whole request, of which ``more_bytes`` at the end lie elsewhere.

    InvalidInputError if it is short or lies about its length.
    """
    if len(request) < HEADER_SIZE:
        raise InvalidInputError(f"FUSE request of {len(request)} bytes")
    header = Header._make(_HEADER.unpack_from(request))
    if header.length != len(request) + more_bytes:
        size = len(request) + more_bytes
        raise InvalidInputError(f"FUSE request of {size} bytes says {header.length}")
    return header


def opcode_of(request: memoryview | bytes) -> int:
    """The opcode of a request that is at least as long as a header."""
    opcode: int = _HEADER.unpack_from(request)[1]
    return opcode


def unique_of(request: memoryview) -> int | None:
    """The ``unique`` of a request whose header did not decode, if there is that much of it."""
    return _HEADER.unpack_from(request)[2] if len(request) >= HEADER_SIZE else None


def body(header: Header, request: memoryview) -> memoryview:
    """What follows the header, without extensions; InvalidInputError if those cannot be."""
    if not header.extension_words:
        return request[HEADER_SIZE:]
    end = header.length - 8 * header.extension_words
    if end < HEADER_SIZE:
        raise InvalidInputError(f"FUSE request with {header.extension_words} words of extensions")
    return request[HEADER_SIZE:end]


def decode_body(header: Header, request: memoryview) -> Any:
    """The message of ``DECODERS`` for this opcode (which must have a row there).

    Raises InvalidInputError for a body that is short, overlong or without its names.
    """
    return DECODERS[header.opcode](body(header, request))
