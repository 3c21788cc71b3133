"""A vhost-user front end with the driver of a guest: drives a back end without any VM.

The guest's memory is a memfd of this process. Each queue's ring lies at the front of it; requests
are built in slots behind, one for each request that may be under way.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence

from snapshotter.fuse.virtiofs.memory import RegionLayout
from snapshotter.fuse.virtiofs.vhost_user import Feature, Request
from snapshotter.fuse.virtiofs.vring import RingAddresses

USER_BASE = 0x7F00_0000_0000
MEMORY_BYTES = 64 << 20
SLOTS_AT = 1 << 20
SLOT_BYTES = 5 << 19
"""2.5 MiB: an indirect table, the longest request, the longest reply."""
NEXT, WRITE, INDIRECT = 1, 2, 4
DEADLINE_S = 20.0
_HEADER = struct.Struct("<III")
_DESCRIPTOR = struct.Struct("<QIHH")
_FUSE_HEADER = struct.Struct("=IIQQIIIHxx")
_FUSE_REPLY = struct.Struct("=IiQ")
_REQUEST_AT, _REPLY_AT = 0x8000, 5 << 18


class Closed(Exception):  # noqa: N818 - an end, no error
    """The back end hung up."""


def sealed_memory(size: int = MEMORY_BYTES) -> int:
    """A memfd as QEMU makes one: it cannot shrink."""
    descriptor = os.memfd_create("guest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return descriptor


class Connection:
    """Vhost-user messages, one by one."""

    def __init__(self, path: str | socket.socket) -> None:
        if isinstance(path, socket.socket):
            self.socket = path
        else:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(path)
        self.socket.settimeout(DEADLINE_S)

    def send(
        self, number: int, body: bytes = b"", descriptors: Sequence[int] = (), *, flags: int = 1
    ) -> None:
        message = _HEADER.pack(number, flags, len(body)) + body
        try:
            socket.send_fds(self.socket, [message], list(descriptors))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error

    def receive(self) -> bytes:
        header = self._receive_exactly(_HEADER.size)
        _, flags, size = _HEADER.unpack(header)
        assert flags == 5
        return self._receive_exactly(size)

    def ask(self, number: int, body: bytes = b"") -> bytes:
        self.send(number, body)
        return self.receive()

    def tell(self, number: int, body: bytes = b"", descriptors: Sequence[int] = ()) -> int:
        """Sends what needs a reply by REPLY_ACK; what that says (0 for success)."""
        self.send(number, body, descriptors, flags=1 | 8)
        (status,) = struct.unpack("<Q", self.receive())
        return int(status)

    def _receive_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                more = self.socket.recv(size - len(data))
            except ConnectionResetError as error:
                raise Closed from error
            if not more:
                raise Closed
            data += more
        return data

    def close(self) -> None:
        self.socket.close()


class DriverQueue:
    """The driver's side of one ring, at ``at`` in the guest's memory."""

    def __init__(self, memory: memoryview, at: int, size: int) -> None:
        self.size = size
        self.descriptors_at = at
        self.available_at = at + 16 * size
        self.used_at = at + 0x8000
        self.kick = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.call = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.error = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.available = memory[self.available_at : self.available_at + 4 + 2 * size].cast("H")
        used = memory[self.used_at : self.used_at + 4 + 8 * size]
        self.used_head = used[:4].cast("H")
        self.used_elements = used[4:].cast("I")
        self.next_used = 0

    def post(self, head: int) -> None:
        index = self.available[1]
        self.available[2 + index % self.size] = head
        self.available[1] = (index + 1) & 0xFFFF

    def post_and_kick(self, head: int) -> None:
        self.post(head)
        os.eventfd_write(self.kick, 1)

    def take_used(self) -> tuple[int, int] | None:
        if self.next_used == self.used_head[1]:
            return None
        at = self.next_used % self.size * 2
        self.next_used = (self.next_used + 1) & 0xFFFF
        return self.used_elements[at], self.used_elements[at + 1]

    def close(self) -> None:
        for descriptor in (self.kick, self.call, self.error):
            os.close(descriptor)


class FrontEnd:
    """A guest with ``queue_count`` queues (0: urgent, then requests) behind a socket."""

    def __init__(
        self,
        path: str | socket.socket,
        *,
        queue_count: int = 2,
        size: int = 128,
        has_indirect: bool = True,
        regions: Sequence[RegionLayout] = (RegionLayout(0, MEMORY_BYTES, USER_BASE, 0),),
    ) -> None:
        self.connection = Connection(path)
        self.file = sealed_memory()
        self._mapping = mmap.mmap(self.file, MEMORY_BYTES)
        self.memory = memoryview(self._mapping)
        self.has_indirect = has_indirect
        self.regions = list(regions)
        self.unique = 0
        self.queues = [
            DriverQueue(self.memory, 0x10000 * (index + 1), size) for index in range(queue_count)
        ]
        self.negotiate()
        for index in range(queue_count):
            self.start_queue(index)

    def negotiate(self) -> None:
        connection = self.connection
        (self.features,) = struct.unpack("<Q", connection.ask(Request.GET_FEATURES))
        protocol = connection.ask(Request.GET_PROTOCOL_FEATURES)
        connection.send(Request.SET_PROTOCOL_FEATURES, protocol)
        (self.queue_limit,) = struct.unpack("<Q", connection.ask(Request.GET_QUEUE_NUM))
        connection.send(Request.SET_OWNER)
        wanted = self.features if self.has_indirect else self.features & ~Feature.INDIRECT_DESC
        connection.send(Request.SET_FEATURES, struct.pack("<Q", wanted))
        self.set_memory(self.regions)

    def set_memory(self, regions: Sequence[RegionLayout]) -> None:
        body = struct.pack("<II", len(regions), 0)
        body += b"".join(struct.pack("<QQQQ", *region) for region in regions)
        descriptors = [self.file] * len(regions)
        assert self.connection.tell(Request.SET_MEM_TABLE, body, descriptors) == 0

    def start_queue(self, index: int, *, base: int = 0) -> None:
        queue, send = self.queues[index], self.connection.send
        send(Request.SET_VRING_NUM, struct.pack("<II", index, queue.size))
        send(Request.SET_VRING_BASE, struct.pack("<II", index, base))
        send(Request.SET_VRING_ADDR, struct.pack("<IIQQQQ", index, 0, *self.addresses(index), 0))
        send(Request.SET_VRING_ERR, struct.pack("<Q", index), [queue.error])
        send(Request.SET_VRING_KICK, struct.pack("<Q", index), [queue.kick])
        send(Request.SET_VRING_CALL, struct.pack("<Q", index), [queue.call])
        assert self.connection.tell(Request.SET_VRING_ENABLE, struct.pack("<II", index, 1)) == 0

    def stop_queue(self, index: int) -> int:
        """Stops a queue; where its successor is to begin."""
        answer = self.connection.ask(Request.GET_VRING_BASE, struct.pack("<II", index, 0))
        base: int = struct.unpack("<II", answer)[1]
        return base

    def addresses(self, index: int) -> RingAddresses:
        queue = self.queues[index]
        user = self.regions[0].user_address - self.regions[0].guest_address
        return RingAddresses(
            user + queue.descriptors_at, user + queue.used_at, user + queue.available_at
        )

    # Requests

    def put_descriptor(self, queue: int, slot: int, row: tuple[int, int, int, int]) -> None:
        _DESCRIPTOR.pack_into(self.memory, self.queues[queue].descriptors_at + 16 * slot, *row)

    def build(
        self,
        parts: Sequence[bytes],
        room: Sequence[int],
        *,
        slot: int = 0,
        queue: int = 1,
        scattered: bool = False,
    ) -> tuple[int, list[tuple[int, int]]]:
        """Puts a request of these parts, with room for a reply, into a slot.

        Returns the head of its chain, and address and size of each piece of the room. Those behind
        the first come in descending order when they are to lie ``scattered``.
        """
        base = SLOTS_AT + slot * SLOT_BYTES
        rows: list[tuple[int, int, int]] = []
        at = base + _REQUEST_AT
        for part in parts:
            self.memory[at : at + len(part)] = part
            rows.append((at, len(part), 0))
            at += len(part)
        assert at <= base + _REPLY_AT
        at = base + _REPLY_AT
        pieces = []
        for size in room:
            pieces.append((at, size))
            at += size
        assert at <= base + SLOT_BYTES
        if scattered:
            pieces[1:] = reversed(pieces[1:])
        rows += [(address, size, WRITE) for address, size in pieces]
        if self.has_indirect:
            first, table = 0, base
            self.put_descriptor(queue, slot, (table, 16 * len(rows), INDIRECT, 0))
            head = slot
        else:
            table = self.queues[queue].descriptors_at
            head = first = slot * 8
            assert len(rows) <= 8
        for number, (address, size, flags) in enumerate(rows):
            is_last = number == len(rows) - 1
            row = (address, size, flags | (0 if is_last else NEXT), first + number + 1)
            _DESCRIPTOR.pack_into(self.memory, table + 16 * (first + number), *row)
        return head, pieces

    def wait(self, queue: int = 1) -> tuple[int, int]:
        """The next used element; TimeoutError if none comes, Closed if the queue was broken."""
        driver = self.queues[queue]
        end = time.monotonic() + DEADLINE_S
        while (used := driver.take_used()) is None:
            left = end - time.monotonic()
            watched = [driver.call, driver.error, self.connection.socket]
            ready = select.select(watched, [], [], max(0.0, left))[0]
            if not ready:
                raise TimeoutError
            if driver.call not in ready:
                raise Closed
            os.eventfd_read(driver.call)
        return used

    def exchange(
        self, parts: Sequence[bytes], room: Sequence[int], *, slot: int = 0, queue: int = 1
    ) -> bytes:
        """One request and its reply, the only ones under way in this queue."""
        head, pieces = self.build(parts, room, slot=slot, queue=queue)
        self.queues[queue].post_and_kick(head)
        used = self.wait(queue)
        assert used[0] == head
        at = pieces[0][0] if pieces else 0
        return bytes(self.memory[at : at + used[1]])

    def post_fuse(
        self,
        opcode: int,
        body: bytes = b"",
        *,
        nodeid: int = 1,
        room: int = 4096,
        slot: int = 0,
        queue: int = 1,
    ) -> int:
        """Sends a FUSE request; where its reply will be."""
        self.unique += 2
        length = _FUSE_HEADER.size + len(body)
        header = _FUSE_HEADER.pack(length, opcode, self.unique, nodeid, 0, 0, 1, 0)
        head, pieces = self.build([header, body], [16, room], slot=slot, queue=queue)
        self.queues[queue].post_and_kick(head)
        return pieces[0][0]

    def fuse(self, opcode: int, body: bytes = b"", *, nodeid: int = 1, room: int = 4096) -> bytes:
        """The payload of one FUSE reply; OSError for one that is an error."""
        at = self.post_fuse(opcode, body, nodeid=nodeid, room=room)
        _, written = self.wait()
        reply = bytes(self.memory[at : at + written])
        length, error, unique = _FUSE_REPLY.unpack_from(reply)
        assert (length, unique) == (written, self.unique)
        if error:
            raise OSError(-error, os.strerror(-error))
        return reply[_FUSE_REPLY.size :]

    def close(self) -> None:
        self.connection.close()
        for queue in self.queues:
            queue.close()
        self.queues.clear()
        self.memory = memoryview(b"")
        os.close(self.file)


@contextlib.contextmanager
def front_end(path: str | socket.socket, **options: object) -> Iterator[FrontEnd]:
    guest = FrontEnd(path, **options)  # type: ignore[arg-type]
    try:
        yield guest
    finally:
        guest.close()
