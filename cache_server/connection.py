"""One client's connection: frames in, answers out (docs/protocol/cache-v1.md)."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TypeVar

import structlog

from cache_server.answers import Answers
from cache_server.companions import Trail
from cache_server.prepare import Preparer
from snapshotter.cache_v1 import protocol
from snapshotter.cache_v1.protocol import (
    ChunkTable,
    Envelope,
    Fetch,
    Open,
    Ping,
    Prepare,
    Prepared,
    Progress,
    Request,
    Response,
)
from snapshotter.errors import (
    AccessDeniedError,
    InvalidInputError,
    SnapshotterError,
    UnsupportedError,
)
from snapshotter.framing import MAX_FRAME_BYTES, encode_frame

VERSIONS = (1, 2)
FEATURES = ["objects", "progress"]
_PROGRESS_INTERVAL_S = 0.2
_HEARTBEAT_S = 9.0
_STALL_S = 30.0
"""A client that leaves a frame unfinished, or an answer unread, for so long is cut off."""

T = TypeVar("T")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """What all connections share. ``in_thread`` runs blocking reads, or raises BusyError."""

    preparer: Preparer
    answers: Answers
    in_thread: Callable[[Callable[[], T]], Coroutine[None, None, T]]
    token: str | None
    idle_s: float


class Connection:
    """Serves one client until it leaves, is idle, or breaks the protocol."""

    def __init__(
        self, service: Service, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._service = service
        self._reader = reader
        self._writer = writer
        self._trail = Trail()

    async def run(self) -> None:
        """Answers requests in order; returns when the connection is to be closed."""
        try:
            while await self._exchange(await self._next_frame()):
                pass
        except InvalidInputError as error:
            await self._send(protocol.error_response(error))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass  # the client left, or was idle or stalled for too long

    async def _next_frame(self) -> bytes:
        async with asyncio.timeout(self._service.idle_s):
            head = await self._reader.readexactly(4)
        length = int.from_bytes(head, "big")
        if not 1 <= length <= MAX_FRAME_BYTES:
            raise InvalidInputError(f"frame of {length} bytes (1 to {MAX_FRAME_BYTES})")
        async with asyncio.timeout(_STALL_S):
            return await self._reader.readexactly(length)

    async def _exchange(self, payload: bytes) -> bool:
        """Answers one request; whether another may follow. InvalidInputError for bad JSON."""
        envelope = protocol.decode_envelope(payload)
        try:
            self._admit(envelope)
        except SnapshotterError as error:
            await self._send(protocol.error_response(error))
            return False
        try:
            await self._answer(protocol.decode_request(envelope.request))
        except SnapshotterError as error:
            await self._send(protocol.error_response(error))
        except (OSError, asyncio.IncompleteReadError):
            raise
        except Exception as error:
            log.exception("request failed", request=payload[:200])
            failure = SnapshotterError(f"the server failed: {type(error).__name__}: {error}")
            await self._send(protocol.error_response(failure))
        return envelope.version == protocol.VERSION

    def _admit(self, envelope: Envelope) -> None:
        token = self._service.token
        if token is not None and not hmac.compare_digest(
            (envelope.token or "").encode(), token.encode()
        ):
            raise AccessDeniedError("the token is missing or wrong")
        if envelope.version not in VERSIONS:
            raise UnsupportedError(f"cache-v1 version {envelope.version}: 1 and 2 are spoken here")

    async def _answer(self, request: Request) -> None:
        match request:
            case Ping():
                counters = self._service.answers.counters.snapshot()
                await self._send(protocol.Ready(features=FEATURES, counters=counters))
            case Prepare():
                await self._prepare(request)
            case Open():
                await self._send_prepared(await self._service.preparer.open(request))
            case ChunkTable():
                answers = self._service.answers
                await self._write(
                    await self._service.in_thread(lambda: answers.chunk_table(request))
                )
            case Fetch():
                await self._fetch(request)

    async def _prepare(self, request: Prepare) -> None:
        preparation = self._service.preparer.start(request)
        clock = asyncio.get_running_loop().time
        told: Progress | None = None
        told_at_s = clock()
        while not (await asyncio.wait({preparation.task}, timeout=_PROGRESS_INTERVAL_S))[0]:
            if self._reader.at_eof():
                raise ConnectionResetError("the client left while its image was prepared")
            progress = preparation.progress
            if request.progress and (progress != told or clock() - told_at_s > _HEARTBEAT_S):
                told, told_at_s = progress, clock()
                await self._send(progress)
        await self._send_prepared(preparation.task.result())

    async def _send_prepared(self, prepared: Prepared) -> None:
        self._service.answers.companions.warm(prepared)
        await self._send(prepared)

    async def _fetch(self, request: Fetch) -> None:
        """Asked chunks in order, then companions, then the end; a few MiB at a time."""
        steps = self._service.answers.fetch(request, self._trail)
        is_last = False
        while not is_last:
            part, is_last = await self._service.in_thread(lambda: next(steps))
            await self._write(part)

    async def _send(self, response: Response) -> None:
        await self._write(encode_frame(protocol.encode_response(response)))

    async def _write(self, data: bytes) -> None:
        self._writer.write(data)
        async with asyncio.timeout(_STALL_S):
            await self._writer.drain()
