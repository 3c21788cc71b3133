"""A source of one image whose blobs stop halfway until they are released."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cache_server.library import BlobDescriptor
from cache_server.sources.manifest import Descriptor
from cache_server.sources.source import ManifestSource
from snapshotter.errors import SnapshotterError
from tests.support.images import Image


class HeldSource(ManifestSource):
    """Counts what is asked of it. With ``error`` set, resolve and blobs fail with it."""

    def __init__(self, image: Image) -> None:
        super().__init__("held")
        self.image = image
        self.index: bytes | None = None
        """What the reference names instead of the image, and which lists it."""
        self.release = asyncio.Event()
        self.reached = asyncio.Event()
        self.reached_all = asyncio.Event()
        self.held_apart: dict[str, asyncio.Future[None]] = {}
        """Blobs that end as these say, once each, and not with ``release`` and ``error``."""
        self.opened: list[str] = []
        self.resolved = 0
        self.resolved_twice = asyncio.Event()
        self.error: SnapshotterError | None = None

    async def _top(self, architecture: str) -> bytes:
        self.resolved += 1
        if self.resolved == 2:
            self.resolved_twice.set()
        if self.error is not None:
            raise self.error
        return self.index or self.image.manifest

    async def _manifest(self, descriptor: Descriptor) -> bytes:
        return self.image.manifest

    async def _config(self, descriptor: Descriptor) -> bytes:
        return self.image.config

    @asynccontextmanager
    async def open_blob(self, descriptor: BlobDescriptor) -> AsyncIterator[AsyncIterator[bytes]]:
        self.opened.append(descriptor.digest)
        yield self._pieces(descriptor.digest)

    async def _pieces(self, digest: str) -> AsyncIterator[bytes]:
        blob = next(x.blob for x in self.image.layers if x.descriptor["digest"] == digest)
        yield blob[:500_000]
        self.reached.set()
        if len(self.opened) == len(self.image.layers):
            self.reached_all.set()
        if digest in self.held_apart:
            await self.held_apart.pop(digest)
        else:
            await self.release.wait()
            if self.error is not None:
                raise self.error
        yield blob[500_000:]
