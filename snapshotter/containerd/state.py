"""The state directory of one service: held by one process, and opened whatever a crash left."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import structlog

from snapshotter.containerd.directories import Directories
from snapshotter.containerd.metastore import Metastore
from snapshotter.errors import BusyError, CorruptError

_log = structlog.get_logger()
_RECORDS = "snapshots.db"
_DIRECTORIES = "snapshots"
_SIDE_FILES = ("", "-wal", "-shm")
"""SQLite's own files beside the database."""
_SMALLEST_BYTES = 512
"""The smallest page SQLite has: it takes less for a database that is new."""


class State:
    """The records and directories below ``directory``, which is made when there is none."""

    def __init__(self, directory: Path) -> None:
        """Opens it. Raises BusyError when another process has it, and UnsupportedError.

        Records that are damaged or gone are set aside, together with the directories that they
        described: containerd pulls again what it needs, and nothing of it is lost.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        self._lock = _lock(directory)
        try:
            self.records = self._open_records()
            self.directories = Directories(directory / _DIRECTORIES)
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def metadata(self) -> Path:
        """Where merged images are mounted."""
        return self.directory / "metadata"

    def close(self) -> None:
        """Closes the records and lets go of the directory."""
        self.records.close()
        os.close(self._lock)

    def _open_records(self) -> Metastore:
        path = self.directory / _RECORDS
        if not path.exists() or path.stat().st_size < _SMALLEST_BYTES:
            if self._has_directories():
                self._set_aside("the records are gone")
            return Metastore(path)
        try:
            return Metastore(path)
        except CorruptError as error:
            self._set_aside(str(error))
            return Metastore(path)

    def _has_directories(self) -> bool:
        try:
            return bool(os.listdir(self.directory / _DIRECTORIES))
        except FileNotFoundError:
            return False

    def _set_aside(self, reason: str) -> None:
        """What is mounted goes on: overlayfs holds its directories wherever they are moved to."""
        aside = self.directory / f"lost-{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 1000}"
        aside.mkdir(mode=0o700)
        for name in (*(f"{_RECORDS}{suffix}" for suffix in _SIDE_FILES), _DIRECTORIES):
            try:
                (self.directory / name).rename(aside / name)
            except FileNotFoundError:
                continue
        _log.error(
            "all snapshots are forgotten; containers that run go on, images must be pulled again",
            reason=reason,
            kept=f"{aside}; remove it when nothing in it is needed",
        )


def _lock(directory: Path) -> int:
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 20, 0).decode(errors="replace").strip() or "?"
        os.close(lock)
        raise BusyError(
            f"state {directory}: process {holder} serves it already; each containerd needs a"
            " service of its own, with a --state and a --socket of its own: two on one would"
            " remove each other's snapshots"
        ) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock
