"""Copies files into and out of a sandbox's root, as tar would, but for what carries privilege.

Kept are content with its holes, permission bits, times, links, hard links within a copy, fifos,
and, where the target's file system holds them, extended attributes of users and ACLs. Not kept are
owners, set-id bits and capabilities, which would make a sandbox's program one of the host's, and
devices and sockets, which are refused. Names that were there are replaced, directories merged;
other file systems below what is copied are left out (their mount points are empty directories).

Trees are walked from directory descriptor to directory descriptor without following links.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field

from snapshotter.api import paths_within as within
from snapshotter.api.cancelling import Cancellation
from snapshotter.api.paths_within import Owner, closing, errors_told
from snapshotter.errors import InvalidInputError
from snapshotter.overlay.syscalls import open_beneath

_PIECE_BYTES = 16 << 20
_MAX_DEPTH = 128
"""Each level holds two descriptors: 256 of the 1,024 that programs have by default."""
_PERMISSIONS = 0o1777
_KEPT_ATTRIBUTES = ("user.", "system.posix_acl_")

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def read_file(root: int, path: str) -> bytes:
    """The content of a file in a sandbox. Raises as ``copy_out`` does."""
    with errors_told(f"read {path} in the sandbox"):
        descriptor = within.open_regular(within.resolve(root, path), path)
        with open(descriptor, "rb") as file:
            return file.read()


def write_file(root: int, path: str, data: bytes, *, mode: int, owner: Owner) -> None:
    """Makes a file in a sandbox, with the directories to it. Raises as ``copy_in`` does."""
    with errors_told(f"write {path} in the sandbox"):
        parent, name = within.parent_of(root, path, owner)
        with closing(parent), open(within.create(parent, name), "wb") as file:
            file.write(data)
            file.flush()
            os.fchown(file.fileno(), owner.uid, owner.gid)
            os.fchmod(file.fileno(), mode & _PERMISSIONS)


def copy_in(
    root: int, source: str, target: str, *, owner: Owner, cancellation: Cancellation
) -> None:
    """Copies a file or a directory of the host to ``target``, the name of the copy itself.

    Directories to it are made. Raises NotFoundError, AccessDeniedError, InvalidInputError for what
    cannot be copied, DiskFullError, and SnapshotterError for anything else the kernel refuses.
    """
    with errors_told(f"copy {source} to {target} in the sandbox"):
        opened = os.open(source, os.O_PATH | os.O_CLOEXEC)
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            with closing(within.open_listing(opened)) as listed:
                there, is_new = within.make_directories(root, target, owner)
                with closing(there):
                    _Copy(source, owner, cancellation, listed, there).top(is_new=is_new)
        else:
            with closing(within.open_regular(opened, source)) as file:
                parent, name = within.parent_of(root, target, owner)
                with closing(parent):
                    _Copy(source, owner, cancellation, file, parent).content(file, parent, name)


def copy_out(root: int, source: str, target: str, *, cancellation: Cancellation) -> None:
    """Copies a file or a directory of a sandbox to ``target`` here; its parent must exist.

    Links are copied as they are, and may lead anywhere when they are followed here. Raises as
    ``copy_in`` does.
    """
    with errors_told(f"copy {source} in the sandbox to {target}"):
        opened = within.resolve(root, source)
        directory, name = os.path.split(os.path.abspath(target))
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            with closing(within.open_listing(opened)) as listed:
                with closing(os.open(directory, _DIRECTORY)) as parent:
                    is_new = name != "" and within.make_directory(parent, name)
                with closing(os.open(target, _DIRECTORY)) as there:
                    _Copy(f"{source} in the sandbox", None, cancellation, listed, there).top(
                        is_new=is_new
                    )
        else:
            with (
                closing(within.open_regular(opened, source)) as file,
                closing(os.open(directory, _DIRECTORY)) as parent,
            ):
                _Copy(f"{source} in the sandbox", None, cancellation, file, parent).content(
                    file, parent, name
                )


@dataclass(slots=True)
class _Copy:
    """One copy, of what is called ``name``: from ``source`` to the directory ``target``.

    ``owner`` None leaves copies to this process's user. Descriptors are closed by who opened them.
    """

    name: str
    owner: Owner | None
    cancellation: Cancellation
    source: int
    target: int
    _linked: dict[tuple[int, int], tuple[str, tuple[int, int]]] = field(default_factory=dict)
    """Files with several names, by device and inode: path and identity of the copy."""

    def top(self, *, is_new: bool) -> None:
        """What is in ``source`` into ``target``; a directory that was there stays as it is."""
        self._entries(self.source, self.target, "", 0)
        if is_new:
            self._take_attributes(self.source, self.target)

    def content(self, source: int, parent: int, name: str) -> tuple[int, int]:
        """The content and attributes of a file, as ``name`` in ``parent``; the copy's identity."""
        with closing(within.create(parent, name)) as made:
            self._data(source, made)
            self._take_attributes(source, made)
            return _identity(os.fstat(made))

    def _entries(self, source: int, target: int, path: str, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise InvalidInputError(f"copy {path}: more than {_MAX_DEPTH} directories deep")
        for name in os.listdir(source):
            self.cancellation.check()
            below = os.path.join(path, name)
            with errors_told(f"copy {below} of {self.name}"):
                self._entry(source, target, below, depth)

    def _entry(self, source: int, target: int, path: str, depth: int) -> None:
        name = os.path.basename(path)
        opened = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=source)
        kind = os.fstat(opened).st_mode
        if stat.S_ISDIR(kind):
            with closing(within.open_listing(opened)) as listed:
                self._directory(listed, target, path, depth + 1)
        elif stat.S_ISLNK(kind) or stat.S_ISFIFO(kind):
            with closing(opened):
                self._special(opened, target, name)
        else:
            self._regular(opened, target, path)

    def _directory(self, source: int, target: int, path: str, depth: int) -> None:
        name = os.path.basename(path)
        is_new = within.make_directory(target, name)
        with closing(os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=target)) as made:
            if os.fstat(source).st_dev == os.fstat(self.source).st_dev:
                self._entries(source, made, path, depth)
            if is_new:
                self._take_attributes(source, made)

    def _regular(self, opened: int, target: int, path: str) -> None:
        name = os.path.basename(path)
        status = os.fstat(opened)
        first = self._linked.get(_identity(status)) if status.st_nlink > 1 else None
        if first is not None and self._link_again(*first, target, name):
            os.close(opened)
            return
        with closing(within.open_regular(opened, f"{path} of {self.name}")) as file:
            made = self.content(file, target, name)
        if status.st_nlink > 1:
            self._linked[_identity(status)] = (path, made)

    def _link_again(self, path: str, made: tuple[int, int], target: int, name: str) -> bool:
        """Gives a copy one more name; False when it is not there as it was made."""
        try:
            with closing(open_beneath(self.target, os.fsencode(path), os.O_PATH)) as first:
                if _identity(os.fstat(first)) != made:
                    return False
                within.remove_name(target, name)
                os.link(f"/proc/self/fd/{first}", name, dst_dir_fd=target, follow_symlinks=True)
        except OSError:
            return False  # renamed by the sandbox, or too many links: it is copied once more
        return True

    def _special(self, opened: int, target: int, name: str) -> None:
        """A link, as it is, or a fifo of the same attributes."""
        status = os.fstat(opened)
        within.remove_name(target, name)
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink("", dir_fd=opened), name, dir_fd=target)
        else:
            os.mkfifo(name, 0o600, dir_fd=target)
        with closing(
            os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=target)
        ) as made:
            itself = f"/proc/self/fd/{made}"
            if self.owner is not None:
                os.chown(itself, self.owner.uid, self.owner.gid)
            if stat.S_ISFIFO(os.fstat(made).st_mode):
                os.chmod(itself, status.st_mode & _PERMISSIONS)
            os.utime(itself, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _data(self, source: int, made: int) -> None:
        size = os.fstat(source).st_size
        offset = 0
        while offset < size:
            try:
                offset = os.lseek(source, offset, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break  # nothing but a hole is left
            end = os.lseek(source, offset, os.SEEK_HOLE)
            os.lseek(made, offset, os.SEEK_SET)
            while offset < end:
                sent = os.sendfile(made, source, offset, min(end - offset, _PIECE_BYTES))
                if not sent:
                    return  # it was cut short meanwhile
                offset += sent
                self.cancellation.check()
        os.ftruncate(made, size)

    def _take_attributes(self, source: int, made: int) -> None:
        status = os.fstat(source)
        if self.owner is not None:
            os.fchown(made, self.owner.uid, self.owner.gid)
        for name in os.listxattr(source):
            if name.startswith(_KEPT_ATTRIBUTES):
                _set_attribute(made, name, os.getxattr(source, name))
        os.fchmod(made, status.st_mode & _PERMISSIONS)
        os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))


def _set_attribute(made: int, name: str, value: bytes) -> None:
    try:
        os.setxattr(made, name, value)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
