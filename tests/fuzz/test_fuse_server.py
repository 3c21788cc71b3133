"""The FUSE server over a real overlay, given requests as no kernel would send them."""

from __future__ import annotations

import os
import random
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.errors import InvalidInputError
from snapshotter.fuse import wire
from snapshotter.fuse.cache_policy import BRIEF, KernelCache
from snapshotter.fuse.file_system_server import FileSystemServer
from snapshotter.fuse.negotiation import WRITABLE
from snapshotter.fuse.wire import Opcode
from snapshotter.kernel_view import syscalls
from snapshotter.overlay.merged import Merged
from snapshotter.overlay.upper import Upper
from tests.support.file_systems import image_lower, make_sample
from tests.support.fuse_requests import request
from tests.support.fuzzing import fuzz

pytestmark = [pytest.mark.mount, pytest.mark.timeout(7200)]
COUNT = 200_000

_INIT = struct.pack("=IIIII44x", 7, 45, 1 << 17, WRITABLE & 0xFFFFFFFF, WRITABLE >> 32)
_HANDLE = struct.pack("=Q", 1)
_READ = _HANDLE + struct.pack("=QIIQI4x", 0, 4096, 0, 0, 0)
_TWO_NAMES = b"file\0dir\0"
BODIES: list[tuple[int, bytes]] = [
    (Opcode.INIT, _INIT),
    *((Opcode.LOOKUP, name + b"\0") for name in (b"file", b"dir", b"many", b"link", b"new")),
    (Opcode.FORGET, struct.pack("=Q", 1)),
    (Opcode.BATCH_FORGET, struct.pack("=IIQQQQ", 2, 0, 2, 1, 3, 1)),
    (Opcode.GETATTR, bytes(16)),
    (Opcode.SETATTR, struct.pack("=I4xQQQqqqIIII4xII4x", 0x7F, 1, 9, 0, 1, 1, 1, 1, 1, 1,
                                 0o644, 1, 1)),
    (Opcode.READLINK, b""),
    (Opcode.SYMLINK, b"new\0target\0"),
    (Opcode.MKNOD, struct.pack("=III4x", 0o100644, 0, 0) + b"new\0"),
    (Opcode.MKDIR, struct.pack("=II", 0o755, 0) + b"new\0"),
    (Opcode.UNLINK, b"new\0"),
    (Opcode.RMDIR, b"new\0"),
    (Opcode.RENAME, struct.pack("=Q", 1) + _TWO_NAMES),
    (Opcode.RENAME2, struct.pack("=QI4x", 1, 2) + _TWO_NAMES),
    (Opcode.LINK, struct.pack("=Q", 2) + b"new\0"),
    *((Opcode.OPEN, struct.pack("=II", flags, 0)) for flags in (0, 1, 2, 0o1001)),
    (Opcode.CREATE, struct.pack("=IIII", 2, 0o644, 0, 0) + b"new\0"),
    (Opcode.READ, _READ),
    (Opcode.WRITE, _HANDLE + struct.pack("=QIIQI4x", 0, 5, 4, 0, 0) + b"bytes"),
    (Opcode.STATFS, b""),
    (Opcode.RELEASE, _HANDLE + bytes(16)),
    (Opcode.FSYNC, _HANDLE + bytes(8)),
    (Opcode.SETXATTR, struct.pack("=IIII", 3, 0, 1, 0) + b"user.a\0abc"),
    (Opcode.GETXATTR, struct.pack("=II", 99, 0) + b"user.a\0"),
    (Opcode.LISTXATTR, struct.pack("=II", 999, 0)),
    (Opcode.REMOVEXATTR, b"user.a\0"),
    (Opcode.OPENDIR, bytes(8)),
    (Opcode.READDIR, _READ),
    (Opcode.READDIRPLUS, _READ),
    (Opcode.RELEASEDIR, _HANDLE + bytes(16)),
    (Opcode.FSYNCDIR, _HANDLE + bytes(8)),
    (Opcode.INTERRUPT, struct.pack("=Q", 2)),
    (Opcode.DESTROY, b""),
    (Opcode.FALLOCATE, _HANDLE + struct.pack("=QQI4x", 0, 4096, 0)),
    (Opcode.LSEEK, _HANDLE + struct.pack("=qI4x", 0, 3)),
    (Opcode.COPY_FILE_RANGE, _HANDLE + struct.pack("=qQQqQQ", 0, 2, 2, 0, 9, 0)),
    (Opcode.COPY_FILE_RANGE_64, _HANDLE + struct.pack("=qQQqQQ", 0, 2, 2, 0, 9, 0)),
    (Opcode.IOCTL, bytes(32)),
]  # fmt: skip
_ENTRIES = {Opcode.LOOKUP, Opcode.MKNOD, Opcode.MKDIR, Opcode.SYMLINK, Opcode.LINK}
SIZES = {
    **dict.fromkeys(_ENTRIES, (128,)),
    Opcode.CREATE: (144,),
    Opcode.GETATTR: (104,),
    Opcode.SETATTR: (104,),
    Opcode.OPEN: (16,),
    Opcode.OPENDIR: (16,),
    Opcode.WRITE: (8,),
    Opcode.STATFS: (80,),
    Opcode.LSEEK: (8,),
    Opcode.INIT: (64,),
    Opcode.COPY_FILE_RANGE: (8,),
    Opcode.COPY_FILE_RANGE_64: (8,),
    **dict.fromkeys((Opcode.UNLINK, Opcode.RMDIR, Opcode.RENAME, Opcode.RELEASE), (0,)),
}


