"""Which contents the gate has answered with a FUSE file, on disk, so that a successor knows.

overlayfs keeps such a node for as long as a view needs it, and asks for it by number. The number
follows from the content's name and the gate's id (a secret, so that no image can be made to clash
with another's content); the way back from number to name is this journal. What the kernel has
forgotten leaves it, so that it is never larger than what the kernel itself remembers.

File: a header of 40 bytes (``lzgnode1`` and the gate id), then 40 bytes a record: the content id
and the size (u64, little-endian) with bit 63 set where the node is gone. Zeros follow, which are
room that a full disk cannot take away. A record is written before the node is answered. The file
matters only as long as its gate is mounted, so it is never synced; another gate's is discarded.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from snapshotter.errors import SnapshotterError
from snapshotter.names import ContentName
from snapshotter.store.objects import write_whole

CONTENT_NODE = 1 << 63
"""Set in the nodeid of every content, clear in those of directories."""

_MAGIC = b"lzgnode1"
_RECORD = struct.Struct("<32sQ")
_HEADER_BYTES = _RECORD.size
_GONE = 1 << 63
_ROOM_BYTES = 256 << 10
"""Kept allocated behind the last record: 6,553 more nodes on a disk that is full."""
_SLACK_RECORDS = 4096
"""So many records more than nodes are left in the file before it is written anew."""


class _Node:
    """A content that the kernel knows, by so many lookups that were answered.

    ``is_inherited``: a predecessor answered further ones, nobody knows how many.
    """

    __slots__ = ("is_inherited", "lookups", "name")

    def __init__(self, name: ContentName, *, is_inherited: bool) -> None:
        self.name = name
        self.lookups = 0
        self.is_inherited = is_inherited

    def forget(self, lookups: int) -> bool:
        """Takes off what the kernel forgets; whether it surely knows nothing of the node now.

        When it evicts a node it forgets all lookups at once. Of an inherited node that proves
        enough only if none was answered here: else the latest may still be on its way to it.
        """
        if self.is_inherited and lookups > self.lookups:
            return self.lookups == 0
        self.lookups -= lookups
        return self.lookups <= 0 and not self.is_inherited


class NodeJournal:
    """The journal of gate ``gate_id`` (32 bytes); safe from any thread.

    Raises OSError if the file cannot be read or written.
    """

    def __init__(self, path: Path, gate_id: bytes) -> None:
        self._path = path
        self._header = _MAGIC + gate_id
        self._gate_id = gate_id
        self._lock = threading.Lock()
        self._nodes: dict[int, _Node] = {}
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._length = 0
        self._load()

    def close(self) -> None:
        """Closes the file; the journal is not to be used any more."""
        os.close(self._file)

    def __len__(self) -> int:
        """How many nodes the kernel may know."""
        return len(self._nodes)

    def nodeid(self, name: ContentName) -> int:
        """The nodeid of this content, journalled or not."""
        raw = _RECORD.pack(name.content_id, name.size)
        short = hashlib.blake2b(raw, digest_size=8, key=self._gate_id).digest()
        return CONTENT_NODE | int.from_bytes(short, "little") >> 1

    def name(self, nodeid: int) -> ContentName | None:
        """The content that was answered with this nodeid."""
        node = self._nodes.get(nodeid)
        return None if node is None else node.name

    def has(self, name: ContentName) -> bool:
        """Whether the kernel may know this content as a node, so that it must be one again."""
        return bool(self._nodes) and self.name(self.nodeid(name)) == name

    def add(self, name: ContentName) -> int:
        """Notes that a lookup of this content is answered with a node, and returns the nodeid.

        Raises SnapshotterError if another content has that nodeid already, OSError if the record
        cannot be written; then nothing has changed.
        """
        nodeid = self.nodeid(name)
        with self._lock:
            node = self._nodes.get(nodeid)
            if node is None:
                self._append(_RECORD.pack(name.content_id, name.size))
                node = self._nodes[nodeid] = _Node(name, is_inherited=False)
            elif node.name != name:
                raise SnapshotterError(
                    f"{name} and {node.name} have one nodeid; the former is refused"
                )
            node.lookups += 1
        return nodeid

    def forget(self, forgets: Iterable[tuple[int, int]]) -> int:
        """Drops nodes, each with its number of lookups, that the kernel forgets; how many."""
        gone = []
        with self._lock:
            for nodeid, lookups in forgets:
                node = self._nodes.get(nodeid)
                if node is not None and node.forget(lookups):
                    del self._nodes[nodeid]
                    gone.append(_RECORD.pack(node.name.content_id, node.name.size | _GONE))
            if gone:
                with suppress(OSError):  # a successor then keeps them, which does no harm
                    self._append(b"".join(gone))
                    self._compact()
        return len(gone)

    def _append(self, records: bytes) -> None:
        written = os.pwrite(self._file, records, self._length)
        if written != len(records):
            os.ftruncate(self._file, self._length)
            raise OSError(f"node journal: only {written} of {len(records)} bytes fit")
        self._length += written
        self._make_room()

    def _make_room(self) -> None:
        if os.fstat(self._file).st_size - self._length < _ROOM_BYTES:
            with suppress(OSError):  # the disk is full; there is some room left, or the next fails
                os.posix_fallocate(self._file, self._length, 2 * _ROOM_BYTES)

    def _compact(self) -> None:
        """Writes the file anew once most of its records are of nodes that are gone."""
        records = (self._length - _HEADER_BYTES) // _RECORD.size
        if records < 2 * len(self._nodes) + _SLACK_RECORDS:
            return
        names = (node.name for node in self._nodes.values())
        raw = b"".join([self._header, *(_RECORD.pack(n.content_id, n.size) for n in names)])
        temporary = self._path.with_name(f".{self._path.name}.new")
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_whole(file, raw, 0)
            temporary.replace(self._path)
        except OSError:
            os.close(file)
            raise
        os.close(self._file)
        self._file, self._length = file, len(raw)
        self._make_room()

    def _load(self) -> None:
        raw = os.pread(self._file, os.fstat(self._file).st_size, 0)
        if not raw.startswith(self._header):
            os.ftruncate(self._file, 0)
            self._append(self._header)
            return
        # A writer killed in the middle leaves a piece of a record, which nobody was answered.
        whole = len(raw) - len(raw) % _RECORD.size
        self._length = _HEADER_BYTES
        for content_id, size in _RECORD.iter_unpack(raw[_HEADER_BYTES:whole]):
            if not size:
                break
            name = ContentName(content_id, size & ~_GONE)
            if size & _GONE:
                self._nodes.pop(self.nodeid(name), None)
            else:
                self._nodes[self.nodeid(name)] = _Node(name, is_inherited=True)
            self._length += _RECORD.size
        os.ftruncate(self._file, self._length)
        self._make_room()
