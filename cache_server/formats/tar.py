"""Reads a layer's tar as a stream of entries and content; no I/O of its own.

Formats: v7, ustar and pax as POSIX.1-2017 describes them (pax, "Extended Description"), and GNU's
long names, long links, base-256 numbers and sparse files (GNU tar manual, "Basic Tar Format").
What an entry means is what containerd's unpacker makes of it (its ``archive`` package over Go's
archive/tar), so that an image shows the same tree here: pax global headers say nothing about
entries, data behind links and devices' headers is not there, ``trusted.*`` attributes are not
taken, and times that cannot be expressed become the epoch. Where this is not so on purpose,
docs/decisions says why.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator

from cache_server.formats.tar_entry import GNU_SPARSE, parse_entry, raw_name
from cache_server.formats.tar_fields import (
    Extensions,
    check_checksum,
    parse_number,
    parse_pax_records,
    show,
    text,
)
from cache_server.formats.tar_sparse import (
    SparseMap,
    expand,
    has_pax_map,
    read_gnu_map,
    read_pax_map,
)
from cache_server.limits import IngestLimits
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.names import CHUNK_SIZE
from snapshotter.projection.tree import LayerEntry

BLOCK_SIZE = 512
_ZERO_BLOCK = bytes(BLOCK_SIZE)
_DEFAULT_LIMITS = IngestLimits()


def read_tar(
    blocks: Iterable[bytes], limits: IngestLimits = _DEFAULT_LIMITS
) -> Iterator[LayerEntry | memoryview]:
    """The entries of a tar that comes in pieces of any length, in order.

    A regular file's entry of ``size`` > 0 is followed by its content in views of one chunk each
    (the last one shorter), holes as zeros; ``content`` is left empty, for the reader to fill in.
    All of ``blocks`` is consumed, also what follows the end of the archive.

    Raises InvalidInputError, naming the entry, for what an image must not hold or what exceeds the
    limits on single entries; CorruptError for a damaged or truncated archive.
    """
    source = _Stream(blocks)
    extensions = Extensions()
    while (header := _next_header(source)) is not None:
        kind = header[156:157]
        if kind in b"xgLK":
            extensions = _read_extension(source, header, kind, extensions, limits)
            continue
        entry, stored_bytes, sparse = _member(source, header, kind, extensions, limits)
        extensions = Extensions()
        if entry is not None:
            yield entry
        if sparse is not None:
            pieces = _sparse_content(source, sparse, stored_bytes, header)
        elif stored_bytes:
            pieces = _content(source, stored_bytes, header)
        else:
            continue
        is_wanted = entry is not None and entry.size > 0
        for piece in pieces:
            if is_wanted:
                yield piece
    source.drain()


def _content(source: _Stream, size: int, header: bytes) -> Iterator[memoryview]:
    left = size
    while left:
        piece = source.take(min(left, CHUNK_SIZE))
        if piece is None:
            raise _truncated(header)
        left -= len(piece)
        yield piece
    if source.take(-size % BLOCK_SIZE) is None:
        raise _truncated(header)


def _sparse_content(
    source: _Stream, sparse: SparseMap, stored_bytes: int, header: bytes
) -> Iterator[memoryview]:
    try:
        yield from expand(sparse, source.take)
    except CorruptError as error:
        raise _truncated(header) from error
    if source.take(-stored_bytes % BLOCK_SIZE) is None:
        raise _truncated(header)


def _truncated(header: bytes) -> CorruptError:
    return CorruptError(f"tar: truncated in the content of {show(text(header[:100]))}")


class _Stream:
    """Gives out a stream of pieces in the lengths that are asked for."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._view = memoryview(b"")
        self._at = 0

    def take(self, length: int) -> memoryview | None:
        """The next ``length`` bytes, or None if the stream ends before."""
        end = self._at + length
        if end <= len(self._view):
            taken = self._view[self._at : end]
            self._at = end
            return taken
        return self._take_across(length)

    def _take_across(self, length: int) -> memoryview | None:
        parts: list[bytes | memoryview] = [self._view[self._at :]]
        have = len(self._view) - self._at
        while have < length:
            block = next(self._blocks, None)
            if block is None:
                self._view, self._at = memoryview(b"".join(parts)), 0
                return None
            parts.append(block)
            have += len(block)
        last = memoryview(parts.pop())
        self._view, self._at = last, length - (have - len(last))
        return memoryview(b"".join((*parts, last[: self._at])))

    @property
    def is_at_end(self) -> bool:
        """Whether nothing follows, as ``take`` found."""
        return self._at == len(self._view)

    def drain(self) -> None:
        """Reads and forgets the rest."""
        for _ in self._blocks:
            pass


def _next_header(source: _Stream) -> bytes | None:
    """The next header block; None at the end: a zero block, or no further byte."""
    view = source.take(BLOCK_SIZE)
    if view is None:
        if source.is_at_end:
            return None
        raise CorruptError("tar: truncated within a header")
    header = bytes(view)
    if header == _ZERO_BLOCK:
        second = source.take(BLOCK_SIZE)
        if second is not None and second != _ZERO_BLOCK:
            raise CorruptError("tar: data follows a single zero block")
        return None
    check_checksum(header)
    return header


def _read_extension(
    source: _Stream, header: bytes, kind: bytes, extensions: Extensions, limits: IngestLimits
) -> Extensions:
    """What holds for the next entry now that one more extended header was read."""
    size = parse_number(header[124:136], "size")
    if not 0 <= size <= limits.extension_bytes:
        raise InvalidInputError(
            f"tar: extended header of {size} bytes"
            f" (limit extension_bytes: {limits.extension_bytes})"
        )
    view = source.take(size + -size % BLOCK_SIZE)
    if view is None:
        raise CorruptError("tar: truncated within an extended header")
    data = bytes(view[:size])
    if kind == b"L":
        extensions.long_name = text(data) or None
    elif kind == b"K":
        extensions.long_link = text(data) or None
    elif kind == b"x":
        extensions.pax = parse_pax_records(data)
    else:
        # To Go a global header is an entry, so that what stands before it is about that.
        parse_pax_records(data)
        return Extensions()
    return extensions


def _member(
    source: _Stream, header: bytes, kind: bytes, extensions: Extensions, limits: IngestLimits
) -> tuple[LayerEntry | None, int, SparseMap | None]:
    """The entry of a header (None: to be skipped), the bytes of data behind it, and their map.

    A map that stands in front of the data is read on the way.
    """
    raw = raw_name(header, kind, extensions)
    sparse = None
    try:
        entry, size = parse_entry(header, kind, extensions, raw, limits)
        if kind == GNU_SPARSE:
            sparse = read_gnu_map(header, size, source.take)
        elif extensions.pax and has_pax_map(extensions.pax):
            sparse, size = read_pax_map(extensions.pax, size, source.take)
    except (InvalidInputError, CorruptError) as error:
        raise type(error)(f"tar: entry {show(raw)}: {error}") from error
    if sparse is not None and entry is not None and stat.S_ISREG(entry.mode):
        entry.size = sparse.size
        if entry.size > limits.layer_bytes:
            raise InvalidInputError(
                f"tar: entry {show(raw)}: {entry.size} bytes"
                f" (limit layer_bytes: {limits.layer_bytes})"
            )
    return entry, size, sparse
