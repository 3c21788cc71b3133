"""The cache-v1 client against a server that misbehaves on purpose."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio
import trio.testing

from snapshotter.cache_v1 import client as client_module
from snapshotter.cache_v1.client import MAX_CONNECTIONS, CacheClient
from snapshotter.cache_v1.connection import Body
from snapshotter.cache_v1.protocol import Data, Done, Error, Prepare, Prepared, Progress
from snapshotter.digest import format_digest, sha256
from snapshotter.errors import (
    AccessDeniedError,
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    SnapshotterError,
    UnavailableError,
)
from snapshotter.framing import encode_frame
from snapshotter.names import ContentName
from snapshotter.telemetry import Counters
from tests.support.fake_cache_server import fake_cache_server
from tests.support.trio_tests import autojump_test, trio_test

PREPARED = Prepared(
    image_handle="h",
    metadata_generation="1",
    digest=None,
    architecture="amd64",
    env={},
    entrypoint=None,
    cmd=None,
    config=None,
    totals=None,
    layers=[],
    metadata_image=None,
)


class Collected:
    """Keeps what a fetch brings."""

    def __init__(self) -> None:
        self.bodies: dict[bytes, bytes] = {}
        self.ended: list[tuple[bytes, SnapshotterError | None]] = []
        self.companions: list[tuple[ContentName, bytes]] = []

    def sink(self, digest: bytes):
        def keep(body: Body) -> None:
            self.bodies[digest] = bytes(body)

        return keep

    def finish(self, digest: bytes, error: SnapshotterError | None) -> None:
        self.ended.append((digest, error))

    def companion(self, name: ContentName, body: Body) -> None:
        self.companions.append((name, bytes(body)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.sock"


@trio_test
async def test_ping_says_what_the_server_can(path: Path) -> None:
    async with fake_cache_server(path) as server:
        client = CacheClient(path)
        assert (await client.ping()).features == ["objects", "progress"]
        await client.ping()
        assert server.connections == 1
        client.close()


@trio_test
async def test_chunks_of_any_size_come_whole_and_in_order(path: Path) -> None:
    async with fake_cache_server(path) as server:
        contents = [b"a", b"b" * 70_000, b"c" * (1 << 20), b"d" * 65_536]
        digests = [server.add(content).content_id for content in contents]
        client, got = CacheClient(path), Collected()
        await client.fetch(digests, got)
        assert got.bodies == dict(zip(digests, contents, strict=True))
        assert got.ended == [(digest, None) for digest in digests]
        client.close()


@trio_test
async def test_a_chunk_with_other_bytes_is_refused_and_the_others_come(path: Path) -> None:
    async with fake_cache_server(path) as server:
        first, large, last = (server.add(body).content_id for body in (b"1", b"2" * 99_999, b"3"))
        server.corrupt(first)
        server.corrupt(large)
        client, got = CacheClient(path), Collected()
        await client.fetch([first, large, last], got)
        assert got.bodies == {last: b"3"}
        errors = dict(got.ended)
        assert isinstance(errors[first], CorruptError)
        assert isinstance(errors[large], CorruptError)
        assert format_digest(first) in str(errors[first])
        assert server.connections == 1
        client.close()


@trio_test
async def test_a_chunk_that_fails_alone_is_told_as_such(path: Path) -> None:
    async with fake_cache_server(path) as server:
        known, unknown = server.add(b"x").content_id, sha256(b"unknown")
        client, got = CacheClient(path), Collected()
        await client.fetch([unknown, known], got)
        assert got.bodies == {known: b"x"}
        assert isinstance(got.ended[0][1], NotFoundError)
        client.close()


@trio_test
async def test_a_companion_with_other_bytes_or_size_is_left_out_and_counted(path: Path) -> None:
    async with fake_cache_server(path) as server:
        asked = server.add(b"asked").content_id
        good = server.add(b"good")
        server.companions = [
            (server.add(b"bad!"), b"evil"),
            (ContentName(sha256(b"good"), 5), b"good"),
            (good, b"good"),
        ]
        counters = Counters()
        client, got = CacheClient(path, counters=counters), Collected()
        await client.fetch([asked], got, companions_bytes=100, handle="h")
        assert got.companions == [(good, b"good")]
        assert counters.snapshot()["companions_refused"] == 2
        client.close()


@trio_test
async def test_chunk_table_is_compared_with_the_content_id(path: Path) -> None:
    async with fake_cache_server(path) as server:
        name = server.add(b"z" * ((1 << 20) + 1))
        client = CacheClient(path)
        assert sha256(await client.chunk_table(name)) == name.content_id
        text = format_digest(name.content_id)
        server.tables[text] = server.tables[text][:-1] + b"\0"
        with pytest.raises(CorruptError, match="chunk table"):
            await client.chunk_table(name)
        client.close()


@trio_test
async def test_no_server_is_unavailable_with_the_way_out(path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"cache-server serve") as caught:
        await CacheClient(path).ping()
    assert str(path) in str(caught.value)


@trio_test
async def test_a_cut_answer_is_repeated_once_for_what_is_missing(path: Path) -> None:
    async with fake_cache_server(path) as server:
        digests = [server.add(body).content_id for body in (b"first", b"second" * 20_000)]
        counters = Counters()
        client, got = CacheClient(path, counters=counters), Collected()
        server.cuts, server.cut_at = 1, 1
        await client.fetch(digests, got)
        assert set(got.bodies) == set(digests)
        texts = [format_digest(digest) for digest in digests]
        assert [request.chunks for request in server.fetches] == [texts, texts[1:]]
        assert counters.snapshot()["retries"] == 1
        server.cuts, server.cut_at = 2, 0
        with pytest.raises(UnavailableError, match="in the middle of an answer"):
            await client.fetch(digests, got)
        client.close()


@trio_test
async def test_an_idle_connection_that_was_closed_is_not_a_try(path: Path) -> None:
    async with fake_cache_server(path) as server:
        digest = server.add(b"x").content_id
        counters = Counters()
        client, got = CacheClient(path, counters=counters), Collected()
        server.idle_close = True
        for _ in range(3):
            await client.fetch([digest], got)
            while server.open_connections:
                await trio.testing.wait_all_tasks_blocked()
        assert len(got.ended) == 3
        assert "retries" not in counters.snapshot()
        server.idle_close = False
        await client.fetch([digest], got)
        server.cuts = 1  # the same reused connection may still use its one repetition
        await client.fetch([digest], got)
        assert counters.snapshot()["retries"] == 1
        client.close()


@trio_test
async def test_prepare_is_not_repeated(path: Path) -> None:
    async with fake_cache_server(path) as server:
        server.closes = 1
        with pytest.raises(UnavailableError, match="prepare docker://x"):
            await CacheClient(path).prepare("docker://x", architecture="amd64")
        assert len(server.requests) == 1


@trio_test
async def test_prepare_tells_progress(path: Path) -> None:
    async with fake_cache_server(path) as server:
        told = [Progress(phase="download", done_bytes=1), Progress(phase="merge")]
        server.answer = lambda _: [*told, PREPARED]
        client, seen = CacheClient(path), []
        assert await client.prepare("i", architecture="a", on_progress=seen.append) == PREPARED
        assert seen == told
        assert isinstance(server.requests[0], Prepare)
        assert server.requests[0].progress
        server.answer = lambda _: [PREPARED]
        assert (await client.open(handle="h", architecture="a")) == PREPARED
        client.close()


@trio_test
async def test_the_servers_errors_arrive_as_ours_and_keep_the_connection(path: Path) -> None:
    async with fake_cache_server(path) as server:
        client = CacheClient(path)
        for code, kind in (
            ("permission_denied", AccessDeniedError),
            ("invalid_request", InvalidInputError),
            ("not_found", NotFoundError),
        ):
            server.answer = lambda _, code=code: [Error(code=code, message=f"it is {code}")]
            with pytest.raises(kind, match=f"it is {code}"):
                await client.open(handle="h", architecture="a")
        assert server.connections == 1
        client.close()


@pytest.mark.parametrize(
    "answer",
    [
        [Done()],
        [Data(length=3, chunk=format_digest(sha256(b"other")))],
        [Data(length=(1 << 20) + 1, chunk=format_digest(sha256(b"x")))],
        [PREPARED],
    ],
    ids=["done too early", "another chunk", "too long", "another answer"],
)
@trio_test
async def test_a_broken_protocol_is_unavailable_and_ends_the_connection(
    path: Path, answer: list[object]
) -> None:
    async with fake_cache_server(path) as server:
        server.answer = lambda _: answer
        client, got = CacheClient(path), Collected()
        with pytest.raises(UnavailableError, match="broke the protocol"):
            await client.fetch([sha256(b"x")], got)
        assert got.bodies == {}
        server.answer = lambda _: None
        await client.ping()
        assert server.connections == 2
        client.close()


@pytest.mark.parametrize("sent", [b"\0\0\0\0", b"\xff\xff\xff\xff", encode_frame(b"{not json")])
@trio_test
async def test_bytes_that_are_no_frame_are_unavailable(path: Path, sent: bytes) -> None:
    async def serve(listener: trio.socket.SocketType) -> None:
        while True:
            connected, _ = await listener.accept()
            await connected.recv(1000)
            await connected.send(sent)
            connected.close()

    with trio.socket.socket(socket.AF_UNIX) as listener:
        await listener.bind(str(path))
        listener.listen(5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, listener)
            with pytest.raises(UnavailableError, match="broke the protocol"):
                await CacheClient(path).ping()
            nursery.cancel_scope.cancel()


@trio_test
async def test_busy_is_waited_out_also_when_the_server_then_closes(path: Path) -> None:
    async with fake_cache_server(path) as server:
        counters = Counters()
        client = CacheClient(path, counters=counters)
        server.busy_answers = 2
        await client.ping()
        server.busy_answers, server.busy_and_close = 2, True
        await client.ping()
        assert counters.snapshot() == {"busy_waits": 4}
        client.close()


@autojump_test
async def test_busy_until_the_deadline_is_busy(path: Path) -> None:
    async with fake_cache_server(path) as server:
        server.busy_answers = 10_000
        began_at = trio.current_time()
        client = CacheClient(path)
        with pytest.raises(BusyError):
            await client.ping()
        client.close()
        assert 25 < trio.current_time() - began_at <= 30.5
        assert server.busy_answers > 9_800  # it backs off


@autojump_test
async def test_silence_is_given_up_after_the_deadline_of_each_operation(path: Path) -> None:
    async with fake_cache_server(path) as server:
        server.gate = trio.Event()
        client = CacheClient(path)
        for call, deadline_s in (
            (client.ping, client_module.READ_DEADLINE_S),
            (lambda: client.prepare("i", architecture="a"), client_module.PREPARE_DEADLINE_S),
        ):
            began_at = trio.current_time()
            with pytest.raises(UnavailableError, match="did not answer within"):
                await call()
            assert trio.current_time() - began_at == pytest.approx(deadline_s, abs=1)
        assert len(server.requests) == 2


@trio_test
async def test_no_more_than_four_connections(path: Path) -> None:
    async with fake_cache_server(path) as server:
        server.gate = trio.Event()
        client = CacheClient(path)
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(client.ping)
            await trio.testing.wait_all_tasks_blocked(0.01)
            server.gate.set()
        assert server.most_connections == MAX_CONNECTIONS
        assert len(server.requests) == 20
        client.close()


@trio_test
async def test_a_cancelled_call_leaves_no_half_read_connection(path: Path) -> None:
    async with fake_cache_server(path) as server:
        server.gate = trio.Event()
        client = CacheClient(path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.ping)
            await server.arrived.wait()
            nursery.cancel_scope.cancel()
        server.gate.set()
        await client.ping()
        assert server.connections == 2
        client.close()


@trio_test
async def test_a_sink_that_fails_fails_its_chunk_alone(path: Path) -> None:
    class Full(Collected):
        def sink(self, digest: bytes):
            def refuse(_: Body) -> None:
                raise SnapshotterError("disk full")

            return super().sink(digest) if self.ended else refuse

    async with fake_cache_server(path) as server:
        digests = [server.add(body).content_id for body in (b"1", b"2")]
        client, got = CacheClient(path), Full()
        await client.fetch(digests, got)
        assert [str(error) for _, error in got.ended] == ["disk full", "None"]
        client.close()
