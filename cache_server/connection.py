"""One client's connection: frames in, answers out (docs/protocol/cache-v1.md).

Blocking, in a thread of its own: a fetch of a small file is answered in the time that handing it
from an event loop to a thread and back would take several times over.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import structlog

from cache_server.answers import Answers, Browse
from cache_server.companions import Trail
from cache_server.images import is_merged
from cache_server.library import ChunkLocation, Library
from cache_server.prepare import Preparation, Preparer
from cache_server.tending import remove_image
from snapshotter.cache_v1 import protocol
from snapshotter.cache_v1.protocol import (
    ChunkTable,
    Collect,
    Envelope,
    Fetch,
    List,
    Open,
    Ping,
    Prepare,
    Prepared,
    Progress,
    Read,
    Remove,
    Request,
    Response,
    Stat,
)
from snapshotter.errors import (
    AccessDeniedError,
    CorruptError,
    InvalidInputError,
    SnapshotterError,
    UnsupportedError,
)
from snapshotter.framing import FrameDecoder, encode_frame

VERSIONS = (1, 2)
FEATURES = ["objects", "progress"]
_PROGRESS_INTERVAL_S = 0.2
_HEARTBEAT_S = 9.0
_STALL_S = 30
"""A client that leaves an answer unread for so long is cut off."""
_RECEIVE_BYTES = 1 << 16
_SO_SNDBUFFORCE = 32
"""Of asm-generic/socket.h; the socket module has no name for it."""
_SEND_BUFFER_BYTES = 1 << 20
"""A whole chunk, so that sender and receiver need not wake each other for every part of it."""
_TIMEOUT = struct.Struct("ll")

T = TypeVar("T")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """What all connections share. ``reads`` bounds how many read content at once."""

    loop: asyncio.AbstractEventLoop
    preparer: Preparer
    answers: Answers
    reads: threading.Semaphore
    token: str | None
    idle_s: float


class Connection:
    """Serves one client until it leaves, is idle, or breaks the protocol."""

    def __init__(self, service: Service, connected: socket.socket, trail: Trail) -> None:
        self._service = service
        self._socket = connected
        self._decoder = FrameDecoder()
        self._trail = trail

    def run(self) -> None:
        """Answers requests in order; returns when the connection is to be closed."""
        seconds, fraction = divmod(self._service.idle_s, 1)
        idle = _TIMEOUT.pack(int(seconds), int(fraction * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, idle)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEOUT.pack(_STALL_S, 0))
        self._enlarge_send_buffer()
        try:
            while (payload := self._next_frame()) is not None and self._exchange(payload):
                pass
        except InvalidInputError as error:
            self._send_last(error)
        except OSError:
            pass  # the client left, or was idle or stalled for too long

    def _enlarge_send_buffer(self) -> None:
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BUFFER_BYTES)
        except PermissionError:  # not root: as much as the system allows
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    def _next_frame(self) -> bytes | None:
        """The next request's payload, None at the end of the stream."""
        while (payload := self._decoder.next_frame()) is None:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                return None
            self._decoder.feed(data)
        return payload

    def _exchange(self, payload: bytes) -> bool:
        """Answers one request; whether another may follow. InvalidInputError for bad JSON."""
        envelope = protocol.decode_envelope(payload)
        try:
            self._admit(envelope)
        except SnapshotterError as error:
            self._send(protocol.error_response(error))
            return False
        try:
            self._answer(protocol.decode_request(envelope.request))
        except SnapshotterError as error:
            self._send(protocol.error_response(error))
        except concurrent.futures.CancelledError:
            return False  # the server is closing
        except OSError:
            raise
        except Exception as error:
            log.exception("request failed", request=payload[:200])
            failure = SnapshotterError(f"the server failed: {type(error).__name__}: {error}")
            self._send(protocol.error_response(failure))
        return envelope.version == protocol.VERSION

    def _admit(self, envelope: Envelope) -> None:
        token = self._service.token
        if token is not None and not hmac.compare_digest(
            (envelope.token or "").encode(), token.encode()
        ):
            raise AccessDeniedError("the token is missing or wrong")
        if envelope.version not in VERSIONS:
            raise UnsupportedError(f"cache-v1 version {envelope.version}: 1 and 2 are spoken here")

    def _answer(self, request: Request) -> None:
        answers = self._service.answers
        match request:
            case Fetch():
                self._fetch(request)
            case ChunkTable():
                with self._service.reads:
                    answer = answers.chunk_table(request)
                self._socket.sendall(answer)
            case Ping():
                counters = answers.counters.snapshot()
                self._send(protocol.Ready(features=FEATURES, counters=counters))
            case Prepare():
                self._prepare(request)
            case List() | Stat() | Read():
                self._browse(request)
            case Remove():
                self._send(self._alone(lambda library: remove_image(library, request)))
            case Collect():
                collected = self._alone(
                    lambda library: library.collect_garbage(dry_run=request.dry_run)
                )
                log.info("garbage collected", **msgspec.structs.asdict(collected))
                self._send(collected)
            case Open():
                self._send_prepared(self._on_loop(self._service.preparer.open(request)).result())

    def _browse(self, request: Browse) -> None:
        answers = self._service.answers
        prepared = answers.trees.find(request.digest)
        if not is_merged(prepared):
            known = Open(handle=prepared.image_handle, architecture=prepared.architecture)
            prepared = self._on_loop(self._service.preparer.open(known)).result()
        assert prepared.metadata_image is not None
        with self._service.reads:
            answer = answers.browse(prepared.metadata_image, request)
        self._socket.sendall(answer)

    def _fetch(self, request: Fetch) -> None:
        """Asked chunks in order, then companions, then the end; a few MiB at a time."""
        parts = self._service.answers.fetch(request, self._trail)
        while True:
            with self._service.reads:
                part = next(parts, None)
            if part is None:
                return
            if isinstance(part, bytes):
                self._socket.sendall(part)
            else:
                self._send_stored(part)

    def _send_stored(self, location: ChunkLocation) -> None:
        try:
            self._service.answers.library.send_located(location, self._socket.fileno())
        except CorruptError as error:
            # Its length is announced already: all that can be said now is that it ends here.
            log.exception("chunk cannot be read to its end")
            raise ConnectionAbortedError(str(error)) from error

    def _prepare(self, request: Prepare) -> None:
        preparation = self._on_loop(self._start(request)).result()
        finished = self._on_loop(_finish(preparation))
        told: Progress | None = None
        told_at_s = time.monotonic()
        while not concurrent.futures.wait((finished,), timeout=_PROGRESS_INTERVAL_S).done:
            if self._has_left():
                return
            progress = preparation.progress
            if request.progress and (
                progress != told or time.monotonic() - told_at_s > _HEARTBEAT_S
            ):
                told, told_at_s = progress, time.monotonic()
                self._send(progress)
        self._send_prepared(finished.result())

    def _alone(self, work: Callable[[Library], T]) -> T:
        """What ``work`` gives, done while nothing is prepared; BusyError if something is."""
        return self._on_loop(
            self._service.preparer.run_alone(lambda: work(self._service.answers.library))
        ).result()

    async def _start(self, request: Prepare) -> Preparation:
        return self._service.preparer.start(request)

    def _on_loop(self, work: Coroutine[None, None, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._service.loop)

    def _has_left(self) -> bool:
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False

    def _send_prepared(self, prepared: Prepared) -> None:
        self._service.answers.companions.warm(prepared)
        self._send(prepared)

    def _send(self, response: Response) -> None:
        self._socket.sendall(encode_frame(protocol.encode_response(response)))

    def _send_last(self, error: SnapshotterError) -> None:
        try:
            self._send(protocol.error_response(error))
        except OSError:
            pass  # it did not wait to be told


async def _finish(preparation: Preparation) -> Prepared:
    """Waits without taking the shared work along when the waiting is cancelled."""
    return await asyncio.shield(preparation.task)
