"""Sequential reading of a large file: what to fetch before it is asked for.

The kernel reads ahead 4 MiB at most, so a reader that is as fast as the fetching waits at every
window's end, and each of its requests waits for a turn of the loop. What was fetched ahead is
answered at once.
"""

from __future__ import annotations

from snapshotter.names import CHUNK_SIZE

_SLACK_BYTES = 4 * CHUNK_SIZE
"""The kernel's requests of a window may come in any order."""
LEAST_BYTES = 2 * CHUNK_SIZE
"""Of a run, before anything is fetched ahead: the kernel asks for half a MiB on its own account."""


class ReadAhead:
    """The latest run of reads of one file, ``size`` bytes long.

    At most ``most_bytes`` are fetched ahead of the reader; with fewer than 2 MiB, none.
    """

    __slots__ = ("_asked", "_end", "_most_bytes", "_size", "_start")

    def __init__(self, size: int, most_bytes: int) -> None:
        self._size = size
        self._most_bytes = most_bytes
        self._start = self._end = self._asked = 0

    def note(self, offset: int, length: int) -> tuple[int, int] | None:
        """A read; the range (offset and length) to be fetched on its account, if any.

        As much as was read so far, within ``most_bytes``, in steps of at least half of it.
        """
        if not self._start <= offset <= self._end + _SLACK_BYTES:
            self._start = self._end = self._asked = offset
        self._end = max(self._end, min(offset + length, self._size))
        window = min(self._end - self._start, self._most_bytes)
        begin, end = max(self._asked, self._end), min(self._end + window, self._size)
        if window < LEAST_BYTES or begin >= end:
            return None
        if end - begin < window // 2 and end < self._size:
            return None
        self._asked = end
        return begin, end - begin
