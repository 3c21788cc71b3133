"""What ``docker save`` and ``podman save`` write: a tar with manifest.json, configs and layers.

Such an archive has no registry manifest, so one is made of what it has; the digest of an image
from an archive is that one's, not the one that a registry may know the image by.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec

from cache_server.formats.compression import compression_of
from cache_server.library import BlobDescriptor
from cache_server.sources.files import Files
from cache_server.sources.manifest import (
    MAX_CONFIG_BYTES,
    MAX_MANIFEST_BYTES,
    ResolvedImage,
    parse_config,
    resolved,
)
from cache_server.sources.reference import RegistryReference, parse_reference
from cache_server.sources.source import Source
from snapshotter.decoding import DECODE_ERRORS
from snapshotter.digest import format_digest, sha256
from snapshotter.errors import InvalidInputError, NotFoundError, UnsupportedError

_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG = "application/vnd.docker.container.image.v1+json"
_LAYER = "application/vnd.docker.image.rootfs.diff.tar"


class _Saved(msgspec.Struct, rename="pascal"):
    """One image in manifest.json."""

    config: str
    layers: list[str] | None = None
    repo_tags: list[str] | None = None


class DockerArchiveSource(Source):
    """The image of that name (``NAME:TAG`` in full; or the only one) in a docker archive."""

    def __init__(self, name: str, files: Files, tag: str | None) -> None:
        super().__init__(name)
        self._files = files
        self._tag = tag
        self._blobs: dict[str, str] = {}
        """Paths in the archive by digest, once resolved."""

    async def resolve(self, architecture: str) -> ResolvedImage:
        """The image, if it is for that architecture; errors are ``Source``'s."""
        saved = self._chosen(await self._saved())
        config = await self._files.read(saved.config, MAX_CONFIG_BYTES)
        rootfs = parse_config(config, self.name).rootfs
        diff_ids = rootfs.diff_ids if rootfs else []
        paths = saved.layers or []
        if len(diff_ids) != len(paths):
            raise InvalidInputError(
                f"{self.name}: {len(paths)} layers but {len(diff_ids)} diffIDs in {saved.config}"
            )
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": {
                "mediaType": _CONFIG,
                "size": len(config),
                "digest": format_digest(sha256(config)),
            },
            "layers": [
                await self._layer(path, diff_id)
                for path, diff_id in zip(paths, diff_ids, strict=True)
            ],
        }
        return resolved(msgspec.json.encode(manifest), config, architecture, self.name)

    def open_blob(
        self, descriptor: BlobDescriptor
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """A layer of the resolved image, in pieces of up to 1 MiB."""
        return self._files.open(self._blobs[descriptor.digest])

    async def _saved(self) -> list[_Saved]:
        try:
            data = await self._files.read("manifest.json", MAX_MANIFEST_BYTES)
            return msgspec.json.decode(data, type=list[_Saved])
        except NotFoundError as error:
            raise UnsupportedError(
                f"{error}; archives from before Docker 1.10 are not read, and a tar of an OCI"
                " layout is named oci-archive:FILE"
            ) from error
        except DECODE_ERRORS as error:
            raise InvalidInputError(f"{self.name}: manifest.json: {error}") from error

    def _chosen(self, listed: list[_Saved]) -> _Saved:
        images = [
            saved
            for saved in listed
            if self._tag is None or self._tag in map(_full_name, saved.repo_tags or [])
        ]
        if len(images) == 1:
            return images[0]
        tags = sorted(tag for saved in listed for tag in saved.repo_tags or [])
        offered = ", ".join(tags) or "no tags"
        raise NotFoundError(f"{self.name}: names {len(images)} images; the archive has {offered}")

    async def _layer(self, path: str, diff_id: str) -> dict[str, Any]:
        """The descriptor of a layer. That of a plain tar is its diffID, which ingest checks."""
        _, extent = await asyncio.to_thread(self._files.find, path)
        digest, compression = diff_id, ""
        async with self._files.open(path) as pieces:
            head = await anext(pieces, b"")
            compression = compression_of(head)
            if compression:
                whole = hashlib.sha256(head)
                async for piece in pieces:
                    await asyncio.to_thread(whole.update, piece)
                digest = format_digest(whole.digest())
        self._blobs[digest] = path
        media_type = f"{_LAYER}.{compression}" if compression else _LAYER
        return {"mediaType": media_type, "size": extent.size, "digest": digest}


def _full_name(tag: str) -> str:
    """A tag of the archive as references are compared; left alone if it is none."""
    try:
        named = parse_reference(tag)
    except InvalidInputError:
        return tag
    return str(named).removeprefix("docker://") if isinstance(named, RegistryReference) else tag
