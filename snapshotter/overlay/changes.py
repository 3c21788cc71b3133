"""Making, linking and removing files of the merged tree. Renames are in ``renames``.

Each change is one atomic step on disk, prepared in the work directory; what the program sees
changes with that step and never before it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable

from snapshotter.overlay import acls, syscalls
from snapshotter.overlay.copy_up import CopyUp
from snapshotter.overlay.node import Inherited, Node
from snapshotter.overlay.tree import Tree, link_count
from snapshotter.overlay.upper import Place, Upper
from snapshotter.vfs import Caller, Entry

_NO_ACL = frozenset((errno.ENODATA, errno.EOPNOTSUPP))


class Changes:
    """Changes ``tree``, which has an upper. Called while holding its lock."""

    def __init__(self, tree: Tree, upper: Upper, copy_up: CopyUp) -> None:
        self._tree = tree
        self._upper = upper
        self._copy_up = copy_up

    def make(
        self, parent: Node, name: bytes, mode: int, caller: Caller, start: Callable[[Place], None]
    ) -> Entry[Node]:
        """A new file of the kind of ``mode``, which ``start`` makes, empty, at a place in work."""
        self._expect_free(parent, name)
        self._copy_up.ensure(parent)
        made = self._upper.temporary()
        is_directory = stat.S_ISDIR(mode)
        try:
            start(made)
            self._own(made, parent, mode, caller)
            if is_directory and self._is_whited_out(parent, name):
                self._upper.make_opaque(made)
                self._upper.put_over_whiteout(made, parent, name)
            else:
                self._upper.put(made, parent, name)
        except BaseException:
            self._upper.discard(made)
            raise
        return self._tree.adopt_new(parent, name)

    def _is_whited_out(self, parent: Node, name: bytes) -> bool:
        """Whether a whiteout is at a name that shows nothing."""
        return self._upper.find(parent, name) is not None

    def _own(self, made: Place, parent: Node, mode: int, caller: Caller) -> None:
        """Gives a new file owner, permissions and what it inherits from its directory.

        What it has already is left alone: most files are right as they are made.
        """
        directory, name = made
        inherited = parent.inherited or self._inherited(parent)
        gid = caller.gid if inherited.gid is None else inherited.gid
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        is_ours = (status.st_uid, status.st_gid) == (caller.uid, gid)
        if not is_ours:  # which takes the set-id bits
            os.chown(name, caller.uid, gid, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISLNK(mode):
            return
        permissions, access = stat.S_IMODE(mode), None
        if inherited.default_acl is None:
            permissions &= ~caller.umask
        else:
            permissions, access = acls.inherit(inherited.default_acl, permissions)
        if stat.S_ISDIR(mode):
            permissions |= 0 if inherited.gid is None else stat.S_ISGID
            if inherited.default_acl is not None:
                os.setxattr(made.path, acls.DEFAULT, inherited.default_acl)
        if access is not None:
            os.setxattr(made.path, acls.ACCESS, access)
        is_right = is_ours and access is None and stat.S_IMODE(status.st_mode) == permissions
        if not is_right:
            os.chmod(name, permissions, dir_fd=directory)

    def _inherited(self, parent: Node) -> Inherited:
        """What new files in ``parent``, which is in the upper, get from it; read once."""
        descriptor = self._upper.directory(parent)
        status = os.fstat(descriptor)
        try:
            acl = os.getxattr(descriptor, acls.DEFAULT)
        except OSError as error:
            if error.errno not in _NO_ACL:
                raise
            acl = None
        gid = status.st_gid if status.st_mode & stat.S_ISGID else None
        parent.inherited = Inherited(gid, acl)
        return parent.inherited

    def link(self, node: Node, parent: Node, name: bytes) -> None:
        """One more name for a file."""
        self._expect_free(parent, name)
        if node.is_directory:
            raise PermissionError(errno.EPERM, "link: is a directory", name)
        if self._copy_up.ensure_content(node):
            self._expect_free(parent, name)
        self._copy_up.ensure(parent)
        if not node.names and not (node.alias and self._tree.attr(node).nlink):
            raise FileNotFoundError(errno.ENOENT, "link: the file is removed", name)
        made = self._upper.temporary()
        place = self._upper.place(node)
        os.link(
            place.name,
            made.name,
            src_dir_fd=place.directory,
            dst_dir_fd=made.directory,
            follow_symlinks=place.is_held,
        )
        try:
            self._upper.put(made, parent, name)
        except BaseException:
            self._upper.discard(made)
            raise
        self._tree.add_name(node, parent, name)
        self._tree.note_linked(node, self._upper.stat(node).st_ino)

    def unlink(self, parent: Node, name: bytes) -> None:
        """Takes a name away from a file; whoever holds its node can go on with it."""
        node = self._tree.child(parent, name)
        if node.is_directory:
            raise IsADirectoryError(errno.EISDIR, "unlink: is a directory", name)
        is_covering = not node.has_upper or self._tree.lower_has(parent, name)
        self._copy_up.ensure(parent)
        if node.has_upper:
            self._upper.hold(node)
        directory = self._upper.directory(parent)
        if not is_covering:
            os.unlink(name, dir_fd=directory)
        elif not node.has_upper:
            self._upper.whiteout(directory, name)
        else:
            self._upper.put(self._upper.new_whiteout(), parent, name)
        self.note_unlinked(node, parent, name)

    def note_unlinked(self, node: Node, parent: Node, name: bytes) -> None:
        """A name of ``node`` is gone on disk; the node was held before, if it is in the upper."""
        self._tree.drop_name(node, parent, name)
        if not node.has_upper:
            node.lost_names += 1
            return
        status = os.fstat(self._upper.hold(node))
        if link_count(node, status.st_nlink) > 0:
            return
        if node.alias is not None:
            self._upper.aliases.discard(node.alias[1])
            os.unlink(node.alias[1], dir_fd=self._upper.alias_directory)
            node.alias = None
        self._tree.note_gone(status.st_ino)

    def rmdir(self, parent: Node, name: bytes) -> None:
        """Removes a directory that shows nothing."""
        node = self._tree.child(parent, name)
        if not node.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, "rmdir: is no directory", name)
        is_covering = self._tree.lower_has(parent, name)
        if node.has_upper and not node.lowers and not is_covering:
            self._upper.hold_directory(node)
            if self._remove_empty(parent, name):
                self.note_removed(node, parent, name)
                return
            node.let_go()
        if not self._tree.is_empty(node):
            raise OSError(errno.ENOTEMPTY, "rmdir: is not empty", name)
        self._copy_up.ensure(parent)
        if not node.has_upper:
            self._upper.whiteout(self._upper.directory(parent), name)
        else:
            self._upper.hold_directory(node)
            if is_covering:
                self._replace_by_whiteout(parent, name)
            else:
                self._take_away(parent, name)
        self.note_removed(node, parent, name)

    def note_removed(self, node: Node, parent: Node, name: bytes) -> None:
        """A directory is gone on disk; it was held before, if it is in the upper."""
        self._tree.drop_name(node, parent, name)
        if node.has_upper:
            self._tree.note_gone(self._upper.stat(node).st_ino)

    def _remove_empty(self, parent: Node, name: bytes) -> bool:
        """Removes a directory of the upper alone, unless there is something in it."""
        try:
            os.rmdir(name, dir_fd=self._upper.directory(parent))
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            return False
        return True

    def _replace_by_whiteout(self, parent: Node, name: bytes) -> None:
        """Puts a whiteout over a directory of the upper."""
        made = self._upper.new_whiteout()
        try:
            self._upper.put(made, parent, name, syscalls.RENAME_EXCHANGE)
        finally:
            self._upper.discard(made)

    def _take_away(self, parent: Node, name: bytes) -> None:
        """Moves a directory, with the whiteouts in it, into work, to be removed there."""
        made = self._upper.temporary()
        syscalls.rename(self._upper.directory(parent), name, self._upper.work, made.name)
        self._upper.discard(made)

    def _expect_free(self, parent: Node, name: bytes) -> None:
        """Raises unless ``name`` may be made in ``parent``."""
        if self._tree.find_child(parent, name) is not None:
            raise FileExistsError(errno.EEXIST, "name is taken", name)
        if self._tree.is_removed(parent):
            raise FileNotFoundError(errno.ENOENT, "the directory is removed", name)
