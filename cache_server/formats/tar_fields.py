"""The single fields of tar headers: texts, numbers, paths, checksums and pax records."""

from __future__ import annotations

import re
import zlib
from functools import lru_cache

from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.names import MAX_COMPONENT_BYTES, MAX_PATH_BYTES, check_component
from snapshotter.projection.posix_acl import access_acl_after_chmod, parse_acl

_NS = 1_000_000_000
_INT64 = 1 << 63
_TIME = re.compile(rb"([+-]?)([0-9]{1,19})(?:\.([0-9]*))?")
_INTEGER = re.compile(rb"[+-]?[0-9]{1,20}")
_ODD = re.compile(rb"(?:^|/)\.{0,2}(?:/|$)|\0")
"""What a path has that needs a closer look: an empty, ``.`` or ``..`` part, or a NUL."""
_SPARSE_MAP = b"GNU.sparse.map"
_SPARSE_PARTS = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
_TEXTS = (b"path", b"linkpath", b"uname", b"gname")
_XATTR_KEY = b"SCHILY.xattr."
# What lsetxattr takes on any file system; others containerd's unpacker warns of and leaves out,
# and trusted.* it leaves out so that an image cannot speak to overlayfs.
_XATTR_PREFIXES = (b"user.", b"security.")
_CAPABILITY = b"security.capability"
_ACCESS_ACL, _DEFAULT_ACL = b"system.posix_acl_access", b"system.posix_acl_default"
_CAPABILITY_REVISIONS = {20: 2, 24: 3}
"""Lengths of file capabilities, and the revision of each (include/uapi/linux/capability.h)."""
_MAX_XATTR_NAME_BYTES = 255
_MAX_XATTR_VALUE_BYTES = 65_535


class Extensions:
    """What extended headers say about the entry that follows them."""

    __slots__ = ("long_link", "long_name", "pax")

    def __init__(self) -> None:
        self.long_name: bytes | None = None
        self.long_link: bytes | None = None
        self.pax: dict[bytes, bytes] = {}

    def number(self, key: str, field: bytes) -> int:
        """The integer of pax record ``key``, else that of the header's field."""
        value = self.pax.get(key.encode()) if self.pax else None
        if value is None:
            return parse_number(field, key)
        if _INTEGER.fullmatch(value) is None:
            raise InvalidInputError(f"pax {key} is not a number: {show(value)}")
        return int(value)

    def time_ns(self, field: bytes) -> int:
        """The modification time in ns; the epoch for one that 64 bits cannot hold."""
        value = None
        if self.pax:
            for key in (b"atime", b"ctime"):
                if key in self.pax:
                    parse_time_ns(self.pax[key])
            value = self.pax.get(b"mtime")
        time_ns = parse_number(field, "mtime") * _NS if value is None else parse_time_ns(value)
        return time_ns if -_INT64 <= time_ns < _INT64 else 0

    def xattrs(self, mode: int, limit_bytes: int) -> dict[bytes, bytes]:
        """The extended attributes that are taken over, for a file of that ``mode``."""
        found = {}
        total = 0
        for key, value in self.pax.items():
            name = key[len(_XATTR_KEY) :]
            if not key.startswith(_XATTR_KEY) or not (
                name.startswith(_XATTR_PREFIXES) or name in (_ACCESS_ACL, _DEFAULT_ACL)
            ):
                continue
            if len(name) > _MAX_XATTR_NAME_BYTES or len(value) > _MAX_XATTR_VALUE_BYTES:
                raise InvalidInputError(
                    f"xattr {show(name)}: name of {len(name)} bytes, value of {len(value)}"
                )
            total += len(name) + len(value)
            kept = _as_linux_keeps_it(name, value, mode)
            if kept is not None:
                found[name] = kept
        if total > limit_bytes:
            raise InvalidInputError(f"xattrs of {total} bytes (limit xattr_bytes: {limit_bytes})")
        return found


def _as_linux_keeps_it(name: bytes, value: bytes, mode: int) -> bytes | None:
    """The value of an xattr that the kernel itself reads; None if it would not be there."""
    if name == _CAPABILITY:
        revision = _CAPABILITY_REVISIONS.get(len(value))
        if revision is None or value[3] != revision:
            raise InvalidInputError(f"xattr {show(name)} is none: {value[:24].hex()}")
    elif name == _ACCESS_ACL:
        return access_acl_after_chmod(value, mode)
    elif name == _DEFAULT_ACL:
        return value if parse_acl(value) else None
    return value


def show(name: bytes) -> str:
    """A name for a message: printable, and not too long."""
    return repr(name if len(name) <= 200 else name[:200] + b"...")[1:]


