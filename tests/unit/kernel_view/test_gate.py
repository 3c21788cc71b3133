"""The gate without a mount: requests as bytes in, replies as bytes out, a store to order."""

import errno
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from snapshotter.config import Config
from snapshotter.errors import DiskFullError, UnavailableError
from snapshotter.fuse.server import Server, encode_answer
from snapshotter.fuse.wire import RESENT, Opcode
from snapshotter.kernel_view import asker
from snapshotter.kernel_view.content_store import TakeLater
from snapshotter.kernel_view.gate import Gate
from snapshotter.kernel_view.node_journal import NodeJournal
from snapshotter.names import ContentName
from snapshotter.telemetry import Counters
from tests.support.fuse_requests import request

GATE_ID = b"g" * 32
SMALL = ContentName(b"\xab" + b"s" * 31, 100)
LARGE = ContentName(b"\xab" + b"l" * 31, 9 << 20)
DEADLINE_S = 30.0


class FakeStore:
    def __init__(self) -> None:
        self.objects: set[ContentName] = set()
        self.ready: set[ContentName] = set()
        self.calls: list[tuple[Any, ...]] = []
        self.failure: Exception | None = None
        self.delay_s = 0.0
        self.is_full = False
        self.is_coming = False
        self.later: list[TakeLater] = []

    def has(self, name: ContentName) -> bool:
        return name in self.objects

    def read_ready(self, name: ContentName, offset: int, length: int) -> bytes | None:
        return b"x" * length if name in self.objects | self.ready else None

    def read_later(self, name: ContentName, offset: int, length: int, take: TakeLater) -> bool:
        if self.is_coming:
            self.later.append(take)
        return self.is_coming

    async def materialise(self, name: ContentName, *, image: int = 0) -> None:
        await self._work("materialise", name, image)
        if self.is_full:
            raise DiskFullError(f"keep {name}: no space")
        self.objects.add(name)

    async def prepare_partial(self, name: ContentName, *, image: int = 0) -> None:
        await self._work("prepare_partial", name, image)

    async def ensure(self, name: ContentName, offset: int, length: int, *, image: int = 0) -> None:
        await self._work("ensure", name, offset, length)
        (self.objects if name == SMALL and not self.is_full else self.ready).add(name)

    async def _work(self, *call: Any) -> None:
        self.calls.append(call)
        await trio.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure


class FakeSession:
    """Keeps replies; its thread waits for the unmount, as the real one would."""

    def __init__(self) -> None:
        self.replies: list[bytes] = []
        self.dropped: list[int] = []
        self.has_replied = trio.Event()
        self._unmounted = threading.Event()

    def run(self) -> None:
        self._unmounted.wait(30)

    def reply(self, unique: int, answer: bytes | int) -> None:
        self.replies.append(b"".join(encode_answer(unique, answer)))
        self.has_replied.set()

    def stop(self) -> None:
        self._unmounted.set()

    def drop_pages(self, nodeid: int) -> None:
        self.dropped.append(nodeid)


class Rig:
    def __init__(self, directory: Path) -> None:
        self.store = FakeStore()
        self.session = FakeSession()
        self.journal = NodeJournal(directory / "nodes", GATE_ID)
        self.counters = Counters()
        self.resolvable: list[ContentName] = []
        self.gate = Gate(
            self.store,
            self.journal,
            config=Config(lookup_deadline_s=DEADLINE_S),
            counters=self.counters,
            on_resolvable=self.resolvable.append,
        )
        self.faults: list[Exception] = []
        self.server = Server(
            self.gate.operations(), report_fault=lambda error, _header: self.faults.append(error)
        )
        self._unique = 0

    def send(self, opcode: int, body: bytes, *, nodeid: int = 1, unique: int = 0) -> bytes | None:
        raw = request(opcode, body, nodeid=nodeid, unique=unique or self._next(), pid=77)
        buffers = self.server.handle(memoryview(raw))
        return None if buffers is None else b"".join(buffers)

    def _next(self) -> int:
        self._unique += 2
        return self._unique

    def lookup(self, parent: int, name: bytes, *, unique: int = 0) -> bytes | None:
        return self.send(Opcode.LOOKUP, name + b"\0", nodeid=parent, unique=unique)

    def directory(self, path: bytes) -> int:
        nodeid = 1
        for part in path.split(b"/"):
            reply = self.lookup(nodeid, part)
            assert reply is not None
            nodeid = nodeid_of(reply)
        return nodeid

    def ask(self, top: bytes, name: ContentName, *, unique: int = 0) -> bytes | None:
        parent = self.directory(top + b"/" + name.directory.encode())
        return self.lookup(parent, name.file.encode(), unique=unique)

    async def answer(self, reply: bytes | None) -> bytes:
        """``reply``, or the one that a trio task gives later."""
        if reply is not None:
            return reply
        await self.session.has_replied.wait()
        self.session.has_replied = trio.Event()
        return self.session.replies.pop()

    def read(self, nodeid: int, offset: int, size: int, *, unique: int = 0) -> bytes | None:
        body = struct.pack("=QQIIQII", 0, offset, size, 0, 0, 0, 0)
        return self.send(Opcode.READ, body, nodeid=nodeid, unique=unique)


