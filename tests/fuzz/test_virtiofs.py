"""A hostile guest: whatever lies in its rings and its requests, only its own queue suffers.

Invariants: every request is answered by a well-formed reply, or its queue is stopped with the error
descriptor signalled; nothing is written but where the guest offered room; no exception that was
not foreseen; no descriptor left over; the host's files beside the upper untouched; and a guest that
behaves is served afterwards.
"""

from __future__ import annotations

import os
import random
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from snapshotter.errors import InvalidInputError
from snapshotter.fuse.cache_policy import BRIEF, KernelCache
from snapshotter.fuse.file_system_server import FileSystemServer
from snapshotter.fuse.wire import Opcode
from tests.support.compare_trees import scan_tree
from tests.support.file_systems import file_system, make_sample
from tests.support.fuse_client import FuseClient
from tests.support.fuzzing import LONG
from tests.support.scratch import scratch_directory
from tests.support.vfs_paths import find
from tests.support.vhost_user_front_end import (
    INDIRECT,
    MEMORY_BYTES,
    NEXT,
    WRITE,
    Closed,
    FrontEnd,
)
from tests.support.virtiofs_guest import Backend, asker

COUNT = 50_000 * (20 if LONG else 1)
MIB = 1 << 20
REQUEST_AT, TABLE_AT, REPLY_AT, CANARY_AT = 2 * MIB, 3 * MIB, 4 * MIB, 48 * MIB
CANARY = b"\xa5" * MIB
SIZE = 64
SMALL_FILE = 1 << 20
HEADER = struct.Struct("=IIQQIIIHxx")
LIMIT = 200
DIRECTORIES = 200
"""The upper keeps descriptors of so many directories."""
WORDS = (0, 1, 2, 3, 7, 8, 255, 4095, 4096, 1 << 16, 1 << 31, (1 << 32) - 1)
LONG_WORDS = (*WORDS, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
NAMES = (
    b"file", b"dir", b"many", b"new", b"link", b"fifo", b"device", b"empty", b"large", b"other",
    b"..", b".", b"", b"a/b", b"n" * 255, b"n" * 256, b"user.a", b"trusted.overlay.opaque",
    b"system.posix_acl_access", b"\xff",
)  # fmt: skip
OPCODES = [int(opcode) for opcode in Opcode if opcode not in (Opcode.INIT, Opcode.DESTROY)]


class HostileGuest:
    """Sends what chance makes of requests; counts what became of them."""

    def __init__(self, guest: FrontEnd, seed: int) -> None:
        self.guest = guest
        self.source = random.Random(seed)
        self.answered = self.broken = 0
        self._is_sound = True
        guest.memory[CANARY_AT : CANARY_AT + MIB] = CANARY

    def attack(self) -> None:
        source, guest = self.source, self.guest
        request = self._request()
        guest.memory[REQUEST_AT : REQUEST_AT + len(request)] = request
        guest.memory[REPLY_AT : REPLY_AT + 16] = bytes(16)
        rows = self._rows(len(request))
        self._is_sound = True
        if source.random() < 0.05:
            self._damage(rows)
        head = self._put(rows)
        queue = guest.queues[1]
        posts = 1
        if source.random() < 0.01:
            posts = source.choice((2, SIZE + 1, 5000))
            self._is_sound = False
            queue.available[1] = (queue.available[1] + posts) & 0xFFFF
        else:
            queue.post(head)
        os.eventfd_write(queue.kick, 1)
        try:
            for _ in range(posts):
                _, written = guest.wait()
        except Closed:
            self.broken += 1
            self._start_anew()
            return
        self.answered += 1
        if written and self._is_sound:
            length, error = struct.unpack_from("=Ii", guest.memory, REPLY_AT)
            assert length == written, (length, error, written)
            assert -4096 < error <= 0, error

    def _start_anew(self) -> None:
        queue = self.guest.queues[1]
        assert os.eventfd_read(queue.error) == 1
        self.guest.stop_queue(1)
        queue.available[1] = queue.used_head[1] = queue.next_used = 0
        self.guest.start_queue(1)

    def _word(self) -> int:
        source = self.source
        return source.choice(LONG_WORDS) if source.random() < 0.3 else source.randrange(40)

    def _request(self) -> bytes:
        """A request of a known opcode with fields that are sometimes right."""
        source = self.source
        opcode = source.choice(OPCODES) if source.random() < 0.97 else source.randrange(70)
        fields = [
            self._word() & (1 << 64) - 1 for _ in range(source.choice((0, 1, 2, 3, 4, 5, 11)))
        ]
        body = struct.pack(f"={len(fields)}Q", *fields)
        if source.random() < 0.1:
            body = body[: source.randrange(len(body) + 1)]
        for _ in range(source.choice((0, 1, 1, 2))):
            body += source.choice(NAMES) + (b"\0" if source.random() < 0.95 else b"")
        if opcode == Opcode.WRITE:
            size = source.choice((0, 5, 100, 4096, 6000))
            count = size if source.random() < 0.9 else self._word() & 0xFFFF_FFFF
            body = struct.pack("=QQIIQI4x", source.randrange(9), self._word() & (1 << 64) - 1,
                               count, 0, 0, 0) + source.randbytes(size)  # fmt: skip
        nodeid = source.randrange(1, 30) if source.random() < 0.9 else self._word()
        length = 40 + len(body)
        if source.random() < 0.03:
            length = source.choice((0, 39, 40, length - 1, length + 1, (1 << 32) - 1))
        unique = source.choice((2, 4, source.getrandbits(64)))
        ids = source.choice((0, 0, 1, (1 << 32) - 1))
        extension = 0 if source.random() < 0.98 else source.randrange(1 << 16)
        head = HEADER.pack(length & 0xFFFF_FFFF, opcode, unique, nodeid, ids, ids, 1, extension)
        return head + body

    def _rows(self, size: int) -> list[tuple[int, int, int]]:
        source = self.source
        cut = source.randrange(1, size) if size > 1 and source.random() < 0.3 else size
        rows = [(REQUEST_AT, cut, 0)]
        if cut < size:
            rows.append((REQUEST_AT + cut, size - cut, 0))
        rows.append((REPLY_AT, source.choice((16, 16, 16, 15, 80, 4096)), WRITE))
        for number in range(source.choice((0, 1, 1, 2, 5))):
            room = source.choice((1, 16, 104, 128, 4096, 4096, 1 << 17))
            rows.append((REPLY_AT + (number + 1) * MIB, room, WRITE))
        return rows

    def _damage(self, rows: list[tuple[int, int, int]]) -> None:
        source = self.source
        self._is_sound = False
        at = source.randrange(len(rows))
        address, size, flags = rows[at]
        match source.randrange(4):
            case 0:
                address = source.choice((MEMORY_BYTES - 8, 1 << 40, (1 << 64) - 4))
            case 1:
                size = source.choice((0, 1, 39, MIB + 65_537, 1 << 31, (1 << 32) - 1))
                address = REPLY_AT if flags & WRITE else REQUEST_AT
            case 2:
                flags ^= source.choice((WRITE, INDIRECT))
            case _:
                rows.reverse()
                return
        if flags & WRITE and address < CANARY_AT < address + size:
            return
        rows[at] = (address, size, flags)

    def _put(self, rows: list[tuple[int, int, int]]) -> int:
        """Writes the chain, direct or as an indirect table; the head."""
        source, guest = self.source, self.guest
        is_indirect = source.random() < 0.7
        base = TABLE_AT if is_indirect else guest.queues[1].descriptors_at
        for number, (address, size, flags) in enumerate(rows):
            following = number + 1
            if source.random() < 0.003:
                following = source.choice((0, number, SIZE, 0xFFFF))
                self._is_sound = False
            chained = NEXT if number < len(rows) - 1 else 0
            if source.random() < 0.003:
                chained ^= NEXT
                self._is_sound = False
            struct.pack_into(
                "<QIHH", guest.memory, base + 16 * number, address, size, flags | chained, following
            )
        if is_indirect:
            size = 16 * len(rows)
            if source.random() < 0.01:
                size = source.choice((0, 8, size - 1, 16 * 1025, (1 << 32) - 16))
                self._is_sound = False
            guest.put_descriptor(1, 0, (TABLE_AT, size, INDIRECT, 0))
        if source.random() < 0.005:
            self._is_sound = False
            return source.choice((SIZE, 0xFFFF))
        return 0


@contextmanager
def small_files() -> Iterator[None]:
    """No request of a guest's may fill the disk of the tests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def writable() -> Iterator[tuple[Any, Path]]:
    with scratch_directory() as base:
        make_sample(base / "sample")
        with file_system("upper on an image", base / "sample", base) as made:
            yield made, base


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.timeout(600 * (20 if LONG else 1))
def test_a_hostile_guest_harms_but_itself(writable: tuple[Any, Path]) -> None:
    fs, base = writable
    outside = scan_tree(base / "sample")
    faults: list[Exception] = []
    server = FileSystemServer(
        fs,
        KernelCache(BRIEF),
        writable=True,
        report_fault=lambda error, _header: faults.append(error),
        limit=LIMIT,
    )
    before = open_files()
    backend = Backend(server)
    try:
        guest = FrontEnd(backend.socket, size=SIZE)
        with small_files():
            _attack(guest, server, faults)
        seen = FuseClient(asker(guest))
        assert seen.getattr(find(seen, b"file")).size == 10
        guest.close()
    finally:
        backend.join()
    server.connection.clear()
    assert open_files() <= before + DIRECTORIES
    assert scan_tree(base / "sample") == outside
    foreseen = "InvalidInputError"
    assert all(foreseen in fault for fault in backend.faults)


def _attack(guest: FrontEnd, server: FileSystemServer, faults: list[Exception]) -> None:
    FuseClient(asker(guest))
    hostile = HostileGuest(guest, seed=20_261_201)
    for number in range(COUNT):
        hostile.attack()
        if not number % 500:
            assert guest.memory[CANARY_AT : CANARY_AT + MIB] == CANARY
        assert all(isinstance(fault, InvalidInputError) for fault in faults), faults
        faults.clear()
        connection = server.connection
        assert max(len(connection.inodes), len(connection.files)) <= LIMIT
        assert len(connection.directories) <= LIMIT
    assert hostile.answered > COUNT // 2
    assert hostile.broken > COUNT // 100
