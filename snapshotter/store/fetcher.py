"""Fetches chunks for whoever asks: one fetch for a chunk at a time, several chunks in one request.

Asking is synchronous and never waits: ``submit`` puts a chunk on a list, and as many workers as the
client has connections take from it what has gathered, whenever they are free. Small files go
first, what is fetched ahead of its reader last. Large chunks are dealt out to two connections, so
that neighbours travel side by side, and small files wait for none of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio

from snapshotter.cache_v1.client import MAX_CONNECTIONS, CacheClient
from snapshotter.cache_v1.connection import Body
from snapshotter.cache_v1.protocol import MAX_FETCH_CHUNKS
from snapshotter.errors import NotFoundError, SnapshotterError, UnavailableError
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.store import images
from snapshotter.telemetry import Counters

SMALL_BYTES = 64 << 10
"""Whole objects up to this size are likely to be read with their neighbours: ask for companions."""
_REQUEST_BYTES = CHUNK_SIZE
_LARGE_CONNECTIONS = MAX_CONNECTIONS - 2
"""As many threads receive and digest large chunks: more of them keep one another from running.
What is left is for small files, so that none waits for a large one."""
_MOST_LARGE_CHUNKS = 8
"""In one request, when there is enough for every connection."""

Sink = Callable[[Body], None]
"""Keeps a chunk's verified bytes; called in any thread, may block, raises SnapshotterError."""
Finish = Callable[[SnapshotterError | None], None]
"""Told on the loop that the sink has returned, or why there is no chunk."""


@dataclass(slots=True)
class _Wanted:
    digest: bytes
    length: int
    image: int
    takers: list[tuple[Sink, Finish]] = field(default_factory=list)


class Fetcher:
    """The chunks that are wanted and those on their way. Lives on one trio loop."""

    def __init__(
        self,
        client: CacheClient,
        *,
        images_directory: Path,
        companions_bytes: int,
        on_companion: Callable[[ContentName, Body], None],
        counters: Counters,
    ) -> None:
        self._client = client
        self._images_directory = images_directory
        self._companions_bytes = companions_bytes
        self._on_companion = on_companion
        self._counters = counters
        self._small: dict[bytes, _Wanted] = {}
        self._large: dict[bytes, _Wanted] = {}
        self._ahead: dict[bytes, _Wanted] = {}
        self._queues = (self._small, self._large, self._ahead)
        self._flying: dict[bytes, _Wanted] = {}
        self._handles: dict[int, str] = {}
        self._accompanied: set[str] = set()
        self._large_requests = 0
        self._lock = threading.Lock()
        """Held where takers join a chunk and where, in a thread, its list of takers is closed."""
        self._free = trio.lowlevel.ParkingLot()

    def submit(
        self,
        digest: bytes,
        length: int,
        sink: Sink,
        finish: Finish,
        *,
        image: int = 0,
        is_ahead: bool = False,
    ) -> None:
        """Wants a chunk; ``finish`` is called once, later, whatever happens.

        ``image``: number of the image that a whole small object belongs to, so that companions
        may come with it; 0 for anything else. What ``is_ahead`` nobody waits for yet.
        """
        large = self._ahead if is_ahead else self._large
        queue = self._small if length <= SMALL_BYTES else large
        if not is_ahead:
            self.hurry(digest)
        with self._lock:
            wanted = self._find(digest)
            if wanted is None:
                wanted = queue[digest] = _Wanted(digest, length, image)
                self._free.unpark()
            wanted.takers.append((sink, finish))

    def hurry(self, digest: bytes) -> None:
        """Somebody waits now for a chunk that may have been submitted ahead of its reader.

        [any thread]
        """
        with self._lock:
            wanted = self._ahead.pop(digest, None)
            if wanted is not None:
                self._large[digest] = wanted

    def _find(self, digest: bytes) -> _Wanted | None:
        found = (queue.get(digest) for queue in (*self._queues, self._flying))
        return next((wanted for wanted in found if wanted is not None), None)

    def withdraw(self, digest: bytes) -> None:
        """The one who wanted that small object has it: ``finish`` is not called.

        If it is on its way, or if others want the same chunk, it comes all the same.
        """
        wanted = self._small.get(digest)
        if wanted is not None and len(wanted.takers) == 1:
            del self._small[digest]

    async def run(self) -> None:
        """Fetches what is submitted until cancelled; then everything unfinished fails."""
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(MAX_CONNECTIONS):
                    nursery.start_soon(self._work)
        finally:
            queues = (*self._queues, self._flying)
            with self._lock:
                unfinished = [wanted for queue in queues for wanted in queue.values()]
                for queue in queues:
                    queue.clear()
            for wanted in unfinished:
                _finish(wanted, UnavailableError("the store is stopping; try again"))

    async def _work(self) -> None:
        while True:
            while (queue := self._next_queue()) is None:
                await self._free.park()
            batch = self._take(queue)
            is_large = queue is not self._small
            self._large_requests += is_large
            if self._next_queue() is not None:
                self._free.unpark()
            if is_large:
                await self._fetch_large(batch)
                self._large_requests -= 1
            else:
                await self._fetch(batch)

    def _next_queue(self) -> dict[bytes, _Wanted] | None:
        """Small before large, and as long as there are connections for it."""
        if self._small:
            return self._small
        if self._large_requests == _LARGE_CONNECTIONS:
            return None
        return self._large or self._ahead or None

    def _take(self, queue: dict[bytes, _Wanted]) -> list[_Wanted]:
        """The next request: small chunks of about one chunk's bytes, or a few large ones."""
        with self._lock:
            chosen = self._choose_small() if queue is self._small else self._choose_large()
            for wanted in chosen:
                for waiting in self._queues:
                    waiting.pop(wanted.digest, None)
                self._flying[wanted.digest] = wanted
        return chosen

    def _choose_small(self) -> list[_Wanted]:
        """In the order of asking."""
        chosen: list[_Wanted] = []
        total_bytes = 0
        for wanted in self._small.values():
            if len(chosen) == MAX_FETCH_CHUNKS or total_bytes >= _REQUEST_BYTES:
                break
            chosen.append(wanted)
            total_bytes += wanted.length
        return chosen

    def _choose_large(self) -> list[_Wanted]:
        """Every second or third, if as many connections are free: neighbours come side by side."""
        waiting = [*self._large.values(), *self._ahead.values()]
        return waiting[:: _LARGE_CONNECTIONS - self._large_requests][:_MOST_LARGE_CHUNKS]

    async def _fetch_large(self, batch: list[_Wanted]) -> None:
        receiver = self._receiver(batch)
        self._counters.add("fetches")
        try:
            await self._client.fetch_large(receiver.remaining(), receiver)
        except SnapshotterError as error:
            receiver.fail(error)

    def _receiver(self, batch: list[_Wanted]) -> _Receiver:
        return _Receiver(batch, self._flying, self._lock, self._on_companion, self._counters)

    async def _fetch(self, batch: list[_Wanted]) -> None:
        handle = self._handle_for(batch)
        receiver = self._receiver(batch)
        try:
            await self._ask(receiver, handle)
        except SnapshotterError as error:
            receiver.fail(error)
        finally:
            # Here after a cancellation too: what is left is then in the keeping of ``run``.
            self._accompanied.discard(handle or "")

    async def _ask(self, receiver: _Receiver, handle: str | None) -> None:
        self._counters.add("fetches")
        if handle is None:
            await self._client.fetch(receiver.remaining(), receiver)
            return
        try:
            await self._client.fetch(
                receiver.remaining(),
                receiver,
                companions_bytes=self._companions_bytes,
                handle=handle,
            )
        except NotFoundError:
            # The server no longer knows that image; its chunks it may know.
            self._handles = {n: known for n, known in self._handles.items() if known != handle}
            if receiver.remaining():
                await self._client.fetch(receiver.remaining(), receiver)

    def _handle_for(self, batch: list[_Wanted]) -> str | None:
        """The image to ask companions of: one request at a time for each image."""
        image = next((wanted.image for wanted in batch if wanted.image), 0)
        if not image or not self._companions_bytes:
            return None
        handle = self._handles.get(image)
        if handle is None:
            handle = self._load_handle(image)
            if handle is None:
                return None
        if handle in self._accompanied:
            return None
        self._accompanied.add(handle)
        return handle

    def _load_handle(self, image: int) -> str | None:
        try:
            record = images.load(self._images_directory, image)
        except (SnapshotterError, OSError):
            self._counters.add("image_record_failures")  # costs the companions alone
            return None
        if record is None:
            return None
        self._handles[image] = record.handle
        return record.handle


