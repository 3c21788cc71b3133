"""A directory of the host as a lower. Nobody can lead it outside: no link is ever followed.

A node is a path relative to the directory. Each call opens the file's directory below the
descriptor of the root (openat2: beneath it, no links, no other file system) and then works on one
name in it, so a link put in place of a directory is an error and never a way out.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from snapshotter.descriptor_file import DescriptorFile
from snapshotter.overlay import syscalls
from snapshotter.overlay.metacopies import ContentBelow
from snapshotter.overlay.metadata_cache import MetadataCache
from snapshotter.overlay.whiteouts import (
    TRUSTED,
    WHITEOUT_MODE,
    WITH_WHITEOUTS,
    YES,
    OverlayXattrs,
    is_whiteout,
)
from snapshotter.vfs import NO_MARKS, TYPE_MASK, Attr, DirEntry, Entry, File, Marks

_MAX_PATH = 4000
"""Bytes of a path given to one system call; Linux takes 4,095."""
_NAME_MAX = 255
_DIRECTORY = os.O_PATH | os.O_DIRECTORY
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
_NO_MARK = frozenset((errno.ENODATA, errno.EOPNOTSUPP))


class DirectoryLower:
    """The tree below ``path``, on that one file system.

    ``immutable`` promises that nobody changes it while this object lives; only then is ``cache``
    used, with ``layer`` as this lower's number in it. ``xattrs`` are the names of overlayfs's marks
    in it. To the files of another file system that is mounted below, opening them is EXDEV.
    """

    root = b""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        immutable: bool = False,
        xattrs: OverlayXattrs = TRUSTED,
        cache: MetadataCache | None = None,
        layer: int = 0,
    ) -> None:
        self._descriptor = os.open(path, _DIRECTORY)
        self.is_immutable = immutable
        self.identity = f"{os.fstatvfs(self._descriptor).f_fsid:016x}".encode()
        self._xattrs = xattrs
        self._cache = cache if immutable else None
        self._layer = layer

    def close(self) -> None:
        """Lets go of the directory."""
        os.close(self._descriptor)

    def lookup(self, parent: bytes, name: bytes) -> Entry[bytes]:
        """Finds ``name`` in a directory; whiteouts are shown as the devices they are."""
        path = parent + b"/" + name if parent else name
        if self._cache is None:
            return Entry(path, self._stat(parent, name))
        attr = self._cache.get(self._layer, path)
        if attr is None:
            attr = self._stat(parent, name)
            if not is_whiteout(attr.mode, attr.rdev):
                self._cache.put(self._layer, path, attr)
        return Entry(path, attr)

    def getattr(self, node: bytes) -> Attr:
        """The attributes of now."""
        parent, _, name = node.rpartition(b"/")
        if name:
            return self.lookup(parent, name).attr
        status = os.fstat(self._descriptor)
        return Attr.from_stat(status, ino=status.st_ino)

    def marks(self, node: bytes) -> Marks:
        """The marks of a layer that was an upper."""
        opaque = self._mark(node, self._xattrs.opaque) == YES
        redirect = self._mark(node, self._xattrs.redirect) or b""
        return Marks(opaque, redirect) if opaque or redirect else NO_MARKS

    def readlink(self, node: bytes) -> bytes:
        """The target of a symbolic link."""
        with self._directory_of(node) as (directory, name):
            return os.readlink(name, dir_fd=directory)

    def getxattr(self, node: bytes, name: bytes) -> bytes:
        """One of the file's own xattrs."""
        return self._getxattr(node, self._xattrs.stored(name))

    def listxattr(self, node: bytes) -> list[bytes]:
        """The names of the file's own xattrs."""
        with self._directory_of(node) as (directory, name):
            found = os.listxattr(_below(directory, name), follow_symlinks=False)
        shown = (self._xattrs.shown(os.fsencode(stored)) for stored in found)
        return [name for name in shown if name is not None]

    def open(self, node: bytes, flags: int) -> File:
        """Opens a regular file; whatever else it has become meanwhile is refused.

        ContentBelow for a metacopy.
        """
        if flags & _WRITING:
            raise OSError(errno.EROFS, "open: a lower is never written to", node)
        # O_NONBLOCK: a fifo that took the file's place must not hold us up.
        opened = self._open_below(node, os.O_RDONLY | os.O_NONBLOCK)
        mode = os.fstat(opened).st_mode
        if not stat.S_ISREG(mode):
            os.close(opened)
            number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(number, "open: no regular file", node)
        if _mark(opened, self._xattrs.metacopy) is not None:
            redirect = _mark(opened, self._xattrs.redirect) or b""
            os.close(opened)
            raise ContentBelow(node, redirect)
        return DescriptorFile(opened)

    def opendir(self, node: bytes) -> HostDirectory:
        """Opens a directory."""
        opened = self._open_below(node, os.O_RDONLY | os.O_DIRECTORY)
        # As for the kernel: only there are files looked at one by one.
        is_searched = _mark(opened, self._xattrs.opaque) == WITH_WHITEOUTS
        return HostDirectory(opened, whiteout=self._xattrs.whiteout if is_searched else None)

    def statfs(self) -> os.statvfs_result:
        """Of the file system that the directory is on."""
        return os.fstatvfs(self._descriptor)

    def _stat(self, parent: bytes, name: bytes) -> Attr:
        if not parent:
            return self._stat_in(self._descriptor, name)
        directory = self._open_below(parent, _DIRECTORY)
        try:
            return self._stat_in(directory, name)
        finally:
            os.close(directory)

    def _stat_in(self, directory: int, name: bytes) -> Attr:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        attr = Attr.from_stat(status, ino=status.st_ino)
        if status.st_size or not stat.S_ISREG(status.st_mode):
            return attr
        if _mark(_below(directory, name), self._xattrs.whiteout) is None:
            return attr
        return msgspec.structs.replace(attr, mode=WHITEOUT_MODE, rdev=0)

    def _getxattr(self, node: bytes, stored: bytes) -> bytes:
        with self._directory_of(node) as (directory, name):
            return os.getxattr(_below(directory, name), stored, follow_symlinks=False)

    def _mark(self, node: bytes, stored: bytes) -> bytes | None:
        try:
            return self._getxattr(node, stored)
        except OSError as error:
            if error.errno in _NO_MARK:
                return None
            raise

    @contextmanager
    def _directory_of(self, node: bytes) -> Iterator[tuple[int, bytes]]:
        """A descriptor of the directory that holds ``node``, and the node's name in it."""
        parent, _, name = node.rpartition(b"/")
        directory = self._open_below(parent, _DIRECTORY)
        try:
            yield directory, name or b"."
        finally:
            os.close(directory)

    def _open_below(self, path: bytes, flags: int) -> int:
        """Opens what is at ``path``, however long that is; b"" is the directory itself."""
        at = self._descriptor
        while len(path) > _MAX_PATH:
            cut = path.rindex(b"/", 0, _MAX_PATH)
            opened = syscalls.open_beneath(at, path[:cut], _DIRECTORY)
            if at != self._descriptor:
                os.close(at)
            at, path = opened, path[cut + 1 :]
        try:
            return syscalls.open_beneath(at, path or b".", flags)
        finally:
            if at != self._descriptor:
                os.close(at)


