"""Reads a layer's tar as a stream of entries and content; no I/O of its own.

Formats: v7, ustar and pax as POSIX.1-2017 describes them (pax, "Extended Description"), and GNU's
long names, long links and base-256 numbers (GNU tar manual, "Basic Tar Format"). What an entry
means is what containerd's unpacker makes of it (its ``archive`` package over Go's archive/tar),
so that an image shows the same tree here: pax global headers say nothing about entries, data
behind links and devices' headers is not there, ``trusted.*`` attributes are not taken, and times
that cannot be expressed become the epoch. Stricter than it: ``..`` is refused, not resolved.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator

from cache_server.formats.tar_fields import (
    Extensions,
    check_checksum,
    parse_number,
    parse_path,
    parse_pax_records,
    show,
    text,
)
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.names import CHUNK_SIZE, MAX_CONTENT_SIZE, check_component
from snapshotter.projection.tree import EntryKind, LayerEntry

BLOCK_SIZE = 512
MAX_EXTENSION_BYTES = 1 << 20
"""The longest pax header or GNU long name that is read; Go's archive/tar has the same limit."""

_MAX_ID = (1 << 32) - 2
_MAX_TARGET_BYTES = 4095
_ZERO_BLOCK = bytes(BLOCK_SIZE)

_TYPE_BITS = {
    b"2": stat.S_IFLNK,
    b"3": stat.S_IFCHR,
    b"4": stat.S_IFBLK,
    b"5": stat.S_IFDIR,
    b"6": stat.S_IFIFO,
}
_REGULAR = b"07\x00"
_WHITEOUT = b".wh."
_AUFS = b".wh..wh."
_OPAQUE = b".wh..wh..opq"


def read_tar(blocks: Iterable[bytes]) -> Iterator[LayerEntry | memoryview]:
    """The entries of a tar that comes in pieces of any length, in order.

    A regular file's entry of ``size`` > 0 is followed by its content in views of one chunk each
    (the last one shorter); ``content`` is left empty, for the reader to fill in. All of
    ``blocks`` is consumed, also what follows the end of the archive.

    Raises InvalidInputError, naming the entry, for what an image must not hold; CorruptError for
    a damaged or truncated archive.
    """
    source = _Stream(blocks)
    extensions = Extensions()
    while (header := _next_header(source)) is not None:
        kind = header[156:157]
        if kind in b"xgLK":
            _read_extension(source, header, kind, extensions)
            continue
        entry, size = _entry(header, kind, extensions)
        extensions = Extensions()
        if entry is not None:
            yield entry
        if size:
            for piece in _content(source, size, text(header[:100])):
                if entry is not None and entry.size:
                    yield piece
    if not extensions.is_empty:
        raise CorruptError("tar: ends after an extended header, without its entry")
    source.drain()


def _content(source: _Stream, size: int, name: bytes) -> Iterator[memoryview]:
    left = size
    while left:
        piece = source.take(min(left, CHUNK_SIZE))
        if piece is None:
            raise CorruptError(f"tar: truncated in the content of {show(name)}")
        left -= len(piece)
        yield piece
    if source.take(-size % BLOCK_SIZE) is None:
        raise CorruptError(f"tar: truncated after the content of {show(name)}")


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


def _read_extension(source: _Stream, header: bytes, kind: bytes, extensions: Extensions) -> None:
    size = parse_number(header[124:136], "size")
    if not 0 <= size <= MAX_EXTENSION_BYTES:
        raise InvalidInputError(
            f"tar: extended header of {size} bytes ({MAX_EXTENSION_BYTES} at most)"
        )
    view = source.take(size + -size % BLOCK_SIZE)
    if view is None:
        raise CorruptError("tar: truncated within an extended header")
    data = bytes(view[:size])
    if kind == b"L":
        extensions.long_name = text(data)
    elif kind == b"K":
        extensions.long_link = text(data)
    elif kind == b"x":
        extensions.pax = parse_pax_records(data)
    extensions.is_empty = False


def _raw_name(header: bytes, extensions: Extensions) -> bytes:
    if extensions.long_name is not None:
        return extensions.long_name
    if b"path" in extensions.pax:
        return extensions.pax[b"path"]
    name = text(header[:100])
    # GNU and v7 headers have other things, or nothing, where ustar has the prefix.
    if header[257:263] == b"ustar\0" and header[345]:
        return text(header[345:500]) + b"/" + name
    return name


