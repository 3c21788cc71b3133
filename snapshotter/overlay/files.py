"""Open files and directories of the merged tree."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from snapshotter.descriptor_file import DescriptorFile
from snapshotter.vfs import DirEntry, File


class MergedFile:
    """An open regular file.

    ``reopen`` gives the file in the upper once there is one, so that a file that was opened before
    its copy-up shows what was written since; None for a file that was opened there.
    """

    def __init__(self, file: File, reopen: Callable[[], File | None] | None) -> None:
        self._file = file
        self._reopen = reopen
        self._superseded: list[File] = []
        self._lock = threading.Lock()

    def read(self, size: int, offset: int) -> bytes:
        """What the file has now."""
        return self._current().read(size, offset)

    def write(self, data: bytes | memoryview, offset: int, *, append: bool = False) -> int:
        """Writes to the upper."""
        return self._file.write(data, offset, append=append)

    def seek(self, offset: int, whence: int) -> int:
        """As lseek(2)."""
        return self._current().seek(offset, whence)

    def allocate(self, mode: int, offset: int, size: int) -> None:
        """As fallocate(2)."""
        self._file.allocate(mode, offset, size)

    def copy_from(self, source: File, source_offset: int, offset: int, size: int) -> int:
        """As copy_file_range(2)."""
        return self._file.copy_from(source, source_offset, offset, size)

    def fsync(self, *, data_only: bool = False) -> None:
        """As fsync(2); a lower has nothing that was written."""
        self._current().fsync(data_only=data_only)

    def fileno(self) -> int | None:
        """The descriptor that has the bytes of now."""
        return self._current().fileno()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        for file in self._superseded:
            file.close()

    def _current(self) -> File:
        if self._reopen is None:
            return self._file
        with self._lock:
            if self._reopen is not None:
                newer = self._reopen()
                if newer is not None:
                    # Others may be reading from the old one: it stays open until the end.
                    self._superseded.append(self._file)
                    self._file, self._reopen = newer, None
            return self._file


class UnsyncedFile(DescriptorFile):
    """A file in a volatile upper."""

    __slots__ = ()

    def fsync(self, *, data_only: bool = False) -> None:
        """Does nothing: volatile means that nobody waits for the disk."""


class MergedDirectory:
    """An open directory. Offsets count the names as they were when last at 0."""

    def __init__(self, read: Callable[[], list[DirEntry]]) -> None:
        self._read = read
        self._names: list[DirEntry] | None = None

    def entries(self, offset: int = 0) -> Iterator[DirEntry]:
        """The merged names: those of the upper, then those of each lower."""
        if self._names is None or not offset:
            self._names = self._read()
        names = self._names
        return (names[position] for position in range(offset, len(names)))

    def close(self) -> None:
        """Lets go of the names."""
        self._names = None
