"""The store's control socket: requests of ``store_control``, and events to those who subscribe.

Only root and the store's own user are served. Runs on the store's trio loop.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import structlog
import trio

from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import InvalidInputError, SnapshotterError
from snapshotter.framing import FrameDecoder, encode_frame
from snapshotter.kernel_view.content_store import ContentStore
from snapshotter.names import ContentName
from snapshotter.service import store_control as messages
from snapshotter.store.removal import Evicted
from snapshotter.telemetry import Counters

_DEBOUNCE_S = 0.25
_RECEIVE_BYTES = 65_536
_NAMES_PER_EVENT = 4096
"""About 0.4 MB of names: less than half of what a frame holds."""

_QUEUED_EVENTS = 64
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid

_log = structlog.get_logger()
_requests: msgspec.json.Decoder[messages.Request] = msgspec.json.Decoder(messages.Request)


class ServedStore(ContentStore, Protocol):
    """What the control socket needs of the store beyond what the gate does."""

    async def materialise(
        self, name: ContentName, *, image: int = 0, is_vital: bool = False
    ) -> None:
        """Makes the object; what ``is_vital`` may use the space that is to be left free."""

    async def settle(self) -> None:
        """Makes every arrival durable."""

    async def evict(self, names: Sequence[ContentName]) -> Evicted:
        """Removes contents that are worth less than their space."""

    async def discard(self, names: Iterable[ContentName]) -> list[ContentName]:
        """Removes, and returns, contents that prove to be corrupt."""


class ResolvableEvents:
    """Gathers names of contents that became objects and tells subscribers, some at a time."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._names: dict[ContentName, None] = {}
        self._has_names = trio.Event()
        self._subscribers: set[trio.MemorySendChannel[messages.Resolvable]] = set()

    def add(self, name: ContentName) -> None:
        """Notes a name; from any thread."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._add, name)

    def _add(self, name: ContentName) -> None:
        self._names[name] = None
        self._has_names.set()

    async def run(self) -> None:
        """Tells subscribers what came within a quarter of a second, until cancelled."""
        while True:
            await self._has_names.wait()
            await trio.sleep(_DEBOUNCE_S)
            names = [str(name) for name in self._names]
            self._names.clear()
            self._has_names = trio.Event()
            for start in range(0, len(names), _NAMES_PER_EVENT):
                self._publish(messages.Resolvable(names=names[start : start + _NAMES_PER_EVENT]))

    def _publish(self, event: messages.Resolvable) -> None:
        for subscriber in self._subscribers:
            try:
                subscriber.send_nowait(event)
            except trio.WouldBlock:
                # Missing an event costs speed only: the view keeps its FUSE file until remounted.
                _log.warning("event dropped", operation="subscribe", cause="a subscriber is slow")

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[trio.MemoryReceiveChannel[messages.Resolvable]]:
        """The events from now on, as long as the context lasts."""
        sender, receiver = trio.open_memory_channel[messages.Resolvable](_QUEUED_EVENTS)
        self._subscribers.add(sender)
        try:
            with sender, receiver:
                yield receiver
        finally:
            self._subscribers.discard(sender)


class StoreServer:
    """Serves the control socket; ``stop`` is called when a client asks the store to end.

    ``on_discarded`` is awaited with corrupt contents that were removed.
    """

    def __init__(
        self,
        store: ServedStore,
        events: ResolvableEvents,
        counters: Counters,
        *,
        stop: Callable[[], None],
        on_discarded: Callable[[list[ContentName]], Awaitable[None]],
    ) -> None:
        self._store = store
        self._on_discarded = on_discarded
        self._events = events
        self._counters = counters
        self._stop = stop

    async def run(
        self, path: Path, *, task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Listens on ``path`` until cancelled; a socket left there by another store is replaced."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            await listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen(64)
        await trio.serve_listeners(
            self._serve, [trio.SocketListener(listener)], task_status=task_status
        )

    async def _serve(self, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                if _is_allowed(stream):
                    await self._exchange(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the client is gone, and what it asked for is of use to others
        except InvalidInputError as error:
            _log.warning("control connection dropped", cause=str(error))

    async def _exchange(self, stream: trio.SocketStream) -> None:
        decoder = FrameDecoder()
        while True:
            frame = await _receive(stream, decoder)
            if frame is None:
                return
            try:
                request = _requests.decode(frame)
            except DECODE_ERRORS as error:
                failure = InvalidInputError(f"store: not a request: {error}")
                await _send(stream, _failed(failure))
                continue
            if isinstance(request, messages.Subscribe):
                await self._send_events(stream)
                return
            await _send(stream, await self._answer(request))
            if isinstance(request, messages.Stop):
                self._stop()

    async def _answer(self, request: messages.Request) -> messages.Response:
        try:
            if isinstance(request, messages.Status):
                return messages.Running(pid=os.getpid(), counters=self._counters.snapshot())
            if isinstance(request, messages.Ensure):
                await self._ensure(request)
            elif isinstance(request, messages.Settle):
                await self._store.settle()
            elif isinstance(request, messages.Evict):
                return await self._evict(request)
            elif isinstance(request, messages.Discard):
                names = [ContentName.parse_path(name) for name in request.names]
                gone = await self._store.discard(names)
                await self._on_discarded(gone)
                return messages.Discarded(names=[str(name) for name in gone])
            return messages.Done()
        except SnapshotterError as error:
            return _failed(error)
        except OSError as error:
            return _failed(SnapshotterError(f"store: {request}: {error}"))

    async def _ensure(self, request: messages.Ensure) -> None:
        name = ContentName.parse_path(request.name)
        if request.length is None:
            await self._store.materialise(name, image=request.image, is_vital=True)
            return
        if request.offset < 0 or request.length < 0 or request.offset + request.length > name.size:
            raise InvalidInputError(
                f"store: ensure {name}: {request.length} bytes at {request.offset} are not in it"
            )
        await self._store.ensure(name, request.offset, request.length, image=request.image)

    async def _evict(self, request: messages.Evict) -> messages.Evicted:
        evicted = await self._store.evict([ContentName.parse_path(name) for name in request.names])
        return messages.Evicted(
            removed=evicted.removed, freed_bytes=evicted.freed_bytes, kept=evicted.kept
        )

    async def _send_events(self, stream: trio.SocketStream) -> None:
        with self._events.subscribe() as events:
            await _send(stream, messages.Done())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_end_with_peer, stream, nursery.cancel_scope)
                async for event in events:
                    await _send(stream, event)


async def _end_with_peer(stream: trio.SocketStream, scope: trio.CancelScope) -> None:
    with contextlib.suppress(trio.BrokenResourceError):
        await stream.receive_some(1)
    scope.cancel()


async def _receive(stream: trio.SocketStream, decoder: FrameDecoder) -> bytes | None:
    while (frame := decoder.next_frame()) is None:
        data = await stream.receive_some(_RECEIVE_BYTES)
        if not data:
            return None
        decoder.feed(data)
    return frame


async def _send(stream: trio.SocketStream, response: messages.Response) -> None:
    await stream.send_all(encode_frame(msgspec.json.encode(response)))


def _failed(error: SnapshotterError) -> messages.Failed:
    return messages.Failed(code=error.code, message=str(error))


def _is_allowed(stream: trio.SocketStream) -> bool:
    raw = stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(raw)[1]
    if uid in (0, os.geteuid()):
        return True
    _log.warning("control connection refused", uid=uid)
    return False
