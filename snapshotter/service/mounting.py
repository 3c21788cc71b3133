"""Makes mounts for those who ask, looks after them while they live, and clears up after them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
import trio

from snapshotter.config import Config
from snapshotter.errors import (
    InvalidInputError,
    NotFoundError,
    SnapshotterError,
    UnavailableError,
    UnsupportedError,
)
from snapshotter.kernel_view import syscalls
from snapshotter.kernel_view.probe import Abilities
from snapshotter.names import ContentName
from snapshotter.paths import Paths
from snapshotter.service import uppers, views
from snapshotter.service.backing import Backing
from snapshotter.service.control import Mount, MountRecord
from snapshotter.service.freshness import Freshness
from snapshotter.service.images import metadata_name
from snapshotter.service.mounts import MountTable, StoredMount, boot_id, start_ticks
from snapshotter.service.processes import exit_status, wait_for_end
from snapshotter.service.requesting import FOR_GUESTS
from snapshotter.service.uppers import Upper
from snapshotter.service.view_maker import MadeView, Plan, ViewMaker, name_of
from snapshotter.store.images import ImageRecord

_log = structlog.get_logger()
_MOUNT_DEADLINE_S = 30.0
_VACATE_DEADLINE_S = 5.0
_VACATE_POLL_S = 0.05
_DEGRADED = "its gate is gone: what was not read before cannot be opened (ENOTCONN)"
_UNSERVED = "its process is gone: nothing in it can be used; unmount it and mount it again"


class Mounting:
    """The mounts of this root. Lives on the daemon's trio loop; blocking work is in threads.

    Owners are watched in ``nursery``.
    """

    def __init__(
        self,
        paths: Paths,
        abilities: Abilities,
        backing: Backing,
        nursery: trio.Nursery,
        config: Config,
    ) -> None:
        self._paths = paths
        self._backing = backing
        self._nursery = nursery
        self._table = MountTable(paths.mounts)
        self._maker = ViewMaker(paths, abilities, config)
        self._watches: dict[str, trio.CancelScope] = {}
        self._clearing = trio.CapacityLimiter(4)
        self._freshness = Freshness(paths, backing, self._table)

    async def recover(self) -> None:
        """Takes up the mounts of an earlier daemon; those that ended meanwhile are cleared up."""
        await trio.to_thread.run_sync(views.remove_placed, self._paths.run / "metadata")
        for mount_id in await trio.to_thread.run_sync(self._table.load):
            _log.info("mount did not survive the reboot", id=mount_id)
            await self.drop(mount_id)
        await self.sweep()
        for stored in self._table.all():
            self._watch(stored)

    def close(self) -> None:
        """Lets go of the metadata images; views stay."""
        self._maker.close()

    def choose_view(self, wanted: str) -> tuple[str, str]:
        """The view to make and why this one; UnsupportedError when there can be none such."""
        return self._maker.choose(wanted)

    async def mount(self, request: Mount, image: ImageRecord, view: str) -> tuple[MountRecord, int]:
        """A new mount of an image: its record and the descriptor of the detached view.

        ``view`` is one that ``choose_view`` named.

        Raises BusyError for an upper in use, InvalidInputError for one that does not fit or an
        owner that is no process,
        UnavailableError when the store does not answer, SnapshotterError for the kernel's refusal.
        """
        if request.owner_pid is not None:
            _check_owner(request.owner_pid)
        elif view == "virtiofs":
            raise UnsupportedError(f"view virtiofs: {FOR_GUESTS}")
        mount_id = self._table.new_id()
        if request.upper is None:
            return await self._mount(mount_id, request, image, view)
        if not request.upper.startswith("/"):
            raise InvalidInputError(f"upper {request.upper}: an absolute path is needed")
        with self._table.claim_upper(request.upper):
            return await self._mount(mount_id, request, image, view)

    async def _mount(
        self, mount_id: str, request: Mount, image: ImageRecord, view: str
    ) -> tuple[MountRecord, int]:
        await self._have_metadata(image)
        plan = self._plan(mount_id, request, image, view)
        with contextlib.ExitStack() as undo:
            if plan.is_private and plan.directory is not None:
                undo.callback(uppers.remove, plan.directory)
            descriptor, server = await self._make_view(plan)
            undo.callback(os.close, descriptor)
            record = MountRecord(
                id=mount_id,
                image=request.image if request.image in image.references else plan.name,
                image_number=image.number,
                view=view,
                upper=str(plan.directory) if plan.directory else None,
                private_upper=plan.is_private,
                read_only=plan.read_only,
                created_at_s=time.time(),
                device=os.fstat(descriptor).st_dev,
                owner_pid=request.owner_pid,
            )
            stored = self._table.add(
                record,
                gate_device=self._backing.gate_device or 0,
                volatile=plan.volatile,
                server_pid=server,
            )
            undo.pop_all()
        self._watch(stored)
        return record, descriptor

    async def lend(self, mount_id: str, image: ImageRecord, *, read_only: bool) -> MountRecord:
        """Makes an image ready for a view that somebody else mounts; raises as ``mount`` does."""
        self.choose_view("kernel")
        await self._have_metadata(image)
        if syscalls.device_at(self._paths.gate) != self._backing.gate_device:
            await self._backing.ensure_gate()
        known = self._table.find(mount_id)
        if known is not None and known.gate_device == self._backing.gate_device:
            return known.mount
        record = MountRecord(
            id=mount_id,
            image=name_of(image),
            image_number=image.number,
            view="kernel",
            upper=None,
            private_upper=False,
            read_only=read_only,
            created_at_s=time.time(),
            device=0,
            lent=True,
        )
        self._table.add(record, gate_device=self._backing.gate_device or 0, volatile=False)
        return record

    async def _make_view(self, plan: Plan) -> MadeView:
        """Tries again when it failed for want of a gate, which somebody may have unmounted."""
        try:
            return await self._in_thread(lambda: self._maker.make(plan), f"mount {plan.name}")
        except SnapshotterError:
            if plan.view != "kernel" or not await self._backing.ensure_gate():
                raise
        await self._backing.wait_for_store()
        return await self._in_thread(lambda: self._maker.make(plan), f"mount {plan.name}")

    async def _have_metadata(self, image: ImageRecord) -> None:
        name = metadata_name(image.prepared)
        await self._backing.wait_for_store()
        await self._backing.wait_for_start()
        if not os.path.exists(self._paths.objects / name.path):  # noqa: ASYNC240 - a local stat
            await self._backing.wait_for_cache_server()
            await self._backing.store.ensure(name)

    def _plan(self, mount_id: str, request: Mount, image: ImageRecord, view: str) -> Plan:
        is_private = request.upper is None and not request.read_only
        if is_private:
            directory: Path | None = self._table.directory_of(mount_id)
        else:
            directory = Path(request.upper) if request.upper else None
        volatile = is_private or (request.volatile and directory is not None)
        return Plan(mount_id, image, view, directory, is_private, volatile, request.read_only)

    def place(self, mount_id: str, target: str, pid: int) -> None:
        """Records where a mount stands now; NotFoundError if there is none of that id."""
        if not target.startswith("/"):
            raise InvalidInputError(f"target {target}: an absolute path is needed")
        self._table.place(mount_id, target, pid)

    async def drop(self, mount_id: str) -> None:
        """Forgets a mount that is gone; NotFoundError if there is none of that id.

        A volatile upper of the user is durable when this returns. A private one is removed in the
        background.
        """
        stored = self._table.get(mount_id)
        gone = self._table.drop(mount_id)
        watch = self._watches.pop(mount_id, None)
        if watch is not None:
            watch.cancel()
        self._freshness.note_dropped()
        _log.info("mount dropped", id=mount_id, target=stored.mount.target)
        upper = stored.mount.upper
        if upper is None or stored.mount.private_upper:
            self._nursery.start_soon(self._clear_up, stored, gone)
        else:
            with self._table.claim_upper(upper):
                await self._clear_up(stored, gone)

    async def release(self, metadata: ContentName) -> None:
        """Lets go of a metadata image that no record needs any more."""
        await trio.to_thread.run_sync(self._maker.release, metadata)

    async def list(self) -> list[MountRecord]:
        """The mounts that stand, each with what is wrong with it."""
        await self.sweep()
        mounts = [self._described(stored) for stored in self._table.all()]
        if not any(mount.lent for mount in mounts):
            return mounts
        standing = await trio.to_thread.run_sync(views.mounts_everywhere)
        return [mount for mount in mounts if not mount.lent or mount.id in standing]

    async def sweep(self) -> None:
        """Drops the records of mounts that are nowhere any more."""

        vanished = await trio.to_thread.run_sync(self._table.find_vanished, views.mounts_everywhere)
        for mount_id in vanished:
            with contextlib.suppress(NotFoundError):  # dropped by its owner's end meanwhile
                await self.drop(mount_id)

    async def clear_leftovers(self) -> None:
        """Removes what dropped mounts left, to the end."""
        await trio.to_thread.run_sync(self._table.remove_dropped)

    async def follow_store(self) -> None:
        """Keeps views at kernel speed; never returns."""
        await self._freshness.run()

    async def refresh(self) -> None:
        """Lets idle files of all views resolve anew; what takes more than 60 s goes on behind."""
        await self._freshness.refresh()

    def _described(self, stored: StoredMount) -> MountRecord:
        if stored.mount.view == "virtiofs":
            return stored.mount
        if stored.server_pid is not None:
            if stored.is_served:
                return stored.mount
            return msgspec.structs.replace(stored.mount, degraded=_UNSERVED)
        gate = self._backing.gate_device
        if gate is None or gate == stored.gate_device:
            return stored.mount
        return msgspec.structs.replace(stored.mount, degraded=_degraded(stored.mount))

    def _watch(self, stored: StoredMount) -> None:
        if stored.server_pid is not None and stored.is_served:
            self._nursery.start_soon(self._watch_server, stored)
        if stored.mount.owner_pid is not None:
            scope = self._watches[stored.mount.id] = trio.CancelScope()
            self._nursery.start_soon(self._watch_owner, stored, scope)

    async def _watch_owner(self, stored: StoredMount, scope: trio.CancelScope) -> None:
        owner = stored.mount.owner_pid
        assert owner is not None
        with scope:
            if stored.owner_started is not None and start_ticks(owner) == stored.owner_started:
                await wait_for_end(owner)
        if not scope.cancelled_caught:
            self._watches.pop(stored.mount.id, None)
            with contextlib.suppress(NotFoundError):
                await self.drop(stored.mount.id)

    async def _watch_server(self, stored: StoredMount) -> None:
        """The process of a view ends with its mount; one that ends before leaves a dead mount."""
        pid = stored.server_pid
        assert pid is not None
        await wait_for_end(pid)
        with contextlib.suppress(ChildProcessError):  # an earlier daemon's
            exit_status(pid)
        log = self._paths.log("fuse-views")
        _log.info("process of a view ended", id=stored.mount.id, pid=pid, log=str(log))

    async def _clear_up(self, stored: StoredMount, gone: Path) -> None:
        try:
            await trio.to_thread.run_sync(
                _clear_up, stored, gone, limiter=self._clearing, abandon_on_cancel=True
            )
        except OSError as error:
            _log.error("not cleared up", id=stored.mount.id, error=str(error))

    async def _in_thread(self, make: Callable[[], MadeView], what: str) -> MadeView:
        """Runs ``make`` in a thread for at most 30 s; a descriptor that comes later is closed."""
        late = threading.Event()

        def run() -> MadeView:
            made = make()
            if late.is_set():
                os.close(made.descriptor)
            return made

        try:
            with trio.fail_after(_MOUNT_DEADLINE_S):
                return await trio.to_thread.run_sync(run, abandon_on_cancel=True)
        except trio.TooSlowError as error:
            raise UnavailableError(
                f"{what}: nothing for {_MOUNT_DEADLINE_S:g} s; see {self._paths.log('store')}"
            ) from error
        finally:
            late.set()


def _degraded(mount: MountRecord) -> str:
    """What is wrong with a view whose gate is gone, and how to mend it without losing anything.

    The kernel cannot give a view another gate, and takes no second view over an upper in use.
    """
    again = "unmount it and mount it again"
    if mount.upper is not None:
        again += (
            "; what was written goes with it, so copy that out first"
            if mount.private_upper
            else f" with --upper {mount.upper}"
        )
    return f"{_DEGRADED}; {again}"


def _check_owner(pid: int) -> None:
    try:
        os.close(os.pidfd_open(pid))
    except (OSError, OverflowError) as error:
        raise InvalidInputError(f"owner {pid}: there is no such process ({error})") from error


def _clear_up(stored: StoredMount, gone: Path) -> None:
    """Blocks. The mount may take a moment to follow its owner, so its upper is waited for.

    A volatile upper from before a reboot keeps its mark: what it lost is not known.
    """
    mount = stored.mount
    ends_volatile = stored.volatile and stored.boot == boot_id()
    if mount.upper is None or not (mount.private_upper or ends_volatile):
        uppers.remove(gone)
        return
    upper = Upper(gone if mount.private_upper else Path(mount.upper))
    deadline = time.monotonic() + _VACATE_DEADLINE_S
    while uppers.is_in_use(upper) and time.monotonic() < deadline:
        time.sleep(_VACATE_POLL_S)
    if mount.private_upper:
        uppers.remove(gone)
    elif not uppers.is_in_use(upper):
        uppers.end_volatile(upper)
        uppers.remove(gone)
