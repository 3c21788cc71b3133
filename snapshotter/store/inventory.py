"""What is in the store's directories, and whether it is what its name says. Only reads.

Users: the store itself, before it removes something as corrupt, and processes that look after the
disk. Whatever vanishes or is still being written meanwhile is passed over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshotter.digest import sha256
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.store import chunk_table
from snapshotter.store.objects import FAN_OUT
from snapshotter.store.partial import MAP, TABLE

_STAT_BLOCK_BYTES = 512
"""Unit of st_blocks, on every file system (stat(2))."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An object or a partial file; ``arrived_at_s`` is when its last byte was written.

    ``links`` is the number of names that its inode has: a partial file that became an object
    shares it with that object.
    """

    name: ContentName
    disk_bytes: int
    arrived_at_s: float
    links: int


def list_files(directory: Path) -> Iterator[StoredFile]:
    """The files of objects below ``directory`` (OBJECTS, ARRIVALS or partial), sorted by name."""
    for fan_out in FAN_OUT:
        try:
            files = sorted(os.listdir(directory / fan_out))
        except FileNotFoundError:
            continue  # partial/ makes its directories when they are needed
        for file in files:
            try:
                name = ContentName.parse(fan_out.encode(), file.encode())
            except InvalidInputError:
                continue  # a chunk table or a map
            if (stored := read_stored(directory, name)) is not None:
                yield stored


def read_stored(directory: Path, name: ContentName) -> StoredFile | None:
    """That file of ``directory``, None if it is not there."""
    try:
        found = os.stat(directory / name.path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return StoredFile(name, found.st_blocks * _STAT_BLOCK_BYTES, found.st_mtime, found.st_nlink)


def find_object_fault(directory: Path, name: ContentName) -> str | None:
    """What is wrong with the object ``name`` in ``directory``; None if it is right or not there.

    Reads all of it.
    """
    try:
        descriptor = os.open(directory / name.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(descriptor).st_size
        if size != name.size:
            return f"it has {size} bytes"
        buffer = _buffer(name)
        digests = [
            sha256(_read_chunk(descriptor, name, index, buffer))
            for index in range(name.chunk_count)
        ]
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    finally:
        os.close(descriptor)
    found = chunk_table.content_name(digests, size)
    return None if found == name else "its bytes are not those of its name"


def find_partial_fault(directory: Path, name: ContentName) -> str | None:
    """What is wrong with a partial file; None if it is right, not there or still being made.

    Reads its chunk table and every chunk that its map says is there.
    """
    path = directory / name.path
    try:
        # The map first: a chunk that it has was written before.
        present = Path(f"{path}{MAP}").read_bytes()[: name.chunk_count]
        digests = chunk_table.decode(Path(f"{path}{TABLE}").read_bytes(), name)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except CorruptError as error:
        return f"its {error}"
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    buffer = _buffer(name)
    try:
        for index in (index for index, is_here in enumerate(present) if is_here):
            piece = _read_chunk(descriptor, name, index, buffer)
            if sha256(piece) != digests[index]:
                return f"its chunk {index} is not what the chunk table says"
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    finally:
        os.close(descriptor)
    return None


def _buffer(name: ContentName) -> memoryview:
    return memoryview(bytearray(min(name.size, CHUNK_SIZE)))


def _read_chunk(descriptor: int, name: ContentName, index: int, buffer: memoryview) -> memoryview:
    """Chunk ``index`` in ``buffer``; fewer bytes where the file is short."""
    wanted = buffer[: chunk_table.chunk_length(name, index)]
    got = 0
    while got < len(wanted):
        count = os.preadv(descriptor, [wanted[got:]], index * CHUNK_SIZE + got)
        if count == 0:
            break
        got += count
    return wanted[:got]
