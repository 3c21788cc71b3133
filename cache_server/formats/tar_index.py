"""Where the files in an uncompressed tar lie, so that they can be read in place.

For archives of images (``oci-archive:``, ``docker-archive:``): only headers are read, each with a
seek over the data before it. Layers are read by ``formats.tar``, as a stream.
"""

from __future__ import annotations

import os
import posixpath
from dataclasses import dataclass, field

from cache_server.formats.compression import compression_of
from cache_server.formats.tar_entry import GNU_SPARSE, raw_name
from cache_server.formats.tar_fields import (
    Extensions,
    check_checksum,
    parse_number,
    parse_path,
    parse_pax_records,
    show,
    text,
)
from cache_server.formats.tar_sparse import has_pax_map
from snapshotter.errors import CorruptError, InvalidInputError, NotFoundError, UnsupportedError

MAX_MEMBERS = 100_000
"""More than any image's archive has: a few for each layer."""

_BLOCK_SIZE = 512
_MAX_EXTENSION_BYTES = 1 << 20
_MAX_LINKS = 16
_PLAIN = (b"0", b"7", b"\0")
_HARD_LINK, _SYMLINK = b"1", b"2"
_EXTENSIONS = (b"x", b"g", b"L", b"K")


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes within a file."""

    offset: int
    size: int


@dataclass(slots=True)
class TarIndex:
    """The members of one archive by path; a later member replaces an earlier one."""

    files: dict[bytes, Extent] = field(default_factory=dict)
    links: dict[bytes, bytes] = field(default_factory=dict)
    """Links of both kinds, to the path in the archive that they mean."""

    def find(self, path: bytes) -> Extent:
        """Where the file ``path`` lies, links followed. Raises NotFoundError."""
        at = path
        for _ in range(_MAX_LINKS):
            if at not in self.links:
                break
            at = self.links[at]
        if at not in self.files:
            raise NotFoundError(f"no file {show(path)} in the archive")
        return self.files[at]


def read_index(descriptor: int) -> TarIndex:
    """The index of the tar behind a file descriptor. Blocks.

    Raises CorruptError for what is damaged, cut short or no tar, UnsupportedError for compressed
    ones and sparse files, InvalidInputError for what no archive of an image has, OSError.
    """
    size = os.fstat(descriptor).st_size
    kind = compression_of(os.pread(descriptor, 4, 0))
    if kind:
        raise UnsupportedError(f"compressed ({kind}) archives are not read; decompress it first")
    index = TarIndex()
    extensions = Extensions()
    at = members = 0
    while (header := _header(descriptor, at)) is not None:
        members += 1
        if members > MAX_MEMBERS:
            raise InvalidInputError(f"more than {MAX_MEMBERS} members")
        at += _BLOCK_SIZE
        length = _length(header, extensions)
        if not 0 <= length <= size - at:
            raise CorruptError(f"truncated: {length} bytes are to follow at {at} of {size}")
        if header[156:157] in _EXTENSIONS:
            extensions = _extended(descriptor, Extent(at, length), header[156:157], extensions)
        else:
            _add(index, header, extensions, Extent(at, length))
            extensions = Extensions()
        at += length + -length % _BLOCK_SIZE
    return index


def _header(descriptor: int, at: int) -> bytes | None:
    """The header there; None at the end of the archive."""
    header = os.pread(descriptor, _BLOCK_SIZE, at)
    if not header or (len(header) == _BLOCK_SIZE and not any(header)):
        return None
    if len(header) < _BLOCK_SIZE:
        raise CorruptError("truncated within a header")
    check_checksum(header)
    return header


def _length(header: bytes, extensions: Extensions) -> int:
    """How many bytes of data follow a header: none behind links and such, whatever they say."""
    kind = header[156:157]
    if kind == GNU_SPARSE:
        raise UnsupportedError(f"sparse file {show(text(header[:100]))} in an archive of an image")
    if kind in _EXTENSIONS:
        return parse_number(header[124:136], "size")
    return extensions.number("size", header[124:136]) if kind in _PLAIN else 0


def _extended(descriptor: int, extent: Extent, kind: bytes, extensions: Extensions) -> Extensions:
    """What holds for the next member, now that one more extended header was read."""
    if extent.size > _MAX_EXTENSION_BYTES:
        raise InvalidInputError(
            f"extended header of {extent.size} bytes ({_MAX_EXTENSION_BYTES} at most)"
        )
    data = os.pread(descriptor, extent.size, extent.offset)
    if kind == b"L":
        extensions.long_name = text(data) or None
    elif kind == b"K":
        extensions.long_link = text(data) or None
    elif kind == b"x":
        extensions.pax = parse_pax_records(data)
    return extensions


def _add(index: TarIndex, header: bytes, extensions: Extensions, extent: Extent) -> None:
    kind = header[156:157]
    path = parse_path(raw_name(header, kind, extensions))
    index.files.pop(path, None)
    index.links.pop(path, None)
    if kind in _PLAIN and not has_pax_map(extensions.pax):
        index.files[path] = extent
    elif kind in (_HARD_LINK, _SYMLINK):
        target = extensions.long_link or extensions.pax.get(b"linkpath") or text(header[157:257])
        directory = posixpath.dirname(path) if kind == _SYMLINK else b""
        resolved = posixpath.normpath(posixpath.join(b"/", directory, target))
        index.links[path] = resolved.lstrip(b"/")
