"""Opens the source that a reference names."""

from __future__ import annotations

from cache_server.sources.credentials import Keyring
from cache_server.sources.docker_archive import DockerArchiveSource
from cache_server.sources.files import ArchiveFiles, DirectoryFiles
from cache_server.sources.layout import LayoutSource
from cache_server.sources.network import Network, NetworkSettings
from cache_server.sources.reference import LocalReference, Reference
from cache_server.sources.registry import RegistrySource
from cache_server.sources.source import Source


class Sources:
    """All sources of a process; registries share one HTTP client, made when first needed."""

    def __init__(self, settings: NetworkSettings = NetworkSettings()) -> None:
        self._settings = settings
        self._network: Network | None = None

    def open(self, reference: Reference, authfile: str | None) -> Source:
        """The source of ``reference``, with the authfile's credentials or those of the usual files.

        Raises NotFoundError or InvalidInputError for a bad authfile.
        """
        if isinstance(reference, LocalReference):
            return _open_local(reference)
        keyring = Keyring(authfile)
        if self._network is None:
            self._network = Network(self._settings)
        return RegistrySource(reference, self._network, keyring=keyring)

    async def aclose(self) -> None:
        """Closes connections that are still open."""
        if self._network is not None:
            await self._network.aclose()


def _open_local(reference: LocalReference) -> Source:
    name, path, tag = str(reference), reference.path, reference.tag
    match reference.transport:
        case "oci":
            return LayoutSource(name, DirectoryFiles(name, path), tag)
        case "oci-archive":
            return LayoutSource(name, ArchiveFiles(name, path), tag)
        case "docker-archive":
            return DockerArchiveSource(name, ArchiveFiles(name, path), tag)
