import contextlib
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotter.fuse.virtiofs import queue as queues
from snapshotter.fuse.virtiofs.device import MAX_QUEUES
from snapshotter.fuse.virtiofs.memory import RegionLayout
from snapshotter.fuse.virtiofs.vhost_user import Feature, Request
from tests.support.vhost_user_front_end import (
    MEMORY_BYTES,
    NEXT,
    SLOT_BYTES,
    SLOTS_AT,
    USER_BASE,
    Closed,
    Connection,
    FrontEnd,
    sealed_memory,
)
from tests.unit.fuse.virtiofs.devices import Upper, guest_of, running

HALF = MEMORY_BYTES // 2


def ask(guest: FrontEnd, request: bytes, *, slot: int = 0, queue: int = 1) -> bytes:
    head, ((at, _),) = guest.build([request], [64], slot=slot, queue=queue)
    guest.queues[queue].post_and_kick(head)
    used = guest.wait(queue)
    assert used[0] == head
    return bytes(guest.memory[at : at + used[1]])


def post(guest: FrontEnd, request: bytes, *, slot: int = 0) -> int:
    head, ((at, _),) = guest.build([request], [64], slot=slot)
    guest.queues[1].post_and_kick(head)
    return at


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(found)


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Asserts that nothing stays open."""
    before = open_files()
    yield
    assert open_files() == before


@pytest.fixture
def mappings() -> Iterator[None]:
    """Asserts that no guest's memory stays mapped."""
    yield
    assert "memfd:guest" not in Path("/proc/self/maps").read_text()


pytestmark = pytest.mark.usefixtures("descriptors")


@pytest.mark.usefixtures("mappings")
@pytest.mark.parametrize("has_indirect", [True, False])
def test_requests_are_answered_on_every_queue(has_indirect: bool) -> None:
    with guest_of(Upper(), has_indirect=has_indirect, queue_count=4) as (guest, served):
        for turn in range(50):
            for queue in range(4):
                assert ask(guest, b"turn %d" % turn, queue=queue) == b"TURN %d" % turn
        assert guest.queue_limit == MAX_QUEUES
    assert not served.end
    assert not served.reports


def test_buffers_may_straddle_regions() -> None:
    cut = SLOTS_AT + 0x8003  # within the request of the first slot
    regions = [
        RegionLayout(0, cut, USER_BASE, 0),
        RegionLayout(cut, MEMORY_BYTES - cut, USER_BASE + cut, cut),
    ]
    with guest_of(Upper(), regions=regions) as (guest, _):
        assert ask(guest, b"straddling") == b"STRADDLING"


def test_what_is_deferred_is_answered_later_in_any_order() -> None:
    upper = Upper()
    with guest_of(upper) as (guest, _):
        places = [post(guest, b"later %d" % number, slot=number) for number in range(3)]
        for _ in places:
            assert upper.has_deferred.acquire(timeout=20)
        assert ask(guest, b"now", slot=5) == b"NOW"
        for number, place in ((2, 2), (0, 0), (1, 0)):
            assert upper.release(place)
            head, written = guest.wait()
            assert head == number
            at = places[number]
            assert bytes(guest.memory[at : at + written]) == b"LATER %d" % number


def test_a_stopping_queue_waits_for_what_was_deferred() -> None:
    upper = Upper()
    with guest_of(upper) as (guest, _):
        post(guest, b"later")
        assert upper.has_deferred.acquire(timeout=20)
        threading.Timer(0.05, upper.release, [0]).start()
        assert guest.stop_queue(1) == 1
        assert guest.wait() == (0, 5)


def test_a_stopping_queue_fails_what_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "DRAIN_DEADLINE_S", 0.05)
    upper = Upper()
    with guest_of(upper) as (guest, _):
        at = post(guest, b"later")
        assert upper.has_deferred.acquire(timeout=20)
        guest.stop_queue(1)
        assert guest.wait() == (0, 4)
        assert bytes(guest.memory[at : at + 4]) == b"GONE"
        assert not upper.release(0)


