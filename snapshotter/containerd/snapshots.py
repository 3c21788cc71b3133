"""What containerd's Snapshots service does, without gRPC: a synchronous core for many threads.

A snapshot is a directory, or *remote*: a chain id whose names and content come from the cache
server. Any snapshot on top of a remote one is mounted on one merged image, that of the topmost
remote chain below it, with the directories above it in between.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog

from snapshotter.containerd import labels as labels_of
from snapshotter.containerd.directories import Directories, Usage
from snapshotter.containerd.metastore import Kind, Metastore, Snapshot
from snapshotter.digest import sha256
from snapshotter.errors import ExistsError, InvalidInputError, SnapshotterError
from snapshotter.kernel_view.layers import Options, ViewLayers, mount_options, overlay_options
from snapshotter.service.views import source_of
from snapshotter.telemetry import Counters

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount that containerd is to make, as mount(2) is told of it."""

    type: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedImage:
    """The directories that a kernel view of a chain is made of; ``metadata`` is a mount point."""

    metadata: str
    objects: str
    arrivals: str
    gate: str
    image_number: int
    self_contained: bool


class RemoteLayers(Protocol):
    """What is needed of whoever has remote layers. Calls may wait for the network."""

    def check(self, chain: str, image: str | None) -> None:
        """Returns if that chain can be mounted, after ``image`` was prepared if need be.

        Raises SnapshotterError that says why it cannot.
        """

    def lend(self, chain: str, snapshot_id: str, *, read_only: bool) -> MergedImage:
        """The chain's merged image, ready to be mounted by snapshot ``snapshot_id``.

        Raises SnapshotterError when it cannot be had.
        """

    def give_back(self, snapshot_id: str) -> None:
        """That snapshot is gone. Raises nothing: who lends finds out by itself, too."""

    def lent(self) -> set[str]:
        """Chain ids whose merged images are held ready."""

    def retire(self, chain: str, *, forget: bool) -> None:
        """Holds that merged image no longer; with ``forget`` nobody will ask for it again."""


