"""OCI image layouts: index.json and blobs (image-spec, image-layout.md), as directory or tar."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from cache_server.library import BlobDescriptor
from cache_server.sources.files import Files
from cache_server.sources.manifest import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    MAX_CONFIG_BYTES,
    MAX_MANIFEST_BYTES,
    Descriptor,
    check_described,
    fits,
    parse_document,
)
from cache_server.sources.source import ManifestSource
from snapshotter.digest import parse_digest
from snapshotter.errors import InvalidInputError, NotFoundError

REF_NAME = "org.opencontainers.image.ref.name"


class LayoutSource(ManifestSource):
    """The image with that tag (or the only one) in an OCI layout on this host."""

    def __init__(self, name: str, files: Files, tag: str | None) -> None:
        super().__init__(name)
        self._files = files
        self._tag = tag

    def open_blob(
        self, descriptor: BlobDescriptor
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The blob's bytes, in pieces of up to 1 MiB."""
        return self._files.open(_blob_path(descriptor.digest))

    async def _top(self, architecture: str) -> bytes:
        data = await self._files.read("index.json", MAX_MANIFEST_BYTES)
        index = parse_document(data, self.name)
        if not index.is_index:
            raise InvalidInputError(f"{self.name}: index.json lists no manifests")
        chosen = self._tagged(index.manifests or [], architecture)
        return check_described(await self._manifest(chosen), chosen, f"manifest of {self.name}")

    def _tagged(self, listed: list[Descriptor], architecture: str) -> Descriptor:
        """The entry with the wanted tag; several of one tag are told apart by platform."""
        known = (*INDEX_TYPES, *MANIFEST_TYPES, "")
        images = [entry for entry in listed if entry.media_type in known]
        if self._tag is not None:
            images = [e for e in images if (e.annotations or {}).get(REF_NAME) == self._tag]
        if len(images) > 1:
            images = [e for e in images if e.platform and fits(e.platform, architecture)]
        if len(images) == 1:
            return images[0]
        tags = sorted({(entry.annotations or {}).get(REF_NAME, "") for entry in listed} - {""})
        offered = ", ".join(tags) or "no tags"
        raise NotFoundError(f"{self.name}: names {len(images)} images; the layout has {offered}")

    async def _manifest(self, descriptor: Descriptor) -> bytes:
        return await self._files.read(_blob_path(descriptor.digest), MAX_MANIFEST_BYTES)

    async def _config(self, descriptor: Descriptor) -> bytes:
        return await self._files.read(_blob_path(descriptor.digest), MAX_CONFIG_BYTES)


def _blob_path(digest: str) -> str:
    return f"blobs/sha256/{parse_digest(digest).hex()}"
