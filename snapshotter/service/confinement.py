"""Takes from a process that serves a guest what it does not need, for the day the guest wins.

A mount namespace of its own, in which nothing can be written; no capabilities but those that
serving files takes; no new privileges. The directories of the upper are open before that, and what
is open is not affected.
"""

from __future__ import annotations

from snapshotter.errors import SnapshotterError
from snapshotter.kernel_view import syscalls
from snapshotter.service.sandbox_user import keep_capabilities

_CAP_CHOWN = 0
_CAP_DAC_OVERRIDE = 1
_CAP_DAC_READ_SEARCH = 2
_CAP_FOWNER = 3
_CAP_FSETID = 4
_CAP_SYS_ADMIN = 21  # for xattrs of overlayfs (trusted.*)
_CAP_MKNOD = 27
_CAP_SETFCAP = 31

READING = (_CAP_DAC_READ_SEARCH,)
WRITING = (
    _CAP_CHOWN,
    _CAP_DAC_OVERRIDE,
    _CAP_DAC_READ_SEARCH,
    _CAP_FOWNER,
    _CAP_FSETID,
    _CAP_SYS_ADMIN,
    _CAP_MKNOD,
    _CAP_SETFCAP,
)


def confine(*, writes: bool) -> None:
    """Confines this process, which has one thread; with ``writes`` it serves an upper.

    SnapshotterError if the kernel refuses; root is needed.
    """
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        # What the host unmounts is to be gone here, too; nothing goes the other way.
        syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
        syscalls.mount_setattr(
            syscalls.AT_FDCWD,
            "/",
            set_attributes=syscalls.MOUNT_ATTR_RDONLY | syscalls.MOUNT_ATTR_NOSUID,
            recursive=True,
        )
        keep_capabilities(WRITING if writes else READING)
    except OSError as error:
        raise SnapshotterError(f"confine the process of the view: {error}") from error
