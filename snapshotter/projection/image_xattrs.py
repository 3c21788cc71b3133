"""Extended attributes in a metadata image: the area behind an inode, both ways.

``trusted.overlay.*`` belongs to overlayfs, which takes a file's content from where our redirect
says. A file's own attribute of that name space is escaped as overlayfs does it
(``trusted.overlay.overlay.*``), and shows under its own name again in a view.
"""

from __future__ import annotations

import functools
import struct
from binascii import unhexlify
from collections.abc import Iterator

from snapshotter.digest import DIGEST_SIZE
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.names import MAX_CONTENT_SIZE, ContentName
from snapshotter.projection import erofs

OVERLAY = b"trusted.overlay."
ESCAPED = b"trusted.overlay.overlay."
METACOPY = b"trusted.overlay.metacopy"
REDIRECT = b"trusted.overlay.redirect"

MAX_XATTR_NAME = 255
"""Bytes of a whole name, as Linux limits it (XATTR_NAME_MAX)."""

_HEADER = erofs.XATTR_HEADER.pack(0, 0)
_PAD = (b"", bytes(3), bytes(2), bytes(1))
_TRUSTED = 4
_TRUSTED_PREFIX = erofs.XATTR_PREFIXES[_TRUSTED]
_LENGTH_AT = erofs.XATTR_HEADER_SIZE + 20 + 2
"""Where a redirect's length stands: behind the metacopy entry and two bytes of its own."""
_PATH_AT = _LENGTH_AT + 2 + len("overlay.redirect")
_MAX_PATH = len("/ab/") + 62 + len(".") + len(str(MAX_CONTENT_SIZE))
_ACLS = {name: index for index, name in erofs.XATTR_ACL_NAMES.items()}


def xattr_area(xattrs: dict[bytes, bytes], first: bytes = b"") -> bytes:
    """The area for a file's own ``xattrs``, behind ready-made entries ``first``; b"" for none.

    Names outside the name spaces user, trusted and security and the two of POSIX ACLs are left
    out: Linux has no place for them (images built elsewhere carry such), and unpackers drop them.
    Raises InvalidInputError for an illegal name and for more than the format holds: 65,535 bytes
    in a value, 262,148 in all.
    """
    if not xattrs:
        return _HEADER + first if first else b""
    entries = [first]
    for name in sorted(xattrs):
        split = _split_name(name)
        if split is not None:
            entries.append(_entry(name, *split, xattrs[name]))
    area = _HEADER + b"".join(entries)
    if len(area) > erofs.MAX_XATTR_AREA:
        raise InvalidInputError(f"{len(area)} bytes of xattrs; {erofs.MAX_XATTR_AREA} is the limit")
    return area if len(area) > erofs.XATTR_HEADER_SIZE else b""


def content_area(content_id: bytes, size: int, xattrs: dict[bytes, bytes]) -> bytes:
    """The area of a non-empty regular file: the redirect to its content, then its own xattrs."""
    path = _content_path(content_id, size)
    before, after = _around_redirect(len(path))
    if not xattrs:
        return before + path + after
    return xattr_area(xattrs, before[erofs.XATTR_HEADER_SIZE :] + path + after)


def _content_path(content_id: bytes, size: int) -> bytes:
    return f"/{content_id.hex('/', DIGEST_SIZE - 1)}.{size}".encode()


@functools.lru_cache(maxsize=64)
def _around_redirect(length: int) -> tuple[bytes, bytes]:
    """What stands before and after a redirect of this length in an area without other xattrs."""
    head = _entry_head(_TRUSTED, REDIRECT[len(_TRUSTED_PREFIX) :], length)
    metacopy = _entry(METACOPY, _TRUSTED, METACOPY[len(_TRUSTED_PREFIX) :], b"")
    return _HEADER + metacopy + head, _PAD[(len(head) + length) % 4]


