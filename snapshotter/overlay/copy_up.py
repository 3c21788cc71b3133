"""Copy-up: a file of a lower becomes one of the upper, with all that it is, before it is changed.

The copy is made whole in the work directory and put in place by a rename, so there is never half a
file. Content is copied without the lock of the tree: readers and everybody else go on, and only
who wants to change the same file waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from snapshotter.descriptor_file import copy_range
from snapshotter.overlay import syscalls
from snapshotter.overlay.metacopies import open_below
from snapshotter.overlay.node import Node
from snapshotter.overlay.tree import Tree
from snapshotter.overlay.upper import Place, Upper
from snapshotter.vfs import Attr, File

_STEP_SIZE = 64 << 20
"""Bytes copied by one call at most, so that a signal is seen now and then."""
_CAPABILITY = b"security.capability"


class CopyUp:
    """Copies up files of ``tree``, which has an upper. Called while holding its lock."""

    def __init__(self, tree: Tree, upper: Upper) -> None:
        self._tree = tree
        self._upper = upper
        tree.join_alias = self.join_alias

    def ensure(self, node: Node, *, size_limit: int | None = None) -> bool:
        """Makes ``node`` one of the upper; whether the lock was released meanwhile.

        Of its content no more than ``size_limit`` bytes are copied: what a truncation leaves.
        Raises Pending, with nothing changed, for content that is not here.
        """
        released = False
        while node.copying:
            self._tree.copied.wait()
            released = True
        if node.has_upper:
            return released
        if node.type_bits == stat.S_IFREG:
            self._copy_file(node, size_limit)
            return True
        for ancestor in self._without_upper(node):
            self._copy_in_place(ancestor)
        return released

    def ensure_content(self, node: Node, *, size_limit: int | None = None) -> bool:
        """``ensure``, and a metacopy that was in the upper gets its content."""
        released = self.ensure(node, size_limit=size_limit)
        if node.has_content or node.type_bits != stat.S_IFREG:
            return released
        if self._upper.is_metacopy(node):
            self._complete(node, size_limit)
            return True
        return released

    def _complete(self, node: Node, size_limit: int | None) -> None:
        """Copies content into a metacopy; it is one until all is there."""
        source = None if size_limit == 0 else open_below(self._tree, node)
        node.copying = True
        target = self._upper.open_metacopy(node)
        try:
            before = os.fstat(target)
            capability = self._upper.mark(target, _CAPABILITY)
            size = before.st_size if size_limit is None else min(before.st_size, size_limit)
            with self._released():
                if source is not None:
                    _copy_data(source, target, size)
                    self._upper.sync(target)
            if capability is not None:
                os.setxattr(target, _CAPABILITY, capability)
            self._end_metacopy(target, before, size)
            node.has_content = True
        finally:
            os.close(target)
            if source is not None:
                source.close()
            node.copying = False
            self._tree.copied.notify_all()

    def _end_metacopy(self, target: int, before: os.stat_result, size: int) -> None:
        """Makes a file of its own of a metacopy. What writing to a file takes, it gets again."""
        if size != before.st_size:
            os.ftruncate(target, size)
        os.removexattr(target, self._upper.xattrs.metacopy)
        with contextlib.suppress(OSError):  # there need be none, and nobody reads it any more
            os.removexattr(target, self._upper.xattrs.redirect)
        os.chmod(target, stat.S_IMODE(before.st_mode))
        os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))

    def join_alias(self, node: Node, parent: Node, name: bytes) -> None:
        """Gives a copied-up file with aliases the name of one more of them."""
        assert node.alias is not None
        self.ensure(parent)
        count, alias = node.alias
        with self._unchanged_times(parent):
            os.link(
                alias,
                name,
                src_dir_fd=self._upper.alias_directory,
                dst_dir_fd=self._upper.directory(parent),
                follow_symlinks=False,
            )
        self._tree.add_name(node, parent, name)
        self.count_aliases(node, count - 1)

    def count_aliases(self, node: Node, count: int) -> None:
        """Notes how many aliases of a copied-up file have no name in the upper."""
        assert node.alias is not None
        node.alias = max(0, count), node.alias[1]
        value = b"%d:%s" % node.alias
        self._upper.set_mark(self._upper.place(node), self._upper.xattrs.alias, value)

    def _without_upper(self, node: Node) -> list[Node]:
        """``node`` and those of its directories that are not in the upper, from the top."""
        chain: list[Node] = []
        while not node.has_upper:
            chain.append(node)
            if not node.names:
                break
            node = node.names[0][0]
        chain.reverse()
        return chain

    def _copy_in_place(self, node: Node) -> None:
        """Copies up what has no content, into a directory of the upper."""
        made = self._upper.temporary()
        attr = self._tree.attr(node)
        try:
            _make(made, attr, self._readlink(node))
            self._copy_attributes(node, attr, made.path)
            self._publish(node, made)
        except BaseException:
            self._upper.discard(made)
            raise

    def _copy_file(self, node: Node, size_limit: int | None) -> None:
        source = None if size_limit == 0 else open_below(self._tree, node)
        node.copying = True
        made = self._upper.temporary()
        try:
            attr = self._tree.attr(node)
            size = attr.size if size_limit is None else min(attr.size, size_limit)
            with self._released():
                self._copy_content(source, made, size, node, attr)
            for ancestor in self._without_upper(node)[:-1]:
                self._copy_in_place(ancestor)
            self._publish(node, made)
        except BaseException:
            self._upper.discard(made)
            raise
        finally:
            if source is not None:
                source.close()
            node.copying = False
            self._tree.copied.notify_all()

    @contextmanager
    def _released(self) -> Iterator[None]:
        self._tree.lock.release()
        try:
            yield
        finally:
            self._tree.lock.acquire()

    def _publish(self, node: Node, made: Place) -> None:
        """Puts a copy under the name of its node, or keeps it nameless if that is gone."""
        status = os.stat(made.name, dir_fd=made.directory, follow_symlinks=False)
        if not node.names:
            node.hold(os.open(made.name, os.O_PATH | os.O_NOFOLLOW, dir_fd=made.directory))
            self._upper.discard(made)
            self._tree.note_copied(node, status.st_ino)
            return
        if not node.is_directory and self._has_aliases(node):
            self._publish_aliases(node, made, status.st_ino)
            return
        parent, name = node.names[0]
        with self._unchanged_times(parent):
            self._upper.put(made, parent, name, syscalls.RENAME_NOREPLACE)
        self._tree.note_copied(node, status.st_ino)

    def _has_aliases(self, node: Node) -> bool:
        if node.attr is not None:
            return node.attr.nlink > 1
        layer, lower = node.lowers[0]
        return self._tree.lowers[layer].getattr(lower).nlink > 1

    def _publish_aliases(self, node: Node, made: Place, upper_ino: int) -> None:
        """Gives the copy all known names of its lower file, and one that later ones are given."""
        layer, lower = node.lowers[0]
        attr = self._tree.lowers[layer].getattr(lower)
        alias = self._tree.alias_name(layer, attr)
        value = b"%d:%s" % (attr.nlink - node.lost_names, alias)
        self._upper.set_mark(made, self._upper.xattrs.alias, value)
        assert made.directory is not None
        syscalls.rename(made.directory, made.name, self._upper.alias_directory, alias)
        self._upper.aliases.add(alias)
        place = Place(self._upper.alias_directory, alias)
        node.hold(os.open(alias, os.O_PATH | os.O_NOFOLLOW, dir_fd=place.directory))
        names, node.names = node.names, []
        node.alias = attr.nlink - node.lost_names, alias
        self._tree.note_copied(node, upper_ino)
        self._tree.note_linked(node, upper_ino)
        for parent, name in names:
            self.join_alias(node, parent, name)

    def _readlink(self, node: Node) -> bytes:
        if node.type_bits != stat.S_IFLNK:
            return b""
        layer, lower = node.lowers[0]
        return self._tree.lowers[layer].readlink(lower)

    def _copy_content(
        self, source: File | None, made: Place, size: int, node: Node, attr: Attr
    ) -> None:
        """Makes a copy with the first ``size`` bytes of ``source``, safe on disk."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        target = os.open(made.name, flags, 0o600, dir_fd=made.directory)
        try:
            if source is not None and size:
                os.ftruncate(target, size)
                _copy_data(source, target, size)
                self._upper.sync(target)
            self._copy_attributes(node, attr, target)
        finally:
            os.close(target)

    def _copy_attributes(self, node: Node, attr: Attr, made: int | bytes) -> None:
        """Owner, xattrs, permissions and times, in the order in which none undoes another.

        ``made`` is a descriptor, or the path of what cannot be opened.
        """
        layer, lower = node.lowers[0]
        follow = isinstance(made, int)
        os.chown(made, attr.uid, attr.gid, follow_symlinks=follow)
        source = self._tree.lowers[layer]
        for xattr in source.listxattr(lower):
            stored = self._upper.xattrs.stored(xattr)
            os.setxattr(made, stored, source.getxattr(lower, xattr), follow_symlinks=follow)
        if attr.type_bits != stat.S_IFLNK:
            os.chmod(made, stat.S_IMODE(attr.mode))
        os.utime(made, ns=(attr.atime_ns, attr.mtime_ns), follow_symlinks=follow)

    @contextmanager
    def _unchanged_times(self, parent: Node) -> Iterator[None]:
        """A copy-up is no change of the directory: its times stay."""
        before = os.fstat(self._upper.directory(parent))
        yield
        times = (before.st_atime_ns, before.st_mtime_ns)
        os.utime(self._upper.directory(parent), ns=times)


def _make(made: Place, attr: Attr, target: bytes) -> None:
    """Makes an empty file of a kind, as nobody's yet."""
    kind = attr.type_bits
    if kind == stat.S_IFDIR:
        os.mkdir(made.name, 0o700, dir_fd=made.directory)
    elif kind == stat.S_IFLNK:
        os.symlink(target, made.name, dir_fd=made.directory)
    else:
        os.mknod(made.name, kind | 0o600, attr.rdev, dir_fd=made.directory)


def _copy_data(source: File, target: int, size: int) -> None:
    """Copies the first ``size`` bytes of ``source`` into a file of holes; they are kept."""
    for begin, end in _data_ranges(source, size):
        at = begin
        while at < end:
            copied = copy_range(source, at, target, at, min(end - at, _STEP_SIZE))
            if not copied:
                raise OSError(errno.EIO, f"copy-up: a lower ends at {at}, not at {size}")
            at += copied


def _data_ranges(source: File, size: int) -> Iterator[tuple[int, int]]:
    """The parts of the first ``size`` bytes that are no holes."""
    at = 0
    while at < size:
        try:
            begin = source.seek(at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = min(source.seek(begin, os.SEEK_HOLE), size)
        if begin < end:
            yield begin, end
        at = max(end, begin)
