"""The library: every chunk, chunk table, layer and image that this cache server has.

The one door to packs and catalog, for ingest and for the server; safe from any thread. Adding goes
through a ``Batch``, which is visible and durable as a whole when ``commit`` returns. Reading gives
verified bytes or an error, never anything else.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import zstandard

from cache_server.catalog import Catalog
from cache_server.garbage import Live, collect
from cache_server.packs import PACK_SIZE, Pack, Packs, sync_directory
from cache_server.records import (
    Addition,
    BlobDescriptor,
    ChunkLocation,
    Codec,
    LayerRecord,
    PackRows,
    Source,
    StoredImage,
)
from snapshotter.cache_v1.protocol import Collected
from snapshotter.decoding import DECODE_ERRORS
from snapshotter.digest import format_digest, parse_digest, sha256
from snapshotter.errors import BusyError, CorruptError, InvalidInputError, NotFoundError
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.projection.tree import LayerEntry
from snapshotter.store import chunk_table

__all__ = [
    "Batch",
    "BlobDescriptor",
    "ChunkLocation",
    "Codec",
    "LayerRecord",
    "Library",
    "Source",
    "StoredImage",
]

_LEVEL = 1
_MAX_UNSAVED_CHUNKS = 65_536
"""Some 20 MB of rows in memory."""

_LISTING_PIECE_BYTES = 256 << 10
_ARRAY32 = b"\xdd"

_entry_encoder = msgspec.msgpack.Encoder()
_listing_decoder: msgspec.msgpack.Decoder[list[LayerEntry]] = msgspec.msgpack.Decoder(
    list[LayerEntry]
)


class Library:
    """The library in directory ``root``, made when it is not there; one process at a time.

    What a crash left beyond the last commit is removed. Raises BusyError when another process has
    it open, UnsupportedError for a newer layout, CorruptError when packs lack committed bytes.
    """

    def __init__(self, root: Path) -> None:
        packs = root / "packs"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        packs.mkdir(mode=0o700, exist_ok=True)
        self._lock_descriptor = _lock(packs)
        try:
            self._catalog = Catalog(root / "catalog.db")
            try:
                self._packs = Packs(packs, self._catalog.pack_sizes())
            except BaseException:
                self._catalog.close()
                raise
        except BaseException:
            os.close(self._lock_descriptor)
            raise
        sync_directory(root)
        self._local = threading.local()

    def close(self) -> None:
        """Closes files and lets another process open the library; no call may be under way."""
        self._packs.close()
        self._catalog.close()
        os.close(self._lock_descriptor)

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def layer(self, diff_id: str) -> LayerRecord | None:
        """The record of a layer, None if it was not ingested."""
        return self._catalog.find_layer(diff_id)

    def layer_entries(self, diff_id: str) -> list[LayerEntry]:
        """The entries of an ingested layer, in the order of its tar; else NotFoundError."""
        record, listing = self.layer(diff_id), self._catalog.find_listing(diff_id)
        if record is None or listing is None:
            raise NotFoundError(f"layer {diff_id}: not ingested")
        try:
            packed = zstandard.ZstdDecompressor().decompressobj().decompress(listing)
            count = record.entries.to_bytes(4, "big")
            return _listing_decoder.decode(b"".join((_ARRAY32, count, packed)))
        except (zstandard.ZstdError, *DECODE_ERRORS) as error:
            raise CorruptError(f"layer {diff_id}: its list of entries: {error}") from error

    def diff_id_of_blob(self, blob_digest: str) -> str | None:
        """The diffID of the layer that this blob was seen to hold, None if it was never read."""
        return self._catalog.find_blob(blob_digest)

    def locate(self, digest: bytes) -> ChunkLocation:
        """Where the chunk of that raw digest is stored; NotFoundError if it is not."""
        location = self.locate_all((digest,)).get(digest)
        if location is None:
            raise NotFoundError(f"chunk {format_digest(digest)}: not in the library")
        return location

    def locate_all(self, digests: Sequence[bytes]) -> dict[bytes, ChunkLocation]:
        """Where those of the chunks that are stored are, by raw digest."""
        return self._catalog.find_chunks(digests)

    def read_chunk(self, digest: bytes) -> bytes:
        """A chunk's bytes, verified. Raises NotFoundError or, naming the pack, CorruptError."""
        return self.read_located(digest, self.locate(digest))

    def read_located(self, digest: bytes, location: ChunkLocation) -> bytes:
        """A chunk's bytes from where it is stored, verified; else CorruptError naming the pack."""
        data = self.read_unverified(digest, location)
        if sha256(data) != digest:
            raise CorruptError(
                f"{_where(digest, location)} at {location.offset}: its bytes are not its digest's"
            )
        return data

    def read_unverified(self, digest: bytes, location: ChunkLocation) -> bytes:
        """The same for those who compare digests themselves; CorruptError if it is unreadable."""
        stored = self._packs.read(location.source.path, location.offset, location.length)
        if location.codec == Codec.RAW:
            return stored
        return self._decompress(stored, _where(digest, location))

    def check_located(self, location: ChunkLocation) -> None:
        """Raises CorruptError, naming the pack, if what is to be sent from it is not there."""
        self._packs.check(location.source.path, location.offset, location.length)

    def send_located(self, location: ChunkLocation, target: int) -> None:
        """Sends a chunk that is stored raw to a blocking socket, unverified and uncopied.

        Raises CorruptError, naming the pack, if it ends too early, OSError if the peer is gone.
        """
        self._packs.send(location.source.path, location.offset, location.length, target)

    def _decompress(self, frame: bytes, where: str) -> bytes:
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
        try:
            # The frame's own word on its size is checked before memory is taken for it.
            if not 0 <= zstandard.frame_content_size(frame) <= CHUNK_SIZE:
                raise CorruptError(f"{where}: its frame claims a size out of range")
            data: bytes = decompressor.decompress(frame)
        except zstandard.ZstdError as error:
            raise CorruptError(f"{where}: {error}") from error
        return data

    def chunk_table(self, name: ContentName) -> bytes:
        """The chunk table of content larger than a chunk. Raises NotFoundError, CorruptError."""
        table = self._catalog.find_table(name)
        if table is None:
            raise NotFoundError(f"chunk table of {name}: not in the library")
        if sha256(table) != name.content_id:
            raise CorruptError(f"chunk table of {name}: its digest is not the content id")
        return table

    def chunk_digests(self, name: ContentName) -> list[bytes]:
        """The raw digests of content's chunks, in order. Raises NotFoundError, CorruptError."""
        if not name.is_chunked:
            return [name.content_id]
        return chunk_table.decode(self.chunk_table(name), name)

    def read_content(self, name: ContentName) -> bytes:
        """Whole content, verified. Raises NotFoundError, CorruptError."""
        data = b"".join(map(self.read_chunk, self.chunk_digests(name)))
        if len(data) != name.size:
            raise CorruptError(f"content {name}: its chunks have {len(data)} bytes")
        return data

    def add_content(self, data: bytes | bytearray | memoryview) -> ContentName:
        """Stores content (such as a metadata image) and names it; durable on return.

        Raises InvalidInputError for no bytes at all, which have no name.
        """
        with memoryview(data) as view, self.batch() as batch:
            if not view:
                raise InvalidInputError("content to add is empty")
            digests = [
                batch.add_chunk(view[at : at + CHUNK_SIZE])
                for at in range(0, len(view), CHUNK_SIZE)
            ]
            name = batch.add_file(digests, len(view))
            batch.commit()
        return name

    def batch(self) -> Batch:
        """A batch of additions, to be used as a context manager."""
        return Batch(self._catalog, self._packs)

    def save_image(self, record: StoredImage) -> None:
        """Adds or replaces an image, durably. Its references name it, and no other, from now on;
        those that it had before and that name no other image stay.
        """
        self._catalog.save_image(record)

    def remove_image(self, record: StoredImage, name: str) -> bool:
        """Removes the name from an image that has others too, else the image; whether the latter.

        What it alone needed stays until ``collect_garbage``.
        """
        if name in record.references and len(record.references) > 1:
            self._catalog.remove_reference(name, record.prepared.architecture)
            return False
        self._catalog.remove_image(record.handle)
        return True

    def collect_garbage(self, *, dry_run: bool = False) -> Collected:
        """Removes what no image needs: layers, chunk tables, chunks, and packs of them.

        Nothing may be added meanwhile; reading goes on. With ``dry_run`` only says what it would
        remove. SnapshotterError when the disk fails; calling it again goes on.
        """
        return collect(self._catalog, self._packs, self._live(), dry_run=dry_run)

    def _live(self) -> Iterator[Live]:
        images = self.images()
        for diff_id in {layer.diff_id for image in images for layer in image.prepared.layers}:
            entries = self.layer_entries(diff_id)
            files = {(entry.content, entry.size) for entry in entries if entry.size}
            del entries
            yield self._live_contents(diff_id, (ContentName(*file) for file in files))
        made = (image.prepared.metadata_image for image in images)
        contents = (ContentName(parse_digest(each.content), each.size) for each in made if each)
        yield self._live_contents(None, contents)

    def _live_contents(self, diff_id: str | None, names: Iterable[ContentName]) -> Live:
        live = Live(diff_id, [], [])
        for name in names:
            if name.is_chunked:
                live.tables.append(name)
                live.chunks.extend(chunk_table.decode(self.chunk_table(name), name))
            else:
                live.chunks.append(name.content_id)
        return live

    def find_image(self, handle: str) -> StoredImage | None:
        """The image of that handle, if it was prepared."""
        return self._catalog.find_image(handle)

    def find_reference(self, reference: str, architecture: str) -> StoredImage | None:
        """The image that the reference named when it was last prepared."""
        return self._catalog.find_reference(reference, architecture)

    def find_chain(self, chain_id: str, architecture: str) -> StoredImage | None:
        """An image with that chain among its layers; one that ends with it comes first."""
        return self._catalog.find_chain(chain_id, architecture)

    def images(self) -> list[StoredImage]:
        """Every image, oldest first."""
        return self._catalog.images()