def _split_name(name: bytes) -> tuple[int, bytes] | None:
    """Prefix index and the rest of a legal name as it goes into the image; None to leave it out."""
    if name in _ACLS:
        return _ACLS[name], b""
    if b"\0" in name:
        raise InvalidInputError(f"xattr name with a NUL: {name!r}")
    if name.startswith(OVERLAY):
        name = ESCAPED + name[len(OVERLAY) :]
    for index, prefix in erofs.XATTR_PREFIXES.items():
        if name.startswith(prefix):
            if len(name) == len(prefix) or len(name) > MAX_XATTR_NAME:
                raise InvalidInputError(
                    f"xattr name of {len(name)} bytes in the image: {name[:60]!r}"
                )
            return index, name[len(prefix) :]
    return None


def _entry(name: bytes, index: int, rest: bytes, value: bytes) -> bytes:
    if len(value) > erofs.MAX_XATTR_VALUE:
        raise InvalidInputError(f"xattr {name!r} of {len(value)} bytes; 65535 is the limit")
    entry = _entry_head(index, rest, len(value)) + value
    return entry + _PAD[len(entry) % 4]


def _entry_head(index: int, rest: bytes, value_size: int) -> bytes:
    return erofs.XATTR_ENTRY.pack(len(rest), index, value_size) + rest


# Reading ----------------------------------------------------------------------------------------


def stored_xattrs(area: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Every (name, value) of an area as it is stored; CorruptError for anything malformed."""
    if not area:
        return
    if area[: erofs.XATTR_HEADER_SIZE] != _HEADER:
        raise CorruptError("xattr header of another kind")
    at = erofs.XATTR_HEADER_SIZE
    while at < len(area):
        try:
            name_size, index, value_size = erofs.XATTR_ENTRY.unpack_from(area, at)
        except struct.error as error:
            raise CorruptError("xattr entry is cut off") from error
        name_end = at + erofs.XATTR_ENTRY_SIZE + name_size
        value_end = name_end + value_size
        if value_end > len(area):
            raise CorruptError("xattr reaches beyond its area")
        rest = area[at + erofs.XATTR_ENTRY_SIZE : name_end]
        yield _full_name(index, rest), area[name_end:value_end]
        at = value_end + -value_end % 4


def _full_name(index: int, rest: bytes) -> bytes:
    prefix = erofs.XATTR_PREFIXES.get(index)
    if prefix is not None and rest and b"\0" not in rest:
        return prefix + rest
    name = erofs.XATTR_ACL_NAMES.get(index)
    if name is None or rest:
        raise CorruptError(f"xattr with prefix {index} and name {rest[:60]!r}")
    return name


def own_xattrs(area: bytes) -> dict[bytes, bytes]:
    """A file's own xattrs under their own names; CorruptError for anything malformed."""
    own: dict[bytes, bytes] = {}
    for name, value in stored_xattrs(area):
        if name in (METACOPY, REDIRECT):
            continue
        if name.startswith(OVERLAY):
            if not name.startswith(ESCAPED):
                raise CorruptError(f"xattr of overlayfs itself: {name!r}")
            name = OVERLAY + name[len(ESCAPED) :]  # noqa: PLW2901
        own[name] = value
    return own


def content_name(area: bytes) -> ContentName:
    """The content that the redirect names; CorruptError unless it stands first, as we write it.

    An index of an image comes here for each file: what is found is written again and compared,
    which takes half the time of a pattern.
    """
    length = int.from_bytes(area[_LENGTH_AT : _LENGTH_AT + 2], "little")
    path = area[_PATH_AT : _PATH_AT + length]
    if length <= _MAX_PATH and area.startswith(_around_redirect(length)[0]):
        try:
            content_id, size = unhexlify(path[1:3] + path[4:66]), int(path[67:])
        except ValueError:
            pass
        else:
            if path == _content_path(content_id, size) and 0 < size <= MAX_CONTENT_SIZE:
                return ContentName(content_id, size)
    raise CorruptError(_what_is_wrong(area, path, length))


def _what_is_wrong(area: bytes, path: bytes, length: int) -> str:
    if not area.startswith(_around_redirect(length)[0]) or len(path) != length:
        return "no redirect to its content"
    if not path.startswith(b"/"):
        return f"redirect {path[:100]!r} is not absolute"
    return f"redirect: not an object name: {path[1:100]!r}"
