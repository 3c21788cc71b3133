"""The split virtqueue of virtio 1.x, as the device sees it: chains out, used elements in. No I/O.

Everything in the rings comes from the guest and may change at any time: each field is read once,
checked, and only what was read is used. A guest that breaks the rules gets InvalidInputError,
after which its ring is not to be touched again until it was set up anew.

Memory ordering: indexes and elements are accessed through aligned casts of memoryviews, which
CPython does with one move each, and x86-64 keeps the order of loads and of stores. Only a load
after a store could overtake it, and nothing here needs that order: the event index is not
negotiated, the guest is asked to kick always (used.flags stays 0) and is called always. Other
architectures promise less; see ``is_supported_machine``.
"""

from __future__ import annotations

import functools
import platform
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from snapshotter.errors import InvalidInputError
from snapshotter.fuse.virtiofs.memory import GuestMemory

MAX_SIZE = 1024
"""Descriptors of a ring, and of an indirect table: as many as QEMU gives, and as preadv takes."""

MAX_BYTES = (1 << 20) + (1 << 16)
"""Bytes that one chain may name in one direction: the longest READ with its head. Without it a
thousand descriptors that all name the same 32 MiB would be a request of 32 GiB."""

_DESCRIPTOR = struct.Struct("<QIHH")
_DESCRIPTOR_SIZE = _DESCRIPTOR.size
_NEXT, _WRITE, _INDIRECT = 1, 2, 4
_INDEX_MASK = 0xFFFF
_IN_ORDER = tuple(range(1, MAX_SIZE))


def is_supported_machine() -> bool:
    """Whether this processor orders memory as the ring needs it."""
    return platform.machine() in ("x86_64", "AMD64")


class RingAddresses(NamedTuple):
    """User addresses of a ring's three parts."""

    descriptors: int
    used: int
    available: int


class Chain(msgspec.Struct, gc=False):
    """One request: what the guest wrote, and the room for the reply, as views of its memory.

    ``is_claimed`` is the queue's: somebody answers what was deferred, or has.
    """

    head: int
    readable: list[memoryview]
    writable: list[memoryview]
    readable_size: int
    writable_size: int
    is_claimed: bool = False


