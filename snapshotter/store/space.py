"""Free space on the store's disk: whether content may be kept, and whether an object is in use."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from snapshotter.errors import DiskFullError

_SMALLEST_SHARE = 20
"""On a small file system one of so many of its bytes is left free, not ``min_free_bytes``."""
_RESERVE_BYTES = 1 << 20
"""Is left free in any case, for records and journals."""

_log = structlog.get_logger()


class Space:
    """The file system of ``directory_fd``. ``expect`` is for the store's loop."""

    def __init__(self, directory_fd: int, *, min_free_bytes: int) -> None:
        self._directory_fd = directory_fd
        found = os.fstatvfs(directory_fd)
        most = found.f_blocks * found.f_frsize // _SMALLEST_SHARE
        self.floor_bytes = max(min(min_free_bytes, most), min(_RESERVE_BYTES, most))
        """How much is to be left free."""
        self._is_short = False
        self._expected_bytes = 0

    def missing_bytes(self, size_bytes: int = 0) -> int:
        """How far below the floor free space is, or would be with so much more; 0 if it is not."""
        found = os.fstatvfs(self._directory_fd)
        wanted = self.floor_bytes + self._expected_bytes + size_bytes
        return max(0, wanted - found.f_bavail * found.f_frsize)

    @contextmanager
    def expect(self, size_bytes: int, operation: str) -> Iterator[None]:
        """Around what will keep so much; DiskFullError unless that leaves the floor free.

        Once that failed, a quarter more of the floor has to be free: it does not change all the
        time. Changes are logged.
        """
        self._check(size_bytes, operation)
        self._expected_bytes += size_bytes
        try:
            yield
        finally:
            self._expected_bytes -= size_bytes

    def _check(self, size_bytes: int, operation: str) -> None:
        slack_bytes = self.floor_bytes // 4 if self._is_short else 0
        missing = self.missing_bytes(size_bytes + slack_bytes)
        if missing:
            message = (
                f"{operation}: {missing} bytes of free space are missing, with {self.floor_bytes}"
                " to be left free (min_free_bytes)"
            )
            self.note_short(message)
            raise DiskFullError(f"{message}: snapshotter cache purge, or a larger disk")
        if self._is_short:
            self._is_short = False
            _log.info("there is room again; content is kept")

    def note_short(self, cause: str) -> None:
        """Logs, once until there is room again, that content is not kept."""
        if not self._is_short:
            self._is_short = True
            _log.error(
                "disk is full: content is served without being kept",
                cause=cause,
                remedy="snapshotter cache purge, or a larger disk",
            )


def is_in_use(path: str, directory_fd: int) -> bool:
    """Whether anybody has the file open or mapped, through a view too.

    The kernel grants a write lease only where nobody does (fcntl(2), F_SETLEASE).
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory_fd)
    except FileNotFoundError:
        return False
    try:
        # Who opens it in this instant waits for the close below, and we are sent a signal: one
        # that is ignored by default, where F_SETLEASE's own SIGIO would end the process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no leases on this file system: an open file survives its eviction anyway
    finally:
        os.close(descriptor)
    return False
