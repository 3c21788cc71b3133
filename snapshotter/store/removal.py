"""Takes content out of the store: what is not worth its space, and what proved to be corrupt.

Nothing that a view has open is harmed: its inode lives on, and the next open that finds no object
fetches it again. Only settled content is evicted, so that its one name is in OBJECTS: a lookup that
misses it there goes on to the gate, which fetches. (Gone from ARRIVALS after the gate has pointed
there, it would be EIO.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog
import trio

from snapshotter.config import Config
from snapshotter.digest import parse_digest
from snapshotter.names import ContentName
from snapshotter.paths import Paths
from snapshotter.store import images
from snapshotter.store.descriptors import Descriptors
from snapshotter.store.filling import Filling
from snapshotter.store.inventory import (
    StoredFile,
    find_object_fault,
    find_partial_fault,
    read_stored,
)
from snapshotter.store.objects import Objects, disk_errors
from snapshotter.telemetry import Counters

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an eviction did: contents removed, the bytes of disk they had, contents kept."""

    removed: int = 0
    freed_bytes: int = 0
    kept: int = 0


class Removal:
    """Removes objects and partial files. Lives on the store's trio loop."""

    def __init__(
        self,
        paths: Paths,
        config: Config,
        *,
        objects: Objects,
        filling: Filling,
        descriptors: Descriptors,
        counters: Counters,
    ) -> None:
        self._paths = paths
        self._young_s = 2 * config.settle_s
        self._objects = objects
        self._filling = filling
        self._descriptors = descriptors
        self._counters = counters

    async def evict(
        self,
        names: Sequence[ContentName],
        *,
        is_wanted: Callable[[ContentName], bool] = lambda _name: False,
    ) -> Evicted:
        """Removes contents that are here, settled, not young and no image's metadata image.

        ``is_wanted`` is asked, in a thread, about each content that would be removed; what it says
        yes to is kept. SnapshotterError for a failing disk.
        """
        with disk_errors("evict"):
            chosen = await trio.to_thread.run_sync(self._choose, names, is_wanted)
            idle = [name for name in chosen if self._let_go(name)]
            removed, freed_bytes = await trio.to_thread.run_sync(self._unlink, idle, chosen)
        self._counters.add("evicted_objects", removed)
        self._counters.add("evicted_bytes", freed_bytes)
        return Evicted(removed, freed_bytes, len(names) - removed)

    async def discard(self, names: Iterable[ContentName]) -> list[ContentName]:
        """Removes those contents whose bytes are not what their names say, and logs each.

        Returns them. Everything is checked here again, whoever says that it is corrupt.
        SnapshotterError for a failing disk.
        """
        discarded = []
        for name in names:
            fault = await trio.to_thread.run_sync(self._find_fault, name)
            if fault is None:
                continue
            with disk_errors(f"discard {name}"):
                self._filling.forget(name)
                self._objects.remove(name)
            self._descriptors.drop(("object", name))
            self._counters.add("corrupt_objects")
            _log.error("corrupt content removed", object=str(name), cause=fault)
            discarded.append(name)
        return discarded

    def _find_fault(self, name: ContentName) -> str | None:
        paths = self._paths
        return (
            find_object_fault(paths.objects, name)
            or find_object_fault(paths.arrivals, name)
            or find_partial_fault(paths.partial, name)
        )

    def _choose(
        self, names: Sequence[ContentName], is_wanted: Callable[[ContentName], bool]
    ) -> dict[ContentName, int]:
        """Those that may go, each with the bytes on disk that go with it."""
        kept = _metadata_images(self._paths)
        newest_s = time.time() - self._young_s
        chosen = {}
        for name in names:
            stored = read_stored(self._paths.objects, name)
            partial = read_stored(self._paths.partial, name)
            files = [file for file in (stored, partial) if file is not None]
            if not files or name in kept or any(file.arrived_at_s > newest_s for file in files):
                continue
            if self._objects.is_arriving(name):
                continue
            self._descriptors.drop(("object", name))
            if is_wanted(name):
                continue
            chosen[name] = _bytes_together(stored, partial)
        return chosen

    def _let_go(self, name: ContentName) -> bool:
        return not name.is_chunked or self._filling.forget_idle(name)

    def _unlink(
        self, names: list[ContentName], disk_bytes: dict[ContentName, int]
    ) -> tuple[int, int]:
        freed_bytes = 0
        for name in names:
            self._objects.evict(name)
            self._descriptors.drop(("object", name))
            freed_bytes += disk_bytes[name]
        return len(names), freed_bytes


def _bytes_together(stored: StoredFile | None, partial: StoredFile | None) -> int:
    """A partial file that became the object is the same file under another name."""
    if stored is None or partial is None or stored.links > 1:
        return sum(file.disk_bytes for file in (stored or partial,) if file is not None)
    return stored.disk_bytes + partial.disk_bytes


def _metadata_images(paths: Paths) -> set[ContentName]:
    records = images.load_all(paths.images)
    made = (record.prepared.metadata_image for record in records)
    return {
        ContentName(parse_digest(image.content), image.size) for image in made if image is not None
    }
