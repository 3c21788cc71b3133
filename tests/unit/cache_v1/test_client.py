"""What the cache-v1 client receives: verified bytes, and errors that say what was wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotter.cache_v1.client import CacheClient
from snapshotter.cache_v1.connection import Body
from snapshotter.cache_v1.protocol import Error, Prepare, Progress
from snapshotter.digest import format_digest, sha256
from snapshotter.errors import (
    AccessDeniedError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    SnapshotterError,
)
from snapshotter.names import ContentName
from snapshotter.telemetry import Counters
from tests.support.fake_cache_server import fake_cache_server
from tests.support.trio_tests import trio_test
from tests.unit.cache_v1.receiving import PREPARED, Collected


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
