"""System calls of the overlay that Python does not have. Thin, Linux only; they raise OSError.

Numbers and flags: the kernel's include/uapi/linux/openat2.h, fs.h and the architectures' unistd.h.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from functools import cache

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RENAME_WHITEOUT = 4

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_UTIME_OMIT = (1 << 30) - 2
_NS = 1_000_000_000

_OPENAT2 = 437
_RENAMEAT2 = {"x86_64": 316, "aarch64": 276}[platform.machine()]
_OPEN_HOW = struct.Struct("=QQQ")

_libc = ctypes.CDLL(None, use_errno=True)
# Functions of their own with fixed types: to convert arguments anew for each call costs more than
# the calls themselves.
_openat2_call = ctypes.CFUNCTYPE(
    ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t,
    use_errno=True,
)(("syscall", _libc))  # fmt: skip
_renameat2 = ctypes.CFUNCTYPE(
    ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p,
    ctypes.c_uint, use_errno=True,
)(("syscall", _libc))  # fmt: skip
_TIMES = struct.Struct("@qqqq")


def open_beneath(directory: int, path: bytes, flags: int) -> int:
    """openat2(2): opens ``path`` strictly below ``directory``, on its file system, by no link."""
    resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS | RESOLVE_NO_XDEV
    return _openat2(directory, path, flags | os.O_NOFOLLOW, resolve)


def open_in_root(directory: int, path: bytes, flags: int) -> int:
    """openat2(2): opens what ``path`` means with ``directory`` as the root, links included.

    Raises BlockingIOError when something was renamed meanwhile; it may be tried again.
    """
    return _openat2(directory, path, flags, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)


def rename(
    old_directory: int, old_name: bytes, new_directory: int, new_name: bytes, flags: int = 0
) -> None:
    """renameat2(2)."""
    if not flags:
        os.rename(old_name, new_name, src_dir_fd=old_directory, dst_dir_fd=new_directory)
    elif _renameat2(_RENAMEAT2, old_directory, old_name, new_directory, new_name, flags):
        raise _error("rename", old_name)


def set_times(
    directory: int | None, name: bytes, *, atime_ns: int | None, mtime_ns: int | None, follow: bool
) -> None:
    """utimensat(2); None leaves a time as it is, which os.utime cannot."""
    times = _TIMES.pack(*_timespec(atime_ns), *_timespec(mtime_ns))
    at = AT_FDCWD if directory is None else directory
    if _libc.utimensat(at, name, times, 0 if follow else _AT_SYMLINK_NOFOLLOW):
        raise _error("set times", name)


def _openat2(directory: int, path: bytes, flags: int, resolve: int) -> int:
    how = _how(flags, resolve)
    descriptor: int = _openat2_call(_OPENAT2, directory, path, how, _OPEN_HOW.size)
    if descriptor < 0:
        raise _error("open", path)
    return descriptor


def _timespec(time_ns: int | None) -> tuple[int, int]:
    return (0, _UTIME_OMIT) if time_ns is None else divmod(time_ns, _NS)


@cache
def _how(flags: int, resolve: int) -> bytes:
    """A struct open_how."""
    return _OPEN_HOW.pack(flags | os.O_CLOEXEC, 0, resolve)


def _error(operation: str, name: bytes) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{operation}: {os.strerror(number)}", name)
