"""Partial files: large content that is filling, sparse, chunk by chunk.

Beside ``partial/ab/<62 hex>.<size>`` stand ``….table``, its verified chunk table, and ``….map``,
one byte for each chunk: 1 once the chunk's bytes were written. The map is written after the
data, so a process that dies leaves it true; a machine that goes down may not, so partial files are
dropped at the first start after that. A complete one becomes an object: its inode gets the object's
name, is never written again, and loses the one it has here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.paths import Paths
from snapshotter.store import chunk_table
from snapshotter.store.descriptors import Descriptors, OpenFile
from snapshotter.store.objects import (
    DIRECTORY_MODE,
    OBJECT_MODE,
    Objects,
    open_directory,
    write_whole,
)
from snapshotter.store.read_ahead import ReadAhead
from snapshotter.store.reading import read_range
from snapshotter.store.waiting import Chunk, WaitingReads

TABLE = ".table"
MAP = ".map"
_FILLING_MODE = 0o600

TakeLater = Callable[[bytes | memoryview | None], None]
"""Takes what was read, valid during the call alone, or None: ask for it anew. In any thread."""


class PartialFile:
    """One file. ``read`` and ``write_chunk`` may be called from any thread."""

    def __init__(
        self, name: ContentName, digests: list[bytes], present: bytearray, partials: Partials
    ) -> None:
        self.name = name
        self.digests = digests
        self.read_ahead = ReadAhead(name.size, partials.fetch_ahead_bytes)
        self.waiting = WaitingReads(present)
        self._present = present
        self._partials = partials

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is here."""
        return 0 not in self._present

    def missing(self, offset: int, length: int) -> list[int]:
        """Indexes of the chunks under that range that are not here yet."""
        first, end = _chunk_range(self.name, offset, length)
        return [index for index in range(first, end) if not self._present[index]]

    def read(self, offset: int, length: int) -> bytes | memoryview | None:
        """The bytes of that range, short at the end of the file; None if a chunk is missing."""
        first, end = _chunk_range(self.name, offset, length)
        if self._present.find(0, first, end) != -1:
            return None
        file = self._partials.data(self.name)  # held: it stays open until the read is over
        return read_range(file.descriptor, offset, length)

    def read_later(self, offset: int, length: int, take: TakeLater) -> bool:
        """Has ``take`` called with the bytes of that range, by this call or when they have come.

        False: it will not be called, since not all of them are being fetched.
        """

        first, end = _chunk_range(self.name, offset, length)
        return self.waiting.add(
            first,
            end,
            lambda last: take(self._cut(last, offset, length)),
            lambda: take(None),
        )

    def _cut(self, chunk: Chunk | None, offset: int, length: int) -> bytes | memoryview | None:
        if chunk is not None:
            index, body = chunk
            start = offset - index * CHUNK_SIZE
            end = min(offset + length, self.name.size) - index * CHUNK_SIZE
            if start >= 0 and end <= len(body):
                return body[start:end]
        try:
            return self.read(offset, length)
        except OSError:
            return None  # it has become the object, or the disk fails: who asks anew will know

    def write_chunk(self, index: int, body: bytes | bytearray | memoryview) -> None:
        """Keeps a verified chunk, and answers who waits for it; OSError leaves it missing.

        Raises InvalidInputError for bytes of another length than the chunk's.
        """
        if len(body) != chunk_table.chunk_length(self.name, index):
            raise InvalidInputError(f"chunk {index} of {self.name}: {len(body)} bytes")
        if self._present[index]:
            return
        data, chunk_map = self._partials.data(self.name), self._partials.map(self.name)
        write_whole(data.descriptor, body, index * CHUNK_SIZE)
        write_whole(chunk_map.descriptor, b"\1", index)
        self._present[index] = 1
        with memoryview(body) as view:
            self.waiting.arrived(index, view)

    def promote(self, objects: Objects) -> None:
        """Makes the complete file the object, without a copy; the partial file is gone then."""
        self._partials.link(self.name, objects)
        self._partials.forget(self.name)


