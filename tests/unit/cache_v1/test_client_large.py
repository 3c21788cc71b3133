"""Large chunks, which the cache-v1 client receives in a thread: deadlines and cancellation."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from snapshotter.cache_v1.client import CacheClient
from snapshotter.cache_v1.connection import Body
from snapshotter.cache_v1.protocol import Data
from snapshotter.digest import format_digest, sha256
from snapshotter.errors import UnavailableError
from tests.support.fake_cache_server import fake_cache_server, send
from tests.support.trio_tests import autojump_test, trio_test
from tests.unit.cache_v1.receiving import Collected


@autojump_test
async def test_silence_in_the_middle_of_a_large_chunk_is_given_up(path: Path) -> None:
    body = b"x" * 500_000
    digest = sha256(body)

    async def serve(stream: trio.SocketStream) -> None:
        async for _ in stream:
            await send(stream, Data(length=len(body), chunk=format_digest(digest)), body[:300_000])

    async with trio.open_nursery() as nursery:
        listener = trio.socket.socket(socket.AF_UNIX)
        await listener.bind(str(path))
        listener.listen(5)
        nursery.start_soon(trio.serve_listeners, serve, [trio.SocketListener(listener)])
        client, got = CacheClient(path), Collected()
        with pytest.raises(UnavailableError, match="did not answer within 30 s"):
            await client.fetch_large([digest], got)
        assert got.bodies == {}
        nursery.cancel_scope.cancel()


@trio_test
async def test_a_cancelled_fetch_waits_for_the_sink_of_a_large_chunk(path: Path) -> None:
    class Slow(Collected):
        def __init__(self) -> None:
            super().__init__()
            self.is_in_sink, self.may_go_on = trio.Event(), threading.Event()
            self.token = trio.lowlevel.current_trio_token()

        def sink(self, digest: bytes):
            keep = super().sink(digest)

            def wait(body: Body) -> None:
                self.token.run_sync_soon(self.is_in_sink.set)
                self.may_go_on.wait()
                keep(body)

            return wait

    async with fake_cache_server(path) as server:
        digest = server.add(b"x" * 500_000).content_id
        client, got = CacheClient(path), Slow()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.fetch_large, [digest], got)
            await got.is_in_sink.wait()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked()
            assert not got.bodies
            got.may_go_on.set()
        assert set(got.bodies) == {digest}
        await client.fetch_large([digest], Collected())
        assert server.connections == 2
        client.close()
