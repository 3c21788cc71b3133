import os
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotter.errors import InvalidInputError
from snapshotter.fuse.virtiofs.memory import GuestMemory, RegionLayout
from snapshotter.fuse.virtiofs.vring import MAX_BYTES, Chain, RingAddresses, Vring
from tests.support.vhost_user_front_end import (
    INDIRECT,
    NEXT,
    USER_BASE,
    WRITE,
    DriverQueue,
    sealed_memory,
)

MEMORY = 8 << 20
DATA = 1 << 20
SIZE = 16
Row = tuple[int, int, int, int]


class Guest:
    """A ring of 16 at the front of 8 MiB of memory, the driver's side and the device's."""

    def __init__(self, *, has_indirect: bool = True, base: int = 0) -> None:
        self.file = sealed_memory(MEMORY)
        self.memory = GuestMemory([RegionLayout(0, MEMORY, USER_BASE, 0)], [self.file])
        self.view = self.memory.regions[0].view
        self.driver = DriverQueue(self.view, 0x10000, SIZE)
        self.driver.available[1] = base
        at = self.driver
        self.ring = Vring(
            self.memory,
            RingAddresses(
                USER_BASE + at.descriptors_at, USER_BASE + at.used_at, USER_BASE + at.available_at
            ),
            SIZE,
            has_indirect=has_indirect,
            next_available=base,
        )

    def put(self, rows: dict[int, Row] | list[Row], at: int | None = None) -> None:
        numbered = rows.items() if isinstance(rows, dict) else enumerate(rows)
        table = self.driver.descriptors_at if at is None else at
        for number, row in numbered:
            struct.pack_into("<QIHH", self.view, table + 16 * number, *row)

    def offer(self, rows: dict[int, Row] | list[Row], head: int = 0) -> Chain | None:
        self.put(rows)
        self.driver.post(head)
        return self.ring.pop()

    def close(self) -> None:
        self.driver.close()
        os.close(self.file)


@pytest.fixture
def guest() -> Iterator[Guest]:
    made = Guest()
    yield made
    made.close()


def test_a_chain_becomes_what_is_readable_and_what_is_writable(guest: Guest) -> None:
    guest.view[DATA : DATA + 4] = b"head"
    guest.view[DATA + 100 : DATA + 104] = b"body"
    rows = {
        3: (DATA, 4, NEXT, 9),
        9: (DATA + 100, 4, NEXT, 1),
        1: (DATA + 200, 16, NEXT | WRITE, 0),
        0: (DATA + 300, 50, WRITE, 7),
    }
    chain = guest.offer(rows, head=3)
    assert chain is not None
    assert chain.head == 3
    assert b"".join(chain.readable) == b"headbody"
    assert [len(view) for view in chain.writable] == [16, 50]
    assert (chain.readable_size, chain.writable_size) == (8, 66)
    chain.writable[1][:2] = b"ok"
    assert bytes(guest.view[DATA + 300 : DATA + 302]) == b"ok"
    assert guest.ring.pop() is None


def test_neighbours_become_one_view(guest: Guest) -> None:
    rows = [(DATA, 40, NEXT, 1), (DATA + 40, 8, NEXT, 2), (DATA + 48, 16, NEXT | WRITE, 3)]
    rows += [(DATA + 64, 0, NEXT | WRITE, 4), (DATA + 64, 4096, WRITE, 0)]
    chain = guest.offer(rows)
    assert chain is not None
    assert [len(view) for view in chain.readable] == [48]
    assert [len(view) for view in chain.writable] == [4112]


def test_an_indirect_table_is_walked_likewise(guest: Guest) -> None:
    guest.put([(DATA, 4, NEXT, 2), (0, 0, 0, 0), (DATA + 64, 8, WRITE, 0)], at=2 * DATA)
    chain = guest.offer({5: (2 * DATA, 48, INDIRECT, 0)}, head=5)
    assert chain is not None
    assert (chain.head, chain.readable_size, chain.writable_size) == (5, 4, 8)


def test_a_chain_may_use_every_descriptor_and_the_indexes_wrap(guest: Guest) -> None:
    rows = [(DATA + 8 * n, 4, NEXT if n < SIZE - 1 else 0, n + 1) for n in range(SIZE)]
    guest.put(rows)
    for turn in range(70_000):
        guest.driver.post(0)
        chain = guest.ring.pop()
        assert chain is not None
        if not turn:
            assert len(chain.readable) == SIZE
            guest.put([(DATA, 4, 0, 0)])
        guest.ring.push(chain.head, turn & 0xFF)
        assert guest.driver.take_used() == (0, turn & 0xFF)
    assert guest.ring.next_available == 70_000 & 0xFFFF


def test_answers_may_come_in_any_order(guest: Guest) -> None:
    guest.put([(DATA, 4, 0, 0)] * 3)
    for head in (0, 1, 2):
        guest.driver.post(head)
    chains = [guest.ring.pop() for _ in range(3)]
    assert guest.ring.in_flight == 3
    for chain in reversed(chains):
        assert chain is not None
        guest.ring.push(chain.head, chain.head)
    assert [guest.driver.take_used() for _ in range(4)] == [(2, 2), (1, 1), (0, 0), None]
    assert guest.ring.in_flight == 0


def test_a_successor_goes_on_where_the_first_stood() -> None:
    guest = Guest(base=0xFFFF)
    try:
        chain = guest.offer([(DATA, 4, 0, 0)])
        assert chain is not None
        assert guest.ring.next_available == 0
    finally:
        guest.close()


