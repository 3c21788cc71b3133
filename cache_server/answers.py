"""Answers made of stored content, as bytes ready to be sent. Blocking: for worker threads."""

from __future__ import annotations

from collections.abc import Iterator

import structlog

from cache_server.companions import Companions, Trail
from cache_server.library import Library
from snapshotter.cache_v1.protocol import (
    MAX_CHUNK_TABLE_BYTES,
    MAX_FETCH_CHUNKS,
    ChunkTable,
    Data,
    Done,
    Fetch,
    Response,
    encode_response,
    error_response,
)
from snapshotter.digest import format_digest, parse_digest
from snapshotter.errors import InvalidInputError, NotFoundError, SnapshotterError
from snapshotter.framing import encode_frame
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.telemetry import Counters

_STEP_BYTES = 2 << 20
"""A fetch is answered in pieces of about this size: memory stays bounded, sending overlaps."""
_COMPANION_STEP_BYTES = 256 << 10

log = structlog.get_logger(__name__)


class Answers:
    """Makes answers from a library; safe from any thread. ``counters`` say what was served."""

    def __init__(self, library: Library, companions: Companions, counters: Counters) -> None:
        self.companions = companions
        self.counters = counters
        self._library = library

    def chunk_table(self, request: ChunkTable) -> bytes:
        """A whole answer. Raises InvalidInputError, NotFoundError or CorruptError."""
        if request.size <= CHUNK_SIZE:
            raise InvalidInputError(
                f"chunk_table: content of {request.size} bytes is one chunk and has no table"
            )
        name = ContentName(parse_digest(request.content), request.size)
        table = self._library.chunk_table(name)
        if len(table) > MAX_CHUNK_TABLE_BYTES:
            raise InvalidInputError(f"chunk_table: that of {name} has {len(table)} bytes")
        self.counters.add("chunk_tables")
        return _frame(Data(length=len(table), sha256=request.content)) + table

    def fetch(self, request: Fetch, trail: Trail) -> Iterator[tuple[bytes, bool]]:
        """The parts of an answer, to be sent in order, each with whether it is the last.

        Chunks come as asked for, a missing or corrupt one as an error of its own; companions that
        cannot be read are left out. Raises InvalidInputError before the first part.
        """
        digests = _checked(request)
        return self._parts(request, digests, trail)

    def _parts(
        self, request: Fetch, digests: list[bytes], trail: Trail
    ) -> Iterator[tuple[bytes, bool]]:
        self.counters.add("fetches")
        parts: list[bytes] = []
        size = 0
        for text, data in zip(request.chunks, self._read(digests), strict=True):
            size += self._add_chunk(parts, text, data)
            if size >= _STEP_BYTES:
                yield b"".join(parts), False
                parts, size = [], 0
        names = self.companions.choose(request.handle, digests, request.companions_bytes, trail)
        if names and parts:
            yield b"".join(parts), False
            parts, size = [], 0
        companions = self._read([name.content_id for name in names])
        for name, data in zip(names, companions, strict=True):
            size += self._add_companion(parts, name, data)
            if size >= _COMPANION_STEP_BYTES:
                yield b"".join(parts), False
                parts, size = [], 0
        parts.append(_DONE)
        yield b"".join(parts), True

    def _read(self, digests: list[bytes]) -> Iterator[bytes | SnapshotterError]:
        """Each chunk, or why it cannot be had."""
        try:
            locations = self._library.locate_all(digests)
        except SnapshotterError as error:
            yield from (error for _ in digests)
            return
        for digest in digests:
            location = locations.get(digest)
            if location is None:
                yield NotFoundError(f"chunk {format_digest(digest)}: not in the library")
                continue
            try:
                yield self._library.read_located(digest, location)
            except SnapshotterError as error:
                yield error

    def _add_chunk(self, parts: list[bytes], text: str, data: bytes | SnapshotterError) -> int:
        if isinstance(data, SnapshotterError):
            self.counters.add("failed_chunks")
            if data.code != NotFoundError.code:
                log.error("chunk cannot be read", chunk=text, error=str(data))
            parts.append(_frame(error_response(data, chunk=text)))
            return 0
        self.counters.add("chunks")
        self.counters.add("chunk_bytes", len(data))
        parts.append(_frame(Data(length=len(data), chunk=text)))
        parts.append(data)
        return len(data)

    def _add_companion(
        self, parts: list[bytes], name: ContentName, data: bytes | SnapshotterError
    ) -> int:
        if isinstance(data, SnapshotterError):
            return 0  # whoever needs it will ask for it and get the error
        self.counters.add("companions")
        self.counters.add("companion_bytes", len(data))
        parts.append(_frame(Data(length=len(data), companion=True, object=name.path)))
        parts.append(data)
        return len(data)


def _checked(request: Fetch) -> list[bytes]:
    if len(request.chunks) > MAX_FETCH_CHUNKS:
        raise InvalidInputError(f"fetch: {len(request.chunks)} chunks ({MAX_FETCH_CHUNKS} at most)")
    if request.companions_bytes < 0:
        raise InvalidInputError(f"fetch: companions_bytes is {request.companions_bytes}")
    return [parse_digest(text) for text in request.chunks]


def _frame(response: Response) -> bytes:
    return encode_frame(encode_response(response))


_DONE = _frame(Done())