def error_of(reply: bytes) -> int:
    return -int(struct.unpack_from("=IiQ", reply)[1])


def nodeid_of(reply: bytes) -> int:
    assert error_of(reply) == 0, reply
    return int(struct.unpack_from("=Q", reply, 16)[0])


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(asker, "is_metadata_only", lambda _tid: False)
    monkeypatch.setattr(asker, "is_being_killed", lambda _tid: False)
    made = Rig(tmp_path)
    yield made
    made.journal.close()
    assert not made.faults


@asynccontextmanager
async def served(rig: Rig) -> Any:
    async with trio.open_nursery() as nursery:
        await nursery.start(rig.gate.serve, rig.session)
        yield
        rig.session.stop()


def run(rig: Rig, body: Callable[[], Awaitable[None]]) -> list[Any]:
    """Runs ``body`` with the gate served; the log lines meanwhile."""

    async def main() -> None:
        async with served(rig):
            await body()

    with structlog.testing.capture_logs() as logs:
        trio.run(main, clock=MockClock(autojump_threshold=0))
    return logs


def test_directories_have_fixed_numbers(rig: Rig) -> None:
    seen = {
        path: rig.directory(path)
        for path in (b"v", b"v/00", b"v/ff", b"g0", b"g0/00", b"g0/ff", b"g1", b"g1/00", b"g123456")
    }
    assert len(set(seen.values())) == len(seen)
    assert seen[b"v"] == 2
    assert seen[b"v/ff"] == 0x1FF
    assert seen[b"g1/00"] == 1 << 62 | 1 << 9 | 0x100


@pytest.mark.parametrize(
    "name", [b"g", b"g01", b"g+1", b"g1 ", b"gx", b"w", b"g1234567890123456", b"V"]
)
def test_other_names_do_not_exist_in_the_root(rig: Rig, name: bytes) -> None:
    reply = rig.lookup(1, name)
    assert reply is not None
    assert error_of(reply) == errno.ENOENT


@pytest.mark.parametrize(("top", "number"), [(b"g1", errno.ENOENT), (b"v", errno.EIO)])
@pytest.mark.parametrize(
    "name", [b"file", b"0" * 62 + b".0", b"0" * 62 + b".01", b"F" * 62 + b".1"]
)
def test_a_name_of_no_content_fails_without_a_fetch(
    rig: Rig, top: bytes, number: int, name: bytes
) -> None:
    for parent in (rig.directory(top + b"/ab"), rig.directory(top)):
        reply = rig.lookup(parent, name)
        assert reply is not None
        assert error_of(reply) == number
    assert not rig.store.calls


def test_content_that_is_here_is_left_to_the_next_layer(rig: Rig) -> None:
    rig.store.objects.add(SMALL)
    reply = rig.ask(b"g1", SMALL)
    assert reply is not None
    assert error_of(reply) == errno.ENOENT
    assert not rig.store.calls


def test_small_content_is_made_an_object_and_left_to_the_next_layer(rig: Rig) -> None:
    async def body() -> None:
        reply = rig.ask(b"g12", SMALL)
        assert reply is None
        assert error_of(await rig.answer(reply)) == errno.ENOENT
        assert rig.store.calls == [("materialise", SMALL, 12)]

    assert not run(rig, body)


