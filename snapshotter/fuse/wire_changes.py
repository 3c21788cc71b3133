"""The FUSE wire format: requests that change files or names, and what goes with writing. No I/O.

A continuation of ``wire``, with the same rules and the same source.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from snapshotter.errors import InvalidInputError
from snapshotter.fuse.wire import DECODERS, Decoder, Opcode, fixed, named


class AttrField(IntEnum):
    """What a SETATTR sets: bits of ``valid``."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    FH = 1 << 6
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8
    KILL_SUIDGID = 1 << 11


OPEN_KILL_SUIDGID = 1 << 0
"""In ``open_flags``: a truncating open takes the set-id bits."""
WRITE_KILL_SUIDGID = 1 << 2
"""In ``write_flags``: the writer is not privileged, so the file loses its set-id bits."""
SETXATTR_ACL_KILL_SGID = 1 << 0
"""In ``xattr_flags``: with this ACL the file loses its set-gid bit."""
FSYNC_DATA_ONLY = 1 << 0


class SetAttr(NamedTuple):
    """New attributes; ``valid`` says which count. Times are seconds and nanoseconds."""

    valid: int
    fh: int
    size: int
    lock_owner: int
    atime_s: int
    mtime_s: int
    ctime_s: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    uid: int
    gid: int


class Mknod(NamedTuple):
    """A new file that is no directory and no link."""

    mode: int
    rdev: int
    umask: int
    name: bytes


class Mkdir(NamedTuple):
    """A new directory."""

    mode: int
    umask: int
    name: bytes


class Symlink(NamedTuple):
    """A new symbolic link."""

    name: bytes
    target: bytes


class Remove(NamedTuple):
    """UNLINK and RMDIR: a name to take away."""

    name: bytes


class Rename(NamedTuple):
    """RENAME and RENAME2: ``flags`` as of renameat2(2)."""

    new_parent: int
    flags: int
    name: bytes
    new_name: bytes


class Link(NamedTuple):
    """One more name for ``nodeid``, in the directory that the header names."""

    nodeid: int
    name: bytes


class Create(NamedTuple):
    """A new regular file, opened."""

    flags: int
    mode: int
    umask: int
    open_flags: int
    name: bytes


class Write(NamedTuple):
    """``size`` bytes to write, in as many pieces as the transport has them in."""

    fh: int
    offset: int
    size: int
    write_flags: int
    lock_owner: int
    flags: int
    data: Sequence[memoryview]


class Fsync(NamedTuple):
    """FSYNC and FSYNCDIR."""

    fh: int
    fsync_flags: int


class SetXattr(NamedTuple):
    """An extended attribute; ``xattr_flags`` are 0 unless SETXATTR_EXT was negotiated."""

    flags: int
    xattr_flags: int
    name: bytes
    value: bytes


class RemoveXattr(NamedTuple):
    """An extended attribute to take away."""

    name: bytes


class Allocate(NamedTuple):
    """fallocate(2)."""

    fh: int
    offset: int
    length: int
    mode: int


class Seek(NamedTuple):
    """lseek(2) with SEEK_DATA or SEEK_HOLE."""

    fh: int
    offset: int
    whence: int


class CopyRange(NamedTuple):
    """copy_file_range(2), from the node that the header names."""

    fh: int
    offset: int
    to_nodeid: int
    to_fh: int
    to_offset: int
    length: int
    flags: int


def _two_names(message: Callable[..., Any], layout: str) -> Decoder:
    packed = struct.Struct("=" + layout)

    def decode(body: memoryview) -> Any:
        raw = bytes(body)
        # Exactly two NULs, each after a name, the second one last.
        names = raw[packed.size :].split(b"\0")
        if len(raw) < packed.size or len(names) != 3 or not (names[0] and names[1]) or names[2]:
            raise InvalidInputError("FUSE request without two proper names")
        return message(*packed.unpack_from(raw), names[0], names[1])

    return decode


def _plain_rename(new_parent: int, name: bytes, new_name: bytes) -> Rename:
    return Rename(new_parent, 0, name, new_name)


_WRITE = struct.Struct("=QQIIQI4x")


def _decode_write(body: memoryview) -> Write:
    if len(body) < _WRITE.size:
        raise InvalidInputError(f"FUSE WRITE of {len(body)} bytes")
    fh, offset, size, write_flags, lock_owner, flags = _WRITE.unpack_from(body)
    return Write(fh, offset, size, write_flags, lock_owner, flags, (body[_WRITE.size :],))


def setxattr_decoder(*, extended: bool) -> Decoder:
    """For SETXATTR, whose layout depends on whether SETXATTR_EXT was negotiated."""
    packed = struct.Struct("=III4x" if extended else "=II")

    def decode(body: memoryview) -> SetXattr:
        raw = bytes(body)
        if len(raw) < packed.size:
            raise InvalidInputError(f"FUSE SETXATTR of {len(raw)} bytes")
        size, flags, *more = packed.unpack_from(raw)
        end = raw.find(b"\0", packed.size)
        if end <= packed.size or len(raw) - end - 1 != size:
            raise InvalidInputError("FUSE SETXATTR without a proper name and value")
        return SetXattr(flags, more[0] if more else 0, raw[packed.size : end], raw[end + 1 :])

    return decode


_REMOVE = named(Remove, "")
_FSYNC = fixed(Fsync, "QI4x")
_COPY_RANGE = fixed(CopyRange, "QqQQqQQ")

ALL_DECODERS: dict[int, Decoder] = {
    **DECODERS,
    Opcode.SETATTR: fixed(SetAttr, "I4xQQQqqqIIII4xII4x"),
    Opcode.SYMLINK: _two_names(Symlink, ""),
    Opcode.MKNOD: named(Mknod, "III4x"),
    Opcode.MKDIR: named(Mkdir, "II"),
    Opcode.UNLINK: _REMOVE,
    Opcode.RMDIR: _REMOVE,
    Opcode.RENAME: _two_names(_plain_rename, "Q"),
    Opcode.RENAME2: _two_names(Rename, "QI4x"),
    Opcode.LINK: named(Link, "Q"),
    Opcode.CREATE: named(Create, "IIII"),
    Opcode.WRITE: _decode_write,
    Opcode.FSYNC: _FSYNC,
    Opcode.FSYNCDIR: _FSYNC,
    Opcode.SETXATTR: bytes,  # by setxattr_decoder, which must know what was negotiated
    Opcode.REMOVEXATTR: named(RemoveXattr, ""),
    Opcode.FALLOCATE: fixed(Allocate, "QQQI4x"),
    Opcode.LSEEK: fixed(Seek, "QqI4x"),
    Opcode.COPY_FILE_RANGE: _COPY_RANGE,
    Opcode.COPY_FILE_RANGE_64: _COPY_RANGE,
}
"""How the body of each request is read, those of ``wire`` included."""
