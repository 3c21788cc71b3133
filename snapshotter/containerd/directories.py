"""Directories of snapshots: ``<state>/snapshots/<id>/`` with ``upper/`` and ``work/``."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from snapshotter.kernel_view import mountinfo, syscalls
from snapshotter.service.uppers import Upper, copy_attributes
from snapshotter.service.views import source_of

_BLOCK_BYTES = 512  # the unit of st_blocks, stat(2)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a snapshot alone takes: bytes of disk, and inodes."""

    size_bytes: int = 0
    inodes: int = 0


class Directories:
    """All directories of snapshots below ``root``, which is made. Everything here blocks."""

    def __init__(self, root: Path) -> None:
        self._root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def upper(self, snapshot_id: str) -> Upper:
        """The two directories of that snapshot."""
        return Upper(self._root / snapshot_id)

    def make(self, snapshot_id: str, *, like: str | None) -> None:
        """Makes them; ``upper`` gets the attributes of the directory ``like``, or 0755 of root."""
        upper = self.upper(snapshot_id)
        upper.directory.mkdir(mode=0o700)
        upper.work.mkdir(mode=0o711)
        upper.upper.mkdir(mode=0o755)
        if like is not None:
            copy_attributes(like, upper.upper)

    def remove(self, snapshot_id: str) -> None:
        """Removes them with all they hold; what is gone already is no error."""
        try:
            shutil.rmtree(self._root / snapshot_id)
        except FileNotFoundError:
            pass

    def all(self) -> set[str]:
        """Ids that have a directory."""
        return set(os.listdir(self._root))

    def mounted(self) -> set[str]:
        """Ids whose directories are mounted anywhere, as an overlay's upper or as a bind."""
        prefix, marks = source_of(""), f"/{self._root.name}/"
        found: set[str] = set()
        for line in mountinfo.everywhere():
            if line.source.startswith(prefix):
                found.add(line.source.removeprefix(prefix))
            elif marks in line.root:
                found.add(line.root.rpartition(marks)[2].partition("/")[0])
        return found

    def sync(self, snapshot_id: str) -> None:
        """Writes out the file system that holds them."""
        directory = os.open(self._root / snapshot_id, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            syscalls.syncfs(directory)
        finally:
            os.close(directory)

    def usage(self, snapshot_id: str) -> Usage:
        """What ``upper`` takes; files with several names are counted once."""
        seen: set[tuple[int, int]] = set()
        top = str(self.upper(snapshot_id).upper)
        size = _count(os.lstat(top), seen)
        waiting = [top]
        while waiting:
            try:
                with os.scandir(waiting.pop()) as entries:
                    for entry in entries:
                        size += _count(entry.stat(follow_symlinks=False), seen)
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
            except FileNotFoundError:
                continue  # removed by the container meanwhile
        return Usage(size, len(seen))


def _count(status: os.stat_result, seen: set[tuple[int, int]]) -> int:
    key = (status.st_dev, status.st_ino)
    if key in seen:
        return 0
    seen.add(key)
    return status.st_blocks * _BLOCK_BYTES
