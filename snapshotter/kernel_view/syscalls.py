"""System calls that Python does not have: mounts, namespaces, mount ids. Thin, Linux only.

Every function raises OSError with the call's errno and the object it was about; for calls on a
file system context the kernel's own words (read from the context) are part of the message.
Numbers and flags: the kernel's include/uapi/linux/mount.h and the architectures' unistd.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_NOATIME = 0x400
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MS_SHARED = 1 << 20

MNT_FORCE = 0x1
MNT_DETACH = 0x2
UMOUNT_NOFOLLOW = 0x8

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_IDMAP = 0x100000

CLONE_NEWNS = 0x20000
CLONE_NEWCGROUP = 0x2000000
CLONE_NEWUTS = 0x4000000
CLONE_NEWIPC = 0x8000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000
OPEN_TREE_CLONE = 0x1

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

EROFS_MAGIC = 0xE0F5E1E2
OVERLAY_MAGIC = 0x794C7630
TMPFS_MAGIC = 0x01021994
FUSE_MAGIC = 0x65735546

_OPEN_TREE_CLOEXEC = os.O_CLOEXEC
_FSOPEN_CLOEXEC = 0x1
_FSMOUNT_CLOEXEC = 0x1
_FSPICK_CLOEXEC = 0x1
_FSPICK_NO_AUTOMOUNT = 0x4
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_SET_FD = 0, 1, 5
_FSCONFIG_CMD_CREATE, _FSCONFIG_CMD_RECONFIGURE = 6, 7
_STATX_MNT_ID = 0x1000
_AT_NO_AUTOMOUNT = 0x800
_AT_STATX_DONT_SYNC = 0x4000
_STATX_DEVICE_OFFSET = 136
_STATX_MNT_ID_OFFSET = 144
_CONTEXT_LOG_BYTES = 4096

# Calls added since 5.2 have one number on every architecture; pivot_root is older.
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _FSPICK = 428, 429, 430, 431, 432, 433
_OPENAT2 = 437
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

Name = str | bytes | os.PathLike[str]


def _fail(what: str, detail: str = "") -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}{detail}")


def _syscall(what: str, number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char]) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *converted)
    if result < 0:
        raise _fail(what)
    return result


def mount(
    source: Name, target: Name, fs_type: str | None, flags: int = 0, data: str | bytes | None = None
) -> None:
    """mount(2). Unlike mount(8) it never sets up a loop device by itself."""
    raw = os.fsencode(data) if isinstance(data, str) else data
    kind = fs_type.encode() if fs_type is not None else None
    arguments = (os.fsencode(source), os.fsencode(target), kind)
    if _libc.mount(*arguments, ctypes.c_ulong(flags), raw) < 0:
        raise _fail(f"mount {fs_type or 'flags'} on {os.fsdecode(target)}")


def umount(target: Name, flags: int = 0) -> None:
    """umount2(2)."""
    if _libc.umount2(os.fsencode(target), flags) < 0:
        raise _fail(f"unmount {os.fsdecode(target)}")


def fsopen(fs_type: str) -> int:
    """A descriptor of a new file system context."""
    return _syscall(f"fsopen {fs_type}", _FSOPEN, fs_type.encode(), _FSOPEN_CLOEXEC)


def fspick(path: Name, directory: int = AT_FDCWD) -> int:
    """A context of the file system that is mounted at ``path``, to reconfigure it.

    An empty path with a descriptor means the mount of that descriptor.
    """
    raw = os.fsencode(path)
    flags = _FSPICK_CLOEXEC | _FSPICK_NO_AUTOMOUNT | (0 if raw else 0x8)
    return _syscall(f"fspick {os.fsdecode(raw) or directory}", _FSPICK, directory, raw, flags)


def _fsconfig(
    what: str, context: int, command: int, key: bytes | int, value: bytes | int, aux: int
) -> None:
    arguments = [ctypes.c_long(v) if isinstance(v, int) else v for v in (key, value)]
    result = _libc.syscall(
        ctypes.c_long(_FSCONFIG),
        ctypes.c_long(context),
        ctypes.c_long(command),
        *arguments,
        ctypes.c_long(aux),
    )
    if result < 0:
        number = ctypes.get_errno()
        said = "; ".join(context_log(context))
        raise OSError(number, f"{what}: {os.strerror(number)}" + (f" ({said})" if said else ""))


def fsconfig_string(context: int, key: str, value: Name) -> None:
    """Sets ``key=value`` on a context."""
    raw = os.fsencode(value)
    what = f"set {key}={os.fsdecode(raw)}"
    _fsconfig(what, context, _FSCONFIG_SET_STRING, key.encode(), raw, 0)


def fsconfig_flag(context: int, key: str) -> None:
    """Sets a flag (an option without a value) on a context."""
    _fsconfig(f"set {key}", context, _FSCONFIG_SET_FLAG, key.encode(), 0, 0)


def fsconfig_fd(context: int, key: str, descriptor: int) -> None:
    """Sets an option whose value is a descriptor."""
    _fsconfig(f"set {key}", context, _FSCONFIG_SET_FD, key.encode(), 0, descriptor)


def fsconfig_create(context: int) -> None:
    """Makes the superblock that the context describes."""
    _fsconfig("create the file system", context, _FSCONFIG_CMD_CREATE, 0, 0, 0)


def fsconfig_reconfigure(context: int) -> None:
    """Applies the context to the superblock that it was picked from (a remount)."""
    _fsconfig("reconfigure the file system", context, _FSCONFIG_CMD_RECONFIGURE, 0, 0, 0)


def context_log(context: int) -> list[str]:
    """What the kernel had to say about a context, oldest first; it is said once."""
    lines: list[str] = []
    with contextlib.suppress(OSError):  # ENODATA: nothing more
        while line := os.read(context, _CONTEXT_LOG_BYTES):
            text = line.decode(errors="replace").strip()
            lines.append(text[2:] if text[1:2] == " " else text)  # "e overlay: …"
    return lines


def fsmount(context: int, attributes: int = 0) -> int:
    """A descriptor of a detached mount of the context's superblock (MOUNT_ATTR_*)."""
    return _syscall("fsmount", _FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)