class Partials:
    """The directory of partial files, with a bounded number of them open.

    ``fetch_ahead_bytes``: how far ahead of a reader's run they are to be filled, at most.
    """

    def __init__(
        self, paths: Paths, *, descriptors: Descriptors, fetch_ahead_bytes: int = 0
    ) -> None:
        self.fetch_ahead_bytes = fetch_ahead_bytes
        self._directory_fd = open_directory(paths.partial)
        self._descriptors = descriptors

    def close(self) -> None:
        """Closes the directory."""
        os.close(self._directory_fd)

    def drop_all(self) -> None:
        """Removes every partial file: after the machine went down no map can be trusted."""
        for fan_out in os.listdir(self._directory_fd):
            shutil.rmtree(fan_out, dir_fd=self._directory_fd)

    def drop_unfinished(self) -> None:
        """Removes what a making or a removal that was cut short left, so that it takes no space."""
        for fan_out in os.listdir(self._directory_fd):
            descriptor = os.open(fan_out, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._directory_fd)
            try:
                for file in _unfinished(descriptor):
                    os.unlink(file, dir_fd=descriptor)
            finally:
                os.close(descriptor)

    def load(self, name: ContentName) -> PartialFile | None:
        """The partial file as an earlier process left it, or None if there is no usable one."""
        try:
            table = self._read(name.path + TABLE)
            present = self._read(name.path + MAP)
            size = os.stat(name.path, dir_fd=self._directory_fd).st_size
            digests = chunk_table.decode(table, name)
        except (FileNotFoundError, CorruptError):
            return None
        if size != name.size or len(present) != name.chunk_count:
            return None
        return PartialFile(name, digests, bytearray(present), self)

    def create(self, name: ContentName, table: bytes) -> PartialFile:
        """A new, empty partial file. ``table`` is checked: CorruptError if it is another's.

        The data file is always a new one: a leftover may be the inode of an object. The table
        comes last, so that a start that was cut short leaves nothing that ``load`` would take.
        """
        digests = chunk_table.decode(table, name)
        self.forget(name)
        try:
            os.mkdir(name.directory, DIRECTORY_MODE, dir_fd=self._directory_fd)
        except FileExistsError:
            pass
        try:
            self._make(name.path, size=name.size)
            self._make(name.path + MAP, size=name.chunk_count)
            self._make(name.path + TABLE + ".new", content=table)
            os.rename(
                name.path + TABLE + ".new",
                name.path + TABLE,
                src_dir_fd=self._directory_fd,
                dst_dir_fd=self._directory_fd,
            )
        except BaseException:
            self.forget(name)
            raise
        return PartialFile(name, digests, bytearray(name.chunk_count), self)

    def forget(self, name: ContentName) -> None:
        """Removes the partial file, its table and its map; the object, if any, stays."""
        for suffix in (TABLE, TABLE + ".new", MAP, ""):
            try:
                os.unlink(name.path + suffix, dir_fd=self._directory_fd)
            except FileNotFoundError:
                pass
        self._descriptors.drop(("data", name))
        self._descriptors.drop(("map", name))

    def data(self, name: ContentName) -> OpenFile:
        """The open data file; for reading alone once it is complete."""
        return self._descriptors.get(("data", name), lambda: self._open_data(name))

    def map(self, name: ContentName) -> OpenFile:
        """The open map."""
        return self._descriptors.get(
            ("map", name), lambda: os.open(name.path + MAP, os.O_RDWR, dir_fd=self._directory_fd)
        )

    def link(self, name: ContentName, objects: Objects) -> None:
        """Makes the data file read-only and an object."""
        self._descriptors.drop(("map", name))
        self._descriptors.drop(("data", name))
        os.chmod(name.path, OBJECT_MODE, dir_fd=self._directory_fd)
        objects.link(name, name.path, self._directory_fd)

    def _open_data(self, name: ContentName) -> int:
        mode = os.stat(name.path, dir_fd=self._directory_fd).st_mode
        access = os.O_RDWR if mode & 0o200 else os.O_RDONLY
        return os.open(name.path, access, dir_fd=self._directory_fd)

    def _make(self, path: str, *, size: int = 0, content: bytes = b"") -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(path, flags, _FILLING_MODE, dir_fd=self._directory_fd)
        try:
            write_whole(descriptor, content, 0)
            if size:
                os.truncate(descriptor, size)
        finally:
            os.close(descriptor)

    def _read(self, path: str) -> bytes:
        descriptor = os.open(path, os.O_RDONLY, dir_fd=self._directory_fd)
        with open(descriptor, "rb") as file:
            return file.read()


def _chunk_range(name: ContentName, offset: int, length: int) -> tuple[int, int]:
    end = min(offset + length, name.size)
    if offset < 0 or end <= offset:
        return 0, 0
    return offset // CHUNK_SIZE, -(-end // CHUNK_SIZE)


def _unfinished(descriptor: int) -> list[str]:
    files = set(os.listdir(descriptor))
    found = []
    for file in files:
        base = file.removesuffix(".new").removesuffix(TABLE).removesuffix(MAP)
        if (
            file.endswith(".new")
            or not {base, base + TABLE, base + MAP} <= files
            or os.stat(base, dir_fd=descriptor).st_nlink > 1  # the object's name is the other
        ):
            found.append(file)
    return found