@pytest.mark.usefixtures("mappings")
def test_a_front_end_that_hangs_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "DRAIN_DEADLINE_S", 0.05)
    upper = Upper()
    with guest_of(upper) as (guest, served):
        post(guest, b"later")
        assert upper.has_deferred.acquire(timeout=20)
        guest.connection.close()
        served.join()
        assert not upper.release(0)


def test_a_queue_goes_on_where_it_was_stopped() -> None:
    with guest_of(Upper()) as (guest, _):
        for turn in range(3):
            assert ask(guest, b"turn %d" % turn) == b"TURN %d" % turn
            base = guest.stop_queue(1)
            assert base == turn + 1
            guest.start_queue(1, base=base)


def test_requests_from_before_the_start_are_served() -> None:
    with guest_of(Upper()) as (guest, _):
        base = guest.stop_queue(1)
        head, ((at, _),) = guest.build([b"early"], [64])
        guest.queues[1].post(head)
        guest.start_queue(1, base=base)
        assert guest.wait() == (head, 5)
        assert bytes(guest.memory[at : at + 5]) == b"EARLY"


def test_a_new_memory_table_takes_effect_at_once_and_keeps_what_is_deferred() -> None:
    upper = Upper()
    halves = [
        RegionLayout(0, HALF, USER_BASE, 0),
        RegionLayout(HALF, HALF, USER_BASE + HALF, HALF),
    ]
    with guest_of(upper, regions=halves[:1]) as (guest, served):
        at = post(guest, b"later", slot=1)
        assert upper.has_deferred.acquire(timeout=20)
        guest.set_memory(halves)
        far = (HALF - SLOTS_AT) // SLOT_BYTES + 1
        assert ask(guest, b"far", slot=far) == b"FAR"
        assert upper.release(0)
        assert guest.wait() == (1, 5)
        assert bytes(guest.memory[at : at + 5]) == b"LATER"
        guest.set_memory(halves[:1])
        with pytest.raises(Closed):
            ask(guest, b"far", slot=far)
        assert ["InvalidInputError" in error for error in served.reports] == [True]


def test_the_call_descriptor_may_be_replaced_while_the_queue_runs() -> None:
    with guest_of(Upper()) as (guest, _):
        queue = guest.queues[1]
        old, queue.call = queue.call, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        guest.connection.tell(Request.SET_VRING_CALL, struct.pack("<Q", 1), [queue.call])
        assert ask(guest, b"new") == b"NEW"
        os.close(old)


@pytest.mark.parametrize("request_", [b"refuse", b"flaw"])
def test_what_a_handler_cannot_bear_stops_that_queue_only(request_: bytes) -> None:
    with guest_of(Upper(), queue_count=3) as (guest, served):
        with pytest.raises(Closed):
            ask(guest, request_)
        assert os.eventfd_read(guest.queues[1].error) == 1
        assert ask(guest, b"other", queue=2) == b"OTHER"
        assert guest.stop_queue(1) == 1
        guest.queues[1].next_used = guest.queues[1].used_head[1]
        guest.start_queue(1, base=1)
        assert ask(guest, b"again") == b"AGAIN"
        assert len(served.reports) == 1


def test_a_broken_ring_stops_that_queue_only() -> None:
    with guest_of(Upper(), queue_count=3) as (guest, served):
        guest.put_descriptor(1, 0, (SLOTS_AT, 40, NEXT, 0))
        guest.queues[1].post_and_kick(0)
        with pytest.raises(Closed):
            guest.wait()
        assert ask(guest, b"other", queue=2) == b"OTHER"
        assert guest.stop_queue(1) == 0
        assert "no end" in served.reports[0]


def test_queues_run_without_negotiated_protocol_features_too() -> None:
    with guest_of(Upper()) as (guest, _):
        guest.stop_queue(1)
    with running(Upper()) as served:
        connection = Connection(served.socket)
        connection.send(Request.SET_FEATURES, struct.pack("<Q", Feature.VERSION_1))
        assert connection.ask(Request.GET_FEATURES)


PAGE = mmap.PAGESIZE
TABLE = struct.pack("<IIQQQQ", 1, 0, 0, PAGE, USER_BASE, 0)


