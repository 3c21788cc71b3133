"""What a new file inherits from its directory's default ACL. Pure: no I/O.

Source: the layout of ``system.posix_acl_*`` in the kernel's posix_acl_xattr.h, the rules of
POSIX 1003.1e draft 17, 23.1.2 as acl(5) tells them.
"""

from __future__ import annotations

import struct

ACCESS = b"system.posix_acl_access"
DEFAULT = b"system.posix_acl_default"

_VERSION = struct.pack("<I", 2)
_ENTRY = struct.Struct("<HHI")
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_SHIFTS = {_USER_OBJ: 6, _OTHER: 0}


def inherit(default: bytes, mode: int) -> tuple[int, bytes | None]:
    """Mode and access ACL of a new file with permissions ``mode`` below ``default``.

    The ACL is None where the mode says all of it. ValueError for what is no ACL.
    """
    if default[:4] != _VERSION or (len(default) - 4) % _ENTRY.size:
        raise ValueError("default ACL of another version, or cut off")
    entries = list(_ENTRY.iter_unpack(default[4:]))
    tags = {tag for tag, _, _ in entries}
    shifts = _SHIFTS | {_MASK if _MASK in tags else _GROUP_OBJ: 3}
    made = []
    for tag, permissions, who in entries:
        shift = shifts.get(tag)
        if shift is not None:
            permissions &= mode >> shift & 7  # noqa: PLW2901
            mode = mode & ~(7 << shift) | permissions << shift
        made.append(_ENTRY.pack(tag, permissions, who))
    extended = tags - {_USER_OBJ, _GROUP_OBJ, _OTHER}
    return mode, _VERSION + b"".join(made) if extended else None
