"""What the library knows, in one SQLite file: where each chunk is, chunk tables, layers, images.

Users: the library alone. Every change is one transaction, durable when it returns (WAL with
synchronous=FULL); a row that refers to pack bytes is committed only after those bytes are on disk.
Reads come from any thread, each on a connection of its own from a small pool.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from cache_server.records import (
    Addition,
    BlobDescriptor,
    ChunkLocation,
    LayerRecord,
    PackRows,
    Source,
    StoredImage,
)
from snapshotter.cache_v1.protocol import Prepared
from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import CorruptError, SnapshotterError, UnsupportedError
from snapshotter.names import ContentName

CATALOG_VERSION = 1
"""Kept as SQLite's user_version; a catalog with a higher one is refused."""

_MAX_QUERY_DIGESTS = 256

_SCHEMA = """
CREATE TABLE sources (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, path TEXT NOT NULL, size_bytes INTEGER NOT NULL,
    UNIQUE (kind, path)
);
CREATE TABLE chunks (
    digest BLOB PRIMARY KEY, source INTEGER NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, codec INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE chunk_tables (
    content_id BLOB PRIMARY KEY, size INTEGER NOT NULL, chunk_table BLOB NOT NULL
);
CREATE TABLE layers (
    diff_id TEXT PRIMARY KEY, blob_digest TEXT NOT NULL, blob_size INTEGER NOT NULL,
    media_type TEXT NOT NULL, entries INTEGER NOT NULL, files INTEGER NOT NULL,
    content_bytes INTEGER NOT NULL, listing BLOB NOT NULL
);
CREATE TABLE blobs (digest TEXT PRIMARY KEY, diff_id TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE images (
    handle TEXT PRIMARY KEY, architecture TEXT NOT NULL, saved_at_s REAL NOT NULL,
    prepared BLOB NOT NULL
);
CREATE TABLE image_references (
    reference TEXT NOT NULL, architecture TEXT NOT NULL, handle TEXT NOT NULL,
    saved_at_s REAL NOT NULL, PRIMARY KEY (reference, architecture)
) WITHOUT ROWID;
CREATE INDEX references_by_handle ON image_references (handle);
CREATE TABLE image_chains (
    chain_id TEXT NOT NULL, architecture TEXT NOT NULL, handle TEXT NOT NULL,
    layers_above INTEGER NOT NULL, PRIMARY KEY (chain_id, architecture, handle)
) WITHOUT ROWID;
"""


