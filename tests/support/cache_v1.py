"""A cache server in a thread of this process, and a plain blocking client for its protocol."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cache_server.app import Limits, Server
from cache_server.library import Library
from cache_server.prepare import OpenSource
from cache_server.sources.opening import Sources
from snapshotter.cache_v1.protocol import MAX_FETCH_CHUNKS
from snapshotter.digest import format_digest, parse_digest, sha256
from snapshotter.framing import FrameDecoder, encode_frame
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.store import chunk_table

T = TypeVar("T")


class RunningServer:
    """A server on ``path``. ``on_loop`` runs a coroutine where it lives."""

    def __init__(self, path: Path, library: Library) -> None:
        self.path = path
        self.library = library
        self.server: Server
        self.loop: asyncio.AbstractEventLoop

    def on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def client(self, **options: Any) -> Client:
        return Client(self.path, **options)


@contextmanager
def running_server(
    directory: Path,
    *,
    open_source: OpenSource | None = None,
    token: str | None = None,
    limits: Limits = Limits(),
) -> Iterator[RunningServer]:
    """A server with its root and socket below ``directory``."""
    sources = Sources()
    running = RunningServer(directory / "cache.sock", Library(directory / "root"))
    started: threading.Event = threading.Event()
    stop: list[Callable[[], object]] = []

    async def serve() -> None:
        running.loop = asyncio.get_running_loop()
        running.server = Server(
            running.library, open_source or sources.open, token=token, limits=limits
        )
        running.server.listen(running.path)
        ended = asyncio.Event()
        stop.append(ended.set)
        started.set()
        await ended.wait()
        await running.server.aclose()
        await sources.aclose()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(10), "the server did not start"
        yield running
    finally:
        for end in stop:
            running.loop.call_soon_threadsafe(end)
        thread.join(30)
        running.library.close()


class Client:
    """One connection. Answers are (fields, body) pairs; body is b"" but for ``data``.

    ``version`` and ``token`` are those of its requests, unless a request has its own.
    """

    def __init__(self, path: Path, *, token: str | None = None, version: int = 2) -> None:
        self._envelope = {"version": version, "token": token}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(30)
        self._socket.connect(str(path))
        self._decoder = FrameDecoder()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def finish(self) -> None:
        """Says that nothing more will be sent."""
        self._socket.shutdown(socket.SHUT_WR)

    def send_raw(self, data: bytes) -> None:
        self._socket.sendall(data)

    def frame(self, request: dict[str, Any], **envelope: Any) -> bytes:
        """A request as it is sent."""
        whole = {**self._envelope, **envelope, "request": request}
        return encode_frame(json.dumps(whole).encode())

    def send(self, request: dict[str, Any], **envelope: Any) -> None:
        self.send_raw(self.frame(request, **envelope))

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next answer; EOFError if the server has closed."""
        while (frame := self._decoder.next_frame()) is None:
            self._feed()
        fields = json.loads(frame)
        if fields["status"] != "data":
            return fields, b""
        while (body := self._decoder.next_body(fields["length"])) is None:
            self._feed()
        return fields, body

    def ask(self, request: dict[str, Any], **envelope: Any) -> dict[str, Any]:
        """Sends a request and returns its one answer, or the last after any progress."""
        self.send(request, **envelope)
        while (fields := self.receive()[0])["status"] == "progress":
            pass
        return fields

    def fetch(self, chunks: list[str], **fields: Any) -> list[tuple[dict[str, Any], bytes]]:
        """Everything that a fetch is answered, without the ``done`` at its end."""
        self.send({"op": "fetch", "chunks": chunks, **fields})
        answers = []
        while (answer := self.receive())[0]["status"] != "done":
            answers.append(answer)
        return answers

    def content(self, content: str, size: int) -> bytes:
        """Whole content, its chunk table and every chunk compared with what names them."""
        if size <= CHUNK_SIZE:
            return self._chunks([content])
        self.send({"op": "chunk_table", "content": content, "size": size})
        fields, table = self.receive()
        assert fields["status"] == "data", fields
        name = ContentName(parse_digest(content), size)
        digests = [format_digest(digest) for digest in chunk_table.decode(table, name)]
        many = range(0, len(digests), MAX_FETCH_CHUNKS)
        return b"".join(self._chunks(digests[at : at + MAX_FETCH_CHUNKS]) for at in many)

    def _chunks(self, digests: list[str]) -> bytes:
        answers = self.fetch(digests)
        for digest, (fields, body) in zip(digests, answers, strict=True):
            assert fields["chunk"] == digest == format_digest(sha256(body)), fields
        return b"".join(body for _, body in answers)

    def has_answer(self) -> bool:
        """Whether anything came that was not received yet."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def is_closed(self) -> bool:
        """Whether the server closes the connection without another word."""
        try:
            return not self._decoder.next_frame() and self._socket.recv(1) == b""
        except ConnectionResetError:  # it closed before it had read all that was sent
            return True

    def _feed(self) -> None:
        data = self._socket.recv(1 << 18)
        if not data:
            raise EOFError("the server closed the connection")
        self._decoder.feed(data)
