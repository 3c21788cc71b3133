"""Large content: partial files that fill by chunk, and become objects when they are whole."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from snapshotter.cache_v1.client import CacheClient
from snapshotter.cache_v1.connection import Body
from snapshotter.errors import InvalidInputError, SnapshotterError
from snapshotter.names import ContentName
from snapshotter.store import chunk_table
from snapshotter.store.fetcher import Fetcher
from snapshotter.store.flight import Flight, Flights
from snapshotter.store.objects import Objects, disk_errors
from snapshotter.store.partial import PartialFile, Partials
from snapshotter.telemetry import Counters

_log = structlog.get_logger()


class Filling:
    """The partial files in use. Lives on a trio loop, but for ``read``."""

    def __init__(
        self,
        partials: Partials,
        objects: Objects,
        *,
        client: CacheClient,
        fetcher: Fetcher,
        flights: Flights,
        on_complete: Callable[[ContentName], None],
        counters: Counters,
    ) -> None:
        self._partials = partials
        self._objects = objects
        self._client = client
        self._fetcher = fetcher
        self._flights = flights
        self._on_complete = on_complete
        self._counters = counters
        self._files: dict[ContentName, PartialFile] = {}

    def find(self, name: ContentName) -> PartialFile | None:
        """The partial file of ``name`` if it is in use. [any thread]"""
        return self._files.get(name)

    def forget(self, name: ContentName) -> None:
        """Removes the partial file; the object, if there is one, stays."""
        self._files.pop(name, None)
        with disk_errors(f"remove partial file {name}"):
            self._partials.forget(name)

    def forget_idle(self, name: ContentName) -> bool:
        """Removes the partial file unless something is being fetched into it; whether it did."""
        file = self._files.get(name)
        missing = [] if file is None else file.missing(0, name.size)
        keys = (name, ("partial", name), *((name, index) for index in missing))
        if any(self._flights.get(key) is not None for key in keys):
            return False
        self.forget(name)
        return True

    async def prepare(self, name: ContentName) -> PartialFile | None:
        """The partial file, as an earlier process left it or new, its chunk table verified.

        None if it is an object: it may have become one since the caller looked.
        """
        if not name.is_chunked:
            raise InvalidInputError(f"partial file of {name}: it has a single chunk")
        while (file := self._files.get(name)) is None:
            if self._objects.has(name):
                return None
            await self._flights.start(("partial", name), lambda: self._open(name)).wait()
        return file

    async def ensure(
        self, name: ContentName, offset: int, length: int, *, is_ahead: bool = False
    ) -> None:
        """Has the chunks under that range here, and the object if that makes it whole.

        ``is_ahead``: nobody waits for them yet.
        """
        file = await self.prepare(name)
        if file is None:
            return
        missing = file.missing(offset, length)
        flights = [self._fetch(file, index, is_ahead=is_ahead) for index in missing]
        for flight in reversed(flights):  # when the last has ended, most have
            await flight.wait()

    def hurry(self, file: PartialFile, offset: int, length: int) -> None:
        """Somebody waits for a range of which some may be fetched ahead. [any thread]"""
        for index in file.missing(offset, length):
            self._fetcher.hurry(file.digests[index])

    async def complete(self, name: ContentName) -> None:
        """Has all of it here, as an object."""
        await self.ensure(name, 0, name.size)
        file = self._files.get(name)
        if file is not None and file.is_complete:
            self._publish(file)  # failed when the last chunk came: here the error has a taker

    async def _open(self, name: ContentName) -> None:
        with disk_errors(f"open partial file of {name}"):
            file = self._partials.load(name)
        if file is None:
            table = await self._client.chunk_table(name)
            with disk_errors(f"make partial file of {name}"):
                file = self._partials.create(name, table)
        self._files[name] = file
        if file.is_complete:
            self._promote(file)

    def _fetch(self, file: PartialFile, index: int, *, is_ahead: bool) -> Flight:
        key = (file.name, index)
        known = self._flights.get(key)
        if known is not None:
            if not is_ahead:
                self._fetcher.hurry(file.digests[index])
            return known
        flight = self._flights.take_off(key)
        file.waiting.expect(index)

        def sink(body: Body) -> None:
            with disk_errors(f"write chunk {index} of {file.name}"):
                file.write_chunk(index, body)

        def finish(error: SnapshotterError | None) -> None:
            if error is None and file.is_complete:
                self._promote(file)
            self._flights.land(key, flight, error)
            file.waiting.ended(index)

        length = chunk_table.chunk_length(file.name, index)
        self._fetcher.submit(file.digests[index], length, sink, finish, is_ahead=is_ahead)
        return flight

    def _promote(self, file: PartialFile) -> None:
        """Every chunk is here: readers have what they need even if the link fails."""
        if self._files.get(file.name) is not file:
            return  # the chunk that came last but one saw the file complete, too
        try:
            self._publish(file)
        except SnapshotterError as error:
            self._counters.add("publish_failures")
            _log.warning("complete content not published", error=str(error))

    def _publish(self, file: PartialFile) -> None:
        with disk_errors(f"publish object {file.name}"):
            file.promote(self._objects)
        del self._files[file.name]
        self._counters.add("objects_published")
        self._counters.add("partials_completed")
        self._on_complete(file.name)
