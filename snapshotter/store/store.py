"""The store: verified content on this host, fetched when it is first needed.

Users: the gate (through its FUSE thread and a trio loop) and the store's control socket. The one
process that has a Store is the only writer below ``objects``, ``arrivals`` and ``partial``.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog
import trio

from snapshotter.cache_v1.client import CacheClient
from snapshotter.cache_v1.connection import Body
from snapshotter.config import Config
from snapshotter.errors import (
    BusyError,
    CorruptError,
    DiskFullError,
    SnapshotterError,
    UnavailableError,
)
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.paths import Paths
from snapshotter.store.arrivals import Arrivals
from snapshotter.store.assembly import assemble
from snapshotter.store.companions import Companions
from snapshotter.store.descriptors import Descriptors
from snapshotter.store.fetcher import Fetcher
from snapshotter.store.filling import Filling
from snapshotter.store.flight import Flight, Flights
from snapshotter.store.objects import Objects, disk_errors
from snapshotter.store.partial import Partials, TakeLater
from snapshotter.store.read_ahead import LEAST_BYTES
from snapshotter.store.reading import read_range
from snapshotter.store.reclaim import Reclaimer
from snapshotter.store.removal import Evicted, Removal
from snapshotter.store.space import Space
from snapshotter.store.unkept import Unkept
from snapshotter.telemetry import Counters

_SHORTEST_SETTLE_S = 0.1

_log = structlog.get_logger()


class Store:
    """Objects, partial files, and the fetching of both.

    It lives on a trio loop; what says [any thread] may be called from others. Opening it makes
    the directories and brings them in order after an unclean stop; BusyError if another process
    has them open.
    """

    def __init__(self, paths: Paths, config: Config, *, counters: Counters) -> None:
        self.on_complete: Callable[[ContentName], None] | None = None
        """Called on the loop with a content that views should resolve anew: it has become an
        object, or was evicted for want of space."""
        self._config = config
        self._counters = counters
        self._token: trio.lowlevel.TrioToken | None = None
        self._flights = Flights()
        self._descriptors = Descriptors()
        self._lock_fd = _lock(paths.root)
        with disk_errors(f"open the store at {paths.root}"):
            self._arrivals = Arrivals(counters=counters)
            self._objects = Objects(paths, on_arrival=self._arrivals.note)
            self._partials = Partials(
                paths,
                descriptors=self._descriptors,
                fetch_ahead_bytes=config.fetch_ahead_bytes,
            )
            if self._arrivals.recover(paths, self._objects):
                self._partials.drop_all()
                self._arrivals.note_boot(paths)
            self._partials.drop_unfinished()
        self._client = CacheClient(
            config.cache_socket or paths.cache_socket, token=config.token, counters=counters
        )
        self._companions = Companions(self._publish_companion, counters=counters)
        self._fetcher = Fetcher(
            self._client,
            images_directory=paths.images,
            companions_bytes=config.companions_bytes,
            on_companion=self._take_companion,
            counters=counters,
        )
        self._filling = Filling(
            self._partials,
            self._objects,
            client=self._client,
            fetcher=self._fetcher,
            flights=self._flights,
            on_complete=self._tell_complete,
            counters=counters,
        )
        self._removal = Removal(
            paths,
            config,
            objects=self._objects,
            filling=self._filling,
            descriptors=self._descriptors,
            counters=counters,
        )
        self._unkept = Unkept(self._client, self._fetcher, counters=counters)
        self._space = Space(self._objects.objects_fd, min_free_bytes=config.min_free_bytes)
        self._reclaimer = Reclaimer(
            paths,
            self._space,
            self._objects,
            self._removal,
            settle=self.settle,
            on_evicted=self._tell_complete,
        )

    def close(self) -> None:
        """Closes files and lets another process open the store. Not while ``run`` runs."""
        self._client.close()
        self._descriptors.close()
        self._partials.close()
        self._objects.close()
        os.close(self._lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Fetches, publishes and settles until cancelled; who then still waits gets an error."""
        try:
            async with trio.open_nursery() as nursery:
                self._token = trio.lowlevel.current_trio_token()
                await nursery.start(self._flights.run)
                nursery.start_soon(self._fetcher.run)
                nursery.start_soon(self._companions.run)
                nursery.start_soon(self._settle_in_time)
                nursery.start_soon(self._reclaimer.run)
                task_status.started()
        finally:
            self._client.close()

    def has(self, name: ContentName) -> bool:
        """Whether the complete object is here. [any thread]"""
        return self._objects.has(name)

    def read_ready(self, name: ContentName, offset: int, length: int) -> bytes | memoryview | None:
        """The bytes of that range if all are here, short at the end of the file. [any thread]

        None means: call ``ensure`` first. Never zeros for what is missing. SnapshotterError if
        the disk fails. A memoryview is only to be written on (``reading``).
        """
        if length <= 0 or offset >= name.size:
            return b""
        try:
            ready = self._read_partial(name, offset, length)
            if ready is not None:
                return ready
            file = self._descriptors.get(("object", name), lambda: self._objects.open(name))
            return read_range(file.descriptor, offset, length)
        except FileNotFoundError:
            return self._unkept.read(name, offset, length)
        except OSError as error:
            raise SnapshotterError(f"read of {name}: {error.strerror or error}") from error

    def read_later(self, name: ContentName, offset: int, length: int, take: TakeLater) -> bool:
        """Has ``take`` called with that range when it has come, if all of it is on its way.

        Else False, and ``take`` is not called: ``ensure`` gets it. [any thread]
        """
        file = self._filling.find(name)
        if file is None or not file.read_later(offset, length, take):
            return False
        self._filling.hurry(file, offset, length)
        return True

    def _read_partial(
        self, name: ContentName, offset: int, length: int
    ) -> bytes | memoryview | None:
        file = self._filling.find(name)
        if file is None:
            return None
        ahead = file.read_ahead.note(offset, length)
        if ahead is not None and self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._fetch_ahead, name, *ahead)
        try:
            return file.read(offset, length)
        except FileNotFoundError:
            return None  # it has become the object just now

    def _fetch_ahead(self, name: ContentName, offset: int, length: int) -> None:
        """Begins to fetch a range that nobody waits for; a failure is told to who needs it."""
        if self._filling.find(name) is None or self._space.missing_bytes(length):
            return

        async def fetch() -> None:
            with self._space.expect(length, f"keep {name}"):
                await self._filling.ensure(name, offset, length, is_ahead=True)

        with suppress(UnavailableError):  # the store is stopping
            self._flights.start(("ahead", name, offset), fetch)

    async def materialise(
        self, name: ContentName, *, image: int = 0, is_vital: bool = False
    ) -> None:
        """Makes the whole content an object. One fetch, whoever asks.

        Raises CorruptError, UnavailableError, NotFoundError or whatever else the cache server
        said, SnapshotterError for a failing disk, and DiskFullError for a full one: then ``ensure``
        and ``read_ready`` serve it all the same. What ``is_vital`` may use the space that is to be
        left free. Cancelling leaves the fetch to the others.
        """
        flight = self._flights.get(name)
        if flight is not None:
            await flight.wait()
            return
        companion = self._companions.find(name)
        if companion is None and self._objects.has(name):
            return
        with self._making_room(None if is_vital else name.size, name):
            if companion is not None:
                self._publish(name, companion)
            else:
                await self._begin(name, image).wait()

    async def prepare_partial(self, name: ContentName, *, image: int = 0) -> None:
        """Has the chunk table of large content here, verified, and a file for its chunks.

        On a full disk the table alone, in memory. Raises as ``materialise`` does otherwise;
        InvalidInputError for content of a single chunk.
        """
        if self._filling.find(name) is not None or self._objects.has(name):
            return
        try:
            with self._making_room(0, name):
                await self._filling.prepare(name)
            if self._config.fetch_ahead_bytes >= LEAST_BYTES:
                self._fetch_ahead(name, 0, CHUNK_SIZE)  # where most who open it begin to read
        except DiskFullError:
            await self._unkept.prepare(name)

    async def ensure(self, name: ContentName, offset: int, length: int, *, image: int = 0) -> None:
        """Returns when ``read_ready`` answers for that range; raises as ``materialise`` does.

        On a full disk the range is had in memory, from where it goes when others are asked for.
        """
        if length <= 0 or offset >= name.size:
            return
        try:
            await self._ensure_kept(name, offset, length, image)
        except DiskFullError:
            await self._unkept.ensure(name, offset, length)

    async def _ensure_kept(self, name: ContentName, offset: int, length: int, image: int) -> None:
        if self._filling.find(name) is None:
            if self._objects.has(name):
                return
            if not self._is_large(name):
                await self.materialise(name, image=image)
                return
        with self._making_room(max(length, CHUNK_SIZE), name):
            await self._filling.ensure(name, offset, length)

    async def settle(self) -> None:
        """Returns when everything published before the call is on disk and needs no undoing."""
        with disk_errors("sync the objects"):
            await trio.to_thread.run_sync(self._arrivals.settle_all, self._objects)

    async def evict(self, names: Sequence[ContentName]) -> Evicted:
        """Removes contents that are worth less than their space. What views have open goes on.

        Kept are metadata images of recorded images, and what arrived in the last seconds.
        SnapshotterError for a failing disk.
        """
        await self.settle()
        return await self._removal.evict(names)

    async def discard(self, names: Iterable[ContentName]) -> list[ContentName]:
        """Removes, and returns, those contents that prove to be corrupt; SnapshotterError."""
        return await self._removal.discard(names)

    @contextmanager
    def _making_room(self, size_bytes: int | None, name: ContentName) -> Iterator[None]:
        """Around what keeps content: when the disk is full, room is made for the next.

        With None instead of a size no space has to be left free.
        """
        expected = (
            nullcontext() if size_bytes is None else self._space.expect(size_bytes, f"keep {name}")
        )
        try:
            with expected:
                yield
        except DiskFullError as error:
            self._space.note_short(str(error))
            self._reclaimer.wake()
            raise

    def _is_large(self, name: ContentName) -> bool:
        return name.is_chunked and name.size > self._config.large_file_bytes

    def _begin(self, name: ContentName, image: int) -> Flight:
        if self._is_large(name):
            return self._flights.start(name, lambda: self._filling.complete(name))
        if name.is_chunked:
            return self._flights.start(name, lambda: self._assemble(name))
        # One chunk needs no task: the fetcher's worker publishes it on its way.
        flight = self._flights.take_off(name)

        def sink(body: Body) -> None:
            if not flight.has_ended:
                self._publish(name, body)

        self._fetcher.submit(
            name.content_id,
            name.size,
            sink,
            lambda error: self._flights.land(name, flight, error),
            image=image,
        )
        return flight

    async def _assemble(self, name: ContentName) -> None:
        await assemble(name, self._objects, client=self._client, fetcher=self._fetcher)
        self._counters.add("objects_published")

    def _publish(self, name: ContentName, body: Body) -> None:
        """Makes verified bytes of a single chunk an object. [any thread]

        CorruptError if the name gives them another size: nothing may be published under it.
        """
        if len(body) != name.size:
            raise CorruptError(f"object {name}: its content has {len(body)} bytes")
        with disk_errors(f"publish object {name}"):
            self._objects.publish(name, body)
        self._counters.add("objects_published")

    def _publish_companion(self, name: ContentName, body: Body) -> None:
        if not self._objects.has(name):
            self._publish(name, body)

    def _take_companion(self, name: ContentName, body: Body) -> None:
        flight = self._flights.get(name)
        if flight is None:
            if not self._space.missing_bytes(len(body)):
                self._companions.offer(name, body)
            return
        # Asked for on another connection meanwhile: whichever comes first serves the waiters.
        try:
            self._publish(name, body)
        except SnapshotterError as error:
            self._flights.land(name, flight, error)
        else:
            self._flights.land(name, flight)
        self._fetcher.withdraw(name.content_id)

    def _tell_complete(self, name: ContentName) -> None:
        if self.on_complete is not None:
            self.on_complete(name)

    async def _settle_in_time(self) -> None:
        while True:
            await trio.sleep(max(self._config.settle_s, _SHORTEST_SETTLE_S))
            if self._arrivals.is_empty:
                continue
            try:
                await trio.to_thread.run_sync(self._arrivals.settle_ripe, self._objects)
            except OSError as error:
                self._counters.add("settle_failures")
                _log.error("sync of arrivals failed", error=str(error))


def _lock(root: Path) -> int:
    """A descriptor that holds the store's lock, so that this process is the only writer."""
    os.makedirs(root, exist_ok=True)
    descriptor = os.open(root / "store.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise BusyError(f"open the store at {root}: another store process has it open") from error
    return descriptor