class HostDirectory:
    """Reads a directory of the host. Offsets count the names as they were when last at 0."""

    def __init__(self, descriptor: int, *, whiteout: bytes | None) -> None:
        """``whiteout`` is the mark of files that are shown as the whiteouts that they are."""
        self._descriptor = descriptor
        self._whiteout = whiteout
        self._names: list[DirEntry] | None = None

    def entries(self, offset: int = 0) -> Iterator[DirEntry]:
        """The names, in the host's order."""
        if self._names is None or not offset:
            self._names = list(self._scan())
        return iter(self._names[offset:])

    def _scan(self) -> Iterator[DirEntry]:
        with os.scandir(self._descriptor) as found:
            for number, entry in enumerate(found, 1):
                name = os.fsencode(entry.name)
                kind = _type_bits(entry)
                if self._whiteout is not None and kind == stat.S_IFREG:
                    kind = self._file_or_whiteout(name, self._whiteout)
                yield DirEntry(name, entry.inode(), kind, number)

    def _file_or_whiteout(self, name: bytes, mark: bytes) -> int:
        """The type of a regular file, or a whiteout's."""
        if os.stat(name, dir_fd=self._descriptor, follow_symlinks=False).st_size:
            return stat.S_IFREG
        path = _below(self._descriptor, name)
        return stat.S_IFREG if _mark(path, mark) is None else WHITEOUT_MODE

    def close(self) -> None:
        """Closes the directory."""
        os.close(self._descriptor)


def _mark(at: int | bytes, stored: bytes) -> bytes | None:
    """A mark of what is open, or at a path; None if there is none."""
    try:
        return os.getxattr(at, stored, follow_symlinks=isinstance(at, int))
    except OSError as error:
        if error.errno in _NO_MARK:
            return None
        raise


def _type_bits(entry: os.DirEntry[str]) -> int:
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG
    return entry.stat(follow_symlinks=False).st_mode & TYPE_MASK


def _below(directory: int, name: bytes) -> bytes:
    """A path to ``name`` for calls that take no directory descriptor."""
    return b"/proc/self/fd/%d/%s" % (directory, name)
