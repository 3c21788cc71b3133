"""Packs: append-only files of stored chunks, numbered, below ``packs/`` (docs/formats/packs.md).

Users: the library. One writer owns a pack at a time, so several ingests write several packs. A
pack's bytes count only up to the size that the catalog has committed; what lies beyond is what a
crash or a failed ingest left, and is cut off when the packs are opened.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from snapshotter.errors import CorruptError, SnapshotterError

PACK_SIZE = 256 << 20
"""Bytes from which a pack gets no further chunks."""

_BUFFER_BYTES = 1 << 20
_MAX_OPEN = 256
"""Packs kept open for reading; further ones are opened for each read."""


@dataclass(slots=True, eq=False)
class Pack:
    """A pack that takes chunks. ``committed`` is the size in bytes that the catalog knows."""

    name: str
    descriptor: int
    committed: int
    size: int
    buffer: bytearray

    def append(self, data: bytes | memoryview) -> int:
        """Adds stored bytes; returns their offset. They are on disk only after ``sync``."""
        offset = self.size
        self.buffer += data
        self.size += len(data)
        if len(self.buffer) >= _BUFFER_BYTES:
            self.flush()
        return offset

    def flush(self) -> None:
        """Hands buffered bytes to the kernel; SnapshotterError if it does not take them."""
        with memoryview(self.buffer) as view:
            at, start = 0, self.size - len(view)
            try:
                while at < len(view):
                    at += os.pwrite(self.descriptor, view[at:], start + at)
            except OSError as error:
                raise SnapshotterError(
                    f"pack {self.name}: writing at {start + at}: {error}"
                ) from error
        self.buffer = bytearray()

    def sync(self) -> None:
        """Makes everything appended durable; SnapshotterError if that fails."""
        self.flush()
        try:
            os.fdatasync(self.descriptor)
        except OSError as error:
            raise SnapshotterError(f"pack {self.name}: making it durable: {error}") from error


class _Reader:
    """A descriptor for reading that closes when nobody reads from it any more."""

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class Packs:
    """The packs in ``directory``, given the sizes that the catalog has committed.

    What goes beyond them is removed. Raises CorruptError, before that, for a pack that is missing
    or shorter than the catalog knows.
    """

    def __init__(self, directory: Path, committed: dict[str, int]) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._idle: list[Pack] = []
        self._gone: set[str] = set()
        self._readers: dict[str, _Reader] = {}
        for name, size in committed.items():
            self._check(name, size)
        for file in directory.glob("*.pack"):
            if file.name not in committed:
                file.unlink()
        for name, size in committed.items():
            os.truncate(directory / name, size)
            if size < PACK_SIZE:
                descriptor = os.open(directory / name, os.O_RDWR | os.O_CLOEXEC)
                self._idle.append(Pack(name, descriptor, size, size, bytearray()))
        numbers = [int(name.partition(".")[0]) for name in committed]
        self._next_number = max(numbers, default=0) + 1

    def _check(self, name: str, size: int) -> None:
        path = self._directory / name
        found = path.stat().st_size if path.exists() else 0
        if found < size:
            raise CorruptError(
                f"pack {path} has {found} bytes, the catalog knows {size}: "
                f"remove {self._directory.parent} and import again"
            )

    def close(self) -> None:
        """Closes every descriptor; no call may be under way and no pack be taken."""
        for pack in self._idle:
            os.close(pack.descriptor)
        self._readers.clear()
        self._idle.clear()

    def take(self) -> Pack:
        """A pack for the caller alone, with room in it; give it back by ``keep`` or ``drop``."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            name = f"{self._next_number:06d}.pack"
            self._next_number += 1
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(self._directory / name, flags, 0o600)
        except OSError as error:
            raise SnapshotterError(f"pack {self._directory / name}: making it: {error}") from error
        return Pack(name, descriptor, 0, 0, bytearray())

    def keep(self, pack: Pack) -> None:
        """Gives back a pack whose bytes the catalog has committed."""
        pack.committed = pack.size
        if pack.size >= PACK_SIZE:
            os.close(pack.descriptor)
            return
        with self._lock:
            self._idle.append(pack)

    def drop(self, pack: Pack, *, may_be_committed: bool) -> None:
        """Gives back a pack after a failure: cuts off what was added.

        Where a commit may have taken effect nothing is cut; the pack gets no more chunks until
        the packs are opened again and the catalog says how long it is.
        """
        # Not clear(): a traceback may still hold a view of it.
        pack.buffer = bytearray()
        try:
            if not may_be_committed:
                os.ftruncate(pack.descriptor, pack.committed)
                pack.size = pack.committed
        except OSError:
            may_be_committed = True
        if may_be_committed:
            os.close(pack.descriptor)
        else:
            self.keep(pack)

    def retire(self, names: Iterable[str]) -> None:
        """Adds nothing to these packs any more. None of them may be taken."""
        leaving = set(names)
        with self._lock:
            retired = [pack for pack in self._idle if pack.name in leaving]
            self._idle = [pack for pack in self._idle if pack.name not in leaving]
        for pack in retired:
            os.close(pack.descriptor)

    def remove(self, name: str) -> None:
        """Removes a retired pack that the catalog no longer knows. Reads under way finish."""
        with self._lock:
            self._gone.add(name)
            reader = self._readers.pop(name, None)
        del reader
        try:
            os.unlink(self._directory / name)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise SnapshotterError(f"pack {name}: removing it: {error}") from error

    def sync_names(self) -> None:
        """Makes the names of new packs durable."""
        sync_directory(self._directory)

    def read(self, name: str, offset: int, length: int) -> bytes:
        """``length`` stored bytes of a pack; CorruptError if it does not have them. Any thread."""
        reader = self._reader(name)
        return self._read_at(reader.descriptor, name, offset, length)

    def check(self, name: str, offset: int, length: int) -> None:
        """Raises CorruptError unless the pack is there and long enough. Any thread."""
        reader = self._reader(name)
        size = os.fstat(reader.descriptor).st_size
        if size < offset + length:
            raise CorruptError(f"pack {name}: {size} bytes, and {length} are due at {offset}")

    def send(self, name: str, offset: int, length: int, target: int) -> None:
        """Sends stored bytes to a blocking socket, uncopied. Any thread.

        Raises CorruptError if the pack ends too early, OSError if the peer does not take them.
        """
        reader = self._reader(name)  # held, so that it stays open
        at, end = offset, offset + length
        while at < end:
            sent = os.sendfile(target, reader.descriptor, at, end - at)
            if not sent:
                raise CorruptError(f"pack {name}: {at - offset} of {length} bytes at {offset}")
            at += sent

    def _reader(self, name: str) -> _Reader:
        """A descriptor for reading the pack; CorruptError if it cannot be opened."""
        reader = self._readers.get(name)
        if reader is None:
            reader = _Reader(self._open(name))
            with self._lock:
                if len(self._readers) < _MAX_OPEN and name not in self._gone:
                    self._readers.setdefault(name, reader)
        return reader

    def _open(self, name: str) -> int:
        try:
            return os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptError(f"pack {name}: cannot be opened: {error}") from error

    def _read_at(self, descriptor: int, name: str, offset: int, length: int) -> bytes:
        try:
            data = os.pread(descriptor, length, offset)
        except OSError as error:
            raise CorruptError(f"pack {name}: reading at {offset}: {error}") from error
        if len(data) != length:
            raise CorruptError(f"pack {name}: {len(data)} of {length} bytes at {offset}")
        return data


def sync_directory(directory: Path) -> None:
    """Makes the names in a directory durable; SnapshotterError if that fails."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SnapshotterError(f"directory {directory}: making it durable: {error}") from error