BROKEN: dict[str, list[Row] | dict[int, Row]] = {
    "self loop": [(DATA, 40, NEXT, 0)],
    "loop of two": [(DATA, 40, NEXT, 1), (DATA, 16, NEXT | WRITE, 2), (DATA, 16, NEXT | WRITE, 1)],
    "loop of nothing": [(DATA, 0, NEXT, 0)],
    "next outside": [(DATA, 40, NEXT, SIZE)],
    "next far outside": [(DATA, 40, NEXT, 0xFFFF)],
    "address outside": [(1 << 40, 40, 0, 0)],
    "address wraps": [((1 << 64) - 16, 4096, 0, 0)],
    "over the end": [(MEMORY - 16, 40, 0, 0)],
    "4 GiB": [(DATA, 0xFFFF_FFFF, 0, 0)],
    "writable outside": [(DATA, 80, NEXT, 1), (1 << 40, 4096, WRITE, 0)],
    "amplified": [(DATA, 40, NEXT, 1)]
    + [(DATA, 200_000, NEXT | WRITE, n + 2) for n in range(8)]
    + [(DATA, 200_000, WRITE, 0)],
    "too much to read": [(DATA, MAX_BYTES + 1, 0, 0)],
    "indirect of odd length": [(DATA, 17, INDIRECT, 0)],
    "indirect of nothing": [(DATA, 0, INDIRECT, 0)],
    "indirect too long": [(DATA, 1025 * 16, INDIRECT, 0)],
    "indirect huge": [(DATA, 0xFFFF_FFF0, INDIRECT, 0)],
    "indirect outside": [(1 << 50, 32, INDIRECT, 0)],
    "indirect with next": [(DATA, 16, INDIRECT | NEXT, 1)],
    "indirect later": [(DATA + 64, 40, NEXT, 1), (DATA, 16, INDIRECT, 0)],
    "readable behind writable": [(DATA, 128, NEXT | WRITE, 1), (DATA + 4096, 40, 0, 0)],
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_chains_are_refused(guest: Guest, name: str) -> None:
    with pytest.raises(InvalidInputError):
        guest.offer(BROKEN[name])


@pytest.mark.parametrize(
    "rows",
    [
        [(DATA, 16, INDIRECT, 0)],
        [(DATA, 40, NEXT, 1), (DATA, 40, NEXT, 0)],
        [(DATA, 40, NEXT, 2), (DATA, 40, 0, 0)],
    ],
)
def test_broken_indirect_tables_are_refused(guest: Guest, rows: list[Row]) -> None:
    guest.put(rows, at=2 * DATA)
    with pytest.raises(InvalidInputError):
        guest.offer([(2 * DATA, 16 * len(rows), INDIRECT, 0)])


def test_indirect_tables_are_refused_where_not_negotiated() -> None:
    guest = Guest(has_indirect=False)
    try:
        with pytest.raises(InvalidInputError):
            guest.offer([(DATA, 16, INDIRECT, 0)])
    finally:
        guest.close()


def test_heads_and_indexes_out_of_range_are_refused(guest: Guest) -> None:
    with pytest.raises(InvalidInputError):
        guest.offer([], head=SIZE)
    guest.driver.available[1] = SIZE + 1
    with pytest.raises(InvalidInputError):
        guest.ring.pop()


def test_a_request_offered_for_ever_is_refused_when_the_ring_is_full(guest: Guest) -> None:
    for _ in range(SIZE):
        assert guest.offer([(DATA, 4, 0, 0)]) is not None
    with pytest.raises(InvalidInputError):
        guest.offer([(DATA, 4, 0, 0)])


@pytest.mark.parametrize("size", [0, 3, 2048, 1 << 16])
def test_sizes_that_cannot_be_are_refused(guest: Guest, size: int) -> None:
    addresses = RingAddresses(USER_BASE, USER_BASE + 0x8000, USER_BASE + 0x4000)
    with pytest.raises(InvalidInputError):
        Vring(guest.memory, addresses, size, has_indirect=True)


ADDRESS = st.one_of(
    st.integers(0, MEMORY + 4096), st.sampled_from([1 << 40, (1 << 64) - 1, (1 << 64) - 4096])
)
LENGTH = st.one_of(st.integers(0, 5000), st.sampled_from([1 << 20, 1 << 31, (1 << 32) - 1]))
ROW = st.tuples(ADDRESS, LENGTH, st.integers(0, 7), st.integers(0, SIZE + 2))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=st.lists(ROW, max_size=SIZE), head=st.integers(0, SIZE), at=st.sampled_from([0, DATA]))
def test_whatever_a_guest_offers_stays_within_its_memory(
    guest: Guest, table: list[Row], head: int, at: int
) -> None:
    """Invariant: a chain of no more than MAX_BYTES each way, or the ring is refused."""
    guest.put(table, at=at or None)
    if at:
        guest.put([(DATA, 16 * len(table), INDIRECT, 0)])
    guest.driver.post(0 if at else head)
    try:
        chain = guest.ring.pop()
    except InvalidInputError:
        guest.driver.available[1] = guest.ring.next_available
        return
    assert chain is not None
    assert sum(map(len, chain.readable)) == chain.readable_size <= MAX_BYTES
    assert sum(map(len, chain.writable)) == chain.writable_size <= MAX_BYTES
    guest.ring.push(chain.head, 0)
