"""The cache server: a cache-v1 socket in front of a library.

One asyncio loop. Reads and decompression run in worker threads, ingest and merge in others.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog

from cache_server.answers import Answers
from cache_server.companions import Companions
from cache_server.connection import Connection, Service
from cache_server.library import Library
from cache_server.listening import Listener, listen_on
from cache_server.prepare import OpenSource, Preparer
from snapshotter.cache_v1.protocol import encode_response, error_response
from snapshotter.errors import AccessDeniedError, BusyError, SnapshotterError
from snapshotter.framing import encode_frame
from snapshotter.telemetry import Counters

_CREDENTIALS = struct.Struct("3i")
_WRITE_BUFFER_BYTES = 4 << 20

T = TypeVar("T")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is served at once; what is beyond is told ``busy``."""

    connections: int = 64
    read_workers: int = 16
    read_queue: int = 256
    prepare_workers: int = 2
    prepare_queue: int = 16
    idle_s: float = 5.0
    """A connection without a request for so long is closed."""


class Server:
    """Serves ``library`` on a Unix socket. Make it on a running loop; ``aclose`` it once.

    ``aclose`` ends all work, and leaves the library open.
    """

    def __init__(
        self,
        library: Library,
        open_source: OpenSource,
        *,
        token: str | None = None,
        limits: Limits = Limits(),
    ) -> None:
        self.counters = Counters()
        self._limits = limits
        self._companions = Companions(library)
        self._preparer = Preparer(
            library,
            open_source,
            workers=limits.prepare_workers,
            queue=limits.prepare_queue,
        )
        self._threads = ThreadPoolExecutor(limits.read_workers, "read")
        self._reads = 0
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._listener: Listener | None = None
        self._service = Service(
            preparer=self._preparer,
            answers=Answers(library, self._companions, self.counters),
            in_thread=self._in_thread,
            token=token,
            idle_s=limits.idle_s,
        )

    async def listen(self, path: Path) -> None:
        """Accepts clients on ``path`` from now on. Raises BusyError if somebody else does."""
        self._listener = listen_on(path)
        self._server = await asyncio.start_unix_server(self._accept, sock=self._listener.socket)
        log.info("serving", socket=str(path))

    async def aclose(self) -> None:
        """Stops listening, cuts all connections and ends work under way."""
        if self._server is not None and self._listener is not None:
            self._listener.unlink()
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._preparer.aclose()
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._companions.close)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            try:
                self._admit(writer)
            except SnapshotterError as error:
                writer.write(encode_frame(encode_response(error_response(error))))
            else:
                writer.transport.set_write_buffer_limits(high=_WRITE_BUFFER_BYTES)
                await Connection(self._service, reader, writer).run()
        except asyncio.CancelledError:
            pass  # the server is closing; streams would log the cancellation as a failure
        finally:
            self._connections.discard(task)
            writer.close()

    def _admit(self, writer: asyncio.StreamWriter) -> None:
        peer: socket.socket = writer.get_extra_info("socket")
        raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid not in (os.geteuid(), 0):
            raise AccessDeniedError(f"user {uid} may not use this server")
        if len(self._connections) > self._limits.connections:
            raise BusyError(f"{self._limits.connections} connections are open already")

    async def _in_thread(self, read: Callable[[], T]) -> T:
        if self._reads >= self._limits.read_workers + self._limits.read_queue:
            raise BusyError(f"{self._reads} reads are waiting already")
        self._reads += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        finally:
            self._reads -= 1
