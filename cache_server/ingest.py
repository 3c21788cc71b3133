"""Ingests a layer: one streaming pass from its compressed blob to chunks, entries and a record.

Users: prepare, in a thread for each layer. Two threads share the work, since hashing and
(de)compression release the GIL: the caller's reads the blob, digests it, decompresses it and
digests the tar; a second one parses the tar and stores the chunks. A short queue between them
bounds memory whatever the size of the layer.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

from cache_server.formats.compression import decompress
from cache_server.formats.tar import read_tar
from cache_server.library import Batch, BlobDescriptor, LayerRecord, Library
from snapshotter.digest import format_digest, parse_digest
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.projection.tree import EntryKind, LayerEntry

_QUEUE_PIECES = 8
"""Decompressed pieces (512 KiB each) that may wait for the second thread."""


def ingest_layer(
    library: Library,
    blob: Iterable[bytes],
    *,
    descriptor: BlobDescriptor,
    diff_id: str,
    on_progress: Callable[[int], None] = lambda done_bytes: None,
) -> LayerRecord:
    """Reads a layer's blob into the library and returns its record; durable on return.

    ``blob`` gives the blob's bytes as the registry has them, in pieces of any length, and is read
    in the caller's thread; not at all if the library has the layer already. ``on_progress`` is
    called there with the number of blob bytes read so far.

    Raises CorruptError if the blob is not what ``descriptor`` and ``diff_id`` say, or is damaged,
    and InvalidInputError for what a layer must not hold; both name the layer and, where it is one,
    the entry. Whatever is raised, by ``blob`` too, the library then knows nothing of the layer.
    """
    known = library.layer(diff_id)
    if known is not None:
        return known
    parse_digest(diff_id)
    parse_digest(descriptor.digest)
    with library.batch() as batch:
        try:
            counts = _pass_through(batch, _Checked(blob, descriptor, on_progress), diff_id)
        except (CorruptError, InvalidInputError) as error:
            raise type(error)(f"layer {diff_id} (blob {descriptor.digest}): {error}") from error
        record = LayerRecord(diff_id, descriptor, *counts)
        batch.commit(record)
    return record


class _Checked:
    """A blob's bytes on their way through, counted and digested."""

    def __init__(
        self, blob: Iterable[bytes], descriptor: BlobDescriptor, on_progress: Callable[[int], None]
    ) -> None:
        self._blob = blob
        self._descriptor = descriptor
        self._on_progress = on_progress
        self._size = 0
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._blob:
            self._size += len(piece)
            if self._size > self._descriptor.size:
                raise CorruptError(f"the blob is longer than its {self._descriptor.size} bytes")
            self._digest.update(piece)
            yield piece
            self._on_progress(self._size)

    def verify(self) -> None:
        """Refuses a blob that is not the descriptor's."""
        if self._size != self._descriptor.size:
            raise CorruptError(f"the blob has {self._size} bytes, not {self._descriptor.size}")
        found = format_digest(self._digest.digest())
        if found != self._descriptor.digest:
            raise CorruptError(f"the blob's digest is {found}")


def _pass_through(batch: Batch, blob: _Checked, diff_id: str) -> tuple[int, int, int]:
    """Feeds the blob to a second thread that fills ``batch``; verifies every digest at the end."""
    tar_digest = hashlib.sha256()
    pieces = _Pieces()
    with ThreadPoolExecutor(1, thread_name_prefix="ingest") as pool:
        stored = pool.submit(_consume, batch, pieces)
        try:
            for piece in decompress(blob):
                if not pieces.put(piece):
                    break
                tar_digest.update(piece)
        except BaseException:
            pieces.end(is_whole=False)
            raise
        pieces.end(is_whole=True)
        counts = stored.result()
    blob.verify()
    found = format_digest(tar_digest.digest())
    if found != diff_id:
        raise CorruptError(f"the tar's digest is {found}")
    return counts


class _Pieces:
    """Hands pieces of the tar from the thread that decompresses to the one that stores."""

    def __init__(self) -> None:
        self._queue: Queue[bytes | None] = Queue(_QUEUE_PIECES)
        self._is_wanted = True
        self._is_whole = False
        self._is_ended = False

    def put(self, piece: bytes) -> bool:
        """Hands a piece over, waiting for room; False once the other side has failed."""
        self._queue.put(piece)
        return self._is_wanted

    def end(self, *, is_whole: bool) -> None:
        """Says that no more comes; if not ``is_whole``, because this side has failed."""
        self._is_whole = is_whole
        self._queue.put(None)

    def __iter__(self) -> Iterator[bytes]:
        while (piece := self._queue.get()) is not None:
            yield piece
        self._is_ended = True
        if not self._is_whole:
            raise CorruptError("the blob could not be read to its end")

    def discard(self) -> None:
        """After a failure to use them: lets the other side go on, to its end."""
        self._is_wanted = False
        while not self._is_ended:
            self._is_ended = self._queue.get() is None


def _consume(batch: Batch, pieces: _Pieces) -> tuple[int, int, int]:
    try:
        return _store(batch, pieces)
    except BaseException:
        pieces.discard()
        raise


def _store(batch: Batch, pieces: Iterable[bytes]) -> tuple[int, int, int]:
    """Fills ``batch`` from a tar; returns the numbers of entries, files and content bytes."""
    entries = files = content_bytes = left = 0
    digests: list[bytes] = []
    entry = LayerEntry(EntryKind.NODE, b"")
    for event in read_tar(pieces):
        if isinstance(event, LayerEntry):
            entry, left = event, event.size
            entries += 1
            files += event.kind == EntryKind.NODE and stat.S_ISREG(event.mode)
            content_bytes += left
            digests = []
        else:
            digests.append(batch.add_chunk(event))
            left -= len(event)
            if not left:
                entry.content = batch.add_file(digests, entry.size).content_id
        if not left:
            batch.add_entry(entry)
    return entries, files, content_bytes
