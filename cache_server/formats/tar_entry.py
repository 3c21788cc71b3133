"""One entry of a tar: what its header, and the extended headers before it, make of a LayerEntry."""

from __future__ import annotations

import stat
from functools import lru_cache

from cache_server.formats.tar_fields import Extensions, parse_number, parse_path, text
from cache_server.formats.tar_sparse import has_pax_map
from cache_server.limits import IngestLimits
from snapshotter.errors import InvalidInputError
from snapshotter.names import MAX_CONTENT_SIZE, check_component
from snapshotter.projection.tree import EntryKind, LayerEntry

AUFS_LINKS = b".wh..wh.plnk/"
"""Where AUFS kept files with several names; hard links point there, and nothing else may."""

_NO_ID = (1 << 32) - 1
_MAX_TARGET_BYTES = 4095

_TYPE_BITS = {
    b"2": stat.S_IFLNK,
    b"3": stat.S_IFCHR,
    b"4": stat.S_IFBLK,
    b"5": stat.S_IFDIR,
    b"6": stat.S_IFIFO,
}
GNU_SPARSE = b"S"
REGULAR = b"0S\x00"
_USTAR, _GNU, _STAR = b"ustar\0", b"ustar ", b"tar\0"
_WHITEOUT = b".wh."
_AUFS = b".wh..wh."
_OPAQUE = b".wh..wh..opq"


def raw_name(header: bytes, kind: bytes, extensions: Extensions) -> bytes:
    """The path of an entry as its headers give it."""
    pax = extensions.pax
    if b"GNU.sparse.name" in pax and kind in REGULAR and has_pax_map(pax):
        return pax[b"GNU.sparse.name"]
    if extensions.long_name is not None:
        return extensions.long_name
    if b"path" in pax:
        return pax[b"path"]
    name = text(header[:100])
    # GNU and v7 headers have other things, or nothing, where ustar has the prefix.
    if header[257:263] == _USTAR and header[345]:
        end = 476 if header[508:] == _STAR else 500
        return text(header[345:end]) + b"/" + name
    return name


def parse_entry(
    header: bytes, kind: bytes, extensions: Extensions, raw: bytes, limits: IngestLimits
) -> tuple[LayerEntry | None, int]:
    """What an entry named ``raw`` is, None if it is to be skipped, and how much data follows it.

    A sparse file's size is what its header says, not yet that of its map. Raises InvalidInputError,
    without the entry's name, for what an image must not hold.
    """
    path = _checked_path(raw, limits)
    if kind == b"\0" and raw.endswith(b"/"):
        kind = b"5"
    is_regular = kind in REGULAR
    size = _stored_size(header, extensions, is_regular=is_regular)
    if b".wh." in path:
        marker = _marker(path, is_regular=is_regular)
        if marker is not None:
            return (marker if marker.kind != EntryKind.NODE else None), size
    entry = LayerEntry(EntryKind.NODE, path)
    entry.mode = parse_number(header[100:108], "mode") & 0o7777
    entry.uid = _owner(extensions.number("uid", header[108:116]), "uid")
    entry.gid = _owner(extensions.number("gid", header[116:124]), "gid")
    entry.mtime_ns = extensions.time_ns(header[136:148])
    device = _device(header[257:263], header[329:345])
    if extensions.pax:
        entry.xattrs = _fitting(kind, extensions.xattrs(entry.mode, limits.xattr_bytes))
    if is_regular:
        entry.mode |= stat.S_IFREG
        entry.size = size
    elif kind == b"1":
        entry.kind = EntryKind.HARD_LINK
        entry.target = parse_path(_raw_target(header, extensions))
    else:
        _make_special(entry, kind, device, _raw_target(header, extensions))
    if not path and not stat.S_ISDIR(entry.mode):
        raise InvalidInputError("the root is not a directory")
    return entry, size


def _checked_path(raw: bytes, limits: IngestLimits) -> bytes:
    path = parse_path(raw)
    if len(path) <= limits.path_bytes and path.count(b"/") <= limits.path_depth:
        return path
    if len(path) > limits.path_bytes:
        raise InvalidInputError(
            f"path of {len(path)} bytes (limit path_bytes: {limits.path_bytes})"
        )
    raise InvalidInputError(
        f"path below more directories than limit path_depth: {limits.path_depth}"
    )


def _stored_size(header: bytes, extensions: Extensions, *, is_regular: bool) -> int:
    """The bytes of data behind a header; only regular files have any, whatever it says."""
    size = extensions.number("size", header[124:136])
    if not is_regular:
        if extensions.pax and has_pax_map(extensions.pax):
            raise InvalidInputError("a sparse map is for regular files")
        return 0
    if not 0 <= size <= MAX_CONTENT_SIZE:
        raise InvalidInputError(f"size out of range: {size}")
    return size


@lru_cache(maxsize=256)
def _device(magic: bytes, fields: bytes) -> tuple[int, int]:
    """Major and minor, which every header but a v7 one has; a bad one is bad in any entry."""
    if magic not in (_USTAR, _GNU):
        return 0, 0
    return parse_number(fields[:8], "device major"), parse_number(fields[8:], "device minor")


def _fitting(kind: bytes, xattrs: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The xattrs that Linux takes on this kind of file; of others the unpacker only warns."""
    if not xattrs or kind in b"15":
        return xattrs
    if kind == b"2":
        unfit: tuple[bytes, ...] = (b"user.", b"system.")
    else:
        if b"system.posix_acl_default" in xattrs:
            raise InvalidInputError("a default ACL is for directories")
        unfit = () if kind in REGULAR else (b"user.",)
    return {name: value for name, value in xattrs.items() if not name.startswith(unfit)}


def _make_special(entry: LayerEntry, kind: bytes, device: tuple[int, int], target: bytes) -> None:
    type_bits = _TYPE_BITS.get(kind)
    if type_bits is None:
        raise InvalidInputError(f"unknown type {kind!r}")
    entry.mode |= type_bits
    if kind == b"2":
        if not 0 < len(target) <= _MAX_TARGET_BYTES:
            raise InvalidInputError(f"symlink target of {len(target)} bytes")
        entry.target = target
    elif kind in b"34":
        major, minor = device
        if not (0 <= major <= 0xFFF and 0 <= minor <= 0xFFFFF):
            raise InvalidInputError(f"device number out of range: {major}:{minor}")
        entry.rdev = minor & 0xFF | major << 8 | (minor & ~0xFF) << 12


def _raw_target(header: bytes, extensions: Extensions) -> bytes:
    if extensions.long_link is not None:
        return extensions.long_link
    return extensions.pax.get(b"linkpath") or text(header[157:257])


def _owner(number: int, what: str) -> int:
    """An owner; 2^32 - 1, which chown(2) takes for "as it is", leaves root."""
    if not 0 <= number <= _NO_ID:
        raise InvalidInputError(f"{what} out of range: {number}")
    return 0 if number == _NO_ID else number


def _marker(path: bytes, *, is_regular: bool) -> LayerEntry | None:
    """The marker that a path stands for; one of kind NODE is to be skipped; None: no marker."""
    directory, _, base = path.rpartition(b"/")
    if path.startswith(_AUFS) and path != _OPAQUE:
        if is_regular and path.startswith(AUFS_LINKS):
            return None
        return LayerEntry(EntryKind.NODE, path)
    if base == _OPAQUE:
        return LayerEntry(EntryKind.OPAQUE, directory)
    if not base.startswith(_WHITEOUT):
        return None
    hidden = check_component(base[len(_WHITEOUT) :])
    return LayerEntry(EntryKind.WHITEOUT, directory + b"/" + hidden if directory else hidden)
