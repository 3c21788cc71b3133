"""Objects: verified content as ordinary files ``objects/ab/<62 hex>.<size>``, read by the kernel.

A file appears under its name only when it is complete: it is written as a temporary file, renamed
into ARRIVALS (the undo list, see ``arrivals``) and from there linked into OBJECTS. Nothing here
calls fsync, and objects are never written in place. Errors are OSError; callers say of what
operation with ``disk_errors``.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from snapshotter.errors import DiskFullError, SnapshotterError
from snapshotter.names import ContentName
from snapshotter.paths import Paths

DIRECTORY_MODE = 0o700
OBJECT_MODE = 0o444
FAN_OUT = tuple(f"{number:02x}" for number in range(256))
TEMPORARY = "tmp"
"""Directory of temporary files inside ARRIVALS; no object name leads into it."""

_PIECE_BYTES = 256 << 10
"""Of one write. The kernel caches what one call writes in blocks as large as it can. Those of a
whole MiB it took, in a virtual machine, from memory that nobody had used yet and that the host had
to find first: 64 MiB then took 290 ms of processor time instead of 18."""

_NO_SPACE = frozenset((errno.ENOSPC, errno.EDQUOT))


@contextmanager
def disk_errors(operation: str) -> Iterator[None]:
    """Turns an OSError into a SnapshotterError that names ``operation``.

    For want of space it is a DiskFullError.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            message = f"{operation}: {error.strerror}; free some space: snapshotter cache purge"
            raise DiskFullError(message) from error
        raise SnapshotterError(f"{operation}: {error.strerror or error}") from error


def open_directory(path: str | os.PathLike[str]) -> int:
    """A descriptor of the directory ``path``, which is made (0700) if it is not there."""
    os.makedirs(path, DIRECTORY_MODE, exist_ok=True)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def make_fan_out(directory_fd: int) -> None:
    """Makes the 256 directories ``00`` to ``ff``, those that are missing."""
    present = set(os.listdir(directory_fd))
    for name in FAN_OUT:
        if name not in present:
            os.mkdir(name, DIRECTORY_MODE, dir_fd=directory_fd)


def write_whole(descriptor: int, body: bytes | bytearray | memoryview, offset: int) -> None:
    """Writes all of ``body`` at ``offset``; pwrite(2) alone may stop short on a full disk."""
    if len(body) <= _PIECE_BYTES and os.pwrite(descriptor, body, offset) == len(body):
        return
    written = 0
    with memoryview(body) as view:
        while written < len(view):
            piece = view[written : written + _PIECE_BYTES]
            written += os.pwrite(descriptor, piece, offset + written)


class Objects:
    """The directories OBJECTS and ARRIVALS. All methods may be called from any thread.

    ``on_arrival`` is called, in the publishing thread, for each name put into ARRIVALS.
    """

    def __init__(self, paths: Paths, *, on_arrival: Callable[[str], None]) -> None:
        self._on_arrival = on_arrival
        self.objects_fd = open_directory(paths.objects)
        self.arrivals_fd = open_directory(paths.arrivals)
        make_fan_out(self.objects_fd)
        make_fan_out(self.arrivals_fd)
        self._temporary_fd = open_directory(paths.arrivals / TEMPORARY)
        for leftover in os.listdir(self._temporary_fd):
            os.unlink(leftover, dir_fd=self._temporary_fd)
        self._numbers = itertools.count()

    def close(self) -> None:
        """Closes the directories."""
        for descriptor in (self.objects_fd, self.arrivals_fd, self._temporary_fd):
            os.close(descriptor)

    def has(self, name: ContentName) -> bool:
        """Whether the complete object is there, in OBJECTS or in ARRIVALS."""
        path = name.path
        return os.access(path, os.F_OK, dir_fd=self.objects_fd) or os.access(
            path, os.F_OK, dir_fd=self.arrivals_fd
        )

    def is_arriving(self, name: ContentName) -> bool:
        """Whether it is not yet known to be on disk."""
        return os.access(name.path, os.F_OK, dir_fd=self.arrivals_fd)

    def evict(self, name: ContentName) -> None:
        """Removes a settled object. One that arrives anew meanwhile stays, in ARRIVALS at least."""
        _unlink_if_there(name.path, self.objects_fd)

    def remove(self, name: ContentName) -> None:
        """Removes an object that must not be used, settled or not."""
        _unlink_if_there(name.path, self.objects_fd)
        _unlink_if_there(name.path, self.arrivals_fd)

    def open(self, name: ContentName) -> int:
        """A descriptor for reading the object; FileNotFoundError if it is in neither directory."""
        path = name.path
        try:
            return os.open(path, os.O_RDONLY, dir_fd=self.objects_fd)
        except FileNotFoundError:
            return os.open(path, os.O_RDONLY, dir_fd=self.arrivals_fd)

    def publish(self, name: ContentName, body: bytes | bytearray | memoryview) -> None:
        """Makes verified bytes an object; one that exists already is success.

        Five system calls. The temporary file is removed when any of them fails.
        """
        temporary, descriptor = self.make_temporary()
        try:
            try:
                write_whole(descriptor, body, 0)
            finally:
                os.close(descriptor)
            self.adopt(name, temporary)
        except BaseException:
            self.discard(temporary)
            raise

    def make_temporary(self) -> tuple[str, int]:
        """A new file, its name for ``adopt`` or ``discard`` and a descriptor for writing."""
        temporary = str(next(self._numbers))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(temporary, flags, OBJECT_MODE, dir_fd=self._temporary_fd)
        return temporary, descriptor

    def adopt(self, name: ContentName, temporary: str) -> None:
        """Makes a temporary file that holds exactly the content of ``name`` its object."""
        path = name.path
        os.rename(temporary, path, src_dir_fd=self._temporary_fd, dst_dir_fd=self.arrivals_fd)
        self._arrived(path)

    def discard(self, temporary: str) -> None:
        """Removes a temporary file, if it is still there."""
        _unlink_if_there(temporary, self._temporary_fd)

    def link(self, name: ContentName, source: str, source_fd: int) -> None:
        """Gives a complete file elsewhere on this file system the object's name, uncopied."""
        path = name.path
        try:
            os.link(source, path, src_dir_fd=source_fd, dst_dir_fd=self.arrivals_fd)
        except FileExistsError:
            pass
        self._arrived(path)

    def _arrived(self, path: str) -> None:
        """Links the name from ARRIVALS into OBJECTS.

        Others may publish the same object meanwhile. Their rename takes the last link of the file
        that our link(2) has just looked up (ENOENT), and theirs is then as good as ours.
        """
        self._on_arrival(path)
        while True:
            try:
                os.link(path, path, src_dir_fd=self.arrivals_fd, dst_dir_fd=self.objects_fd)
            except FileExistsError:
                return
            except FileNotFoundError:
                if os.access(path, os.F_OK, dir_fd=self.objects_fd):
                    return  # settled in between: it was published long ago
                if not os.access(path, os.F_OK, dir_fd=self.arrivals_fd):
                    raise
            else:
                return


def _unlink_if_there(path: str, directory_fd: int) -> None:
    try:
        os.unlink(path, dir_fd=directory_fd)
    except FileNotFoundError:
        pass
