"""What the process behind a FUSE request is doing, from /proc: its system call, its signals.

Both questions are about a thread that waits for us, so its id cannot be reused meanwhile. Without
an answer (no /proc, no permission, another pid namespace) the cautious thing is said: nothing.
"""

from __future__ import annotations

import os
import platform
import time

# chmod, chown, utime, setxattr, removexattr, rename, link and their newer forms; from the kernel's
# arch/x86/entry/syscalls/syscall_64.tbl and scripts/syscall.tbl (everything but x86).
_FROM_424_ON = {
    452,  # fchmodat2
    463,  # setxattrat
    466,  # removexattrat
    469,  # file_setattr
}
_METADATA_ONLY = {
    "x86_64": frozenset(
        _FROM_424_ON
        | {90, 91, 268}  # chmod fchmod fchmodat
        | {92, 93, 94, 260}  # chown fchown lchown fchownat
        | {132, 235, 261, 280}  # utime utimes futimesat utimensat
        | {188, 189, 190, 197, 198, 199}  # setxattr and removexattr, each with l and f
        | {82, 264, 316}  # rename renameat renameat2
        | {86, 265}  # link linkat
    ),
    "aarch64": frozenset(
        _FROM_424_ON
        | {52, 53}  # fchmod fchmodat
        | {54, 55}  # fchownat fchown
        | {88}  # utimensat
        | {5, 6, 7, 14, 15, 16}  # setxattr and removexattr, each with l and f
        | {38, 276}  # renameat renameat2
        | {37}  # linkat
    ),
}.get(platform.machine(), frozenset())

_SIGKILL_BIT = 1 << 8
_TRIES = 5
_RETRY_S = 30e-6


def is_metadata_only(tid: int) -> bool:
    """Whether thread ``tid`` waits in a call that changes a file's metadata or names only.

    overlayfs looks such a file's content up (it copies the file up) but never reads it.
    """
    if tid == 0:
        return False
    path = f"/proc/{tid}/syscall"
    for _ in range(_TRIES):
        text = _read(path)
        if text != b"running\n":
            break
        time.sleep(_RETRY_S)  # it has sent its request and is not asleep yet
    number = text.partition(b" ")[0]
    return number.isdigit() and int(number) in _METADATA_ONLY


def is_being_killed(tid: int) -> bool:
    """Whether SIGKILL is pending for the thread; any fatal signal's default action shows as that.

    A pending signal with a handler does not count: answering EINTR for it would fail the call of
    a process that lives on.
    """
    if tid == 0:
        return False
    for line in _read(f"/proc/{tid}/status").splitlines():
        if line.startswith((b"SigPnd:", b"ShdPnd:")) and int(line[7:], 16) & _SIGKILL_BIT:
            return True
    return False


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, 4096)
        finally:
            os.close(descriptor)
    except OSError:
        return b""
