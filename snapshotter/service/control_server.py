"""The daemon's end of the control socket: who may ask, one request at a time, errors told.

The server knows nothing of mounts: a ``Handler`` answers. When an asker goes away, what is being
done for it is cancelled; a handler shields what must not stay half done.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import structlog
import trio

from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import InvalidInputError, SnapshotterError
from snapshotter.framing import MAX_FRAME_BYTES
from snapshotter.service import control
from snapshotter.service.frame_stream import FrameStream, listen

_log = structlog.get_logger()
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[control.Request] = msgspec.json.Decoder(control.Request)


class Reply:
    """How a handler answers: any number of progress, then exactly one other response."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream

    async def send(self, response: control.Response, *, descriptor: int | None = None) -> None:
        """Sends one response, with a descriptor beside it where the message comes with one."""
        payload = _encoder.encode(response)
        if len(payload) <= MAX_FRAME_BYTES:
            await self._stream.send(payload, descriptor=descriptor)
            return
        announced = _encoder.encode(control.Long(length_bytes=len(payload)))
        await self._stream.send(announced, descriptor=descriptor, body=payload)


Handler = Callable[[control.Request, Reply], Awaitable[None]]


async def serve_control(
    path: Path,
    handler: Handler,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves the control socket at ``path`` until cancelled; started once it can be reached."""
    with listen(path) as listener:
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                connection, _ = await listener.accept()
                nursery.start_soon(_serve_connection, FrameStream(connection), handler)


async def _serve_connection(stream: FrameStream, handler: Handler) -> None:
    with stream:
        pid, uid = stream.peer()
        if uid not in (0, os.geteuid()):
            _log.warning("control connection refused", pid=pid, uid=uid)
            return
        send, receive = trio.open_memory_channel[bytes](8)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_receive_all, stream, send, nursery.cancel_scope)
                async with receive:
                    async for payload in receive:
                        await _answer(payload, Reply(stream), handler)
        except* (trio.BrokenResourceError, trio.ClosedResourceError) as group:
            _log.debug("control connection broke", pid=pid, error=str(group.exceptions[0]))


async def _receive_all(
    stream: FrameStream, requests: trio.MemorySendChannel[bytes], scope: trio.CancelScope
) -> None:
    """Takes requests in; the end of the stream ends what is being done for it."""
    try:
        while (payload := await stream.receive()) is not None:
            await requests.send(payload)
    except InvalidInputError as error:
        _log.warning("bad frame on the control socket", error=str(error))
    scope.cancel()


async def _answer(payload: bytes, reply: Reply, handler: Handler) -> None:
    try:
        request = _decode(payload)
        await handler(request, reply)
    except SnapshotterError as error:
        await reply.send(control.Failed(code=error.code, message=str(error)))
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        raise  # nobody is left to be told
    except Exception as error:  # noqa: BLE001 - one bad request must not end the daemon
        _log.exception("request failed", request=payload[:200].decode(errors="replace"))
        message = f"the daemon failed at this request ({error!r}); its log says more"
        await reply.send(control.Failed(code=SnapshotterError.code, message=message))


def _decode(payload: bytes) -> control.Request:
    try:
        return _decoder.decode(payload)
    except DECODE_ERRORS as error:
        raise InvalidInputError(f"control request: {error}") from error
