"""Files of local images, found in a directory or within a tar, and read the same way from both."""

from __future__ import annotations

import asyncio
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property

import aiofiles

from cache_server.formats.tar_index import Extent, TarIndex, read_index
from snapshotter.errors import InvalidInputError, NotFoundError, SnapshotterError, UnavailableError

_READ_BYTES = 1 << 20


class Files(ABC):
    """Files at or in ``path``, for the image that messages call ``name``."""

    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._path = path

    @abstractmethod
    def find(self, path: str) -> tuple[str, Extent]:
        """The file on this host with the bytes of ``path``, and where in it they lie. Blocks.

        Raises NotFoundError, CorruptError, InvalidInputError, UnsupportedError, UnavailableError.
        """

    async def read(self, path: str, limit: int) -> bytes:
        """All of a file; raises what ``find`` does, InvalidInputError if it exceeds ``limit``."""
        on_host, extent = await asyncio.to_thread(self.find, path)
        if extent.size > limit:
            raise InvalidInputError(f"{self._name}: {path} is larger than {limit} bytes")
        return b"".join([piece async for piece in self._pieces(on_host, extent)])

    @asynccontextmanager
    async def open(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """A file's bytes, in pieces of up to 1 MiB; raises what ``find`` does."""
        pieces = self._pieces(*await asyncio.to_thread(self.find, path))
        try:
            yield pieces
        finally:
            await pieces.aclose()

    async def _pieces(self, on_host: str, extent: Extent) -> AsyncGenerator[bytes, None]:
        left = extent.size
        try:
            async with aiofiles.open(on_host, "rb", buffering=0) as file:
                await file.seek(extent.offset)
                while left and (piece := await file.read(min(left, _READ_BYTES))):
                    left -= len(piece)
                    yield piece
        except OSError as error:
            raise self._failed(on_host, error) from error

    def _failed(self, path: str, error: OSError) -> NotFoundError | UnavailableError:
        kind = NotFoundError if isinstance(error, FileNotFoundError) else UnavailableError
        return kind(f"{self._name}: cannot read {path}: {error.strerror}")


class DirectoryFiles(Files):
    """Files below a directory."""

    def find(self, path: str) -> tuple[str, Extent]:
        """A regular file."""
        on_host = os.path.join(self._path, path)
        try:
            found = os.stat(on_host)
        except OSError as error:
            raise self._failed(on_host, error) from error
        if not stat.S_ISREG(found.st_mode):
            raise InvalidInputError(f"{self._name}: {on_host} is not a file")
        return on_host, Extent(0, found.st_size)


class ArchiveFiles(Files):
    """Files in an uncompressed tar, read in place. Its index is made once, when first needed."""

    def find(self, path: str) -> tuple[str, Extent]:
        """A file in the archive, links followed."""
        try:
            return self._path, self._index.find(os.fsencode(path))
        except NotFoundError as error:
            raise NotFoundError(f"{self._name}: {error}") from error

    @cached_property
    def _index(self) -> TarIndex:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self._failed(self._path, error) from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InvalidInputError("it is not a file")
            return read_index(descriptor)
        except OSError as error:
            raise self._failed(self._path, error) from error
        except SnapshotterError as error:
            raise type(error)(f"{self._name}: {error}") from error
        finally:
            os.close(descriptor)
