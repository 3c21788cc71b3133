"""Answers made of stored content, as bytes ready to be sent. Blocking: for worker threads."""

from __future__ import annotations

from collections.abc import Iterator

import structlog

from cache_server.companions import Companions, Trail
from cache_server.library import ChunkLocation, Codec, Library
from cache_server.trees import Trees
from snapshotter.cache_v1.protocol import (
    MAX_CHUNK_TABLE_BYTES,
    MAX_FETCH_CHUNKS,
    ChunkTable,
    Data,
    Done,
    Fetch,
    List,
    MetadataImage,
    Read,
    Response,
    Stat,
    encode_response,
    error_response,
)
from snapshotter.digest import format_digest, parse_digest, sha256
from snapshotter.errors import InvalidInputError, NotFoundError, SnapshotterError
from snapshotter.framing import encode_frame
from snapshotter.names import CHUNK_SIZE, MAX_CONTENT_SIZE, ContentName
from snapshotter.telemetry import Counters

_STEP_BYTES = 2 << 20
"""A fetch is answered in pieces of about this size: memory stays bounded, sending overlaps."""
_COMPANION_STEP_BYTES = 256 << 10
_VERIFIED_BYTES = 64 << 10
"""What takes more room than this in its pack is verified by its receiver alone, who must do so
anyway; to do it here too would take half the time of sending it."""

Part = bytes | ChunkLocation
"""Bytes to be sent, or a chunk to be sent straight from its pack."""

Browse = List | Stat | Read
"""What is asked about an image's tree, by a path."""

log = structlog.get_logger(__name__)


class Answers:
    """Makes answers from a library; safe from any thread. ``counters`` say what was served."""

    def __init__(self, library: Library, companions: Companions, counters: Counters) -> None:
        self.companions = companions
        self.trees = Trees(library)
        self.counters = counters
        self.library = library

    def chunk_table(self, request: ChunkTable) -> bytes:
        """A whole answer. Raises InvalidInputError, NotFoundError or CorruptError."""
        if not CHUNK_SIZE < request.size <= MAX_CONTENT_SIZE:
            raise InvalidInputError(f"chunk_table: content of {request.size} bytes has none")
        name = ContentName(parse_digest(request.content), request.size)
        table = self.library.chunk_table(name)
        if len(table) > MAX_CHUNK_TABLE_BYTES:
            raise InvalidInputError(f"chunk_table: that of {name} has {len(table)} bytes")
        self.counters.add("chunk_tables")
        return _frame(Data(length=len(table), sha256=request.content)) + table

    def browse(self, image: MetadataImage, request: Browse) -> bytes:
        """A whole answer about a name in an image's tree, or a part of a directory or file.

        Raises NotFoundError for a name that is not there, and what Trees says else.
        """
        match request:
            case Stat():
                answer, body = _frame(self.trees.stat(image, request)), b""
            case List():
                answer, body = _frame(self.trees.list(image, request)), b""
            case Read():
                body = self.trees.read(image, request)
                answer = _frame(Data(length=len(body), sha256=format_digest(sha256(body))))
                self.counters.add("read_bytes", len(body))
        self.counters.add("browsed")
        return answer + body

    def fetch(self, request: Fetch, trail: Trail) -> Iterator[Part]:
        """The parts of an answer, to be sent in order.

        Chunks come as asked for, a missing or corrupt one as an error of its own; companions that
        cannot be read are left out. Raises InvalidInputError before the first part.
        """
        digests = _checked(request)
        return self._parts(request, digests, trail)

    def _parts(self, request: Fetch, digests: list[bytes], trail: Trail) -> Iterator[Part]:
        self.counters.add("fetches")
        parts: list[bytes] = []
        size = 0
        for text, data in zip(request.chunks, self._read(digests), strict=True):
            if isinstance(data, ChunkLocation):
                yield b"".join((*parts, self._chunk_frame(text, data.length)))
                yield data
                parts, size = [], 0
                continue
            size += self._add_chunk(parts, text, data)
            if size >= _STEP_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
        names = self.companions.choose(request.handle, digests, request.companions_bytes, trail)
        if names and parts:
            yield b"".join(parts)
            parts, size = [], 0
        companions = self._read([name.content_id for name in names])
        for name, data in zip(names, companions, strict=True):
            size += self._add_companion(parts, name, data)
            if size >= _COMPANION_STEP_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
        parts.append(_DONE)
        yield b"".join(parts)

    def _read(self, digests: list[bytes]) -> Iterator[Part | SnapshotterError]:
        """Each chunk, or where to send it from, or why it cannot be had."""
        try:
            locations = self.library.locate_all(digests)
        except SnapshotterError as error:
            yield from (error for _ in digests)
            return
        for digest in digests:
            location = locations.get(digest)
            if location is None:
                yield NotFoundError(f"chunk {format_digest(digest)}: not in the library")
                continue
            try:
                yield self._load(digest, location)
            except SnapshotterError as error:
                yield self._load_moved(digest, location, error)

    def _load_moved(
        self, digest: bytes, former: ChunkLocation, failure: SnapshotterError
    ) -> Part | SnapshotterError:
        """The chunk from where it is now, if it was moved after it was located; else why not."""
        try:
            location = self.library.locate(digest)
            return failure if location == former else self._load(digest, location)
        except SnapshotterError as error:
            return error

    def _load(self, digest: bytes, location: ChunkLocation) -> Part:
        if location.length <= _VERIFIED_BYTES:
            return self.library.read_located(digest, location)
        if location.codec != Codec.RAW:
            return self.library.read_unverified(digest, location)
        self.library.check_located(location)
        return location

    def _add_chunk(self, parts: list[bytes], text: str, data: bytes | SnapshotterError) -> int:
        if isinstance(data, SnapshotterError):
            self.counters.add("failed_chunks")
            if data.code != NotFoundError.code:
                log.error("chunk cannot be read", chunk=text, error=str(data))
            parts.append(_frame(error_response(data, chunk=text)))
            return 0
        parts.append(self._chunk_frame(text, len(data)))
        parts.append(data)
        return len(data)

    def _chunk_frame(self, text: str, length: int) -> bytes:
        self.counters.add("chunks")
        self.counters.add("chunk_bytes", length)
        return _frame(Data(length=length, chunk=text))

    def _add_companion(
        self, parts: list[bytes], name: ContentName, data: Part | SnapshotterError
    ) -> int:
        if not isinstance(data, bytes):
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
