"""The daemon's side of the store's control socket: content it needs itself, and events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import trio

from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import InvalidInputError, UnavailableError, from_code
from snapshotter.names import ContentName
from snapshotter.service import store_control
from snapshotter.service.frame_stream import FrameStream, connect

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[store_control.Response] = msgspec.json.Decoder(
    store_control.Response
)


class StoreClient:
    """Asks the store behind a socket; each request has a connection of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def ensure(self, name: ContentName, *, image: int = 0) -> None:
        """Has the whole content as an object; raises the store's error if it cannot be had."""
        await self._ask(store_control.Ensure(name=name.path, image=image))

    async def status(self) -> store_control.Running:
        """The store's pid and counters."""
        response = await self._ask(store_control.Status())
        if not isinstance(response, store_control.Running):
            raise UnavailableError(f"store at {self._path}: unexpected answer to status")
        return response

    async def evict(self, names: list[str]) -> store_control.Evicted:
        """Has contents removed (object names, 4096 at most)."""
        response = await self._ask(store_control.Evict(names=names))
        if not isinstance(response, store_control.Evicted):
            raise UnavailableError(f"store at {self._path}: unexpected answer to evict")
        return response

    async def discard(self, names: list[str]) -> list[str]:
        """Has contents checked, and those that are corrupt removed; these."""
        response = await self._ask(store_control.Discard(names=names))
        if not isinstance(response, store_control.Discarded):
            raise UnavailableError(f"store at {self._path}: unexpected answer to discard")
        return response.names

    async def stop(self) -> None:
        """Ends the store in good order."""
        await self._ask(store_control.Stop())

    @contextlib.asynccontextmanager
    async def subscribe(self) -> AsyncIterator[AsyncIterator[store_control.Resolvable]]:
        """Events, until the store goes away (which ends the iteration)."""
        with await connect(self._path) as stream:
            await stream.send(_encoder.encode(store_control.Subscribe()))
            yield _events(stream)

    async def _ask(self, request: store_control.Request) -> store_control.Response:
        with await connect(self._path) as stream:
            try:
                await stream.send(_encoder.encode(request))
                payload = await stream.receive()
            except trio.BrokenResourceError as error:
                raise UnavailableError(f"store at {self._path}: {error}; try again") from error
        if payload is None:
            raise UnavailableError(f"store at {self._path}: it ended before it answered; try again")
        response = _decode(payload)
        if isinstance(response, store_control.Failed):
            raise from_code(response.code, response.message)
        return response


async def _events(stream: FrameStream) -> AsyncIterator[store_control.Resolvable]:
    with contextlib.suppress(trio.BrokenResourceError):
        while (payload := await stream.receive()) is not None:
            response = _decode(payload)
            if isinstance(response, store_control.Resolvable):
                yield response


def _decode(payload: bytes) -> store_control.Response:
    try:
        return _decoder.decode(payload)
    except DECODE_ERRORS as error:
        raise InvalidInputError(f"answer of the store: {error}") from error
