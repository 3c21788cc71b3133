"""The store's control socket with a store to order, over a real socket."""

import errno
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import pytest
import trio

from snapshotter.errors import UnavailableError
from snapshotter.framing import FrameDecoder, encode_frame
from snapshotter.kernel_view.content_store import TakeLater
from snapshotter.names import ContentName
from snapshotter.service import store_control as messages
from snapshotter.service import store_server
from snapshotter.service.store_server import ResolvableEvents, StoreServer
from snapshotter.store.removal import Evicted
from snapshotter.telemetry import Counters

SMALL = ContentName(b"s" * 32, 100)
LARGE = ContentName(b"l" * 32, 20 << 20)


class FakeStore:
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.failure: Exception | None = None

    def has(self, name: ContentName) -> bool:
        return False

    def read_ready(self, name: ContentName, offset: int, length: int) -> bytes | None:
        return None

    def read_later(self, name: ContentName, offset: int, length: int, take: TakeLater) -> bool:
        return False

    async def materialise(
        self, name: ContentName, *, image: int = 0, is_vital: bool = False
    ) -> None:
        assert is_vital
        await self._note("materialise", name, image)

    async def prepare_partial(self, name: ContentName, *, image: int = 0) -> None:
        await self._note("prepare_partial", name, image)

    async def ensure(self, name: ContentName, offset: int, length: int, *, image: int = 0) -> None:
        await self._note("ensure", name, offset, length, image)

    async def settle(self) -> None:
        await self._note("settle")

    async def evict(self, names: Sequence[ContentName]) -> Evicted:
        await self._note("evict", *names)
        return Evicted(removed=1, freed_bytes=7, kept=1)

    async def discard(self, names: Iterable[ContentName]) -> list[ContentName]:
        await self._note("discard", *names)
        return list(names)[:1]

    async def _note(self, *call: object) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure


class Client:
    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._decoder = FrameDecoder()

    async def ask(self, request: messages.Request | bytes) -> messages.Response:
        raw = request if isinstance(request, bytes) else msgspec.json.encode(request)
        await self.stream.send_all(encode_frame(raw))
        return await self.next()

    async def next(self) -> messages.Response:
        while (frame := self._decoder.next_frame()) is None:
            data = await self.stream.receive_some(65_536)
            assert data, "the store closed the connection"
            self._decoder.feed(data)
        return msgspec.json.decode(frame, type=messages.Response)


class Rig:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "store.sock"
        self.store = FakeStore()
        self.counters = Counters()
        self.stops = 0
        self.discarded: list[ContentName] = []

    async def connect(self) -> Client:
        stream = await trio.open_unix_socket(str(self.path))
        return Client(stream)

    def stop(self) -> None:
        self.stops += 1

    async def note_discarded(self, names: list[ContentName]) -> None:
        self.discarded += names

    def run(self, body: Callable[[Client], Awaitable[None]]) -> ResolvableEvents:
        async def main() -> None:
            self.events = ResolvableEvents()
            server = StoreServer(
                self.store,
                self.events,
                self.counters,
                stop=self.stop,
                on_discarded=self.note_discarded,
            )
            async with trio.open_nursery() as nursery:
                await nursery.start(server.run, self.path)
                nursery.start_soon(self.events.run)
                with trio.fail_after(20):
                    client = await self.connect()
                    async with client.stream:
                        await body(client)
                nursery.cancel_scope.cancel()

        trio.run(main)
        return self.events


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_the_socket_is_for_its_user_alone_and_replaces_a_dead_one(rig: Rig) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(rig.path))

    async def body(_client: Client) -> None:
        assert stat.S_IMODE(os.stat(rig.path).st_mode) == 0o600

    rig.run(body)


def test_exchanges_follow_one_another_on_a_connection(rig: Rig) -> None:
    async def body(client: Client) -> None:
        rig.counters.add("lookups", 3)
        status = await client.ask(messages.Status())
        assert status == messages.Running(pid=os.getpid(), counters={"lookups": 3})
        for request in (
            messages.Ensure(name=str(SMALL), image=4),
            messages.Ensure(name=str(LARGE), offset=5, length=6),
            messages.Ensure(name=str(LARGE)),
            messages.Settle(),
        ):
            assert await client.ask(request) == messages.Done()
        assert not rig.stops
        assert await client.ask(messages.Stop()) == messages.Done()

    rig.run(body)
    assert rig.store.calls == [
        ("materialise", SMALL, 4),
        ("ensure", LARGE, 5, 6, 0),
        ("materialise", LARGE, 0),
        ("settle",),
    ]
    assert rig.stops == 1


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (UnavailableError("server away"), "unavailable"),
        (OSError(errno.ENOSPC, "disk full"), "request_failed"),
    ],
)
def test_failures_are_told_and_the_connection_lives(
    rig: Rig, failure: Exception, code: str
) -> None:
    rig.store.failure = failure

    async def body(client: Client) -> None:
        answer = await client.ask(messages.Ensure(name=str(SMALL)))
        assert isinstance(answer, messages.Failed)
        assert answer.code == code
        assert str(failure.args[-1]) in answer.message
        assert isinstance(await client.ask(messages.Status()), messages.Running)

    rig.run(body)