def test_the_verdict_is_stale_if_the_content_is_here_and_else_an_error(rig: Rig) -> None:
    reply = rig.ask(b"v", SMALL)
    assert reply is not None
    assert error_of(reply) == errno.EIO
    rig.store.objects.add(SMALL)
    reply = rig.ask(b"v", SMALL)
    assert reply is not None
    assert error_of(reply) == errno.ESTALE


@pytest.mark.parametrize("name", [SMALL, LARGE])
@pytest.mark.parametrize(
    "failure", [UnavailableError("server away"), OSError(errno.ENOSPC, "full"), ValueError("flaw")]
)
def test_a_failed_fetch_is_logged_and_left_to_the_verdict(
    rig: Rig, name: ContentName, failure: Exception
) -> None:
    rig.store.failure = failure

    async def body() -> None:
        assert error_of(await rig.answer(rig.ask(b"g1", name))) == errno.ENOENT

    (line,) = run(rig, body)
    assert (line["operation"], line["object"]) == ("lookup", str(name))
    assert line["cause"] == str(failure)
    assert rig.counters.snapshot()["failures"] == 1


def test_large_content_gets_one_node_for_ever(rig: Rig) -> None:
    async def body() -> None:
        reply = await rig.answer(rig.ask(b"g1", LARGE))
        assert rig.store.calls == [("prepare_partial", LARGE, 1)]
        assert rig.journal.name(nodeid_of(reply)) == LARGE
        entry_s, attr_s = struct.unpack_from("=QQ", reply, 32)
        assert entry_s == attr_s == 1 << 40
        assert struct.unpack_from("=Q", reply, 16 + 40 + 8)[0] == LARGE.size
        rig.store.failure = UnavailableError("away")
        again = rig.ask(b"g2", LARGE)
        rig.store.objects.add(LARGE)
        complete = rig.ask(b"g1", LARGE)
        for later in (again, complete):
            assert later is not None
            assert later[16:] == reply[16:]
        assert rig.resolvable == [LARGE]

    run(rig, body)


def test_large_content_that_was_complete_all_along_gets_no_node(rig: Rig) -> None:
    async def body() -> None:
        rig.store.delay_s = 1
        reply = rig.ask(b"g1", LARGE)
        await wait_all_tasks_blocked()
        rig.store.objects.add(LARGE)
        assert error_of(await rig.answer(reply)) == errno.ENOENT
        assert not rig.journal.has(LARGE)

    run(rig, body)


@pytest.mark.parametrize("name", [SMALL, LARGE])
def test_a_change_of_metadata_gets_an_unfetched_node_that_a_read_fills(
    rig: Rig, name: ContentName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asker, "is_metadata_only", lambda tid: tid == 77)

    async def body() -> None:
        reply = rig.ask(b"g1", name)
        assert reply is not None
        assert not rig.store.calls
        data = await rig.answer(rig.read(nodeid_of(reply), 4096 if name is LARGE else 0, 4096))
        assert len(data) - 16 == min(name.size, 4096)
        assert len(rig.store.calls) == 1

    assert not run(rig, body)
    assert rig.resolvable == ([SMALL] if name is SMALL else [])


def test_content_that_cannot_be_kept_is_served_by_a_node(rig: Rig) -> None:
    async def body() -> None:
        rig.store.is_full = True
        reply = await rig.answer(rig.ask(b"g1", SMALL))
        data = await rig.answer(rig.read(nodeid_of(reply), 0, 4096))
        assert data[16:] == b"x" * SMALL.size
        assert [call[0] for call in rig.store.calls] == ["materialise", "ensure"]

    assert not run(rig, body)
    assert rig.resolvable == []
    assert rig.counters.snapshot()["unkept_lookups"] == 1


