"""Reads that wait for chunks of one file which are on their way.

Whoever brings the last chunk of a read answers it, in his own thread: a turn of the loop for each
read would take longer than the copying of its bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

Chunk = tuple[int, memoryview]
"""Index and verified bytes of a chunk that came just now."""


@dataclass(frozen=True, slots=True)
class _Read:
    first: int
    end: int
    answer: Callable[[Chunk | None], None]
    refuse: Callable[[], None]


class WaitingReads:
    """Safe from any thread. ``present``: a byte for each chunk, not 0 once the chunk is here."""

    def __init__(self, present: bytearray) -> None:
        self._present = present
        self._coming: set[int] = set()
        self._reads: list[_Read] = []
        self._lock = threading.Lock()

    def expect(self, index: int) -> None:
        """The chunk is on its way: ``arrived`` and ``ended``, or ``ended`` alone, will follow."""
        with self._lock:
            self._coming.add(index)

    def add(
        self,
        first: int,
        end: int,
        answer: Callable[[Chunk | None], None],
        refuse: Callable[[], None],
    ) -> bool:
        """Has one of the two called, once, by this call or later, in any thread.

        ``answer`` when all chunks are here, with the one that came last if it had to be waited
        for; ``refuse`` when one does not come. False: neither, since one is not on its way.
        """
        with self._lock:
            missing = [index for index in range(first, end) if not self._present[index]]
            if not self._coming.issuperset(missing):
                return False
            if missing:
                self._reads.append(_Read(first, end, answer, refuse))
                return True
        answer(None)
        return True

    def arrived(self, index: int, body: memoryview) -> None:
        """The chunk is present now: answers the reads that waited for it alone."""
        for read in self._remove(index, lambda it: 0 not in self._present[it.first : it.end]):
            read.answer((index, body))

    def ended(self, index: int) -> None:
        """The chunk's fetch is over; if it did not come, the reads that want it are refused."""
        with self._lock:
            self._coming.discard(index)
        if not self._present[index]:
            for read in self._remove(index, lambda _: True):
                read.refuse()

    def _remove(self, index: int, is_meant: Callable[[_Read], bool]) -> list[_Read]:
        """Takes out those reads of the chunk that are meant."""
        with self._lock:
            meant = [it for it in self._reads if it.first <= index < it.end and is_meant(it)]
            self._reads = [it for it in self._reads if it not in meant]
        return meant
