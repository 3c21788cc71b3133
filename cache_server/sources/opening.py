"""Opens the source that a reference names."""

from __future__ import annotations

import httpx

from cache_server.sources.credentials import find_credentials
from cache_server.sources.docker_archive import DockerArchiveSource
from cache_server.sources.files import ArchiveFiles, DirectoryFiles
from cache_server.sources.layout import LayoutSource
from cache_server.sources.reference import LocalReference, Reference
from cache_server.sources.registry import RegistrySource, make_client
from cache_server.sources.source import Source


class Sources:
    """All sources of a process; registries share one HTTP client, made when first needed."""

    def __init__(self) -> None:
        self._client: httpx.AsyncClient | None = None

    def open(self, reference: Reference, authfile: str | None) -> Source:
        """The source of ``reference``, with the authfile's credentials where it has some.

        Raises NotFoundError or InvalidInputError for a bad authfile.
        """
        if isinstance(reference, LocalReference):
            return _open_local(reference)
        credentials = find_credentials(authfile, reference) if authfile else None
        if self._client is None:
            self._client = make_client()
        return RegistrySource(reference, self._client, credentials=credentials)

    async def aclose(self) -> None:
        """Closes connections that are still open."""
        if self._client is not None:
            await self._client.aclose()


def _open_local(reference: LocalReference) -> Source:
    name, path, tag = str(reference), reference.path, reference.tag
    match reference.transport:
        case "oci":
            return LayoutSource(name, DirectoryFiles(name, path), tag)
        case "oci-archive":
            return LayoutSource(name, ArchiveFiles(name, path), tag)
        case "docker-archive":
            return DockerArchiveSource(name, ArchiveFiles(name, path), tag)