class Catalog:
    """The SQLite file at ``path``; made when it is not there.

    Raises UnsupportedError for a newer layout and CorruptError for a file that is no catalog.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: deque[sqlite3.Connection] = deque()
        self._write_lock = threading.Lock()
        self._sources: dict[int, Source] = {}
        self._writer = self._connect()
        try:
            self._set_up()
        except BaseException:
            self._writer.close()
            raise

    def close(self) -> None:
        """Closes every connection; no call may be under way."""
        while self._idle:
            self._idle.pop().close()
        self._writer.close()

    def _connect(self) -> sqlite3.Connection:
        try:
            # Autocommit: transactions are explicit. Threads take turns on a connection.
            return sqlite3.connect(
                self._path, isolation_level=None, check_same_thread=False, cached_statements=64
            )
        except sqlite3.Error as error:
            raise SnapshotterError(f"catalog {self._path}: cannot be opened: {error}") from error

    def _set_up(self) -> None:
        try:
            version: int = self._writer.execute("PRAGMA user_version").fetchone()[0]
        except sqlite3.DatabaseError as error:
            raise CorruptError(
                f"catalog {self._path}: {error}; remove its directory and import again"
            ) from error
        if version > CATALOG_VERSION:
            raise UnsupportedError(
                f"catalog {self._path} has layout {version}, newer than {CATALOG_VERSION}: "
                "use the version that wrote it, or another root"
            )
        self._writer.execute("PRAGMA journal_mode = WAL").fetchone()
        self._writer.execute("PRAGMA synchronous = FULL")
        if version == 0:
            with self.transaction() as cursor:
                for statement in _SCHEMA.split(";"):
                    cursor.execute(statement)
                cursor.execute(f"PRAGMA user_version = {CATALOG_VERSION}")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Cursor]:
        """All changes made in the context, or none; SnapshotterError if SQLite fails."""
        with self._write_lock:
            cursor = self._writer.cursor()
            try:
                cursor.execute("BEGIN IMMEDIATE")
                yield cursor
                cursor.execute("COMMIT")
            except sqlite3.Error as error:
                raise SnapshotterError(f"catalog {self._path}: writing failed: {error}") from error
            finally:
                if self._writer.in_transaction:
                    cursor.execute("ROLLBACK")

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            yield connection
        except sqlite3.Error as error:
            raise SnapshotterError(f"catalog {self._path}: reading it failed: {error}") from error
        finally:
            self._idle.append(connection)

    def _row(self, query: str, *values: object) -> Any:
        with self._reader() as connection:
            return connection.execute(query, values).fetchone()

    # chunks, tables and layers

    def has_chunk(self, digest: bytes) -> bool:
        """Whether the chunk of that raw digest is stored."""
        return self._row("SELECT 1 FROM chunks WHERE digest = ?", digest) is not None

    def find_chunks(self, digests: Sequence[bytes]) -> dict[bytes, ChunkLocation]:
        """Where those of the chunks that are stored are; cheaper than asking for each."""
        found: dict[bytes, ChunkLocation] = {}
        for begin in range(0, len(digests), _MAX_QUERY_DIGESTS):
            asked = digests[begin : begin + _MAX_QUERY_DIGESTS]
            query = f"SELECT * FROM chunks WHERE digest IN ({','.join('?' * len(asked))})"  # noqa: S608
            with self._reader() as connection:
                rows = connection.execute(query, asked).fetchall()
            found |= {row[0]: ChunkLocation(self._source(row[1]), *row[2:]) for row in rows}
        return found

    def _source(self, number: int) -> Source:
        source = self._sources.get(number)
        if source is None:
            row = self._row("SELECT kind, path FROM sources WHERE id = ?", number)
            source = self._sources[number] = Source(*row)
        return source

    def find_table(self, name: ContentName) -> bytes | None:
        """The chunk table of content of that name, as it was stored."""
        row = self._row(
            "SELECT chunk_table FROM chunk_tables WHERE content_id = ? AND size = ?",
            name.content_id,
            name.size,
        )
        return None if row is None else bytes(row[0])

    def find_layer(self, diff_id: str) -> LayerRecord | None:
        """The record of an ingested layer."""
        row = self._row(
            "SELECT blob_digest, blob_size, media_type, entries, files, content_bytes"
            " FROM layers WHERE diff_id = ?",
            diff_id,
        )
        return None if row is None else LayerRecord(diff_id, BlobDescriptor(*row[:3]), *row[3:])

    def find_listing(self, diff_id: str) -> bytes | None:
        """The encoded entries of an ingested layer."""
        row = self._row("SELECT listing FROM layers WHERE diff_id = ?", diff_id)
        return None if row is None else bytes(row[0])

    def find_blob(self, blob_digest: str) -> str | None:
        """The diffID of the layer that this blob was seen to hold."""
        row = self._row("SELECT diff_id FROM blobs WHERE digest = ?", blob_digest)
        return None if row is None else str(row[0])

    def pack_sizes(self) -> dict[str, int]:
        """Path and committed size in bytes of every pack."""
        with self._reader() as connection:
            rows = connection.execute("SELECT path, size_bytes FROM sources WHERE kind = 'pack'")
            return dict(rows.fetchall())

    def add(self, addition: Addition) -> None:
        """Commits an addition whole, or not at all. Its pack bytes must be on disk already."""
        with self.transaction() as cursor:
            for pack in addition.packs:
                self._add_pack(cursor, pack)
            cursor.executemany(
                "INSERT OR IGNORE INTO chunk_tables VALUES (?, ?, ?)",
                [(name.content_id, name.size, table) for name, table in addition.tables.items()],
            )
            layer = addition.layer
            if layer is None:
                return
            blob = layer.blob
            cursor.execute(
                "INSERT OR IGNORE INTO layers VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    layer.diff_id,
                    blob.digest,
                    blob.size,
                    blob.media_type,
                    layer.entries,
                    layer.files,
                    layer.content_bytes,
                    addition.listing,
                ),
            )
            cursor.execute(
                "INSERT OR IGNORE INTO blobs VALUES (?, ?)", (blob.digest, layer.diff_id)
            )

    def chunks_of(self, source: int) -> list[tuple[bytes, int, int, int]]:
        """Digest, offset, length and codec of each chunk in a source, in the order of offsets."""
        with self._reader() as connection:
            return connection.execute(
                "SELECT digest, offset, length, codec FROM chunks WHERE source = ? ORDER BY offset",
                (source,),
            ).fetchall()

    def move_chunks(self, cursor: sqlite3.Cursor, pack: PackRows) -> None:
        """Within a transaction: says that these chunks are in ``pack`` now."""
        source = self._note_pack(cursor, pack)
        cursor.executemany(
            "UPDATE chunks SET source = ?, offset = ? WHERE digest = ?",
            [(source, offset, digest) for digest, offset, _, _ in sorted(pack.chunks)],
        )

    def _note_pack(self, cursor: sqlite3.Cursor, pack: PackRows) -> int:
        (source,) = cursor.execute(
            "INSERT INTO sources (kind, path, size_bytes) VALUES ('pack', ?, ?)"
            " ON CONFLICT (kind, path) DO UPDATE SET size_bytes = excluded.size_bytes"
            " RETURNING id",
            (pack.path, pack.size_bytes),
        ).fetchone()
        return int(source)

    def _add_pack(self, cursor: sqlite3.Cursor, pack: PackRows) -> None:
        source = self._note_pack(cursor, pack)
        # In digest order the B-tree's pages are visited once each.
        cursor.executemany(
            "INSERT OR IGNORE INTO chunks VALUES (?, ?, ?, ?, ?)",
            [
                (digest, source, offset, length, codec)
                for digest, offset, length, codec in sorted(pack.chunks)
            ],
        )

    # images

    def save_image(self, image: StoredImage) -> None:
        """Adds or replaces an image; its references point to it from now on, and no others do."""
        prepared = image.prepared
        architecture, handle, time_s = prepared.architecture, image.handle, image.saved_at_s
        height = len(prepared.layers) - 1
        with self.transaction() as cursor:
            cursor.execute(
                "INSERT OR REPLACE INTO images VALUES (?, ?, ?, ?)",
                (handle, architecture, time_s, msgspec.msgpack.encode(prepared)),
            )
            cursor.executemany(
                "INSERT OR REPLACE INTO image_references VALUES (?, ?, ?, ?)",
                [(reference, architecture, handle, time_s) for reference in image.references],
            )
            cursor.executemany(
                "INSERT OR REPLACE INTO image_chains VALUES (?, ?, ?, ?)",
                [
                    (layer.chain_id, architecture, handle, height - index)
                    for index, layer in enumerate(prepared.layers)
                ],
            )

    def remove_reference(self, reference: str, architecture: str) -> None:
        """Removes a name of an image, durably."""
        with self.transaction() as cursor:
            cursor.execute(
                "DELETE FROM image_references WHERE reference = ? AND architecture = ?",
                (reference, architecture),
            )

    def remove_image(self, handle: str) -> None:
        """Removes an image with its names, durably. Its layers stay until they are collected."""
        with self.transaction() as cursor:
            for table in ("image_chains", "image_references", "images"):
                cursor.execute(f"DELETE FROM {table} WHERE handle = ?", (handle,))  # noqa: S608

    def find_image(self, handle: str) -> StoredImage | None:
        """The image of that handle."""
        with self._reader() as connection:
            row = connection.execute(
                "SELECT handle, prepared, saved_at_s FROM images WHERE handle = ?", (handle,)
            ).fetchone()
            return None if row is None else self._stored_image(connection, *row)

    def find_reference(self, reference: str, architecture: str) -> StoredImage | None:
        """The image that this reference named when it was last saved."""
        row = self._row(
            "SELECT handle FROM image_references WHERE reference = ? AND architecture = ?",
            reference,
            architecture,
        )
        return None if row is None else self.find_image(row[0])

    def find_chain(self, chain_id: str, architecture: str) -> StoredImage | None:
        """An image with that chain among its layers, one where it is the top if there is one."""
        row = self._row(
            "SELECT handle FROM image_chains WHERE chain_id = ? AND architecture = ?"
            " ORDER BY layers_above, handle LIMIT 1",
            chain_id,
            architecture,
        )
        return None if row is None else self.find_image(row[0])

    def images(self) -> list[StoredImage]:
        """Every image, oldest first."""
        with self._reader() as connection:
            rows = connection.execute(
                "SELECT handle, prepared, saved_at_s FROM images ORDER BY saved_at_s, handle"
            ).fetchall()
            return [self._stored_image(connection, *row) for row in rows]

    def _stored_image(
        self, connection: sqlite3.Connection, handle: str, prepared: bytes, saved_at_s: float
    ) -> StoredImage:
        references = connection.execute(
            "SELECT reference FROM image_references WHERE handle = ?"
            " ORDER BY saved_at_s, reference",
            (handle,),
        ).fetchall()
        try:
            decoded = msgspec.msgpack.decode(prepared, type=Prepared)
        except DECODE_ERRORS as error:
            raise CorruptError(f"catalog {self._path}: image {handle}: {error}") from error
        return StoredImage(
            prepared=decoded, references=[row[0] for row in references], saved_at_s=saved_at_s
        )