class _Receiver:
    """Hands one request's chunks to those who wait for them."""

    def __init__(
        self,
        batch: list[_Wanted],
        flying: dict[bytes, _Wanted],
        lock: threading.Lock,
        on_companion: Callable[[ContentName, Body], None],
        counters: Counters,
    ) -> None:
        self._batch = {wanted.digest: wanted for wanted in batch}
        self._flying = flying
        self._lock = lock
        self._on_companion = on_companion
        self._counters = counters

    def remaining(self) -> list[bytes]:
        """Digests of the chunks that are not finished, in order."""
        return list(self._batch)

    def sink(self, digest: bytes) -> Sink:
        """Closes the list of takers, and gives what hands them the bytes."""
        with self._lock:
            self._flying.pop(digest, None)
        takers = self._batch[digest].takers
        if len(takers) == 1:
            return takers[0][0]

        def hand_to_each(body: Body) -> None:
            failed: SnapshotterError | None = None
            for sink, _ in takers:
                try:
                    sink(body)
                except SnapshotterError as error:
                    failed = error
            if failed is not None:
                raise failed

        return hand_to_each

    def finish(self, digest: bytes, error: SnapshotterError | None) -> None:
        """One chunk is done."""
        self._flying.pop(digest, None)
        wanted = self._batch.pop(digest)
        if error is None:
            self._counters.add("fetched_chunks")
            self._counters.add("fetched_bytes", wanted.length)
        else:
            self._counters.add("fetch_failures")
        _finish(wanted, error)

    def companion(self, name: ContentName, body: Body) -> None:
        """A verified object beyond what was asked for."""
        self._on_companion(name, body)

    def fail(self, error: SnapshotterError) -> None:
        """The request failed: so did every chunk that it still owes."""
        for digest in self.remaining():
            self.finish(digest, error)


def _finish(wanted: _Wanted, error: SnapshotterError | None) -> None:
    for _, finish in wanted.takers:
        finish(error)
