"""Merged images of chains, for views that somebody else mounts: containerd, told by our service.

A chain is known by its chain id (image-spec, config.md), which says what its layers hold. Its
record in the catalog has the name ``chain:<chain id>``, unless a pulled image is the same.
"""

from __future__ import annotations

import re

from snapshotter.digest import parse_digest
from snapshotter.errors import InvalidInputError, NotFoundError, SnapshotterError
from snapshotter.kernel_view.probe import Abilities
from snapshotter.platforms import host_architecture
from snapshotter.service import control
from snapshotter.service.backing import Backing
from snapshotter.service.images import ImageCatalog, Preparer
from snapshotter.service.mounting import Mounting
from snapshotter.store.images import ImageRecord
from snapshotter.telemetry import Counters

_MOUNT_ID = re.compile(r"[0-9a-f]{12}")


def chain_name(chain: str) -> str:
    """The name of a chain's record in the catalog."""
    return f"chain:{chain}"


class Lending:
    """Answers about chains, on the daemon's loop; ``server`` is asked for what is not known."""

    def __init__(
        self,
        catalog: ImageCatalog,
        server: Preparer,
        mounting: Mounting,
        backing: Backing,
        abilities: Abilities,
        counters: Counters,
    ) -> None:
        self._catalog = catalog
        self._server = server
        self._mounting = mounting
        self._backing = backing
        self._abilities = abilities
        self._counters = counters

    async def check(self, request: control.CheckChain) -> None:
        """Returns when the chain can be mounted: its names are here, or its layers at the server.

        Raises NotFoundError when the server does not know it and the image does not have it, and
        what preparing that image raises. Both ends are counted.
        """
        try:
            await self._check(request)
        except SnapshotterError:
            self._counters.add("chains_refused")
            raise
        self._counters.add("chains_checked")

    async def _check(self, request: control.CheckChain) -> None:
        chain = request.chain
        parse_digest(chain)
        self._mounting.choose_view("kernel")
        if any(chain in _chains(record) for record in self._catalog.all()):
            return
        await self._backing.wait_for_cache_server()
        architecture = host_architecture()
        try:
            await self._server.open(chain=chain, architecture=architecture, merge=False)
            return
        except NotFoundError:
            if request.image is None:
                raise
        is_fixed = "@sha256:" in request.image
        for refresh in (False,) if is_fixed else (False, True):  # a tag may have moved
            prepared = await self._server.prepare(
                request.image,
                architecture=architecture,
                refresh=refresh,
                merge=False,
                authfile=request.authfile,
            )
            if chain in [layer.chain_id for layer in prepared.layers]:
                return
        raise NotFoundError(f"chain {chain}: image {request.image} has no such layers")

    async def lend(self, request: control.Lend) -> control.Lent:
        """The chain's merged image, ready to be mounted, and the record of its mount.

        Raises what the server or the store says, and UnsupportedError without a kernel view.
        """
        parse_digest(request.chain)
        if not _MOUNT_ID.fullmatch(request.mount_id):
            raise InvalidInputError(
                f"lend: mount id {request.mount_id[:40]!r} is not 12 hex digits"
            )
        image = self._find(request.chain) or await self._open(request.chain)
        with self._catalog.hold(image):
            mount = await self._mounting.lend(request.mount_id, image, read_only=request.read_only)
        return control.Lent(
            mount=mount,
            image=image,
            erofs_file=self._abilities.erofs_file,
            self_contained=self._abilities.self_contained,
        )

    def _find(self, chain: str) -> ImageRecord | None:
        named = self._catalog.find(chain_name(chain))
        if named is not None:
            return named
        same = (each for each in self._catalog.all() if _chains(each)[-1:] == [chain])
        return next(same, None)

    async def _open(self, chain: str) -> ImageRecord:
        await self._backing.wait_for_cache_server()
        await self._backing.wait_for_store()
        prepared = await self._server.open(
            chain=chain, architecture=host_architecture(), merge=True
        )
        return await self._catalog.add(chain_name(chain), prepared)


def _chains(record: ImageRecord) -> list[str]:
    return [layer.chain_id for layer in record.prepared.layers]
