"""A cache-v1 server in the test's own trio loop: counts, delays, corrupts, cuts, is busy."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from snapshotter.cache_v1 import protocol
from snapshotter.cache_v1.protocol import Data, Done, Error, Fetch, Response
from snapshotter.digest import format_digest, sha256
from snapshotter.framing import FrameDecoder, encode_frame
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.store import chunk_table


class FakeCacheServer:
    """Serves what ``add`` was given. Everything public may be changed while it runs."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.chunks: dict[str, bytes] = {}
        self.tables: dict[str, bytes] = {}
        self.requests: list[protocol.Request] = []
        self.arrived_at_s: list[float] = []
        """When each of them came, in trio's time."""
        self.pause_s = 0.0
        """Before each chunk of a fetch, and before each frame of ``answer``."""
        self.fetched: Counter[str] = Counter()
        self.companions: list[tuple[ContentName, bytes]] = []
        self.connections = 0
        self.open_connections = 0
        self.most_connections = 0
        self.busy_answers = 0
        self.busy_and_close = False
        self.cuts = 0
        """So many next fetches end with the connection closed in the middle of a body …"""
        self.cut_at = 0
        """… of the chunk at this place or, if there is none, not at all."""
        self.closes = 0
        """So many next requests end with the connection closed before any answer."""
        self.gate: trio.Event | None = None
        """When set, no request is answered before it."""
        self.companion_gate: trio.Event | None = None
        self.idle_close = False
        """Whether each connection is closed after one exchange."""
        self.answer: Callable[[protocol.Request], list[Response] | None] = lambda _: None
        """Frames to answer a request with, instead of the usual."""
        self.arrived = trio.Event()
        self._scope = trio.CancelScope()

    def add(self, content: bytes) -> ContentName:
        """Makes ``content`` known; its name."""
        pieces = [content[at : at + CHUNK_SIZE] for at in range(0, len(content), CHUNK_SIZE)]
        digests = [sha256(piece) for piece in pieces]
        for digest, piece in zip(digests, pieces, strict=True):
            self.chunks[format_digest(digest)] = piece
        name = chunk_table.content_name(digests, len(content))
        if name.is_chunked:
            table = chunk_table.encode(digests, len(content))
            self.tables[format_digest(name.content_id)] = table
        return name

    def place(self, text: str, name: ContentName) -> int:
        """Which chunk of that content this digest is."""
        table = self.tables[format_digest(name.content_id)]
        return [format_digest(digest) for digest in chunk_table.decode(table, name)].index(text)

    def corrupt(self, digest: bytes) -> None:
        """Flips a byte of a chunk."""
        text = format_digest(digest)
        chunk = self.chunks[text]
        self.chunks[text] = bytes([chunk[0] ^ 1]) + chunk[1:]

    @property
    def fetches(self) -> list[Fetch]:
        """The fetch requests so far."""
        return [request for request in self.requests if isinstance(request, Fetch)]

    def stop(self) -> None:
        """Closes the listener and every connection."""
        self._scope.cancel()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listens until stopped; may be called again after that."""
        self._scope = trio.CancelScope()
        self.socket_path.unlink(missing_ok=True)
        with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM) as sock:
            await sock.bind(os.fspath(self.socket_path))
            sock.listen(64)
            with self._scope:
                try:
                    task_status.started()
                    await trio.serve_listeners(self._talk, [trio.SocketListener(sock)])
                finally:
                    self.socket_path.unlink(missing_ok=True)

    async def _talk(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        self.open_connections += 1
        self.most_connections = max(self.most_connections, self.open_connections)
        try:
            await self._exchanges(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.open_connections -= 1

    async def _exchanges(self, stream: trio.SocketStream) -> None:
        decoder = FrameDecoder()
        async for data in stream:
            decoder.feed(data)
            while (payload := decoder.next_frame()) is not None:
                envelope = protocol.decode_envelope(payload)
                request = protocol.decode_request(envelope.request)
                self.requests.append(request)
                self.arrived_at_s.append(trio.current_time())
                self.arrived.set()
                if not await self._serve_one(stream, request) or self.idle_close:
                    return

    async def _serve_one(self, stream: trio.SocketStream, request: protocol.Request) -> bool:
        if self.gate is not None:
            await self.gate.wait()
        if self.closes:
            self.closes -= 1
            return False
        if self.busy_answers:
            self.busy_answers -= 1
            await send(stream, Error(code="busy", message="too many"))
            return not self.busy_and_close
        special = self.answer(request)
        if special is not None:
            for response in special:
                await trio.sleep(self.pause_s)
                await send(stream, response)
            return True
        return await self._answer(stream, request)

    async def _answer(self, stream: trio.SocketStream, request: protocol.Request) -> bool:
        match request:
            case protocol.Ping():
                await send(stream, protocol.Ready(features=["objects", "progress"]))
            case protocol.ChunkTable():
                table = self.tables.get(request.content)
                if table is None:
                    await send(stream, Error(code="not_found", message="no such table"))
                else:
                    await send(stream, Data(length=len(table)), table)
            case Fetch():
                return await self._fetch(stream, request)
            case _:
                await send(stream, Error(code="invalid_request", message="not here"))
        return True

    async def _fetch(self, stream: trio.SocketStream, request: Fetch) -> bool:
        for position, digest in enumerate(request.chunks):
            await trio.sleep(self.pause_s)
            chunk = self.chunks.get(digest)
            if chunk is None:
                await send(stream, Error(code="not_found", message="no chunk", chunk=digest))
                continue
            if self.cuts and position >= self.cut_at:
                self.cuts -= 1
                await send(stream, Data(length=len(chunk), chunk=digest), chunk[: len(chunk) // 2])
                return False
            self.fetched[digest] += 1
            await send(stream, Data(length=len(chunk), chunk=digest), chunk)
        if request.companions_bytes:
            if self.companion_gate is not None:
                await self.companion_gate.wait()
            for name, body in self.companions:
                data = Data(length=len(body), companion=True, object=name.path)
                await send(stream, data, body)
        await send(stream, Done())
        return True


async def send(stream: trio.SocketStream, response: Response, body: bytes = b"") -> None:
    """One response frame and its body."""
    await stream.send_all(encode_frame(protocol.encode_response(response)) + body)


@asynccontextmanager
async def fake_cache_server(socket_path: Path) -> AsyncIterator[FakeCacheServer]:
    """A running server, stopped at the end."""
    server = FakeCacheServer(socket_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.serve)
        try:
            yield server
        finally:
            nursery.cancel_scope.cancel()