class Snapshots:
    """All snapshots of one containerd. Times out nothing by itself; safe from any thread."""

    def __init__(
        self,
        records: Metastore,
        directories: Directories,
        remote: RemoteLayers,
        counters: Counters,
    ) -> None:
        self._records = records
        self._directories = directories
        self._remote = remote
        self._counters = counters
        self._pending: dict[str, str | None] = {}  # ids under way, and the chains they need
        self._deciding = threading.Lock()
        self._reclaiming = threading.Lock()

    def prepare(self, key: str, parent: str, labels: Mapping[str, str]) -> list[Mount]:
        """A new active snapshot on ``parent`` (empty: on nothing), and how to mount it.

        When the labels name a chain that is or can be made remote, it is recorded as committed
        and ExistsError is raised, by which containerd knows that it need not fetch the layer.
        Else raises ExistsError, NotFoundError, InvalidInputError as ``Metastore.add`` does.
        """
        chain = labels_of.chain_in(labels)
        if chain is not None:
            self._try_remote(key, chain, parent, labels)
        return self._create(key, parent, Kind.ACTIVE, labels)

    def view(self, key: str, parent: str, labels: Mapping[str, str]) -> list[Mount]:
        """A new view of ``parent``, and how to mount it. Raises as ``Metastore.add`` does."""
        return self._create(key, parent, Kind.VIEW, labels)

    def mounts(self, key: str) -> list[Mount]:
        """How to mount an active snapshot or a view.

        Raises NotFoundError, InvalidInputError for a committed one, and what lending a merged
        image raises.
        """
        snapshot = self._records.get(key)
        if snapshot.kind is Kind.COMMITTED:
            raise InvalidInputError(f"snapshot {key!r} is committed: it has no mounts of its own")
        ids, chain = self._records.layers(snapshot.parent)
        with self._needing(snapshot.id, chain):
            return self._mounts(snapshot, ids, self._lend(snapshot, chain))

    def commit(self, name: str, key: str, labels: Mapping[str, str]) -> None:
        """Makes an active snapshot a committed one, ``name``, with what it holds durable.

        Raises as ``Metastore.commit`` does.
        """
        snapshot = self._records.check_active(key)
        usage = self._directories.usage(snapshot.id)
        self._directories.sync(snapshot.id)
        self._records.commit(key, name, labels, size_bytes=usage.size_bytes, inodes=usage.inodes)

    def remove(self, name: str) -> None:
        """Removes the record; what it had is taken away later, by ``reclaim``.

        Raises NotFoundError, and BusyError when another snapshot is on top of it.
        """
        self._records.remove(name)

    def stat(self, name: str) -> Snapshot:
        """One snapshot; NotFoundError if there is none of that name."""
        return self._records.get(name)

    def update(self, name: str, labels: Mapping[str, str], paths: Sequence[str]) -> Snapshot:
        """Changes labels: all of them without ``paths`` or by ``labels``, one by ``labels.<name>``.

        One that is named and not given is removed. Raises NotFoundError, and InvalidInputError for
        a path that is something else.
        """
        known = dict(self._records.get(name).labels)
        if not paths:
            known = dict(labels)
        for path in paths:
            if path == "labels":
                known = dict(labels)
                continue
            field, dot, label = path.partition(".")
            if field != "labels" or not dot or not label:
                raise InvalidInputError(f"update snapshot {name!r}: {path!r} cannot be changed")
            if label in labels:
                known[label] = labels[label]
            else:
                known.pop(label, None)
        return self._records.relabel(name, known)

    def find(self, filters: Sequence[str] = ()) -> list[Snapshot]:
        """All snapshots, or those that the filter wants where it is one that we know."""
        wanted = labels_of.wanted_by(list(filters))
        if wanted is None:
            return self._records.all()
        chain, parent = wanted
        return self._records.find(parent=parent, label=labels_of.REF, value=chain)

    def usage(self, name: str) -> Usage:
        """What a snapshot takes for itself: for a remote one nothing, its content is shared.

        Raises NotFoundError.
        """
        snapshot = self._records.get(name)
        if snapshot.kind is Kind.ACTIVE:
            return self._directories.usage(snapshot.id)
        return Usage(snapshot.size_bytes, snapshot.inodes)

    def reclaim(self) -> None:
        """Takes away what removed snapshots and crashes left, except what is mounted.

        Merged images that no snapshot is mounted on are let go. What cannot be removed is logged
        and tried again the next time.
        """
        with self._reclaiming:
            present = self._directories.all()
            pending = set(self._pending)
            living = {each.id for each in self._records.all()}
            removed = self._records.removed()
            standing = self._directories.mounted() if removed or present - living else set()
            self._records.sync()
            pinned = {low for each in removed if each.id in standing for low in each.lowers}
            for each in removed:
                if each.id not in standing | pinned and self._delete(each.id):
                    if each.chain is not None:
                        self._remote.give_back(each.id)
                    self._records.forget(each.id)
            orphans = present - living - pending - standing - {each.id for each in removed}
            for orphan in sorted(orphans):
                _log.warning("directory without a snapshot; it is removed", id=orphan)
                self._delete(orphan)
            self._retire_images()

    def _delete(self, snapshot_id: str) -> bool:
        try:
            self._directories.remove(snapshot_id)
        except OSError as error:
            _log.error("snapshot's directory not removed", id=snapshot_id, error=str(error))
            return False
        return True

    def _retire_images(self) -> None:
        lent = self._remote.lent()
        if not lent:
            return
        with self._deciding:
            everything = self._records.all()
            known = {each.chain for each in everything}
            used = {
                self._records.layers(each.parent)[1]
                for each in everything
                if each.kind is not Kind.COMMITTED and each.parent
            }
            for chain in lent - used - set(self._pending.values()):
                self._remote.retire(chain, forget=chain not in known)

    def _try_remote(self, key: str, chain: str, parent: str, labels: Mapping[str, str]) -> None:
        """Records the chain as a remote snapshot and raises ExistsError, or logs why it cannot."""
        name = f"remote/{chain}"
        if parent:
            name += f"@{sha256(parent.encode()).hex()[:16]}"
        remote = Snapshot(
            name=name,
            id=secrets.token_hex(6),
            parent=parent,
            kind=Kind.COMMITTED,
            chain=chain,
            labels=labels,
        )
        self._records.check(Snapshot(name=key, id=remote.id, parent=parent, kind=Kind.ACTIVE))
        image = labels_of.image_in(labels)
        try:
            self._remote.check(chain, image)
        except (SnapshotterError, OSError) as error:
            self._counters.add("remote_refused")
            _log.warning(
                "layer cannot be remote; containerd fetches it",
                chain=chain,
                image=image,
                error=str(error),
                refused=self._counters.snapshot()["remote_refused"],
            )
            return
        try:
            self._records.add(remote)
            self._counters.add("remote_added")
        except ExistsError:
            pass  # somebody else has the same image
        raise ExistsError(f"snapshot {name!r} is remote: its layer need not be fetched")

    def _create(self, key: str, parent: str, kind: Kind, labels: Mapping[str, str]) -> list[Mount]:
        snapshot = Snapshot(
            name=key, id=secrets.token_hex(6), parent=parent, kind=kind, labels=labels
        )
        self._records.check(snapshot)
        ids, chain = self._records.layers(parent)
        with self._needing(snapshot.id, chain):
            merged = self._lend(snapshot, chain)
            try:
                if kind is Kind.ACTIVE or not parent:
                    self._directories.make(snapshot.id, like=self._top(ids, merged))
                mounts = self._mounts(snapshot, ids, merged)
                self._records.add(snapshot)
            except BaseException:
                self._delete(snapshot.id)
                if merged is not None:
                    self._remote.give_back(snapshot.id)
                raise
        return mounts

    @contextmanager
    def _needing(self, snapshot_id: str, chain: str | None) -> Iterator[None]:
        """While its record is not there yet, ``reclaim`` leaves alone what a snapshot needs."""
        with self._deciding:
            self._pending[snapshot_id] = chain
        try:
            yield
        finally:
            self._pending.pop(snapshot_id, None)

    def _lend(self, snapshot: Snapshot, chain: str | None) -> MergedImage | None:
        if chain is None:
            return None
        return self._remote.lend(chain, snapshot.id, read_only=snapshot.kind is Kind.VIEW)

    def _top(self, ids: Sequence[str], merged: MergedImage | None) -> str | None:
        """The root directory of what is right below a new upper."""
        if ids:
            return str(self._directories.upper(ids[0]).upper)
        return merged.metadata if merged is not None else None

    def _mounts(
        self, snapshot: Snapshot, ids: Sequence[str], merged: MergedImage | None
    ) -> list[Mount]:
        own = self._directories.upper(snapshot.id)
        above = tuple(str(self._directories.upper(each).upper) for each in ids)
        is_view = snapshot.kind is Kind.VIEW
        if merged is None and len(above) <= is_view:
            bound = above[0] if above else str(own.upper)
            return [Mount("bind", bound, ("rbind", "ro" if is_view else "rw"))]
        upper, work = (None, None) if is_view else (str(own.upper), str(own.work))
        options = (
            _overlay(above, upper, work)
            if merged is None
            else overlay_options(
                ViewLayers(
                    metadata=merged.metadata,
                    objects=merged.objects,
                    arrivals=merged.arrivals,
                    gate=merged.gate,
                    image_number=merged.image_number,
                    above=above,
                    upper=upper,
                    work=work,
                    self_contained=merged.self_contained,
                )
            )
        )
        flags = ("ro",) if is_view else ()
        return [Mount("overlay", source_of(snapshot.id), (*mount_options(options), *flags))]


def _overlay(lowers: Sequence[str], upper: str | None, work: str | None) -> Options:
    options: Options = [*(("lowerdir+", lower) for lower in lowers), ("index", "off")]
    if upper is not None:
        options += [("upperdir", upper), ("workdir", work)]
    return options
