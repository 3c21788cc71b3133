"""The cache server: a cache-v1 socket in front of a library.

An asyncio loop accepts clients and prepares images; each client is then served by a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from cache_server.answers import Answers
from cache_server.companions import Companions, Trail
from cache_server.connection import Connection, Service
from cache_server.library import Library
from cache_server.limits import IngestLimits
from cache_server.listening import Listener, listen_on
from cache_server.prepare import OpenSource, Preparer
from snapshotter.cache_v1.protocol import encode_response, error_response
from snapshotter.errors import AccessDeniedError, BusyError, SnapshotterError
from snapshotter.framing import encode_frame
from snapshotter.telemetry import Counters

_CREDENTIALS = struct.Struct("3i")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is served at once. Connections and prepares beyond it are told ``busy``; reads
    wait their turn, of which a connection has one at a time.
    """

    connections: int = 64
    read_workers: int = 16
    prepare_workers: int = 2
    prepare_queue: int = 16
    idle_s: float = 5.0
    """A connection on which nothing comes for so long, while something is due, is closed."""


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
        ingest_limits: IngestLimits = IngestLimits(),
    ) -> None:
        self.counters = Counters()
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._companions = Companions(library)
        self._preparer = Preparer(
            library,
            open_source,
            workers=limits.prepare_workers,
            queue=limits.prepare_queue,
            limits=ingest_limits,
        )
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._trails: dict[int, tuple[Trail, int]] = {}
        """By process id of the client: its trail, and how many connections it has."""
        self._lock = threading.Lock()
        self._listener: Listener | None = None
        self._service = Service(
            loop=self._loop,
            preparer=self._preparer,
            answers=Answers(library, self._companions, self.counters),
            reads=threading.BoundedSemaphore(limits.read_workers),
            token=token,
            idle_s=limits.idle_s,
        )

    def listen(self, path: Path) -> None:
        """Accepts clients on ``path`` from now on. Raises BusyError if somebody else does."""
        self._listener = listen_on(path)
        self._listener.socket.setblocking(False)
        self._loop.add_reader(self._listener.socket, self._accept, self._listener.socket)
        log.info("serving", socket=str(path))

    async def aclose(self) -> None:
        """Stops listening, cuts all connections and ends work under way."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.socket)
            self._listener.unlink()
            self._listener.socket.close()
        with self._lock:
            threads = list(self._connections.values())
            for connected in self._connections:
                with contextlib.suppress(OSError):
                    connected.shutdown(socket.SHUT_RDWR)
        await self._preparer.aclose()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        await asyncio.to_thread(self._companions.close)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connected, _ = listener.accept()
        except BlockingIOError:
            return  # the client left before it was accepted
        except OSError as error:
            log.warning("cannot accept a client", error=str(error))
            return
        connected.setblocking(True)
        process, user = _peer(connected)
        try:
            self._admit(user)
        except SnapshotterError as error:
            with connected, contextlib.suppress(OSError):
                connected.sendall(encode_frame(encode_response(error_response(error))))
            return
        thread = threading.Thread(target=self._serve, args=(connected, process), name="connection")
        with self._lock:
            self._connections[connected] = thread
        thread.start()

    def _serve(self, connected: socket.socket, process: int) -> None:
        with connected:
            try:
                with self._trail(process) as trail:
                    Connection(self._service, connected, trail).run()
            finally:
                with self._lock:
                    del self._connections[connected]

    @contextlib.contextmanager
    def _trail(self, process: int) -> Iterator[Trail]:
        """The trail that all connections of a client share; the last one to end forgets it."""
        with self._lock:
            trail, users = self._trails.get(process) or (Trail(), 0)
            self._trails[process] = (trail, users + 1)
        try:
            yield trail
        finally:
            with self._lock:
                users = self._trails[process][1] - 1
                if users:
                    self._trails[process] = (trail, users)
                else:
                    del self._trails[process]

    def _admit(self, user: int) -> None:
        if user not in (os.geteuid(), 0):
            raise AccessDeniedError(f"user {user} may not use this server")
        if len(self._connections) >= self._limits.connections:
            raise BusyError(f"{self._limits.connections} connections are open already")


def _peer(connected: socket.socket) -> tuple[int, int]:
    """Process id and user id of the client, as the kernel knows them."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return process, user
