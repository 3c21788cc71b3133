"""Makes room when the disk is nearly full: evicts, oldest first, what no view has open."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
import trio

from snapshotter.errors import SnapshotterError
from snapshotter.names import ContentName
from snapshotter.paths import Paths
from snapshotter.store.inventory import StoredFile, list_files
from snapshotter.store.objects import Objects, disk_errors
from snapshotter.store.removal import Removal
from snapshotter.store.space import Space, is_in_use

_BATCH = 256
_PAUSE_S = 5.0
"""Until the next look. What was evicted takes space until the views were refreshed."""

_log = structlog.get_logger()


class Reclaimer:
    """Evicts when it is woken. Lives on the store's trio loop.

    ``settle`` makes arrivals durable; ``on_evicted`` is told one name, so that views are refreshed.
    """

    def __init__(
        self,
        paths: Paths,
        space: Space,
        objects: Objects,
        removal: Removal,
        *,
        settle: Callable[[], Awaitable[None]],
        on_evicted: Callable[[ContentName], None],
    ) -> None:
        self._paths = paths
        self._space = space
        self._objects = objects
        self._removal = removal
        self._settle = settle
        self._on_evicted = on_evicted
        self._woken = trio.Event()

    def wake(self) -> None:
        """Space is wanted."""
        self._woken.set()

    async def run(self) -> None:
        """Makes room whenever it is woken, until cancelled."""
        while True:
            await self._woken.wait()
            try:
                await self._reclaim()
            except SnapshotterError as error:
                _log.error("no room made", cause=str(error))
            await trio.sleep(_PAUSE_S)
            self._woken = trio.Event()

    async def _reclaim(self) -> None:
        """Evicts as much as is missing to the floor and a quarter, so as not to come back at once.

        On a disk without a floor: a twentieth of what is stored.
        """
        await self._settle()
        with disk_errors("list the store"):
            oldest = await trio.to_thread.run_sync(_by_age, self._paths)
        wanted_bytes = self._space.missing_bytes() + self._space.floor_bytes // 4
        wanted_bytes = wanted_bytes or sum(file.disk_bytes for file in oldest) // 20
        freed_bytes = removed = 0
        position = 0
        while position < len(oldest) and freed_bytes < wanted_bytes:
            batch = _enough(oldest[position : position + _BATCH], wanted_bytes - freed_bytes)
            position += len(batch)
            evicted = await self._removal.evict(batch, is_wanted=self._is_in_use)
            freed_bytes += evicted.freed_bytes
            removed += evicted.removed
            if evicted.removed:
                self._on_evicted(batch[0])
        _log.info("room made", evicted=removed, freed_bytes=freed_bytes, wanted_bytes=wanted_bytes)

    def _is_in_use(self, name: ContentName) -> bool:
        return is_in_use(name.path, self._objects.objects_fd)


def _by_age(paths: Paths) -> list[StoredFile]:
    """Every content once: a partial file that became an object goes with it."""
    files = {file.name: file for file in list_files(paths.partial)}
    files |= {file.name: file for file in list_files(paths.objects)}
    return sorted(files.values(), key=lambda file: file.arrived_at_s)


def _enough(files: list[StoredFile], wanted_bytes: int) -> list[ContentName]:
    """The first of ``files`` that together have so many bytes on disk, or all."""
    names = []
    for file in files:
        if wanted_bytes <= 0:
            break
        names.append(file.name)
        wanted_bytes -= file.disk_bytes
    return names