@pytest.mark.parametrize(
    "request_",
    [
        b"{",
        b"[]",
        b'{"op": "dance"}',
        b'{"op": "status", "more": 1}',
        b'{"op": "dance", "with": ' + b"[" * 5000,
        b'{"op": "ensure", "name": "\xff"}',
        messages.Ensure(name="../../etc/passwd"),
        messages.Ensure(name=str(LARGE), offset=-1, length=5),
        messages.Ensure(name=str(LARGE), offset=0, length=-5),
        messages.Ensure(name=str(LARGE), offset=LARGE.size, length=1),
    ],
    ids=str,
)
def test_bad_requests_are_refused_and_do_nothing(
    rig: Rig, request_: messages.Request | bytes
) -> None:
    async def body(client: Client) -> None:
        answer = await client.ask(request_)
        assert isinstance(answer, messages.Failed)
        assert answer.code == "invalid_request"
        assert isinstance(await client.ask(messages.Status()), messages.Running)

    rig.run(body)
    assert not rig.store.calls


def test_a_false_length_ends_its_connection_alone(rig: Rig) -> None:
    async def body(client: Client) -> None:
        hostile = await rig.connect()
        async with hostile.stream:
            await hostile.stream.send_all(b"\xff\xff\xff\xff")
            assert await hostile.stream.receive_some(1) == b""
        assert isinstance(await client.ask(messages.Status()), messages.Running)

    rig.run(body)


def test_a_client_that_leaves_does_not_disturb_others(rig: Rig) -> None:
    async def body(client: Client) -> None:
        for request in (messages.Ensure(name=str(SMALL)), messages.Subscribe()):
            other = await rig.connect()
            await other.stream.send_all(encode_frame(msgspec.json.encode(request)))
            await other.stream.aclose()
        rig.events.add(SMALL)
        assert isinstance(await client.ask(messages.Status()), messages.Running)

    rig.run(body)


def test_events_come_in_batches_without_repetition_to_all_subscribers(rig: Rig) -> None:
    async def body(client: Client) -> None:
        other = await rig.connect()
        async with other.stream:
            for each in (client, other):
                assert await each.ask(messages.Subscribe()) == messages.Done()
            rig.events.add(SMALL)
            await trio.to_thread.run_sync(rig.events.add, LARGE)
            rig.events.add(SMALL)
            for each in (client, other):
                assert await each.next() == messages.Resolvable(names=[str(SMALL), str(LARGE)])
            rig.events.add(SMALL)
            assert await client.next() == messages.Resolvable(names=[str(SMALL)])

    rig.run(body)


def test_very_many_names_are_told_in_several_events(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "_NAMES_PER_EVENT", 3)
    names = [ContentName(b"n" * 32, size) for size in range(1, 8)]

    async def body(client: Client) -> None:
        await client.ask(messages.Subscribe())
        for name in names:
            rig.events.add(name)
        events = [await client.next() for _ in range(3)]
        told = [
            name
            for event in events
            if isinstance(event, messages.Resolvable)
            for name in event.names
        ]
        assert told == [str(name) for name in names]

    rig.run(body)


def test_a_name_noted_after_the_end_is_no_error(rig: Rig) -> None:
    async def body(client: Client) -> None:
        await client.ask(messages.Status())

    rig.run(body).add(SMALL)


def test_eviction_and_discarding_are_relayed(rig: Rig) -> None:
    async def body(client: Client) -> None:
        names = [str(SMALL), str(LARGE)]
        assert await client.ask(messages.Evict(names=names)) == messages.Evicted(
            removed=1, freed_bytes=7, kept=1
        )
        discarded = await client.ask(messages.Discard(names=names))
        assert discarded == messages.Discarded(names=[str(SMALL)])
        refused = await client.ask(messages.Evict(names=["../etc/passwd"]))
        assert isinstance(refused, messages.Failed)
        assert refused.code == "invalid_request"

    rig.run(body)
    assert rig.store.calls == [("evict", SMALL, LARGE), ("discard", SMALL, LARGE)]
    assert rig.discarded == [SMALL]
