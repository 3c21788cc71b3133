"""When the cache-v1 client asks again, gives up, and how many connections it has."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import pytest
import trio
import trio.testing

from snapshotter.cache_v1 import client as client_module
from snapshotter.cache_v1.client import MAX_CONNECTIONS, CacheClient
from snapshotter.cache_v1.protocol import Data, Done, Error, Progress
from snapshotter.digest import format_digest, sha256
from snapshotter.errors import (
    BY_CODE,
    BusyError,
    UnavailableError,
)
from snapshotter.framing import encode_frame
from snapshotter.names import ContentName
from snapshotter.telemetry import Counters
from tests.support.fake_cache_server import fake_cache_server
from tests.support.trio_tests import autojump_test, trio_test
from tests.unit.cache_v1.receiving import PREPARED, Collected


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
        assert server.connections == 2
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


READS = {
    "ping": lambda client: client.ping(),
    "open": lambda client: client.open(handle="h", architecture="a"),
    "chunk_table": lambda client: client.chunk_table(ContentName(sha256(b"t"), 1 << 21)),
    "fetch": lambda client: client.fetch([sha256(b"x")], Collected()),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@trio_test
async def test_what_changes_nothing_is_repeated_once_on_a_fresh_connection(
    path: Path, read: Callable[[CacheClient], Awaitable[object]]
) -> None:
    async with fake_cache_server(path) as server:
        client = CacheClient(path)
        server.closes = 10
        with pytest.raises(UnavailableError, match="without an answer"):
            await read(client)
        assert (len(server.requests), server.connections) == (2, 2)
        client.close()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("code", sorted(BY_CODE.keys() - {"busy"}))
@trio_test
async def test_what_the_server_said_is_not_asked_again(
    path: Path, read: Callable[[CacheClient], Awaitable[object]], code: str
) -> None:
    async with fake_cache_server(path) as server:
        server.answer = lambda _: [Error(code=code, message="no")]
        client = CacheClient(path)
        with pytest.raises(BY_CODE[code]):
            await read(client)
        assert len(server.requests) == 1
        client.close()


@trio_test
async def test_a_broken_protocol_is_not_tried_again(path: Path) -> None:
    async with fake_cache_server(path) as server:
        server.answer = lambda _: [Done()]
        client = CacheClient(path)
        with pytest.raises(UnavailableError, match="broke the protocol"):
            await client.ping()
        assert len(server.requests) == 1
        client.close()


@trio_test
async def test_prepare_goes_out_again_where_an_idle_connection_was_closed(path: Path) -> None:
    async with fake_cache_server(path) as server:
        client = CacheClient(path)
        server.idle_close = True
        await client.ping()
        while server.open_connections:
            await trio.testing.wait_all_tasks_blocked()
        server.answer = lambda _: [PREPARED]
        assert await client.prepare("i", architecture="a") == PREPARED
        assert len(server.requests) == 2  # the server saw it once
        client.close()


@trio_test
async def test_prepare_is_not_repeated(path: Path) -> None:
    async with fake_cache_server(path) as server:
        server.closes = 1
        with pytest.raises(UnavailableError, match="prepare docker://x"):
            await CacheClient(path).prepare("docker://x", architecture="amd64")
        assert len(server.requests) == 1


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
async def test_busy_is_asked_again_after_10_to_500_ms_ever_later(path: Path) -> None:
    async with fake_cache_server(path) as server:
        client = CacheClient(path)
        server.busy_answers = 12
        await client.ping()
        times = server.arrived_at_s
        pauses_s = [later - earlier for earlier, later in pairwise(times)]
        assert len(pauses_s) == 12
        assert all(0.01 <= pause_s <= 0.5 + 1e-9 for pause_s in pauses_s)
        assert pauses_s[0] <= 0.02
        assert min(pauses_s[-3:]) >= 0.25
        client.close()


@autojump_test
async def test_busy_is_not_the_one_try_again(path: Path) -> None:
    async with fake_cache_server(path) as server:
        client = CacheClient(path)
        server.busy_answers, server.closes = 1, 1
        await client.ping()
        assert len(server.requests) == 3
        client.close()


@autojump_test
async def test_each_answer_of_a_fetch_has_30_s(path: Path) -> None:
    async with fake_cache_server(path) as server:
        digests = [server.add(bytes([n])).content_id for n in range(4)]
        client, got = CacheClient(path), Collected()
        server.pause_s = client_module.READ_DEADLINE_S - 1
        await client.fetch(digests, got)
        assert len(got.bodies) == 4
        server.pause_s = client_module.READ_DEADLINE_S + 1
        with pytest.raises(UnavailableError, match="did not answer within 30 s"):
            await client.fetch(digests, Collected())
        assert len(server.requests) == 2  # silence is no transport failure
        client.close()


@autojump_test
async def test_a_prepare_that_nobody_follows_may_take_long_too(path: Path) -> None:
    async with fake_cache_server(path) as server:
        client = CacheClient(path)
        server.answer = lambda _: [*[Progress(phase="download")] * 10, PREPARED]
        server.pause_s = client_module.PREPARE_DEADLINE_S - 1
        assert await client.prepare("i", architecture="a") == PREPARED
        assert server.requests[0].progress
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
