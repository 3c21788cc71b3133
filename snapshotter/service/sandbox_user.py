"""Who a sandbox's process is: users and groups of the image, and the privileges that are left."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotter.errors import NotFoundError
from snapshotter.service.sandbox_spec import split_user

_MAX_ID = (1 << 32) - 2

KEPT_CAPABILITIES = (
    0,  # CHOWN
    1,  # DAC_OVERRIDE
    3,  # FOWNER
    4,  # FSETID
    5,  # KILL
    6,  # SETGID
    7,  # SETUID
    8,  # SETPCAP
    10,  # NET_BIND_SERVICE
    13,  # NET_RAW
    18,  # SYS_CHROOT
    29,  # AUDIT_WRITE
    31,  # SETFCAP
)
"""What container engines leave by default (numbers: linux/capability.h), without MKNOD: engines
hold that in check by a device cgroup, and a sandbox has none."""

_CAPABILITY_VERSION_3 = 0x20080522
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Identity:
    """Numeric ids of a process, and the home directory that goes with the user."""

    uid: int
    gid: int
    groups: Sequence[int]
    home: str


def look_up(user: str, *, passwd: Iterable[str], group: Iterable[str]) -> Identity:
    """The identity of ``NAME|UID[:GROUP|GID]`` by the lines of a passwd and a group file.

    A number needs no entry. A user given without a group has the groups that the files say; one
    given with a group has that alone. Raises NotFoundError for a name without an entry.
    """
    user_name, group_name = split_user(user)
    entries = [fields for line in passwd if len(fields := line.rstrip("\n").split(":")) >= 6]
    groups = [fields for line in group if len(fields := line.rstrip("\n").split(":")) >= 4]
    entry = _find(user_name, entries)
    if entry is None and _as_id(user_name) is None:
        raise NotFoundError(f"user {user_name!r} is not in the image's /etc/passwd; give a number")
    uid = _id_of(user_name, entry)
    home = entry[5] if entry is not None and entry[5] else "/"
    if group_name is not None:
        found = _find(group_name, groups)
        if found is None and _as_id(group_name) is None:
            raise NotFoundError(
                f"group {group_name!r} is not in the image's /etc/group; give a number"
            )
        gid = _id_of(group_name, found)
        return Identity(uid, gid, (gid,), home)
    gid = _as_id(entry[3]) or 0 if entry is not None else 0
    name = entry[0] if entry is not None else None
    members = (_as_id(g[2]) for g in groups if name is not None and name in g[3].split(","))
    extra = [number for number in members if number is not None and number != gid]
    return Identity(uid, gid, (gid, *extra), home)


def look_up_here(user: str) -> Identity:
    """``look_up`` by /etc/passwd and /etc/group of this root; a missing file has no entries."""
    return look_up(user, passwd=_lines("/etc/passwd"), group=_lines("/etc/group"))


def become(identity: Identity) -> None:
    """Takes the identity and gives up, for good, every privilege that a sandbox has not.

    The bounding set shrinks to KEPT_CAPABILITIES and no_new_privs is set; then a process of root
    has that set, any other has none.
    """
    _shrink_bounding_set(KEPT_CAPABILITIES)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    os.setgroups(list(identity.groups))
    os.setresgid(identity.gid, identity.gid, identity.gid)
    os.setresuid(identity.uid, identity.uid, identity.uid)
    _set_capabilities(KEPT_CAPABILITIES if identity.uid == 0 else ())
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def keep_capabilities(kept: Sequence[int]) -> None:
    """Gives up, for good, all but these; no_new_privs is set too."""
    _shrink_bounding_set(kept)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    _set_capabilities(kept)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, 9)


def _find(wanted: str, entries: Iterable[Sequence[str]]) -> Sequence[str] | None:
    """The first entry of that name, else the first of that number."""
    rows = list(entries)
    by_name = (row for row in rows if row[0] == wanted)
    by_id = (row for row in rows if row[2] == wanted)
    return next(by_name, None) or next(by_id, None)


def _as_id(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and int(text) <= _MAX_ID else None


def _id_of(text: str, entry: Sequence[str] | None) -> int:
    number = _as_id(entry[2] if entry is not None else text)
    if number is None:
        raise NotFoundError(f"{text!r} has no valid number in the image's /etc/passwd or group")
    return number


def _lines(path: str) -> Sequence[str]:
    try:
        return Path(path).read_text(errors="surrogateescape").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return ()


def _shrink_bounding_set(kept: Sequence[int]) -> None:
    """Drops what is not kept, up to the last capability that the kernel knows.

    The kernel itself says where that is: a read-only view may have no /proc to read it from.
    """
    for number in range(64):
        if number in kept:
            continue
        try:
            _prctl(_PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    if _libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option} {value}: {os.strerror(number)}")


def _set_capabilities(kept: Iterable[int]) -> None:
    """capset(2): effective and permitted are those of ``kept`` that we have, inheritable none."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    present = ctypes.create_string_buffer(24)
    _libc.capget(header, present)
    _, permitted_low, _, _, permitted_high, _ = struct.unpack("=6I", present.raw)
    mask = sum(1 << number for number in kept)
    low, high = mask & permitted_low, (mask >> 32) & permitted_high
    data = struct.pack("=6I", low, low, 0, high, high, 0)
    if _libc.capset(header, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"capset {mask:#x}: {os.strerror(number)}")
