"""Carries a blob from the event loop, where it is downloaded, to the thread that ingests it."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator

from snapshotter.errors import UnavailableError

_PIECE_BYTES = 1 << 18
_DEPTH = 8


class BlobPipe:
    """A bounded queue with an async end and a blocking end; made on the event loop.

    ``fill`` waits while ``_DEPTH`` pieces are untaken, so memory stays small whatever the speeds.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._space = asyncio.Semaphore(_DEPTH)
        self._pieces: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()
        self.taken_bytes = 0
        """How much the thread has taken; may be read from anywhere."""

    async def fill(self, pieces: AsyncIterator[bytes]) -> None:
        """Feeds everything to the other end, and then the end or the error that it came to.

        Only cancellation is raised here; the download's own errors are raised at the other end.
        """
        gathered = bytearray()
        try:
            async for piece in pieces:
                gathered += piece
                if len(gathered) >= _PIECE_BYTES:
                    await self._put(bytes(gathered))
                    gathered.clear()
            if gathered:
                await self._put(bytes(gathered))
            self._pieces.put(None)
        except Exception as error:  # noqa: BLE001 - it is raised in the thread that reads
            self._pieces.put(error)

    def close(self) -> None:
        """Ends the other end with UnavailableError, unless it has ended already."""
        self._pieces.put(UnavailableError(f"{self._name}: the download was given up"))

    def __iter__(self) -> Iterator[bytes]:
        """The blob's pieces; blocks, so it is for a thread. Raises what the download raised."""
        while (item := self._pieces.get()) is not None:
            if isinstance(item, Exception):
                raise item
            self._loop.call_soon_threadsafe(self._space.release)
            self.taken_bytes += len(item)
            yield item

    async def _put(self, piece: bytes) -> None:
        await self._space.acquire()
        self._pieces.put(piece)