def memory(connection: Connection, body: bytes, *, count: int = 1, size: int = PAGE) -> None:
    descriptor = sealed_memory(size)
    try:
        connection.send(Request.SET_MEM_TABLE, body, [descriptor] * count)
    finally:
        os.close(descriptor)


def eventfd(connection: Connection, number: int, body: bytes, *, count: int = 1) -> None:
    descriptor = os.eventfd(0)
    try:
        connection.send(number, body, [descriptor] * count)
    finally:
        os.close(descriptor)


def ring_outside(connection: Connection) -> None:
    memory(connection, TABLE)
    connection.send(Request.SET_VRING_NUM, struct.pack("<II", 0, 128))
    body = struct.pack("<IIQQQQ", 0, 0, USER_BASE, USER_BASE + PAGE, USER_BASE + 2048, 0)
    connection.send(Request.SET_VRING_ADDR, body)
    connection.send(Request.SET_FEATURES, struct.pack("<Q", Feature.VERSION_1))
    eventfd(connection, Request.SET_VRING_KICK, struct.pack("<Q", 0))


FAULTS: dict[str, Callable[[Connection], None]] = {
    "unknown request": lambda c: c.send(99),
    "request not offered": lambda c: c.send(6, bytes(16)),
    "wrong version": lambda c: c.send(Request.GET_FEATURES, flags=2),
    "a reply": lambda c: c.send(Request.GET_FEATURES, flags=5),
    "huge size": lambda c: c.socket.sendall(struct.pack("<III", 5, 1, 0xFFFF_FFFF)) or None,
    "half a header": lambda c: c.socket.sendall(b"\1\0\0\0\1") or None,
    "half a body": lambda c: c.socket.sendall(struct.pack("<III", 2, 1, 8) + b"\0") or None,
    "short body": lambda c: c.send(Request.SET_FEATURES, b"123"),
    "features not offered": lambda c: c.send(Request.SET_FEATURES, struct.pack("<Q", 1 << 33)),
    "legacy": lambda c: c.send(Request.SET_FEATURES, struct.pack("<Q", 0)),
    "protocol features": lambda c: c.send(Request.SET_PROTOCOL_FEATURES, struct.pack("<Q", 2)),
    "table without descriptor": lambda c: c.send(Request.SET_MEM_TABLE, TABLE),
    "table with too many": lambda c: memory(c, TABLE, count=2),
    "table cut short": lambda c: memory(c, TABLE[:-1]),
    "table of a million": lambda c: memory(c, struct.pack("<II", 1 << 20, 0)),
    "beyond the file": lambda c: memory(c, struct.pack("<IIQQQQ", 1, 0, 0, 2 * PAGE, USER_BASE, 0)),
    "ring of three": lambda c: c.send(Request.SET_VRING_NUM, struct.pack("<II", 0, 3)),
    "ring of none": lambda c: c.send(Request.SET_VRING_NUM, struct.pack("<II", 0, 0)),
    "ring of 65536": lambda c: c.send(Request.SET_VRING_NUM, struct.pack("<II", 0, 65536)),
    "queue 200": lambda c: c.send(Request.SET_VRING_NUM, struct.pack("<II", 200, 128)),
    "ring outside": ring_outside,
    "kick without descriptor": lambda c: c.send(Request.SET_VRING_KICK, struct.pack("<Q", 0)),
    "kick with two": lambda c: eventfd(c, Request.SET_VRING_KICK, bytes(8), count=2),
    "no kicks": lambda c: c.send(Request.SET_VRING_KICK, struct.pack("<Q", 0x100)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_front_end_that_breaks_the_protocol_is_hung_up_on(name: str) -> None:
    with running(Upper()) as served:
        connection = Connection(served.socket)
        FAULTS[name](connection)
        with contextlib.suppress(OSError):
            connection.socket.shutdown(1)
        with pytest.raises(Closed):
            connection.receive()
    assert served.end


def test_a_running_queue_cannot_be_changed() -> None:
    with guest_of(Upper()) as (guest, served), pytest.raises(Closed):
        guest.connection.tell(Request.SET_VRING_NUM, struct.pack("<II", 1, 64))
    assert "is running" in served.end
