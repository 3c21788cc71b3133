"""Contents for a process that serves a view: it reads what the store keeps, and writes nothing.

A complete content is an object, opened like any file. One that is large and still fills is read
from its partial file, whose map tells (true, since data is written before it) which chunks are
there. Whatever is not here is Pending, for ``view_fetch`` to ask the store for.
"""

from __future__ import annotations

import errno
import os
import threading

from snapshotter.descriptor_file import DescriptorFile
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.paths import Paths
from snapshotter.store.partial import MAP
from snapshotter.vfs import File, Pending

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_AHEAD_BYTES = 4 * CHUNK_SIZE
"""Asked for with what is missing in a large file that is read from front to end."""


class ViewContents:
    """Objects and partial files below a root. Content above ``large_file_bytes`` opens at once."""

    def __init__(self, paths: Paths, *, large_file_bytes: int) -> None:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        self._objects = os.open(paths.objects, flags)
        self._partial = os.open(paths.partial, flags)
        self._large_file_bytes = large_file_bytes

    def close(self) -> None:
        """Lets go of the directories; open contents stay open."""
        os.close(self._objects)
        os.close(self._partial)

    def open(self, name: ContentName) -> File:
        """The content; Pending for a small one that is not here."""
        descriptor = self.open_object(name)
        if descriptor is not None:
            return DescriptorFile(descriptor)
        if name.size <= self._large_file_bytes:
            raise Pending(name, 0, name.size)
        return FillingFile(self, name)

    def open_object(self, name: ContentName) -> int | None:
        """A descriptor of the complete content, if it is here."""
        return _open(name.path, self._objects)

    def open_partial(self, name: ContentName) -> tuple[int, int] | None:
        """Descriptors of the data and the map of a content that fills, if it does."""
        chunk_map = _open(name.path + MAP, self._partial)
        if chunk_map is None:
            return None
        data = _open(name.path, self._partial)
        if data is None:  # it became an object, or was dropped, in between
            os.close(chunk_map)
            return None
        return data, chunk_map


def _open(path: str, directory: int) -> int | None:
    try:
        return os.open(path, _READ, dir_fd=directory)
    except FileNotFoundError:
        return None


class FillingFile:
    """A large content that was not complete when it was opened, and may be meanwhile."""

    def __init__(self, contents: ViewContents, name: ContentName) -> None:
        self._contents = contents
        self._name = name
        self._lock = threading.Lock()
        self._object: int | None = None
        self._partial: tuple[int, int] | None = None

    def read(self, size: int, offset: int) -> bytes:
        """As a file's; Pending for chunks that are not here."""
        size = min(size, self._name.size - offset)
        if size <= 0:
            return b""
        descriptor = self.fileno()
        if descriptor is not None:
            return os.pread(descriptor, size, offset)
        with self._lock:
            if not self._has(offset, size):
                self._open_anew()
                if not self._has(offset, size):
                    raise self._pending(offset, size)
            assert self._partial is not None
            return os.pread(self._partial[0], size, offset)

    def fileno(self) -> int | None:
        """The descriptor of the object, once there is one."""
        if self._object is None:
            with self._lock:
                if self._object is None:
                    self._object = self._contents.open_object(self._name)
        return self._object

    def seek(self, offset: int, whence: int) -> int:
        """Content has no holes: those of a partial file are not its own."""
        if not 0 <= offset < self._name.size:
            raise OSError(errno.ENXIO, f"seek: {offset} is behind the end of content {self._name}")
        return offset if whence == os.SEEK_DATA else self._name.size

    def write(self, data: bytes | memoryview, offset: int, *, append: bool = False) -> int:
        """EBADF: content is never written."""
        raise OSError(errno.EBADF, f"write: content {self._name} is open for reading")

    def allocate(self, mode: int, offset: int, size: int) -> None:
        """EBADF."""
        raise OSError(errno.EBADF, f"allocate: content {self._name} is open for reading")

    def copy_from(self, source: File, source_offset: int, offset: int, size: int) -> int:
        """EBADF."""
        raise OSError(errno.EBADF, f"copy: content {self._name} is open for reading")

    def fsync(self, *, data_only: bool = False) -> None:
        """There is nothing to sync."""

    def close(self) -> None:
        """Closes what is open."""
        with self._lock:
            if self._object is not None:
                os.close(self._object)
            self._object = None
            self._close_partial()

    def _has(self, offset: int, size: int) -> bool:
        if self._partial is None:
            return False
        first, end = offset // CHUNK_SIZE, -(-(offset + size) // CHUNK_SIZE)
        return os.pread(self._partial[1], end - first, first) == b"\1" * (end - first)

    def _open_anew(self) -> None:
        """A partial file that was dropped never fills: another may stand in its place."""
        self._close_partial()
        self._partial = self._contents.open_partial(self._name)

    def _close_partial(self) -> None:
        for descriptor in self._partial or ():
            os.close(descriptor)
        self._partial = None

    def _pending(self, offset: int, size: int) -> Pending:
        begin = offset // CHUNK_SIZE * CHUNK_SIZE
        wanted = max(offset + size, begin + _READ_AHEAD_BYTES)
        return Pending(self._name, begin, min(wanted, self._name.size) - begin)