class Fuzzed:
    """A server, and what it told a kernel: later requests go for that."""

    def __init__(self, server: FileSystemServer, faults: list[Exception]) -> None:
        self.server = server
        self.faults = faults
        self.nodeids = [1]
        self.files = [1]
        self.handles = [1]
        self.directory_handles = [1]
        self._source = random.Random(7)
        self.answered = 0

    def ask(self, raw: bytes) -> None:
        """There is one well-formed reply, or none where none is due; no fault but bad input."""
        self.faults.clear()
        reply = self.server.handle(memoryview(raw))
        assert all(isinstance(fault, InvalidInputError) for fault in self.faults), self.faults
        opcode = struct.unpack_from("=I", raw, 4)[0] if len(raw) >= 24 else 0
        if opcode == Opcode.FORGET:
            gone = struct.unpack_from("=Q", raw, 16)[0]
            self.nodeids = [n for n in self.nodeids if n != gone] or [1]
            self.files = [n for n in self.files if n != gone] or [1]
        if reply is None:
            assert len(raw) < wire.HEADER_SIZE or opcode in wire.UNANSWERED
            return
        whole = b"".join(reply)
        length, error, unique = struct.unpack_from("=IiQ", whole)
        assert length == len(whole)
        assert unique == struct.unpack_from("=Q", raw, 8)[0]
        assert -4096 < error <= 0
        if error:
            assert length == 16
        else:
            self.answered += 1
            self._note(opcode, whole[16:])

    def _note(self, opcode: int, payload: bytes) -> None:
        assert len(payload) in SIZES.get(Opcode(opcode), (len(payload),)), Opcode(opcode)
        if opcode in (Opcode.INIT, Opcode.DESTROY):
            self.nodeids = self.files = self.handles = self.directory_handles = [1]
        if opcode in _ENTRIES or opcode == Opcode.CREATE:
            nodeid, mode = struct.unpack_from("=Q92xI", payload)
            self.nodeids = [*self.nodeids[-30:], nodeid]
            if stat.S_ISREG(mode):
                self.files = [*self.files[-30:], nodeid]
        if opcode in (Opcode.OPEN, Opcode.CREATE):
            self.handles = [*self.handles[-10:], struct.unpack_from("=Q", payload[-16:])[0]]
        if opcode == Opcode.OPENDIR:
            (handle,) = struct.unpack_from("=Q", payload)
            self.directory_handles = [*self.directory_handles[-10:], handle]

    def repair(self, data: bytearray) -> None:
        """A true length, a nodeid and a handle that mean something; half of them as they were.

        An end of the connection is rare: it takes everything that was known.
        """
        source = self._source
        if source.random() < 0.5:
            data[:] = source.choice(SEEDS)
        if data[4:8] in _ENDS and source.random() < 0.998:
            data[4:8] = struct.pack("=I", Opcode.GETATTR)
        if len(data) < wire.HEADER_SIZE:
            return
        data[:4] = struct.pack("=I", len(data))
        data[36:40] = bytes(4)
        opcode = struct.unpack_from("=I", data, 4)[0]
        if source.random() < 0.7:
            known = source.choice(self.nodeids) if source.random() < 0.5 else 1
            known = source.choice(self.files) if opcode in _OF_FILES else known
            data[16:24] = struct.pack("=Q", known)
        if source.random() < 0.8 and opcode in _WITH_HANDLE and len(data) >= 48:
            handles = self.directory_handles if opcode in _OF_DIRECTORIES else self.handles
            data[40:48] = struct.pack("=Q", source.choice(handles))


SEEDS = [
    request(opcode, body, unique=2 * number, nodeid=1)
    for number, (opcode, body) in enumerate(BODIES, 1)
]
_ENDS = (struct.pack("=I", Opcode.INIT), struct.pack("=I", Opcode.DESTROY))
_OF_FILES = {Opcode.OPEN, Opcode.SETATTR, Opcode.COPY_FILE_RANGE}
_OF_DIRECTORIES = {Opcode.READDIR, Opcode.READDIRPLUS, Opcode.RELEASEDIR}
_WITH_HANDLE = {opcode for opcode, body in BODIES if body[:8] == _HANDLE}


@pytest.fixture
def fuzzed(tmp_path: Path) -> Iterator[Fuzzed]:
    """Its upper is on a small tmpfs: no request may fill the disk."""
    make_sample(tmp_path / "sample")
    lower = image_lower(tmp_path / "sample", tmp_path / "objects")
    small = tmp_path / "small"
    small.mkdir()
    syscalls.mount("fuzz", small, "tmpfs", 0, "size=16m")
    try:
        (small / "upper").mkdir()
        (small / "work").mkdir()
        upper = Upper(small / "upper", small / "work")
        faults: list[Exception] = []
        server = FileSystemServer(
            Merged([lower], upper),
            KernelCache(BRIEF),
            writable=True,
            report_fault=lambda error, _header: faults.append(error),
            limit=1000,
        )
        yield Fuzzed(server, faults)
        upper.close()
    finally:
        syscalls.umount(small, syscalls.MNT_DETACH)


def test_hostile_requests(fuzzed: Fuzzed) -> None:
    before = len(os.listdir("/proc/self/fd"))
    fuzz(fuzzed.ask, SEEDS, count=COUNT, repair=fuzzed.repair, allowed=())
    assert fuzzed.answered > COUNT // 10
    fuzzed.ask(request(Opcode.DESTROY))
    connection = fuzzed.server.connection
    assert (len(connection.files), len(connection.directories), len(connection.inodes)) == (0, 0, 1)
    # What is left open are directories of the upper, which it keeps a number of.
    assert len(os.listdir("/proc/self/fd")) <= before + 128
