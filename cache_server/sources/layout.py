"""OCI image layouts: a directory with index.json and blobs (image-spec, image-layout.md)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiofiles

from cache_server.library import BlobDescriptor
from cache_server.sources.manifest import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    MAX_CONFIG_BYTES,
    MAX_MANIFEST_BYTES,
    Descriptor,
    check_blob,
    fits,
    parse_document,
)
from cache_server.sources.reference import LayoutReference
from cache_server.sources.source import Source
from snapshotter.digest import parse_digest
from snapshotter.errors import InvalidInputError, NotFoundError, UnavailableError

REF_NAME = "org.opencontainers.image.ref.name"
_READ_BYTES = 1 << 20


class LayoutSource(Source):
    """An image in an OCI layout on this host."""

    def __init__(self, reference: LayoutReference) -> None:
        super().__init__(str(reference))
        self._reference = reference

    @asynccontextmanager
    async def open_blob(self, descriptor: BlobDescriptor) -> AsyncIterator[AsyncIterator[bytes]]:
        """The blob's bytes, in pieces of up to 1 MiB."""
        path = self._blob_path(descriptor.digest)
        try:
            file = await aiofiles.open(path, "rb", buffering=0)
        except OSError as error:
            raise self._failed(path, error) from error
        try:
            yield self._pieces(file, path)
        finally:
            await file.close()

    async def _pieces(self, file: object, path: str) -> AsyncIterator[bytes]:
        try:
            while piece := await file.read(_READ_BYTES):  # type: ignore[attr-defined]
                yield piece
        except OSError as error:
            raise self._failed(path, error) from error

    async def _top(self, architecture: str) -> bytes:
        path = os.path.join(self._reference.directory, "index.json")
        data = await asyncio.to_thread(self._read, path, MAX_MANIFEST_BYTES)
        index = parse_document(data, self.name)
        if not index.is_index:
            raise InvalidInputError(f"{self.name}: index.json lists no manifests")
        chosen = self._tagged(index.manifests or [], architecture)
        return check_blob(await self._manifest(chosen), chosen.digest, f"manifest of {self.name}")

    def _tagged(self, listed: list[Descriptor], architecture: str) -> Descriptor:
        """The entry with the reference's tag; several of one tag are told apart by platform."""
        known = (*INDEX_TYPES, *MANIFEST_TYPES, "")
        images = [entry for entry in listed if entry.media_type in known]
        tag = self._reference.tag
        if tag is not None:
            images = [entry for entry in images if (entry.annotations or {}).get(REF_NAME) == tag]
        if len(images) > 1:
            images = [e for e in images if e.platform and fits(e.platform, architecture)]
        if len(images) == 1:
            return images[0]
        tags = sorted({(entry.annotations or {}).get(REF_NAME, "") for entry in listed} - {""})
        offered = ", ".join(tags) or "no tags"
        raise NotFoundError(f"{self.name}: names {len(images)} images; the layout has {offered}")

    async def _manifest(self, descriptor: Descriptor) -> bytes:
        path = self._blob_path(descriptor.digest)
        return await asyncio.to_thread(self._read, path, MAX_MANIFEST_BYTES)

    async def _config(self, descriptor: Descriptor) -> bytes:
        path = self._blob_path(descriptor.digest)
        return await asyncio.to_thread(self._read, path, MAX_CONFIG_BYTES)

    def _blob_path(self, digest: str) -> str:
        return os.path.join(self._reference.directory, "blobs/sha256", parse_digest(digest).hex())

    def _read(self, path: str, limit: int) -> bytes:
        try:
            with open(path, "rb") as file:
                data = file.read(limit + 1)
        except OSError as error:
            raise self._failed(path, error) from error
        if len(data) > limit:
            raise InvalidInputError(f"{self.name}: {path} is larger than {limit} bytes")
        return data

    def _failed(self, path: str, error: OSError) -> NotFoundError | UnavailableError:
        kind = NotFoundError if isinstance(error, FileNotFoundError) else UnavailableError
        return kind(f"{self.name}: cannot read {path}: {error.strerror}")
