"""Opens paths of a sandbox's root, whatever is in there.

The root belongs to whoever runs in it: a path may go through links that lead anywhere, and may
change under our eyes. So the kernel resolves it with the sandbox's root as the root (openat2,
RESOLVE_IN_ROOT), what is made is made by descriptor of its directory, and nothing but a regular
file is ever opened for its content.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from snapshotter.errors import (
    AccessDeniedError,
    DiskFullError,
    InvalidInputError,
    NotFoundError,
    SnapshotterError,
)
from snapshotter.overlay import syscalls

_RESOLVE_TRIES = 32
"""openat2 gives up with EAGAIN when something was renamed meanwhile."""

_KINDS: dict[int, type[SnapshotterError]] = {
    errno.ENOENT: NotFoundError,
    errno.EACCES: AccessDeniedError,
    errno.EPERM: AccessDeniedError,
    errno.EROFS: AccessDeniedError,
    errno.EISDIR: InvalidInputError,
    errno.ENOTDIR: InvalidInputError,
    errno.ELOOP: InvalidInputError,
    errno.EEXIST: InvalidInputError,
    errno.EINVAL: InvalidInputError,
    errno.ENAMETOOLONG: InvalidInputError,
    errno.ENOSPC: DiskFullError,
    errno.EDQUOT: DiskFullError,
}


@dataclass(frozen=True, slots=True)
class Owner:
    """Who new files belong to."""

    uid: int
    gid: int


@contextmanager
def errors_told(what: str) -> Iterator[None]:
    """Errors of the kernel as ours, with what was being done."""
    try:
        yield
    except OSError as error:
        kind = _KINDS.get(error.errno or 0, SnapshotterError)
        name = error.filename
        is_told = isinstance(name, str) and not name.startswith("/proc/self/fd/")
        at = f" at {name}" if is_told and name not in what else ""
        raise kind(f"{what}{at}: {os.strerror(error.errno or errno.EIO)}") from error


@contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Closes a descriptor at the end of a block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def resolve(root: int, path: str) -> int:
    """A descriptor (O_PATH) of what ``path`` means with ``root`` as the root. Raises OSError."""
    return _open_within(root, path, os.O_PATH)


def open_regular(opened: int, path: str) -> int:
    """A file to read, of an O_PATH descriptor, which is closed: so that it is the one looked at.

    Opening a device or a fifo could do anything. Raises OSError, and InvalidInputError for what
    is no regular file.
    """
    with closing(opened):
        kind = os.fstat(opened).st_mode
        if not stat.S_ISREG(kind):
            what = "a directory" if stat.S_ISDIR(kind) else "no regular file"
            raise InvalidInputError(f"read {path}: it is {what}")
        return os.open(f"/proc/self/fd/{opened}", os.O_RDONLY | os.O_CLOEXEC)


def open_listing(opened: int) -> int:
    """A directory to list, of an O_PATH descriptor, which is closed. Raises OSError."""
    with closing(opened):
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=opened)


def parent_of(root: int, path: str, owner: Owner) -> tuple[int, str]:
    """The directory of a path, made if need be, and the last name.

    Raises OSError, and InvalidInputError for a path that does not end with a name.
    """
    directory, name = os.path.split(path)
    if name in ("", ".", ".."):
        raise InvalidInputError(f"write {path}: name the file itself")
    return make_directories(root, directory, owner)[0], name


def make_directories(root: int, path: str, owner: Owner) -> tuple[int, bool]:
    """A descriptor of a directory, and whether it is new; those above it are made too. OSError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return _open_within(root, path, flags), False
    except FileNotFoundError:
        directory, name = os.path.split(path.rstrip("/"))
    with closing(make_directories(root, directory, owner)[0]) as parent:
        is_new = make_directory(parent, name)  # or made meanwhile, or a link that leads nowhere
        made = os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
        if is_new:
            os.fchown(made, owner.uid, owner.gid)
            os.fchmod(made, 0o755)
        return made, is_new


def make_directory(parent: int, name: str) -> bool:
    """Makes a directory for this process alone; False when something has the name. OSError."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        return False
    return True


def create(parent: int, name: str) -> int:
    """A new file in place of whatever has the name: never written through a link. OSError."""
    remove_name(parent, name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o600, dir_fd=parent)


def remove_name(parent: int, name: str) -> None:
    """Makes room for a new entry. Raises OSError, for a directory too."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass


def _open_within(root: int, path: str, flags: int) -> int:
    for _ in range(_RESOLVE_TRIES):
        try:
            return syscalls.open_in_root(root, os.fsencode(path or "."), flags)
        except BlockingIOError as error:
            refused = error
    raise refused
