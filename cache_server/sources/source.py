"""What every source of images does; a kind of source adds only how its bytes are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

import msgspec

from cache_server.library import BlobDescriptor
from cache_server.sources.manifest import (
    Descriptor,
    ResolvedImage,
    check_described,
    choose,
    parse_document,
    resolved,
)
from snapshotter.errors import InvalidInputError

_MAX_INDEX_DEPTH = 4


class Source(ABC):
    """One reference, to be resolved and read."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    async def resolve(self, architecture: str) -> ResolvedImage:
        """The image for that architecture (Go's, perhaps with ``/variant``).

        Waits for the source. Raises NotFoundError, AccessDeniedError, UnavailableError,
        CorruptError (a digest is wrong) or InvalidInputError (not an image).
        """

    @abstractmethod
    def open_blob(
        self, descriptor: BlobDescriptor
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The blob's bytes as they come, NOT checked: whoever reads them checks the digest."""


class ManifestSource(Source):
    """A source that has manifests and indexes, as OCI and Docker define them."""

    async def resolve(self, architecture: str) -> ResolvedImage:
        """The image for that architecture; errors are ``Source``'s."""
        data = await self._top(architecture)
        indexes: list[bytes] = []
        for _ in range(_MAX_INDEX_DEPTH):
            document = parse_document(data, self.name)
            if document.config is not None and not document.is_index:
                config = await self._checked_config(document.config)
                image = resolved(data, config, architecture, self.name)
                return msgspec.structs.replace(image, indexes=indexes)
            indexes.append(data)
            chosen = choose(document, architecture, self.name)
            manifest = await self._manifest(chosen)
            data = check_described(manifest, chosen, f"manifest of {self.name}")
        raise InvalidInputError(f"{self.name}: indexes nested deeper than {_MAX_INDEX_DEPTH}")

    @abstractmethod
    async def _top(self, architecture: str) -> bytes:
        """The manifest or index that the reference names, checked if it names a digest."""

    @abstractmethod
    async def _manifest(self, descriptor: Descriptor) -> bytes:
        """A manifest or index that an index lists."""

    @abstractmethod
    async def _config(self, descriptor: Descriptor) -> bytes:
        """The config that a manifest names."""

    async def _checked_config(self, descriptor: Descriptor) -> bytes:
        data = await self._config(descriptor)
        return check_described(data, descriptor, f"config of {self.name}")
