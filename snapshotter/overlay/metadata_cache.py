"""The physical metadata cache: what lookups in immutable directory lowers found.

It holds what was found and nothing else: never an absence, an error, a whiteout, the upper or
anything merged. So it can be wrong only if a lower changes that was promised not to.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from snapshotter.vfs import Attr

CAPACITY = 4096
"""Entries; the oldest goes when there are more."""


@dataclass(slots=True)
class CacheCounters:
    """Since the start. ``saved_stats`` are the stat calls that hits made needless."""

    hits: int = 0
    misses: int = 0
    saved_stats: int = 0


class MetadataCache:
    """Attributes by (layer, path), of all immutable directory lowers of a mount.

    ``enabled=False`` counts misses and keeps nothing, to measure what the cache is worth.
    """

    def __init__(self, *, enabled: bool = True, capacity: int = CAPACITY) -> None:
        self._capacity = capacity if enabled else 0
        self._found: dict[tuple[int, bytes], Attr] = {}
        self._lock = threading.Lock()
        self.counters = CacheCounters()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, layer: int, path: bytes) -> Attr | None:
        """What a lookup found before, or None."""
        with self._lock:
            attr = self._found.pop((layer, path), None)
            if attr is None:
                self.counters.misses += 1
                return None
            self._found[layer, path] = attr  # the youngest now: dicts keep their order
            self.counters.hits += 1
            self.counters.saved_stats += 1
            return attr

    def put(self, layer: int, path: bytes, attr: Attr) -> None:
        """Keeps what a lookup has found."""
        if not self._capacity:
            return
        with self._lock:
            self._found[layer, path] = attr
            if len(self._found) > self._capacity:
                del self._found[next(iter(self._found))]
