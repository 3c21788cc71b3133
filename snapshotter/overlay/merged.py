"""Lowers and an upper as one file system, as kernel overlayfs merges them and in its format.

Whoever serves a merged tree holds the nodes that its kernel knows. All methods may be called from
several threads; metadata is under one lock, content never is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any

from snapshotter.descriptor_file import DescriptorFile
from snapshotter.errors import InvalidInputError
from snapshotter.overlay import syscalls
from snapshotter.overlay.changes import Changes
from snapshotter.overlay.copy_up import CopyUp
from snapshotter.overlay.files import MergedDirectory, MergedFile, UnsyncedFile
from snapshotter.overlay.metacopies import ContentBelow, open_below
from snapshotter.overlay.node import Node
from snapshotter.overlay.renames import Renames
from snapshotter.overlay.tree import Tree
from snapshotter.overlay.upper import Place, Upper
from snapshotter.overlay.whiteouts import TRUSTED
from snapshotter.vfs import NO_MARKS, Attr, AttrChange, Caller, Entry, File, Lower, Marks

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
_DIRECTORY_PERMISSIONS = 0o1777
"""What mkdir(2) takes of a mode; a set-gid bit only comes from the directory above."""
_PASSED_ON = os.O_TRUNC | os.O_SYNC | os.O_DSYNC


class Merged:
    """``lowers``, topmost first, below ``upper``; without one every change is EROFS.

    Directories that a lower has can be renamed if the upper's marks are root's: kernel overlayfs
    follows no redirect of other users, so theirs is EXDEV.
    """

    identity = b"merged"

    def __init__(self, lowers: Sequence[Lower[Any]], upper: Upper | None = None) -> None:
        if not lowers:
            raise InvalidInputError("a merged tree needs a lower")
        self._tree = Tree(lowers, upper)
        self._upper = upper
        self.root = self._tree.root
        self.is_immutable = upper is None and self._tree.lowers.is_immutable
        if upper is not None:
            self._copy_up = CopyUp(self._tree, upper)
            self._changes = Changes(self._tree, upper, self._copy_up)
            redirects = upper.xattrs == TRUSTED
            self._renames = Renames(
                self._tree, upper, self._copy_up, self._changes, redirects=redirects
            )

    # Reading ------------------------------------------------------------------------------------

    def lookup(self, parent: Node, name: bytes) -> Entry[Node]:
        """Finds ``name`` in a directory."""
        with self._tree.lock:
            return self._tree.entry(parent, name)

    def getattr(self, node: Node) -> Attr:
        """The attributes of now."""
        with self._tree.lock:
            return self._tree.attr(node)

    def marks(self, node: Node) -> Marks:
        """None: it is merged."""
        return NO_MARKS

    def readlink(self, node: Node) -> bytes:
        """The target of a symbolic link."""
        if node.type_bits != stat.S_IFLNK:
            raise OSError(errno.EINVAL, "readlink: is no symbolic link")
        with self._tree.lock:
            if not node.has_upper:
                layer, lower = node.lowers[0]
                return self._tree.lowers[layer].readlink(lower)
            place = self._place(node)
            if node.names:
                return os.readlink(place.name, dir_fd=place.directory)
            return os.readlink(b"", dir_fd=node.held)

    def getxattr(self, node: Node, name: bytes) -> bytes:
        """One of the file's own xattrs."""
        with self._tree.lock:
            if not node.has_upper:
                layer, lower = node.lowers[0]
                return self._tree.lowers[layer].getxattr(lower, name)
            place = self._place(node)
            return os.getxattr(place.path, self._stored(name), follow_symlinks=place.is_held)

    def listxattr(self, node: Node) -> list[bytes]:
        """The names of the file's own xattrs."""
        with self._tree.lock:
            if not node.has_upper:
                layer, lower = node.lowers[0]
                return self._tree.lowers[layer].listxattr(lower)
            place = self._place(node)
            found = os.listxattr(place.path, follow_symlinks=place.is_held)
            shown = (self._writable().xattrs.shown(os.fsencode(name)) for name in found)
            return [name for name in shown if name is not None]

    def open(self, node: Node, flags: int) -> File:
        """Opens a regular file, and copies it up if it is to be written."""
        if node.type_bits != stat.S_IFREG:
            number = errno.EISDIR if node.is_directory else errno.EINVAL
            raise OSError(number, "open: is no regular file")
        with self._tree.lock:
            if flags & _WRITING:
                self._writable()
                size_limit = 0 if flags & os.O_TRUNC else None
                self._copy_up.ensure_content(node, size_limit=size_limit)
                return MergedFile(self._open_upper(node, os.O_RDWR | flags & _PASSED_ON), None)
            if node.has_upper:
                with contextlib.suppress(ContentBelow):
                    return MergedFile(self._open_upper(node, os.O_RDONLY), None)
            file = open_below(self._tree, node)
            return MergedFile(file, None if self._upper is None else self._reopener(node))

    def opendir(self, node: Node) -> MergedDirectory:
        """Opens a directory."""
        if not node.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, "opendir: is no directory")

        def read() -> list[Any]:
            with self._tree.lock:
                return self._tree.listing(node)

        return MergedDirectory(read)

    def statfs(self) -> os.statvfs_result:
        """Of the file system that the upper is on, else of the topmost lower."""
        if self._upper is not None:
            return os.fstatvfs(self._upper.root)
        return self._tree.lowers[1].statfs()

    # Changing names -----------------------------------------------------------------------------

    def create(
        self, parent: Node, name: bytes, mode: int, caller: Caller, flags: int
    ) -> tuple[Entry[Node], File]:
        """Makes a regular file and opens it."""
        mode = stat.S_IFREG | stat.S_IMODE(mode)
        opened: list[int] = []

        def start(made: Place) -> None:
            how = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | flags & _PASSED_ON
            opened.append(os.open(made.name, how, mode, dir_fd=made.directory))

        try:
            entry = self._make(parent, name, mode, caller, start)
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            raise
        return entry, MergedFile(self._upper_file(opened[0]), None)

    def mknod(self, parent: Node, name: bytes, mode: int, rdev: int, caller: Caller) -> Entry[Node]:
        """Makes a regular file, device, fifo or socket."""
        kind = stat.S_IFMT(mode)
        if kind == stat.S_IFCHR and not rdev:
            # On disk that is a whiteout; kernel overlayfs refuses it with the same error.
            raise PermissionError(errno.EPERM, "mknod: 0/0 is no device here", name)

        def start(made: Place) -> None:
            os.mknod(made.name, mode, rdev, dir_fd=made.directory)

        return self._make(parent, name, mode, caller, start)

    def mkdir(self, parent: Node, name: bytes, mode: int, caller: Caller) -> Entry[Node]:
        """Makes a directory."""

        mode &= _DIRECTORY_PERMISSIONS

        def start(made: Place) -> None:
            os.mkdir(made.name, mode, dir_fd=made.directory)

        return self._make(parent, name, stat.S_IFDIR | mode, caller, start)

    def symlink(self, parent: Node, name: bytes, target: bytes, caller: Caller) -> Entry[Node]:
        """Makes a symbolic link."""

        def start(made: Place) -> None:
            os.symlink(target, made.name, dir_fd=made.directory)

        return self._make(parent, name, stat.S_IFLNK | 0o777, caller, start)

    def link(self, node: Node, parent: Node, name: bytes) -> Entry[Node]:
        """Gives a file one more name."""
        with self._tree.lock:
            self._writable()
            self._changes.link(node, parent, name)
            return self._entry(node)

    def unlink(self, parent: Node, name: bytes) -> None:
        """Takes a name away from a file."""
        with self._tree.lock:
            self._writable()
            self._changes.unlink(parent, name)

    def rmdir(self, parent: Node, name: bytes) -> None:
        """Removes an empty directory."""
        with self._tree.lock:
            self._writable()
            self._changes.rmdir(parent, name)

    def rename(
        self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int
    ) -> None:
        """renameat2(2) with 0, RENAME_NOREPLACE or RENAME_EXCHANGE."""
        with self._tree.lock:
            self._writable()
            self._renames.rename(parent, name, new_parent, new_name, flags)

    # Changing files -----------------------------------------------------------------------------

    def setattr(self, node: Node, change: AttrChange) -> Attr:
        """Changes attributes; a chown takes the set-id bits, a mode in the same call stays."""
        with self._tree.lock:
            self._writable()
            if change.size is not None and node.type_bits != stat.S_IFREG:
                number = errno.EISDIR if node.is_directory else errno.EINVAL
                raise OSError(number, "truncate: is no regular file")
            if change.mode is not None and node.type_bits == stat.S_IFLNK:
                raise OSError(errno.EOPNOTSUPP, "chmod: is a symbolic link")
            self._ensure(node, size_limit=change.size)
            if change.size is not None:
                self._copy_up.ensure_content(node, size_limit=change.size)
            node.inherited = None
            self._apply(node, self._place(node), change)
            return self._tree.attr(node)

    def setxattr(self, node: Node, name: bytes, value: bytes, flags: int) -> None:
        """setxattr(2)."""
        with self._tree.lock:
            stored = self._stored(name)
            self._ensure(node)
            node.inherited = None
            place = self._place(node)
            os.setxattr(place.path, stored, value, flags, follow_symlinks=place.is_held)

    def removexattr(self, node: Node, name: bytes) -> None:
        """removexattr(2); what is not there is not copied up to be removed."""
        with self._tree.lock:
            stored = self._stored(name)
            if not node.has_upper:
                layer, lower = node.lowers[0]
                self._tree.lowers[layer].getxattr(lower, name)
            self._ensure(node)
            node.inherited = None
            place = self._place(node)
            os.removexattr(place.path, stored, follow_symlinks=place.is_held)

    def fsyncdir(self, node: Node) -> None:
        """Returns once the names of a directory are on disk; a lower has nothing to write."""
        with self._tree.lock:
            if not node.has_upper or self._tree.is_removed(node):
                return
            descriptor = os.dup(self._writable().directory(node))
        try:
            self._writable().sync(descriptor)
        finally:
            os.close(descriptor)

    # --------------------------------------------------------------------------------------------

    def _entry(self, node: Node) -> Entry[Node]:
        return Entry(node, self._tree.attr(node))

    def _make(
        self, parent: Node, name: bytes, mode: int, caller: Caller, start: Callable[[Place], None]
    ) -> Entry[Node]:
        with self._tree.lock:
            self._writable()
            return self._changes.make(parent, name, mode, caller, start)

    def _writable(self) -> Upper:
        if self._upper is None:
            raise OSError(errno.EROFS, "there is no upper to write to")
        return self._upper

    def _ensure(self, node: Node, *, size_limit: int | None = None) -> None:
        self._writable()
        if not node.has_upper and self._tree.is_removed(node) and node.is_directory:
            raise FileNotFoundError(errno.ENOENT, "the directory is removed")
        self._copy_up.ensure(node, size_limit=size_limit)

    def _stored(self, name: bytes) -> bytes:
        return self._writable().xattrs.stored(name)

    def _place(self, node: Node) -> Place:
        return self._writable().place(node)

    def _open_upper(self, node: Node, flags: int) -> File:
        return self._upper_file(self._writable().open(node, flags))

    def _upper_file(self, descriptor: int) -> File:
        kind = UnsyncedFile if self._writable().is_volatile else DescriptorFile
        return kind(descriptor)

    def _reopener(self, node: Node) -> Callable[[], File | None]:
        def reopen() -> File | None:
            if not node.has_content:
                return None
            with self._tree.lock:
                return self._open_upper(node, os.O_RDONLY)

        return reopen

    def _apply(self, node: Node, place: Place, change: AttrChange) -> None:
        directory, name = place
        follow = place.is_held
        if change.uid is not None or change.gid is not None:
            uid = -1 if change.uid is None else change.uid
            gid = -1 if change.gid is None else change.gid
            os.chown(name, uid, gid, dir_fd=directory, follow_symlinks=follow)
        if change.mode is not None:
            os.chmod(name, stat.S_IMODE(change.mode), dir_fd=directory)
        if change.size is not None:
            descriptor = self._writable().open(node, os.O_WRONLY)
            try:
                os.ftruncate(descriptor, change.size)
            finally:
                os.close(descriptor)
        if change.atime_ns is not None or change.mtime_ns is not None:
            syscalls.set_times(
                directory,
                name,
                atime_ns=change.atime_ns,
                mtime_ns=change.mtime_ns,
                follow=follow,
            )