def make_mount(
    fs_type: str, options: Iterable[tuple[str, str | bytes | None]], *, attributes: int = 0
) -> int:
    """A detached mount of ``fs_type``; an option without a value is a flag.

    It stands nowhere and ends with its last descriptor, unless move_mount placed it.
    """
    context = fsopen(fs_type)
    try:
        for key, value in options:
            if value is None:
                fsconfig_flag(context, key)
            else:
                fsconfig_string(context, key, value)
        fsconfig_create(context)
        return fsmount(context, attributes)
    finally:
        os.close(context)


def reconfigure(path: Name, flags: Iterable[str] = (), directory: int = AT_FDCWD) -> None:
    """Remounts the file system at ``path`` with these flags (``ro`` for one that is read-only).

    On an overlay it drops the names that are not in use, so that they are looked up anew.
    """
    context = fspick(path, directory)
    try:
        for flag in flags:
            fsconfig_flag(context, flag)
        fsconfig_reconfigure(context)
    finally:
        os.close(context)


def move_mount(descriptor: int, target: Name, directory: int = AT_FDCWD) -> None:
    """Places a detached mount at ``target`` in this mount namespace."""
    raw = os.fsencode(target)
    what = f"place a mount on {os.fsdecode(raw)}"
    _syscall(what, _MOVE_MOUNT, descriptor, b"", directory, raw, _MOVE_MOUNT_F_EMPTY_PATH)


def open_tree(path: Name, flags: int = OPEN_TREE_CLONE, directory: int = AT_FDCWD) -> int:
    """A descriptor of the mount at ``path``, by default a detached clone of it."""
    raw = os.fsencode(path)
    what = f"open the mount of {os.fsdecode(raw) or directory}"
    return _syscall(what, _OPEN_TREE, directory, raw, flags | _OPEN_TREE_CLOEXEC)


