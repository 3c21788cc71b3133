"""Records of snapshots, in SQLite: each change is one transaction, durable before it returns.

A snapshot is known by its name (a *key* while it is active or a view, a *name* once committed) and
has an id of its own, which names its directory and its mounts. What was removed stays on a list
until its directory is gone. Times are nanoseconds since 1970. Safe from any thread.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import msgspec

from snapshotter.errors import (
    BusyError,
    CorruptError,
    ExistsError,
    InvalidInputError,
    NotFoundError,
    UnsupportedError,
)

_VERSION = 1
_SCHEMA = f"""
CREATE TABLE snapshots (
    name TEXT PRIMARY KEY, id TEXT NOT NULL UNIQUE, parent TEXT NOT NULL, kind INTEGER NOT NULL,
    chain TEXT, labels TEXT NOT NULL, created_ns INTEGER NOT NULL, updated_ns INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL, inodes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX snapshots_by_parent ON snapshots (parent);
CREATE TABLE removed (id TEXT PRIMARY KEY, lowers TEXT NOT NULL, chain TEXT) WITHOUT ROWID;
PRAGMA user_version = {_VERSION};
"""
_COLUMNS = "name, id, parent, kind, chain, labels, created_ns, updated_ns, size_bytes, inodes"
_BUSY_TIMEOUT_S = 10.0


class Kind(IntEnum):
    """What a snapshot is; the numbers are those of containerd's API."""

    VIEW = 1
    ACTIVE = 2
    COMMITTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One snapshot. ``parent`` is the name of a committed one, or empty.

    ``chain`` is the chain id of a remote snapshot, whose names and content come from the cache
    server, its parents' with them; None for one with a directory. Usage is that at commit.
    """

    name: str
    id: str
    parent: str
    kind: Kind
    chain: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    created_ns: int = 0
    updated_ns: int = 0
    size_bytes: int = 0
    inodes: int = 0


@dataclass(frozen=True, slots=True)
class Removed:
    """A removed snapshot whose directory may be left.

    It was mounted on the directories of ``lowers`` and on the merged image of ``chain``, if any.
    """

    id: str
    lowers: tuple[str, ...]
    chain: str | None


class Metastore:
    """The records in the database at ``path``, which is made when there is none.

    Raises CorruptError when it is damaged and UnsupportedError when a newer version made it;
    neither changes it.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._database = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, timeout=_BUSY_TIMEOUT_S
        )
        try:
            self._open(path)
        except BaseException:
            self._database.close()
            raise

    def _open(self, path: Path) -> None:
        try:
            version = self._database.execute("PRAGMA user_version").fetchone()[0]
            if version > _VERSION:
                raise UnsupportedError(
                    f"records in {path} have version {version}, this program knows {_VERSION}: "
                    "use a newer one, or another --state"
                )
            said = self._database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if said != "ok":
                raise CorruptError(f"records in {path}: {said}")
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            if version == 0:
                self._database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            self._select("LIMIT 0")
            self._database.execute("SELECT id, lowers, chain FROM removed LIMIT 1")
        except sqlite3.DatabaseError as error:
            raise CorruptError(f"records in {path}: {error}") from error

    def close(self) -> None:
        """Closes the database; what was written is in its one file then."""
        with self._lock:
            self._database.close()

    def get(self, name: str) -> Snapshot:
        """One snapshot; NotFoundError if there is none of that name."""
        with self._lock:
            row = self._database.execute(
                f"SELECT {_COLUMNS} FROM snapshots WHERE name = ?",  # noqa: S608 - constants
                (name,),
            ).fetchone()
        if row is None:
            raise NotFoundError(f"snapshot {name!r}: there is none of that name")
        return _snapshot(row)

    def layers(self, name: str) -> tuple[list[str], str | None]:
        """What a mount on that committed snapshot (or on nothing, ``""``) is made of.

        Ids of the snapshots with directories, topmost first, down to the first remote one, and the
        chain id of that: it stands for everything below it, too.
        """
        ids: list[str] = []
        with self._lock:
            while name:
                snapshot = self.get(name)
                if snapshot.chain is not None:
                    return ids, snapshot.chain
                ids.append(snapshot.id)
                name = snapshot.parent
        return ids, None

    def all(self) -> list[Snapshot]:
        """Every snapshot."""
        return self._select("")

    def find(self, *, parent: str, label: str, value: str) -> list[Snapshot]:
        """Those with that parent (empty: without one) whose label has that value."""
        return [
            each
            for each in self._select("WHERE parent = ?", parent)
            if each.labels.get(label) == value
        ]

    def _select(self, condition: str, *values: str) -> list[Snapshot]:
        with self._lock:
            rows = self._database.execute(
                f"SELECT {_COLUMNS} FROM snapshots {condition}",  # noqa: S608 - constants
                values,
            ).fetchall()
        return [_snapshot(row) for row in rows]

    def check(self, snapshot: Snapshot) -> None:
        """Raises what ``add`` would raise now."""
        with self._lock:
            self._check_free(snapshot.name)
            if not snapshot.parent:
                return
            parent = self.get(snapshot.parent)
            if parent.kind is not Kind.COMMITTED:
                raise InvalidInputError(f"snapshot {snapshot.parent!r} is no parent: not committed")

    def add(self, snapshot: Snapshot) -> None:
        """Adds a snapshot; its times are set.

        Raises ExistsError when the name is taken, NotFoundError for a parent that is not there and
        InvalidInputError for one that is not committed.
        """
        with self._changing():
            self.check(snapshot)
            now_ns = time.time_ns()
            self._database.execute(
                f"INSERT INTO snapshots ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
                (
                    snapshot.name,
                    snapshot.id,
                    snapshot.parent,
                    int(snapshot.kind),
                    snapshot.chain,
                    _text(snapshot.labels),
                    now_ns,
                    now_ns,
                    snapshot.size_bytes,
                    snapshot.inodes,
                ),
            )

    def commit(
        self, key: str, name: str, labels: Mapping[str, str], *, size_bytes: int, inodes: int
    ) -> None:
        """The active snapshot ``key`` is ``name`` and committed from now on.

        Raises NotFoundError, ExistsError when the name is taken, and InvalidInputError when
        ``key`` is not active.
        """
        with self._changing():
            self.check_active(key)
            if name != key:
                self._check_free(name)
            now_ns = time.time_ns()
            self._database.execute(
                "UPDATE snapshots SET name = ?, kind = ?, labels = ?, created_ns = ?,"
                " updated_ns = ?, size_bytes = ?, inodes = ? WHERE name = ?",
                (
                    name,
                    int(Kind.COMMITTED),
                    _text(labels),
                    now_ns,
                    now_ns,
                    size_bytes,
                    inodes,
                    key,
                ),
            )

    def check_active(self, key: str) -> Snapshot:
        """The snapshot, if it is active; InvalidInputError otherwise."""
        snapshot = self.get(key)
        if snapshot.kind is not Kind.ACTIVE:
            raise InvalidInputError(f"snapshot {key!r} is not active")
        return snapshot

    def relabel(self, name: str, labels: Mapping[str, str]) -> Snapshot:
        """Replaces the labels; the snapshot as it is then. Raises NotFoundError."""
        with self._changing():
            self.get(name)
            self._database.execute(
                "UPDATE snapshots SET labels = ?, updated_ns = ? WHERE name = ?",
                (_text(labels), time.time_ns(), name),
            )
            return self.get(name)

    def remove(self, name: str) -> None:
        """Takes a snapshot out, onto the list of the removed.

        Raises NotFoundError, and BusyError when it is another's parent. Not synced by itself: lost
        in a crash, the snapshot is there again, and whoever did not need it removes it again.
        """
        with self._changing(sync=False):
            snapshot = self.get(name)
            child = self._database.execute(
                "SELECT name FROM snapshots WHERE parent = ? LIMIT 1", (name,)
            ).fetchone()
            if child is not None:
                raise BusyError(f"remove snapshot {name!r}: {child[0]!r} is on top of it")
            lowers, chain = self.layers(snapshot.parent)
            self._database.execute("DELETE FROM snapshots WHERE name = ?", (name,))
            self._database.execute(
                "INSERT INTO removed VALUES (?, ?, ?)",
                (snapshot.id, msgspec.json.encode(lowers).decode(), chain),
            )

    def removed(self) -> list[Removed]:
        """What was removed and not yet forgotten."""
        with self._lock:
            rows = self._database.execute("SELECT id, lowers, chain FROM removed").fetchall()
        return [Removed(each, tuple(msgspec.json.decode(low)), chain) for each, low, chain in rows]

    def sync(self) -> None:
        """Makes durable what was changed so far, removals too."""
        with self._lock:
            self._database.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def forget(self, snapshot_id: str) -> None:
        """Takes an id off the list of the removed: nothing is left of it."""
        with self._changing(sync=False):
            self._database.execute("DELETE FROM removed WHERE id = ?", (snapshot_id,))

    def _check_free(self, name: str) -> None:
        if not name:
            raise InvalidInputError("a snapshot needs a name")
        taken = self._database.execute("SELECT 1 FROM snapshots WHERE name = ?", (name,))
        if taken.fetchone() is not None:
            raise ExistsError(f"snapshot {name!r} exists already")

    @contextmanager
    def _changing(self, *, sync: bool = True) -> Iterator[None]:
        """One transaction: all of it, or nothing when something is raised."""
        with self._lock:
            if not sync:
                self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            else:
                self._database.execute("COMMIT")
            finally:
                if not sync:
                    self._database.execute("PRAGMA synchronous = FULL")


def _text(labels: Mapping[str, str]) -> str:
    return msgspec.json.encode(dict(labels)).decode()


def _snapshot(row: tuple[str, str, str, int, str | None, str, int, int, int, int]) -> Snapshot:
    name, snapshot_id, parent, kind, chain, labels, created_ns, updated_ns, size, inodes = row
    return Snapshot(
        name=name,
        id=snapshot_id,
        parent=parent,
        kind=Kind(kind),
        chain=chain,
        labels=msgspec.json.decode(labels, type=dict[str, str]),
        created_ns=created_ns,
        updated_ns=updated_ns,
        size_bytes=size,
        inodes=inodes,
    )
