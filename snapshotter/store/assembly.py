"""Content of a few chunks fetched whole: side by side into a temporary file, then published."""

from __future__ import annotations

from snapshotter.cache_v1.client import CacheClient
from snapshotter.cache_v1.connection import Body
from snapshotter.errors import CorruptError, SnapshotterError
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.store import chunk_table
from snapshotter.store.descriptors import OpenFile
from snapshotter.store.fetcher import Fetcher, Sink
from snapshotter.store.flight import Flight
from snapshotter.store.objects import Objects, disk_errors, write_whole


async def assemble(
    name: ContentName, objects: Objects, *, client: CacheClient, fetcher: Fetcher
) -> None:
    """Makes chunked content an object. If a chunk fails, nothing of it is left.

    Raises what the fetch raises, and SnapshotterError for a failing disk.
    """
    digests = chunk_table.decode(await client.chunk_table(name), name)
    with disk_errors(f"make a temporary file for object {name}"):
        temporary, descriptor = objects.make_temporary()
    file = OpenFile(descriptor)  # not closed when cancelled: a sink may still be writing
    flights: list[Flight] = []
    try:
        for index, digest in enumerate(digests):
            flight = Flight()
            length = chunk_table.chunk_length(name, index)
            fetcher.submit(digest, length, _write(name, index, file), flight.end)
            flights.append(flight)
        try:
            await _wait_for_all(flights)
        except SnapshotterError:
            file.close()
            raise
        file.close()
        with disk_errors(f"publish object {name}"):
            objects.adopt(name, temporary)
    except BaseException:
        objects.discard(temporary)
        raise


def _write(name: ContentName, index: int, file: OpenFile) -> Sink:
    def sink(body: Body) -> None:
        if len(body) != chunk_table.chunk_length(name, index):
            raise CorruptError(f"chunk {index} of {name}: {len(body)} bytes")
        with disk_errors(f"write chunk {index} of {name}"):
            write_whole(file.descriptor, body, index * CHUNK_SIZE)

    return sink


async def _wait_for_all(flights: list[Flight]) -> None:
    """Waits even after one failed, so that the next attempt does not meet the rest of this one."""
    failed: SnapshotterError | None = None
    for flight in flights:
        try:
            await flight.wait()
        except SnapshotterError as error:
            failed = failed or error
    if failed is not None:
        raise failed