def test_a_node_given_while_another_lookup_fetches_is_what_that_one_gets_too(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        rig.store.delay_s = 1
        reply = rig.ask(b"g1", SMALL)
        assert reply is None
        monkeypatch.setattr(asker, "is_metadata_only", lambda _tid: True)
        given = rig.ask(b"g2", SMALL)
        assert given is not None
        assert (await rig.answer(reply))[16:] == given[16:]

    run(rig, body)


def test_bytes_that_are_here_are_read_at_once_and_no_further_than_the_end(rig: Rig) -> None:
    nodeid = rig.journal.add(SMALL)
    rig.store.ready.add(SMALL)
    assert [len(rig.read(nodeid, *where) or b"") - 16 for where in ((0, 4096), (90, 50))] == [
        100,
        10,
    ]
    assert rig.read(nodeid, 100, 4096) == struct.pack("=IiQ", 16, 0, 6)


def test_reads_that_fail_are_an_error_and_logged(rig: Rig) -> None:
    nodeid = rig.journal.add(LARGE)
    rig.store.failure = UnavailableError("away")

    async def body() -> None:
        assert error_of(await rig.answer(rig.read(nodeid, 0, 4096))) == errno.EIO

    (line,) = run(rig, body)
    assert (line["operation"], line["object"], line["cause"]) == ("read", str(LARGE), "away")


@pytest.mark.parametrize("is_read", [True, False])
def test_everything_is_answered_within_the_deadline(rig: Rig, is_read: bool) -> None:
    rig.store.delay_s = 1000
    nodeid = rig.journal.add(LARGE)

    async def body() -> None:
        begun_s = trio.current_time()
        reply = rig.read(nodeid, 0, 10) if is_read else rig.ask(b"g1", SMALL)
        expected = errno.EIO if is_read else errno.ENOENT
        assert error_of(await rig.answer(reply)) == expected
        assert trio.current_time() - begun_s == pytest.approx(DEADLINE_S, abs=1)

    (line,) = run(rig, body)
    assert "30 s" in line["cause"]


def test_an_unknown_node_is_an_error_and_no_zeros(rig: Rig) -> None:
    with structlog.testing.capture_logs() as logs:
        replies = [
            rig.read(1 << 63 | 5, 0, 10),
            rig.send(Opcode.GETATTR, struct.pack("=IIQ", 0, 0, 0), nodeid=1 << 63 | 5),
        ]
    assert [error_of(reply) for reply in replies if reply is not None] == [errno.EIO] * 2
    assert len(logs) == 2


def test_attributes_of_directories_and_files(rig: Rig) -> None:
    nodes = [(1, 0o40555, 0), (rig.journal.add(LARGE), 0o100444, LARGE.size)]
    for nodeid, mode, size in nodes:
        reply = rig.send(Opcode.GETATTR, struct.pack("=IIQ", 0, 0, 0), nodeid=nodeid)
        assert reply is not None
        assert struct.unpack_from("=QQ", reply, 32) == (nodeid, size)
        assert struct.unpack_from("=I", reply, 32 + 60)[0] == mode


@pytest.mark.parametrize("opcode", [Opcode.OPEN, Opcode.OPENDIR, Opcode.ACCESS, Opcode.IOCTL, 4])
def test_what_the_kernel_shall_not_ask_is_not_implemented(rig: Rig, opcode: int) -> None:
    reply = rig.send(opcode, bytes(64))
    assert reply is not None
    assert error_of(reply) == errno.ENOSYS


def test_a_read_of_what_is_on_its_way_takes_no_task(rig: Rig) -> None:
    nodeid = rig.journal.add(LARGE)
    rig.store.is_coming = True

    async def body() -> None:
        assert rig.read(nodeid, 0, 4096, unique=500) is None
        rig.store.later.pop()(memoryview(b"later"))
        assert rig.session.replies == [b"".join(encode_answer(500, b"later"))]
        assert rig.store.calls == []

    assert run(rig, body) == []


def test_a_read_of_what_does_not_come_after_all_asks_for_it(rig: Rig) -> None:
    nodeid = rig.journal.add(LARGE)
    rig.store.is_coming = True

    async def body() -> None:
        assert rig.read(nodeid, 4096, 10, unique=500) is None
        rig.store.later.pop()(None)
        assert await rig.answer(None) == b"".join(encode_answer(500, b"x" * 10))
        assert rig.store.calls == [("ensure", LARGE, 4096, 10)]

    assert run(rig, body) == []


def test_a_read_of_what_is_on_its_way_for_too_long_is_given_up(rig: Rig) -> None:
    nodeid = rig.journal.add(LARGE)
    rig.store.is_coming = True

    async def body() -> None:
        begun_s = trio.current_time()
        assert error_of(await rig.answer(rig.read(nodeid, 0, 4096))) == errno.EIO
        assert DEADLINE_S <= trio.current_time() - begun_s <= 1.25 * DEADLINE_S
        rig.store.later.pop()(b"too late")
        assert rig.session.replies == []

    (line,) = run(rig, body)
    assert line["cause"] == "not here within 30 s"


def interrupt(rig: Rig, unique: int) -> None:
    assert rig.send(Opcode.INTERRUPT, struct.pack("=Q", unique)) is None


def test_an_asker_that_is_killed_is_let_go_at_once_and_only_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asker, "is_being_killed", lambda tid: tid == 77)

    async def body() -> None:
        rig.store.delay_s = 5
        rig.ask(b"g1", SMALL, unique=1000)
        interrupt(rig, 1000)
        assert rig.session.replies == [struct.pack("=IiQ", 16, -errno.EINTR, 1000)]
        await trio.sleep(10)
        assert len(rig.session.replies) == 1
        assert SMALL in rig.store.objects
        interrupt(rig, 1000)
        assert len(rig.session.replies) == 1

    assert not run(rig, body)


