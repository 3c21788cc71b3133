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

from msgspec.structs import replace

from cache_server.formats.compression import decompress
from cache_server.formats.tar import read_tar
from cache_server.formats.tar_entry import AUFS_LINKS
from cache_server.formats.tar_fields import show
from cache_server.formats.tar_sparse import ZERO_CHUNK
from cache_server.library import Batch, BlobDescriptor, LayerRecord, Library
from cache_server.limits import IngestLimits
from snapshotter.digest import format_digest, parse_digest
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.projection.tree import EntryKind, LayerEntry

_QUEUE_PIECES = 8
"""Decompressed pieces (512 KiB each) that may wait for the second thread."""
_DEFAULT_LIMITS = IngestLimits()


def ingest_layer(
    library: Library,
    blob: Iterable[bytes],
    *,
    descriptor: BlobDescriptor,
    diff_id: str,
    limits: IngestLimits = _DEFAULT_LIMITS,
    on_progress: Callable[[int], None] = lambda done_bytes: None,
) -> LayerRecord:
    """Reads a layer's blob into the library and returns its record; durable on return.

    ``blob`` gives the blob's bytes as the registry has them, in pieces of any length, and is read
    in the caller's thread; not at all if the library has the layer already. ``on_progress`` is
    called there with the number of blob bytes read so far.

    Raises CorruptError if the blob is not what ``descriptor`` and ``diff_id`` say, or is damaged,
    and InvalidInputError for what a layer must not hold and what exceeds ``limits``; both name the
    layer and, where it is one, the entry. Whatever is raised, by ``blob`` too, the library then
    knows nothing of the layer.
    """
    known = library.layer(diff_id)
    if known is not None:
        return known
    parse_digest(diff_id)
    parse_digest(descriptor.digest)
    with library.batch() as batch:
        try:
            counts = _pass_through(batch, _Checked(blob, descriptor, on_progress), diff_id, limits)
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
        self.read_bytes = 0
        self._digest = hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._blob:
            self.read_bytes += len(piece)
            if self.read_bytes > self._descriptor.size:
                raise CorruptError(f"the blob is longer than its {self._descriptor.size} bytes")
            self._digest.update(piece)
            yield piece
            self._on_progress(self.read_bytes)

    def verify(self) -> None:
        """Refuses a blob that is not the descriptor's."""
        if self.read_bytes != self._descriptor.size:
            raise CorruptError(f"the blob has {self.read_bytes} bytes, not {self._descriptor.size}")
        found = format_digest(self._digest.digest())
        if found != self._descriptor.digest:
            raise CorruptError(f"the blob's digest is {found}")


def _pass_through(
    batch: Batch, blob: _Checked, diff_id: str, limits: IngestLimits
) -> tuple[int, int, int]:
    """Feeds the blob to a second thread that fills ``batch``; verifies every digest at the end."""
    tar_digest = hashlib.sha256()
    pieces = _Pieces()
    with ThreadPoolExecutor(1, thread_name_prefix="ingest") as pool:
        stored = pool.submit(_consume, batch, pieces, limits)
        tar_bytes = 0
        try:
            for piece in decompress(blob):
                tar_bytes += len(piece)
                _check_expansion(tar_bytes, blob.read_bytes, limits)
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


def _check_expansion(tar_bytes: int, blob_bytes: int, limits: IngestLimits) -> None:
    if tar_bytes > limits.layer_bytes:
        raise InvalidInputError(f"decompressed, more than limit layer_bytes: {limits.layer_bytes}")
    if tar_bytes > limits.expansion_floor_bytes and tar_bytes > limits.expansion_ratio * blob_bytes:
        raise InvalidInputError(
            f"{blob_bytes} bytes expand to {tar_bytes} and more"
            f" (limit expansion_ratio: {limits.expansion_ratio})"
        )


def _consume(batch: Batch, pieces: _Pieces, limits: IngestLimits) -> tuple[int, int, int]:
    try:
        return _LayerWriter(batch, limits).write(pieces)
    except BaseException:
        pieces.discard()
        raise


class _LayerWriter:
    """Puts what a tar holds into a batch, and counts it."""

    def __init__(self, batch: Batch, limits: IngestLimits) -> None:
        self._batch = batch
        self._limits = limits
        self._entries = 0
        self._files = 0
        self._content_bytes = 0
        self._names_bytes = 0
        self._zero_digest: bytes | None = None
        self._aufs_links: dict[bytes, LayerEntry] = {}

    def write(self, pieces: Iterable[bytes]) -> tuple[int, int, int]:
        """Returns the numbers of entries, files and content bytes."""
        left = 0
        digests: list[bytes] = []
        entry = LayerEntry(EntryKind.NODE, b"")
        for event in read_tar(pieces, self._limits):
            if isinstance(event, LayerEntry):
                entry, left = event, event.size
                digests = []
                self._count(entry)
            else:
                digests.append(self._add_chunk(event))
                left -= len(event)
                if not left:
                    entry.content = self._batch.add_file(digests, entry.size).content_id
            if not left:
                self._add(entry)
        return self._entries, self._files, self._content_bytes

    def _count(self, entry: LayerEntry) -> None:
        limits = self._limits
        self._entries += 1
        self._content_bytes += entry.size
        self._names_bytes += len(entry.path) + len(entry.target)
        if entry.xattrs:
            self._names_bytes += sum(map(len, entry.xattrs)) + sum(map(len, entry.xattrs.values()))
        if (
            self._entries > limits.layer_entries
            or self._content_bytes > limits.layer_bytes
            or self._names_bytes > limits.names_bytes
        ):
            raise InvalidInputError(
                f"at entry {show(entry.path)}: {self._entries} entries with"
                f" {self._content_bytes} bytes of content and {self._names_bytes} of names"
                f" (limits layer_entries: {limits.layer_entries},"
                f" layer_bytes: {limits.layer_bytes},"
                f" names_bytes: {limits.names_bytes})"
            )

    def _add_chunk(self, data: memoryview) -> bytes:
        if data is not ZERO_CHUNK:
            return self._batch.add_chunk(data)
        if self._zero_digest is None:
            self._zero_digest = self._batch.add_chunk(data)
        return self._zero_digest

    def _add(self, entry: LayerEntry) -> None:
        if entry.path.startswith(AUFS_LINKS):
            self._entries -= 1
            self._content_bytes -= entry.size
            self._aufs_links[entry.path.rpartition(b"/")[2]] = entry
            return
        if entry.kind == EntryKind.HARD_LINK and entry.target.startswith(AUFS_LINKS):
            entry = self._aufs_file(entry)
        self._files += entry.kind == EntryKind.NODE and stat.S_ISREG(entry.mode)
        self._batch.add_entry(entry)

    def _aufs_file(self, link: LayerEntry) -> LayerEntry:
        """What a hard link into AUFS's directory is: the file there, or one more name of it."""
        base = link.target.rpartition(b"/")[2]
        file = self._aufs_links.get(base)
        if file is None:
            raise InvalidInputError(
                f"hard link {show(link.path)}: its target {show(link.target)} is missing"
            )
        if not file.path.startswith(AUFS_LINKS):
            return replace(link, target=file.path)
        self._content_bytes += file.size
        self._aufs_links[base] = replace(file, path=link.path)
        return self._aufs_links[base]