class Vring:
    """One ring. ``pop`` is for one thread; of several that ``push``, one at a time may."""

    def __init__(
        self,
        memory: GuestMemory,
        addresses: RingAddresses,
        size: int,
        *,
        has_indirect: bool,
        next_available: int = 0,
        in_flight: int = 0,
    ) -> None:
        """Goes on where an earlier object stood, given what it says of itself.

        Raises InvalidInputError for a size or addresses that cannot be.
        """
        if not 0 < size <= MAX_SIZE or size & (size - 1):
            raise InvalidInputError(f"ring of {size} descriptors; 1 to {MAX_SIZE}, a power of two")
        self._memory = memory
        self._size = size
        self._has_indirect = has_indirect
        at = memory.at_user_address
        self._descriptors = at(addresses.descriptors, _DESCRIPTOR_SIZE * size, alignment=16)
        # flags, index, then the heads
        self._available = at(addresses.available, 4 + 2 * size, alignment=2).cast("H")
        used = at(addresses.used, 4 + 8 * size, alignment=4)
        self._used_head = used[:4].cast("H")  # flags, index
        self._used_elements = used[4:].cast("I")  # head and length of each
        self._used_head[0] = 0
        self._used_index = self._used_head[1]
        self._next = next_available
        self._popped = in_flight
        self._pushed = 0

    @property
    def next_available(self) -> int:
        """Where in the available ring ``pop`` goes on; what a successor must begin with."""
        return self._next

    @property
    def in_flight(self) -> int:
        """How many chains were popped and not pushed."""
        return self._popped - self._pushed

    def pop(self) -> Chain | None:
        """The next request, or None if there is none now; InvalidInputError for a broken ring."""
        available, size, at = self._available, self._size, self._next
        pending = (available[1] - at) & _INDEX_MASK
        if not pending:
            return None
        if pending > size:
            raise InvalidInputError(f"the index of a ring of {size} moved by {pending}")
        if self._popped - self._pushed >= size:
            raise InvalidInputError(f"more than {size} requests in a ring of {size}")
        head = available[2 + at % size]
        if head >= size:
            raise InvalidInputError(f"request begins at descriptor {head} of {size}")
        chain = self._chain(head)
        self._next = (at + 1) & _INDEX_MASK
        self._popped += 1
        return chain

    def push(self, head: int, written: int) -> None:
        """Gives a chain back to the guest, with ``written`` bytes of its writable part filled."""
        elements = self._used_elements
        index = self._used_index
        at = index % self._size * 2
        elements[at] = head
        elements[at + 1] = written
        self._used_index = index = (index + 1) & _INDEX_MASK
        self._used_head[1] = index  # publishes the element: stores keep their order
        self._pushed += 1

    def _chain(self, head: int) -> Chain:
        readable: list[memoryview] = []
        writable: list[memoryview] = []
        readable_size = writable_size = 0
        for begin, end, writes in self._runs(head):
            if writes:
                writable_size += end - begin
                self._add(writable, begin, end, writable_size)
            elif writable:
                raise InvalidInputError(f"chain {head} is readable behind what is writable")
            else:
                readable_size += end - begin
                self._add(readable, begin, end, readable_size)
        return Chain(head, readable, writable, readable_size, writable_size)

    def _runs(self, head: int) -> list[tuple[int, int, int]]:
        """Begin, end and direction of what a chain names, neighbours in memory taken together."""
        runs: list[tuple[int, int, int]] = []
        begin = end = writes = 0
        for address, size, flags in self._rows(head):
            if flags & _INDIRECT:
                raise InvalidInputError(f"chain {head} has an indirect descriptor within")
            if address == end and flags & _WRITE == writes:
                end += size
            elif size:
                if begin != end:
                    runs.append((begin, end, writes))
                begin, end, writes = address, address + size, flags & _WRITE
            if not flags & _NEXT:
                break
        else:
            raise InvalidInputError(f"chain {head} has no end")
        if begin != end:
            runs.append((begin, end, writes))
        return runs

    def _rows(self, head: int) -> Iterable[tuple[int, int, int]]:
        """Address, size and flags of each descriptor of a chain, and perhaps of more behind it."""
        row = _DESCRIPTOR.unpack_from(self._descriptors, head * _DESCRIPTOR_SIZE)
        address, size, flags, _ = row
        if not flags & _INDIRECT:
            return _follow(self._descriptors, head, row)
        if not self._has_indirect or flags & _NEXT:
            raise InvalidInputError(f"descriptor {head} is indirect and may not be")
        count, rest = divmod(size, _DESCRIPTOR_SIZE)
        if rest or not 0 < count <= MAX_SIZE:
            raise InvalidInputError(f"indirect table of {size} bytes")
        # A private copy: the guest can no longer change the table while it is walked.
        table = self._memory.copy(address, size)
        fields = _table(count).unpack(table)
        if fields[3:-1:4] == _IN_ORDER[: count - 1]:  # as every known driver writes them
            return zip(fields[::4], fields[1::4], fields[2::4], strict=False)
        return _follow(table, 0, fields[:4])

    def _add(self, views: list[memoryview], begin: int, end: int, total: int) -> None:
        """Adds guest addresses [begin, end), with which the direction has ``total`` bytes."""
        if total > MAX_BYTES:
            raise InvalidInputError(f"request of {total} bytes in one direction")
        first = self._memory.regions[0]
        at = first.guest_address
        if at <= begin and end <= first.guest_end:
            views.append(first.view[begin - at : end - at])
        else:
            views += self._memory.spans(begin, end - begin)


@functools.cache
def _table(count: int) -> struct.Struct:
    """All fields of an indirect table at once."""
    return struct.Struct("<" + "QIHH" * count)


def _follow(
    table: memoryview | bytes, first: int, row: tuple[int, int, int, int]
) -> Iterator[tuple[int, int, int]]:
    """The descriptors of a chain in a table, whatever their order; ``row`` is that at ``first``."""
    count = len(table) // _DESCRIPTOR_SIZE
    for _ in range(count):
        address, size, flags, following = row
        yield address, size, flags
        if following >= count:
            raise InvalidInputError(f"chain at {first} goes on at descriptor {following}")
        row = _DESCRIPTOR.unpack_from(table, following * _DESCRIPTOR_SIZE)
