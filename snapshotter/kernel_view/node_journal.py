"""Which contents the gate has answered with a FUSE file, on disk, so that a successor knows.

overlayfs keeps such a node for as long as a view lives, and asks for it by number. The number
follows from the content's name and the gate's id (a secret, so that no image can be made to clash
with another's content); the way back from number to name is this journal.

File: a header of 40 bytes (``lzgnode1`` and the gate id), then 40 bytes a node: the content id and
the size (u64, little-endian). A record is written before the node is answered. The file matters
only as long as its gate is mounted, so it is never synced; another gate's journal is discarded.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from pathlib import Path

from snapshotter.errors import SnapshotterError
from snapshotter.names import ContentName

CONTENT_NODE = 1 << 63
"""Set in the nodeid of every content, clear in those of directories."""

_MAGIC = b"lzgnode1"
_RECORD = struct.Struct("<32sQ")


class NodeJournal:
    """The journal of gate ``gate_id`` (32 bytes); safe from any thread.

    Raises OSError if the file cannot be read or written.
    """

    def __init__(self, path: Path, gate_id: bytes) -> None:
        self._gate_id = gate_id
        self._lock = threading.Lock()
        self._names: dict[int, ContentName] = {}
        self._nodeids: dict[ContentName, int] = {}
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        self._length = 0
        self._load()

    def close(self) -> None:
        """Closes the file; the journal is not to be used any more."""
        os.close(self._file)

    def nodeid(self, name: ContentName) -> int:
        """The nodeid of this content, journalled or not."""
        raw = _RECORD.pack(name.content_id, name.size)
        short = hashlib.blake2b(raw, digest_size=8, key=self._gate_id).digest()
        return CONTENT_NODE | int.from_bytes(short, "little") >> 1

    def name(self, nodeid: int) -> ContentName | None:
        """The content that was answered with this nodeid."""
        return self._names.get(nodeid)

    def has(self, name: ContentName) -> bool:
        """Whether this content was answered with a node, so that it must be again."""
        return name in self._nodeids

    def add(self, name: ContentName) -> int:
        """Notes that this content is answered with a node, and returns the nodeid.

        Raises SnapshotterError if another content has that nodeid already, OSError if the record
        cannot be written; then nothing has changed.
        """
        nodeid = self.nodeid(name)
        with self._lock:
            known = self._names.get(nodeid)
            if known is None:
                self._append(_RECORD.pack(name.content_id, name.size))
                self._note(name, nodeid)
            elif known != name:
                raise SnapshotterError(f"{name} and {known} have one nodeid; the former is refused")
        return nodeid

    def _append(self, record: bytes) -> None:
        written = os.write(self._file, record)
        if written != len(record):
            os.ftruncate(self._file, self._length)
            raise OSError(f"node journal: only {written} of {len(record)} bytes fit")
        self._length += written

    def _load(self) -> None:
        raw = self._read()
        header = _MAGIC + self._gate_id
        if not raw.startswith(header):
            os.ftruncate(self._file, 0)
            self._append(header)
            return
        # A writer killed in the middle leaves a piece of a record, which nobody was answered.
        self._length = len(raw) - len(raw) % _RECORD.size
        os.ftruncate(self._file, self._length)
        for content_id, size in _RECORD.iter_unpack(raw[len(header) : self._length]):
            name = ContentName(content_id, size)
            self._note(name, self.nodeid(name))

    def _note(self, name: ContentName, nodeid: int) -> None:
        self._names[nodeid] = name
        self._nodeids[name] = nodeid

    def _read(self) -> bytes:
        size = os.fstat(self._file).st_size
        return os.pread(self._file, size, 0)
