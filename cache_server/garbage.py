"""Removes what no image needs any more: rows of the catalog, then bytes of packs.

Users: the library, while nothing is being added to it. Reading goes on meanwhile. Each step is one
transaction after which the files that it made useless are removed; a crash in between leaves
files that the catalog does not know, which the next opening of the packs removes. A pack of which
more than a quarter is garbage is rewritten: its living chunks go to other packs first.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cache_server.catalog import Catalog
from cache_server.packs import PACK_SIZE, Pack, Packs
from cache_server.records import PackRows
from snapshotter.cache_v1.protocol import Collected
from snapshotter.names import ContentName

_WORST_SHARE = 4
"""A pack is rewritten when more than one of so many of its bytes are garbage."""

_OUTLINE = """
CREATE TEMP TABLE live_chunks (digest BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TEMP TABLE live_tables (content_id BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TEMP TABLE live_layers (diff_id TEXT PRIMARY KEY) WITHOUT ROWID
"""
_TABLES = ("live_chunks", "live_tables", "live_layers")


@dataclass(frozen=True, slots=True)
class Live:
    """One thing that is needed: a layer (its diffID) or content, its chunk tables and chunks."""

    diff_id: str | None
    tables: list[ContentName]
    chunks: list[bytes]


@dataclass(frozen=True, slots=True)
class _Source:
    """A pack by its number in the catalog, its size and how much of it is needed, in bytes."""

    number: int
    path: str
    size_bytes: int
    live_bytes: int

    @property
    def is_worst(self) -> bool:
        return (self.size_bytes - self.live_bytes) * _WORST_SHARE > self.size_bytes


def collect(catalog: Catalog, packs: Packs, live: Iterable[Live], *, dry_run: bool) -> Collected:
    """Removes everything that is not ``live``; with ``dry_run`` only says what it would be.

    SnapshotterError when the disk fails: what was done until then is done.
    """
    with catalog.transaction() as cursor, _marked(cursor, live):
        sources = _sources(cursor)
        collected = _count(cursor, sources)
        if not dry_run:
            _remove_rows(cursor)
    if dry_run:
        return collected
    dropped = [source for source in sources if not source.live_bytes]
    worst = [source for source in sources if source.live_bytes and source.is_worst]
    packs.retire(source.path for source in (*dropped, *worst))
    for source in dropped:
        with catalog.transaction() as cursor:
            _forget_source(cursor, source)
        packs.remove(source.path)
    for source in worst:
        _rewrite(catalog, packs, source)
    packs.sync_names()
    return collected


@contextmanager
def _marked(cursor: sqlite3.Cursor, live: Iterable[Live]) -> Iterator[None]:
    """Tables of what is needed, for as long as the context lasts."""
    for statement in _OUTLINE.split(";"):
        cursor.execute(statement)
    for each in live:
        if each.diff_id is not None:
            cursor.execute("INSERT INTO live_layers VALUES (?)", (each.diff_id,))
        cursor.executemany(
            "INSERT OR IGNORE INTO live_tables VALUES (?)",
            [(name.content_id,) for name in each.tables],
        )
        cursor.executemany(
            "INSERT OR IGNORE INTO live_chunks VALUES (?)", [(digest,) for digest in each.chunks]
        )
    yield
    for table in _TABLES:
        cursor.execute(f"DROP TABLE {table}")


def _sources(cursor: sqlite3.Cursor) -> list[_Source]:
    rows = cursor.execute(
        "SELECT id, path, size_bytes, (SELECT total(length) FROM chunks"
        " WHERE source = id AND digest IN live_chunks)"
        " FROM sources WHERE kind = 'pack'"
    )
    return [_Source(number, path, size, int(live)) for number, path, size, live in rows]


def _count(cursor: sqlite3.Cursor, sources: list[_Source]) -> Collected:
    def count(query: str) -> int:
        (number,) = cursor.execute(query).fetchone()
        return int(number)

    going = [source for source in sources if not source.live_bytes or source.is_worst]
    return Collected(
        layers=count("SELECT count(*) FROM layers WHERE diff_id NOT IN live_layers"),
        chunk_tables=count("SELECT count(*) FROM chunk_tables WHERE content_id NOT IN live_tables"),
        chunks=count("SELECT count(*) FROM chunks WHERE digest NOT IN live_chunks"),
        packs_dropped=sum(not source.live_bytes for source in going),
        packs_rewritten=sum(bool(source.live_bytes) for source in going),
        freed_bytes=sum(source.size_bytes - source.live_bytes for source in going),
    )


def _remove_rows(cursor: sqlite3.Cursor) -> None:
    cursor.execute("DELETE FROM layers WHERE diff_id NOT IN live_layers")
    cursor.execute("DELETE FROM blobs WHERE diff_id NOT IN live_layers")
    cursor.execute("DELETE FROM chunk_tables WHERE content_id NOT IN live_tables")
    cursor.execute("DELETE FROM chunks WHERE digest NOT IN live_chunks")


def _forget_source(cursor: sqlite3.Cursor, source: _Source) -> None:
    """The row stays, so that its number is never another pack's: readers remember numbers."""
    cursor.execute(
        "UPDATE sources SET kind = 'removed', path = path || '#' || id, size_bytes = 0"
        " WHERE id = ?",
        (source.number,),
    )


def _rewrite(catalog: Catalog, packs: Packs, source: _Source) -> None:
    """Moves a pack's chunks to other packs, as they are: who reads them checks them."""
    rows = catalog.chunks_of(source.number)
    taken: list[Pack] = []
    moved: list[PackRows] = []
    is_committing = False
    try:
        for digest, offset, length, codec in rows:
            if not taken or taken[-1].size >= PACK_SIZE:
                taken.append(packs.take())
                moved.append(PackRows(taken[-1].name))
            place = taken[-1].append(packs.read(source.path, offset, length))
            moved[-1].chunks.append((digest, place, length, codec))
        for pack, pack_rows in zip(taken, moved, strict=True):
            pack.sync()
            pack_rows.size_bytes = pack.size
        packs.sync_names()
        is_committing = True
        with catalog.transaction() as cursor:
            for pack_rows in moved:
                catalog.move_chunks(cursor, pack_rows)
            _forget_source(cursor, source)
        is_committing = False
        while taken:
            packs.keep(taken.pop())
    finally:
        while taken:
            packs.drop(taken.pop(), may_be_committed=is_committing)
    packs.remove(source.path)
