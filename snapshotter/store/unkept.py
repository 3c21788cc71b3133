"""Content that is served without being kept, for a disk that is full: some chunks in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict

from snapshotter.cache_v1.client import CacheClient
from snapshotter.cache_v1.connection import Body
from snapshotter.errors import CorruptError, SnapshotterError
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.store import chunk_table
from snapshotter.store.fetcher import Fetcher, Sink
from snapshotter.store.flight import Flight
from snapshotter.telemetry import Counters

_MOST_BYTES = 64 << 20
_MOST_TABLES = 256


class Unkept:
    """The chunks and chunk tables that were asked for last. Lives on the store's trio loop."""

    def __init__(self, client: CacheClient, fetcher: Fetcher, *, counters: Counters) -> None:
        self._client = client
        self._fetcher = fetcher
        self._counters = counters
        self._lock = threading.Lock()
        self._chunks: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._tables: OrderedDict[ContentName, list[bytes]] = OrderedDict()

    def read(self, name: ContentName, offset: int, length: int) -> bytes | None:
        """The bytes of that range, short at the end; None if some are not here. [any thread]"""
        if not self._chunks:
            return None
        digests = [name.content_id] if not name.is_chunked else self._tables.get(name)
        if digests is None:
            return None
        end = min(offset + length, name.size)
        pieces = []
        for index in range(offset // CHUNK_SIZE, -(-end // CHUNK_SIZE)):
            with self._lock:
                body = self._chunks.get(digests[index])
            if body is None:
                return None
            start = index * CHUNK_SIZE
            pieces.append(bytes(body[max(0, offset - start) : end - start]))
        return b"".join(pieces)

    async def prepare(self, name: ContentName) -> list[bytes]:
        """Has the content's chunk table, if it has one, here; its chunks' digests."""
        if not name.is_chunked:
            return [name.content_id]
        digests = self._tables.get(name)
        if digests is None:
            digests = chunk_table.decode(await self._client.chunk_table(name), name)
            self._tables[name] = digests
            if len(self._tables) > _MOST_TABLES:
                self._tables.popitem(last=False)
        return digests

    async def ensure(self, name: ContentName, offset: int, length: int) -> None:
        """Has the chunks under that range here; raises what fetching them raises."""
        digests = await self.prepare(name)
        end = min(offset + length, name.size)
        flights = []
        for index in range(offset // CHUNK_SIZE, -(-end // CHUNK_SIZE)):
            digest, size = digests[index], chunk_table.chunk_length(name, index)
            if digest not in self._chunks:
                flight = Flight()
                self._fetcher.submit(digest, size, self._keep(digest, size), flight.end)
                flights.append(flight)
        failed: SnapshotterError | None = None
        for flight in flights:
            try:
                await flight.wait()
            except SnapshotterError as error:
                failed = error
        if failed is not None:
            raise failed
        self._counters.add("unkept_reads")

    def _keep(self, digest: bytes, size: int) -> Sink:
        def sink(body: Body) -> None:
            if len(body) != size:
                raise CorruptError(f"chunk {digest.hex()}: {len(body)} bytes, {size} are named")
            with self._lock:
                if digest in self._chunks:
                    return
                self._chunks[digest] = bytes(body)
                self._bytes += size
                while self._bytes > _MOST_BYTES:
                    _, oldest = self._chunks.popitem(last=False)
                    self._bytes -= len(oldest)

        return sink
