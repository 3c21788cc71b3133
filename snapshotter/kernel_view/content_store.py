"""What the gate needs of the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from snapshotter.names import ContentName

TakeLater = Callable[[bytes | memoryview | None], None]
"""Takes bytes, valid during the call alone, or None: they do not come, ask for them."""


class ContentStore(Protocol):
    """Errors are SnapshotterError or OSError."""

    def has(self, name: ContentName) -> bool:
        """Whether the object is here, complete. From any thread."""

    def read_ready(self, name: ContentName, offset: int, length: int) -> bytes | memoryview | None:
        """These bytes (fewer at the end) or None if any are missing. From any thread."""

    def read_later(self, name: ContentName, offset: int, length: int, take: TakeLater) -> bool:
        """Has ``take`` called once, in any thread, when these bytes, which are on their way, came.

        False: they are not on their way, and it will not be called. From any thread.
        """

    async def materialise(self, name: ContentName, *, image: int = 0) -> None:
        """Makes the object; DiskFullError if it can be had only by ``ensure``."""

    async def prepare_partial(self, name: ContentName, *, image: int = 0) -> None:
        """Gets a large content's chunk table, so that it can be served by chunk."""

    async def ensure(self, name: ContentName, offset: int, length: int, *, image: int = 0) -> None:
        """Gets a range; ``read_ready`` then has it."""