def _entry(header: bytes, kind: bytes, extensions: Extensions) -> tuple[LayerEntry | None, int]:
    """The entry of a header (None: to be skipped) and the bytes of data that follow it."""
    raw = _raw_name(header, extensions)
    try:
        return _entry_named(header, kind, extensions, raw)
    except InvalidInputError as error:
        raise InvalidInputError(f"tar: entry {show(raw)}: {error}") from error


def _entry_named(
    header: bytes, kind: bytes, extensions: Extensions, raw: bytes
) -> tuple[LayerEntry | None, int]:
    path = parse_path(raw)
    if kind == b"\0" and raw.endswith(b"/"):
        kind = b"5"
    is_regular = kind in _REGULAR
    size = extensions.number(b"size", header[124:136]) if is_regular else 0
    if not 0 <= size <= MAX_CONTENT_SIZE:
        raise InvalidInputError(f"size out of range: {size}")
    if b".wh." in path:
        marker = _whiteout(path)
        if marker is not None:
            return (marker if marker.kind != EntryKind.NODE else None), size
    entry = LayerEntry(EntryKind.NODE, path)
    entry.mode = parse_number(header[100:108], "mode") & 0o7777
    entry.uid = _owner(extensions.number(b"uid", header[108:116]), "uid")
    entry.gid = _owner(extensions.number(b"gid", header[116:124]), "gid")
    entry.mtime_ns = extensions.time_ns(header[136:148])
    if extensions.pax:
        entry.xattrs = extensions.xattrs()
    if is_regular:
        if extensions.is_sparse:
            raise InvalidInputError("GNU sparse files are not supported; pack without --sparse")
        entry.mode |= stat.S_IFREG
        entry.size = size
    elif kind == b"1":
        entry.kind = EntryKind.HARD_LINK
        entry.target = parse_path(_raw_target(header, extensions))
    else:
        _special(entry, header, kind, extensions)
    if not path and not stat.S_ISDIR(entry.mode):
        raise InvalidInputError("the root is not a directory")
    return entry, size


def _special(entry: LayerEntry, header: bytes, kind: bytes, extensions: Extensions) -> None:
    type_bits = _TYPE_BITS.get(kind)
    if type_bits is None:
        known = {b"S": "GNU sparse files are not supported; pack without --sparse"}
        raise InvalidInputError(known.get(kind, f"unknown type {kind!r}"))
    entry.mode |= type_bits
    if kind != b"5":
        # user.* is for files and directories alone; the unpacker warns and goes on.
        entry.xattrs = {
            name: value for name, value in entry.xattrs.items() if not name.startswith(b"user.")
        }
    if kind == b"2":
        entry.target = _raw_target(header, extensions)
        if not 0 < len(entry.target) <= _MAX_TARGET_BYTES:
            raise InvalidInputError(f"symlink target of {len(entry.target)} bytes")
    elif kind in b"34":
        major = parse_number(header[329:337], "device major")
        minor = parse_number(header[337:345], "device minor")
        if not (0 <= major <= 0xFFF and 0 <= minor <= 0xFFFFF):
            raise InvalidInputError(f"device number out of range: {major}:{minor}")
        entry.rdev = minor & 0xFF | major << 8 | (minor & ~0xFF) << 12


def _raw_target(header: bytes, extensions: Extensions) -> bytes:
    if extensions.long_link is not None:
        return extensions.long_link
    return extensions.pax.get(b"linkpath") or text(header[157:257])


def _owner(number: int, what: str) -> int:
    if not 0 <= number <= _MAX_ID:
        raise InvalidInputError(f"{what} out of range: {number}")
    return number


def _whiteout(path: bytes) -> LayerEntry | None:
    """The marker that a path stands for; one of kind NODE is to be skipped; None: no marker."""
    directory, _, base = path.rpartition(b"/")
    if base == _OPAQUE:
        return LayerEntry(EntryKind.OPAQUE, directory)
    if any(part.startswith(_AUFS) for part in path.split(b"/")):
        return LayerEntry(EntryKind.NODE, path)
    if not base.startswith(_WHITEOUT):
        return None
    hidden = check_component(base[len(_WHITEOUT) :])
    return LayerEntry(EntryKind.WHITEOUT, directory + b"/" + hidden if directory else hidden)
