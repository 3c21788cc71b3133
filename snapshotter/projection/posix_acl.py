"""POSIX ACLs as Linux keeps them in ``system.posix_acl_*`` (include/uapi/linux/posix_acl_xattr.h).

Checked as the kernel checks them when they are set, and then put in agreement with the file's mode
as chmod(2) after it would: unpackers do both, in this order.
"""

from __future__ import annotations

import struct
from itertools import groupby, pairwise

from snapshotter.errors import InvalidInputError

_VERSION = struct.Struct("<I")
_ENTRY = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_NAMED = (_USER, _GROUP)
_NO_ID = 0xFFFF_FFFF

Entries = list[tuple[int, int, int]]
"""Tag, permissions and id of each entry."""


def parse_acl(value: bytes) -> Entries:
    """The entries of an ACL; InvalidInputError unless it is one that Linux takes.

    No bytes, and those of another version, are no entries: unpackers go on without them.
    """
    if not value or (len(value) >= _VERSION.size and _VERSION.unpack_from(value)[0] != 2):
        return []
    if (len(value) - _VERSION.size) % _ENTRY.size:
        raise InvalidInputError(f"not a POSIX ACL: {value[:40].hex()}")
    entries = list(_ENTRY.iter_unpack(value[4:]))
    tags = [tag for tag, _, _ in entries]
    single = [tag for tag, _ in groupby(tags)]
    is_legal = (
        all(tag in (_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER) for tag in tags)
        and all(before < after for before, after in pairwise(single))
        and all(tags.count(tag) == 1 for tag in (_USER_OBJ, _GROUP_OBJ, _OTHER))
        and tags.count(_MASK) <= 1
        and (_MASK in tags or not any(tag in _NAMED for tag in single))
        and all(permissions <= 7 for _, permissions, _ in entries)
        and all(number != _NO_ID for tag, _, number in entries if tag in _NAMED)
    )
    if entries and not is_legal:
        raise InvalidInputError(f"not a legal POSIX ACL: {value[:80].hex()}")
    return entries


def access_acl_after_chmod(value: bytes, mode: int) -> bytes | None:
    """An access ACL as it stands after chmod to ``mode``; None if the mode alone says it all.

    Raises InvalidInputError as parse_acl.
    """
    entries = parse_acl(value)
    tags = {tag for tag, _, _ in entries}
    if tags <= {_USER_OBJ, _GROUP_OBJ, _OTHER}:
        return None
    said = {_USER_OBJ: mode >> 6 & 7, _MASK: mode >> 3 & 7, _OTHER: mode & 7}
    if _MASK not in tags:
        said[_GROUP_OBJ] = mode >> 3 & 7
    changed = [
        (tag, said.get(tag, permissions), number if tag in _NAMED else _NO_ID)
        for tag, permissions, number in entries
    ]
    return _VERSION.pack(2) + b"".join(_ENTRY.pack(*entry) for entry in changed)
