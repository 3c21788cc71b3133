"""What the daemon does for each message of the control socket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import structlog
import trio

import snapshotter
from snapshotter.cache_v1 import protocol
from snapshotter.errors import NotFoundError, SnapshotterError
from snapshotter.kernel_view.probe import Abilities
from snapshotter.paths import Paths
from snapshotter.service import control, fuse_views
from snapshotter.service.backing import Backing
from snapshotter.service.control_server import Reply
from snapshotter.service.housekeeping import Housekeeping
from snapshotter.service.images import ImageCatalog, metadata_name
from snapshotter.service.lending import Lending
from snapshotter.service.mounting import Mounting
from snapshotter.service.requesting import FOR_GUESTS
from snapshotter.service.view_maker import virtiofs_missing
from snapshotter.store.images import ImageRecord
from snapshotter.telemetry import Counters

_log = structlog.get_logger()
_QUEUED_PROGRESS = 64


class Requests:
    """Answers requests; ``stop`` is called for a stop request and returns when all has ended."""

    def __init__(
        self,
        paths: Paths,
        abilities: Abilities,
        catalog: ImageCatalog,
        mounting: Mounting,
        backing: Backing,
        lending: Lending,
        counters: Counters,
        stop: Callable[[Reply], None],
    ) -> None:
        self._paths = paths
        self._abilities = abilities
        self._catalog = catalog
        self._mounting = mounting
        self._backing = backing
        self._lending = lending
        self._counters = counters
        self._stop = stop
        self._housekeeping = Housekeeping(catalog, mounting, backing)

    async def handle(self, request: control.Request, reply: Reply) -> None:
        """Answers one request; raises SnapshotterError for one that fails."""
        match request:
            case control.Mount():
                await self._mount(request, reply)
            case control.Pull():
                image = await self._pull(request, reply)
                await reply.send(control.Image(image=image))
            case control.Placed():
                self._mounting.place(request.id, request.target, request.pid)
                await reply.send(control.Done())
            case control.Unmounted():
                await self._mounting.drop(request.id)
                await reply.send(control.Done())
            case control.RemoveImage() | control.Evict() | control.Discard() | control.Refresh():
                await reply.send(await self._housekeeping.do(request))
            case control.CheckChain():
                await self._lending.check(request)
                await reply.send(control.Done())
            case control.Lend():
                await reply.send(await self._lending.lend(request))
            case control.Stop():
                self._stop(reply)
                await trio.sleep_forever()  # the answer comes when everything has ended
            case _:
                await reply.send(await self._look(request))

    async def _look(self, request: control.Request) -> control.Response:
        """Requests that change nothing."""
        match request:
            case control.ListMounts():
                return control.Mounts(mounts=await self._mounting.list())
            case control.ListImages():
                return control.Images(images=self._catalog.all())
            case control.Inspect():
                return control.Image(image=self._catalog.inspect(request.image))
            case control.Documents():
                record = self._catalog.inspect(request.image)
                await self._backing.wait_for_cache_server()
                documents = await self._catalog.documents(record)
                return control.ImageDocuments(image=record, documents=documents)
            case control.Facts():
                return host_facts(self._abilities, fuse_views.missing())
            case _:
                return await self._status()

    async def _status(self) -> control.Running:
        counters = self._counters.snapshot()
        pids = self._backing.pids()
        if pids.get("store") is not None:
            try:
                with trio.fail_after(1):
                    counters |= (await self._backing.store.status()).counters
            except (SnapshotterError, trio.TooSlowError) as error:
                _log.warning("store did not tell its counters", error=str(error))
        return control.Running(
            version=snapshotter.__version__,
            pid=os.getpid(),
            root=str(self._paths.root),
            run=str(self._paths.run),
            processes={"daemon": os.getpid(), **pids},
            counters=counters,
        )

    async def _pull(self, request: control.Pull, reply: Reply) -> ImageRecord:
        """Pulls and relays progress; what the asker is too slow to take is left out."""
        self._counters.add("pulls")
        send, receive = trio.open_memory_channel[protocol.Progress](_QUEUED_PROGRESS)

        def tell(progress: protocol.Progress) -> None:
            try:
                send.send_nowait(progress)
            except trio.WouldBlock:
                self._counters.add("progress_left_out")

        async def relay() -> None:
            with contextlib.suppress(trio.BrokenResourceError):  # the asker left
                async for said in receive:
                    progress = control.Progress(
                        phase=said.phase,
                        layer=said.layer,
                        done_bytes=said.done_bytes,
                        total_bytes=said.total_bytes,
                    )
                    await reply.send(progress)

        await self._backing.wait_for_cache_server()
        failure: SnapshotterError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay)
            with send:
                try:
                    image = await self._catalog.pull(
                        request.image,
                        request.architecture,
                        refresh=request.refresh,
                        authfile=request.authfile,
                        on_progress=tell,
                    )
                except SnapshotterError as error:  # raised below: not as a group
                    failure = error
        if failure is not None:
            raise failure
        return image

    async def _mount(self, request: control.Mount, reply: Reply) -> None:
        view, reason = self._mounting.choose_view(request.view)
        image = self._catalog.find(request.image, request.architecture)
        if image is None:
            pull = control.Pull(
                image=request.image, architecture=request.architecture, authfile=request.authfile
            )
            image = await self._pull(pull, reply)
        elif not (self._paths.objects / metadata_name(image.prepared).path).exists():
            image = await self._catalog.pull(request.image, request.architecture, refresh=False)
        with self._catalog.hold(image):
            record, descriptor = await self._mounting.mount(request, image, view)
        self._counters.add("mounts")
        answer = control.Mounted(mount=record, image=image, reason=reason)
        try:
            await reply.send(answer, descriptor=descriptor)
        except BaseException:  # nobody took the mount: it ends with its descriptor
            with trio.CancelScope(shield=True):
                await self._forget(record.id)
            raise
        finally:
            os.close(descriptor)

    async def _forget(self, mount_id: str) -> None:
        try:
            await self._mounting.drop(mount_id)
        except NotFoundError:
            _log.info("mount was dropped already", id=mount_id)


def host_facts(abilities: Abilities, lacking: str) -> control.HostFacts:
    """What was probed, and which views it allows. ``lacking`` keeps the fuse view from working."""
    missing = abilities.missing
    kernel = control.Fact(
        name="kernel",
        ok=not missing,
        detail="; ".join(f"{each.name}: {each.detail}" for each in missing) or "works here",
        remedy="; ".join(each.remedy for each in missing),
    )
    fuse = control.Fact(
        name="fuse",
        ok=not lacking,
        detail=lacking or "works here",
        remedy="modprobe fuse" if lacking else "",
    )
    without = virtiofs_missing()
    virtiofs = control.Fact(
        name="virtiofs", ok=not without, detail=without or f"works here; {FOR_GUESTS}"
    )
    facts = [
        control.Fact(name=each.name, ok=each.ok, detail=each.detail, remedy=each.remedy)
        for each in abilities.findings
    ]
    return control.HostFacts(views=[kernel, fuse, virtiofs], facts=facts)