class Batch:
    """Chunks, tables and at most one layer that are being added; of one thread at a time.

    Leaving the context without ``commit`` undoes everything, but for chunks and tables of a very
    large batch: those are saved on the way, to bound memory, and stay, correct but unused.
    """

    def __init__(self, catalog: Catalog, packs: Packs) -> None:
        self._catalog = catalog
        self._packs = packs
        self._taken: list[Pack] = []
        self._rows: list[PackRows] = []
        self._added: set[bytes] = set()
        self._tables: dict[ContentName, bytes] = {}
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
        self._listing = _ListingWriter()
        self._is_committing = False

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._taken:
            self._packs.drop(self._taken.pop(), may_be_committed=self._is_committing)

    def add_chunk(self, data: bytes | memoryview) -> bytes:
        """Stores a chunk unless it is there already; returns its raw digest."""
        digest = sha256(data)
        if digest in self._added or self._catalog.has_chunk(digest):
            return digest
        frame: bytes = self._compressor.compress(data)
        # Less than a sixteenth saved is not worth a reader's decompression.
        is_worth = len(frame) < len(data) - (len(data) >> 4)
        stored, codec = (frame, Codec.ZSTD) if is_worth else (data, Codec.RAW)
        offset = self._pack().append(stored)
        self._rows[-1].chunks.append((digest, offset, len(stored), codec))
        self._added.add(digest)
        if len(self._added) >= _MAX_UNSAVED_CHUNKS:
            self._save()
        return digest

    def _pack(self) -> Pack:
        if not self._taken or self._taken[-1].size >= PACK_SIZE:
            if self._taken:
                self._taken[-1].flush()
            pack = self._packs.take()
            self._taken.append(pack)
            self._rows.append(PackRows(pack.name))
        return self._taken[-1]

    def add_file(self, chunk_digests: list[bytes], size: int) -> ContentName:
        """Names content whose chunks were added, and stores its chunk table if it has one."""
        name = chunk_table.content_name(chunk_digests, size)
        if name.is_chunked:
            self._tables[name] = chunk_table.encode(chunk_digests, size)
        return name

    def add_entry(self, entry: LayerEntry) -> None:
        """Adds the next entry of the layer that ``commit`` will record."""
        self._listing.write(entry)

    def commit(self, layer: LayerRecord | None = None) -> None:
        """Makes the batch, with the layer its entries belong to, durable and then visible."""
        if layer is not None:
            parse_digest(layer.diff_id)
        self._save(layer, self._listing.finish())

    def _save(self, layer: LayerRecord | None = None, listing: bytes = b"") -> None:
        for pack, rows in zip(self._taken, self._rows, strict=True):
            pack.sync()
            rows.size_bytes = pack.size
        if any(not pack.committed for pack in self._taken):
            self._packs.sync_names()
        self._is_committing = True
        self._catalog.add(Addition(self._rows, self._tables, layer, listing))
        self._is_committing = False
        while self._taken:
            self._packs.keep(self._taken.pop())
        self._rows, self._tables, self._added = [], {}, set()


class _ListingWriter:
    """Entries as one zstd frame of msgpack arrays, compressed as they come to keep memory low."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=3).compressobj()
        self._pending = bytearray()
        self._pieces: list[bytes] = []

    def write(self, entry: LayerEntry) -> None:
        self._pending += _entry_encoder.encode(entry)
        if len(self._pending) >= _LISTING_PIECE_BYTES:
            self._pieces.append(self._compressor.compress(self._pending))
            self._pending.clear()

    def finish(self) -> bytes:
        self._pieces.append(self._compressor.compress(self._pending))
        self._pieces.append(self._compressor.flush())
        return b"".join(self._pieces)


def _where(digest: bytes, location: ChunkLocation) -> str:
    return f"chunk {format_digest(digest)} in pack {location.source.path}"


def _lock(directory: Path) -> int:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise BusyError(
            f"library {directory.parent} is in use by another process: stop it, or ask it"
        ) from error
    return descriptor
