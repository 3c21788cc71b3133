"""Requests that remove something: images, and content from the store."""

from __future__ import annotations

import structlog

from snapshotter.errors import BusyError
from snapshotter.service import control
from snapshotter.service.backing import Backing
from snapshotter.service.images import ImageCatalog, metadata_name
from snapshotter.service.mounting import Mounting
from snapshotter.store.images import ImageRecord

_log = structlog.get_logger()
_MOUNTS_TOLD = 5

Removing = control.RemoveImage | control.Evict | control.Discard | control.Refresh


class Housekeeping:
    """Carries out what is to be removed. Lives on the daemon's trio loop."""

    def __init__(self, catalog: ImageCatalog, mounting: Mounting, backing: Backing) -> None:
        self._catalog = catalog
        self._mounting = mounting
        self._backing = backing

    async def do(self, request: Removing) -> control.Response:
        """Answers one request; raises SnapshotterError for one that fails."""
        match request:
            case control.RemoveImage():
                return await self._remove_image(request)
            case control.Evict():
                await self._backing.wait_for_store()
                evicted = await self._backing.store.evict(request.names)
                return control.Evicted(
                    removed=evicted.removed, freed_bytes=evicted.freed_bytes, kept=evicted.kept
                )
            case control.Discard():
                await self._backing.wait_for_store()
                return control.Discarded(names=await self._backing.store.discard(request.names))
            case control.Refresh():
                await self._mounting.refresh()
                return control.Done()

    async def _remove_image(self, request: control.RemoveImage) -> control.Removed:
        mounts = await self._mounting.list()
        # No await from here until the record is gone: nobody mounts it in between.
        record = self._catalog.inspect(request.image)
        is_name = request.image in record.references and len(record.references) > 1
        if not is_name:
            _check_unused(request.image, record, mounts)
        names = [request.image] if is_name else record.references
        if not request.dry_run:
            await self._catalog.remove(record, request.image)
            _log.info("image removed", image=request.image, number=record.number, whole=not is_name)
            if not is_name:
                await self._release_metadata(record)
        return control.Removed(image=record, names=names, whole=not is_name)

    async def _release_metadata(self, record: ImageRecord) -> None:
        name = metadata_name(record.prepared)
        others = (metadata_name(other.prepared) for other in self._catalog.all())
        if name not in others:
            await self._mounting.release(name)


def _check_unused(image: str, record: ImageRecord, mounts: list[control.MountRecord]) -> None:
    users = [mount for mount in mounts if mount.image_number == record.number]
    if users:
        where = ", ".join(
            f"{mount.id} at {mount.target}"
            if mount.target
            else f"{mount.id} of process {mount.owner_pid}"
            for mount in users[:_MOUNTS_TOLD]
        )
        if len(users) > _MOUNTS_TOLD:
            where += f" and {len(users) - _MOUNTS_TOLD} more; see snapshotter ps"
        raise BusyError(f"remove image {image}: it is mounted ({where}); unmount that first")