def text(field: bytes) -> bytes:
    """A NUL-terminated or full field."""
    return field.partition(b"\0")[0]


def check_checksum(header: bytes) -> None:
    """Refuses a header whose sum is not the one it states; some old tars added signed bytes."""
    stated = parse_number(header[148:156], "checksum")
    blanked = header[:148] + b" " * 8 + header[156:]
    # The low half of Adler-32 is one more than the sum of the bytes, modulo 65,521: some 50 times
    # faster than sum(), and the few errors that this lets pass the layer's digest finds.
    if zlib.adler32(blanked) & 0xFFFF == (stated + 1) % 65_521:
        return
    total = sum(blanked)
    high = sum(byte >= 0x80 for byte in blanked)
    if total - 256 * high != stated:
        raise CorruptError(f"tar: wrong checksum in the header of {show(text(header[:100]))}")


@lru_cache(maxsize=1024)
def parse_number(field: bytes, what: str) -> int:
    """An octal number between blanks and NULs (0 if there are only these), or base-256."""
    if field[0] & 0x80:
        return _parse_base_256(field)
    digits = field.strip(b" \0").partition(b"\0")[0].rstrip(b" ")
    if not digits:
        return 0
    try:
        # int() takes signs and underscores, tar does not.
        if digits.isdigit():
            return int(digits, 8)
    except ValueError:
        pass
    raise InvalidInputError(f"{what} is not an octal number: {show(field)}")


def _parse_base_256(field: bytes) -> int:
    """GNU's binary numbers: bit 7 marks them, bit 6 is the sign of a two's complement."""
    number = int.from_bytes(field) & ~(0x80 << 8 * (len(field) - 1))
    bits = 8 * len(field) - 1
    return number - (1 << bits) if field[0] & 0x40 else number


def parse_time_ns(value: bytes) -> int:
    """A pax time, decimal seconds with an optional fraction and sign, in ns (rest cut off)."""
    match = _TIME.fullmatch(value)
    if match is None:
        raise InvalidInputError(f"pax time is not a decimal number: {show(value)}")
    fraction = (match[3] or b"")[:9].ljust(9, b"0")
    time_ns = int(match[2]) * _NS + int(fraction)
    return -time_ns if match[1] == b"-" else time_ns


def parse_path(raw: bytes) -> bytes:
    """A path relative to the root without ``.`` and empty parts; empty for the root itself.

    Raises InvalidInputError for an empty or too long one, ``..``, NUL, and too long parts.
    """
    plain = raw.removeprefix(b"./").strip(b"/")
    if 0 < len(plain) <= MAX_COMPONENT_BYTES and _ODD.search(plain) is None:
        return plain
    if not raw:
        raise InvalidInputError("empty path")
    if len(raw) > MAX_PATH_BYTES:
        raise InvalidInputError(f"path of {len(raw)} bytes ({MAX_PATH_BYTES} at most)")
    parts = [check_component(part) for part in raw.split(b"/") if part not in (b"", b".")]
    return b"/".join(parts)


def parse_pax_records(data: bytes) -> dict[bytes, bytes]:
    """The records of a pax header, each ``LENGTH KEY=VALUE\\n``; the last of a key counts.

    A record without value says nothing, as in Go's archive/tar; an xattr may be empty.
    """
    records: dict[bytes, bytes] = {}
    sparse: list[bytes] = []
    at = 0
    while at < len(data):
        blank = data.find(b" ", at, at + 20)
        digits = data[at:blank] if blank > at else b""
        end = at + int(digits) if digits.isdigit() else 0
        # No blank is found at -1, and no end lies there: each record must lead on.
        if not at < blank < end <= len(data) or data[end - 1] != 0x0A:
            raise CorruptError(f"tar: bad pax record: {show(data[at : at + 40])}")
        key, equals, value = data[blank + 1 : end - 1].partition(b"=")
        if not key or not equals:
            raise CorruptError(f"tar: pax record without a key: {show(data[at : at + 40])}")
        if b"\0" in key or (key in _TEXTS and b"\0" in value):
            raise InvalidInputError(f"tar: NUL in pax record {show(key)}: {show(value)}")
        if key in _SPARSE_PARTS:
            if key != _SPARSE_PARTS[len(sparse) % 2] or not value.isdigit():
                raise InvalidInputError(f"tar: pax {key.decode()} out of place: {show(value)}")
            sparse.append(value)
        elif value or key.startswith(_XATTR_KEY):
            records[key] = value
        else:
            records.pop(key, None)
        at = end
    if sparse:
        records[_SPARSE_MAP] = b",".join(sparse)
    return records