def mount_setattr(
    descriptor: int,
    path: Name = "",
    *,
    set_attributes: int = 0,
    clear_attributes: int = 0,
    propagation: int = 0,
    user_namespace: int = 0,
    recursive: bool = False,
) -> None:
    """Changes attributes of a mount: of ``descriptor`` itself when ``path`` is empty."""
    attributes = struct.pack("<QQQQ", set_attributes, clear_attributes, propagation, user_namespace)
    raw = os.fsencode(path)
    flags = (0 if raw else AT_EMPTY_PATH) | (AT_RECURSIVE if recursive else 0)
    what = f"set mount attributes of {os.fsdecode(raw) or descriptor}"
    _syscall(what, _MOUNT_SETATTR, descriptor, raw, flags, attributes, len(attributes))


def openat2(path: Name, directory: int, flags: int, *, mode: int = 0, resolve: int = 0) -> int:
    """openat2(2): opens ``path`` from a directory's descriptor, resolved as RESOLVE_* say."""
    raw = os.fsencode(path)
    how = struct.pack("<QQQ", flags | os.O_CLOEXEC, mode, resolve)
    return _syscall(f"open {os.fsdecode(raw)}", _OPENAT2, directory, raw, how, len(how))


def pivot_root(new_root: Name, put_old: Name) -> None:
    """pivot_root(2); both may be "." to leave the old root stacked on the new one."""
    number = _PIVOT_ROOT[os.uname().machine]
    _syscall(f"pivot_root {new_root!r}", number, os.fsencode(new_root), os.fsencode(put_old))


def unshare(flags: int) -> None:
    """Gives the calling thread new namespaces (CLONE_NEW*)."""
    if _libc.unshare(flags) < 0:
        raise _fail(f"unshare {flags:#x}")


def setns(descriptor: int, flags: int) -> None:
    """Joins the namespace(s) of a namespace file or pidfd."""
    if _libc.setns(descriptor, flags) < 0:
        raise _fail(f"setns {flags:#x}")


def syncfs(descriptor: int) -> None:
    """Writes out the file system of an open descriptor."""
    if _libc.syncfs(descriptor) < 0:
        raise _fail(f"syncfs {descriptor}")


def mount_id(path: Name | int) -> int:
    """The id of the mount that a path or descriptor is on (statx; unique among living mounts)."""
    directory, raw = (path, b"") if isinstance(path, int) else (AT_FDCWD, os.fsencode(path))
    buffer = ctypes.create_string_buffer(256)
    flags = _AT_NO_AUTOMOUNT | (AT_EMPTY_PATH if not raw else 0)
    if _libc.statx(directory, raw, flags, _STATX_MNT_ID, buffer) < 0:
        raise _fail(f"statx {os.fsdecode(raw) or directory}")
    number: int = struct.unpack_from("<Q", buffer, _STATX_MNT_ID_OFFSET)[0]
    return number


def device_at(path: Name) -> int:
    """st_dev of what is at ``path``, from what the kernel knows: no file system is asked."""
    buffer = ctypes.create_string_buffer(256)
    raw = os.fsencode(path)
    flags = _AT_NO_AUTOMOUNT | _AT_STATX_DONT_SYNC
    if _libc.statx(AT_FDCWD, raw, flags, 0, buffer) < 0:
        raise _fail(f"statx {os.fsdecode(raw)}")
    major, minor = struct.unpack_from("<II", buffer, _STATX_DEVICE_OFFSET)
    return os.makedev(major, minor)


def fs_magic(path: Name) -> int:
    """The magic number of the file system that ``path`` is on (statfs f_type)."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), buffer) < 0:
        raise _fail(f"statfs {os.fsdecode(path)}")
    number: int = struct.unpack_from("<Q", buffer)[0]
    return number