def test_a_handled_signal_is_watched_for_a_kill_that_follows(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        rig.store.delay_s = 20
        rig.ask(b"g1", SMALL, unique=1000)
        interrupt(rig, 1000)
        await trio.sleep(5)
        assert not rig.session.replies
        monkeypatch.setattr(asker, "is_being_killed", lambda _tid: True)
        await trio.sleep(1)
        assert rig.session.replies == [struct.pack("=IiQ", 16, -errno.EINTR, 1000)]

    assert not run(rig, body)


def test_a_repeated_request_is_served_under_its_number_and_watched(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        reply = await rig.answer(rig.ask(b"g1", SMALL, unique=RESENT | 1000))
        assert reply == struct.pack("=IiQ", 16, -errno.ENOENT, RESENT | 1000)
        monkeypatch.setattr(asker, "is_being_killed", lambda _tid: True)
        rig.store.objects.clear()
        rig.ask(b"g1", SMALL, unique=RESENT | 1002)
        assert rig.session.replies == [struct.pack("=IiQ", 16, -errno.EINTR, RESENT | 1002)]

    assert not run(rig, body)


def test_a_cancelled_gate_leaves_requests_to_a_successor(rig: Rig) -> None:
    async def main() -> None:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(rig.gate.serve, rig.session)
                rig.store.delay_s = 5
                assert rig.ask(b"g1", SMALL) is None
                await wait_all_tasks_blocked()
                scope.cancel()
        assert rig.ask(b"g1", LARGE) is None  # its thread may still have been in an operation
        await trio.sleep(10)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert not rig.session.replies


def test_a_node_that_the_kernel_forgot_may_become_a_plain_file(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asker, "is_metadata_only", lambda _tid: True)
    nodeids = [nodeid_of(rig.ask(b"g1", name) or b"") for name in (SMALL, LARGE)]
    rig.store.objects.add(SMALL)
    assert nodeid_of(rig.ask(b"g2", SMALL) or b"") == nodeids[0]
    assert rig.send(Opcode.FORGET, struct.pack("=Q", 2), nodeid=nodeids[0]) is None
    batch = struct.pack("=I4xQQQQ", 2, nodeids[1], 1, 1, 1)
    assert rig.send(Opcode.BATCH_FORGET, batch) is None
    assert error_of(rig.ask(b"g1", SMALL) or b"") == errno.ENOENT
    assert rig.counters.snapshot()["nodes_forgotten"] == 2
    assert len(rig.journal) == 0


def test_pages_are_dropped_of_what_was_answered_with_a_node(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asker, "is_metadata_only", lambda _tid: True)
    nodeid = nodeid_of(rig.ask(b"g1", SMALL) or b"")

    async def body() -> None:
        await rig.gate.drop_pages([LARGE, SMALL])
        assert rig.session.dropped == [nodeid]

    run(rig, body)
