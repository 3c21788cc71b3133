"""renameat2 on the merged tree: decided on what is merged, done as one rename in the upper."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from snapshotter.overlay import syscalls
from snapshotter.overlay.changes import Changes
from snapshotter.overlay.copy_up import CopyUp
from snapshotter.overlay.node import Node
from snapshotter.overlay.tree import Tree
from snapshotter.overlay.upper import Upper
from snapshotter.overlay.whiteouts import is_whiteout
from snapshotter.vfs import RENAME_EXCHANGE, RENAME_NOREPLACE

_MAX_REDIRECT = 256
"""Bytes of an absolute redirect that kernel overlayfs writes; beyond it programs have to copy."""


class _Names(NamedTuple):
    """From where to where."""

    parent: Node
    name: bytes
    new_parent: Node
    new_name: bytes


class Renames:
    """Renames files of ``tree``, which has an upper. Called while holding its lock.

    ``redirects`` says whether a directory that a lower has may be renamed, which leaves a redirect
    in the upper; else that is EXDEV, and programs copy it.
    """

    def __init__(
        self, tree: Tree, upper: Upper, copy_up: CopyUp, changes: Changes, *, redirects: bool
    ) -> None:
        self._tree = tree
        self._upper = upper
        self._copy_up = copy_up
        self._changes = changes
        self._redirects = redirects

    def rename(
        self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int
    ) -> None:
        """renameat2(2) with 0, RENAME_NOREPLACE or RENAME_EXCHANGE."""
        if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
            raise OSError(errno.EINVAL, f"rename: flags {flags:#x} are not supported", name)
        names = _Names(parent, name, new_parent, new_name)
        while True:
            old = self._tree.child(parent, name)
            new = self._tree.find_child(new_parent, new_name)
            self._check(names, old, new, flags)
            if old is new:
                return
            if not self._copy_up_both(names, old, new if flags & RENAME_EXCHANGE else None):
                break
        if flags & RENAME_EXCHANGE:
            assert new is not None
            self._exchange(names, old, new)
        else:
            self._move(names, old, new)

    def _check(self, names: _Names, old: Node, new: Node | None, flags: int) -> None:
        """Everything that Linux refuses, in its order."""
        if flags & RENAME_NOREPLACE and new is not None:
            raise FileExistsError(errno.EEXIST, "rename: name is taken", names.new_name)
        if flags & RENAME_EXCHANGE and new is None:
            raise FileNotFoundError(errno.ENOENT, "rename: nothing to exchange", names.new_name)
        if self._tree.is_removed(names.new_parent):
            raise FileNotFoundError(errno.ENOENT, "rename: the directory is removed", names.name)
        if _is_inside(names.new_parent, old):
            raise OSError(errno.EINVAL, "rename: into itself", names.name)
        if new is not None and _is_inside(names.parent, new):
            number = errno.EINVAL if flags & RENAME_EXCHANGE else errno.ENOTEMPTY
            raise OSError(number, "rename: over a directory that it is in", names.new_name)
        if new is None or new is old:
            self._check_movable(names.name, old)
            return
        if not flags & RENAME_EXCHANGE:
            self._check_replaceable(names.new_name, old, new)
        self._check_movable(names.name, old)
        if flags & RENAME_EXCHANGE:
            self._check_movable(names.new_name, new)

    def _check_replaceable(self, name: bytes, old: Node, new: Node) -> None:
        if old.is_directory and not new.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, "rename: over what is no directory", name)
        if not old.is_directory and new.is_directory:
            raise IsADirectoryError(errno.EISDIR, "rename: over a directory", name)

    def _check_movable(self, name: bytes, node: Node) -> None:
        if node.is_directory and node.lowers and not self._redirects:
            raise OSError(errno.EXDEV, "rename: a lower has this directory", name)

    def _copy_up_both(self, names: _Names, old: Node, exchanged: Node | None) -> bool:
        """Copies up what has to be; whether others may have changed something meanwhile."""
        released = self._copy_up.ensure_content(old)
        released |= self._copy_up.ensure(names.new_parent)
        if exchanged is not None:
            released |= self._copy_up.ensure_content(exchanged)
        return released

    def _exchange(self, names: _Names, old: Node, new: Node) -> None:
        is_same = names.parent is names.new_parent
        self._prepare_move(old, names.new_parent, is_same=is_same)
        self._prepare_move(new, names.parent, is_same=is_same)
        self._rename(names, syscalls.RENAME_EXCHANGE)
        self._tree.drop_name(old, names.parent, names.name)
        self._tree.drop_name(new, names.new_parent, names.new_name)
        self._tree.add_name(old, names.new_parent, names.new_name)
        self._tree.add_name(new, names.parent, names.name)

    def _move(self, names: _Names, old: Node, new: Node | None) -> None:
        if new is not None and new.is_directory and not self._tree.is_empty(new):
            raise OSError(errno.ENOTEMPTY, "rename: over a directory in use", names.new_name)
        leaves_whiteout = self._tree.lower_has(names.parent, names.name)
        self._prepare_move(old, names.new_parent, is_same=names.parent is names.new_parent)
        if new is not None and new.has_upper:
            if new.is_directory:
                self._upper.clear(new)
            self._upper.hold_directory(new)
        if old.is_directory and self._is_whited_out(names):
            self._swap_with_whiteout(names, leaves_whiteout=leaves_whiteout)
        else:
            self._rename(names, syscalls.RENAME_WHITEOUT if leaves_whiteout else 0)
        self._tree.drop_name(old, names.parent, names.name)
        if new is not None and new.is_directory:
            self._changes.note_removed(new, names.new_parent, names.new_name)
        elif new is not None:
            self._changes.note_unlinked(new, names.new_parent, names.new_name)
        self._tree.add_name(old, names.new_parent, names.new_name)

    def _is_whited_out(self, names: _Names) -> bool:
        covered = self._upper.find(names.new_parent, names.new_name)
        return covered is not None and is_whiteout(covered.st_mode, covered.st_rdev)

    def _swap_with_whiteout(self, names: _Names, *, leaves_whiteout: bool) -> None:
        """A directory cannot be renamed over a whiteout, but they can change places."""
        self._rename(names, syscalls.RENAME_EXCHANGE)
        if not leaves_whiteout:
            os.unlink(names.name, dir_fd=self._upper.directory(names.parent))

    def _rename(self, names: _Names, flags: int) -> None:
        source = self._upper.directory(names.parent)
        target = self._upper.directory(names.new_parent)
        syscalls.rename(source, names.name, target, names.new_name, flags)

    def _prepare_move(self, node: Node, new_parent: Node, *, is_same: bool) -> None:
        """Marks a directory so that at its new place the lowers are merged as they were.

        The marks are true at the old place too, should the rename not come to pass.
        """
        if not node.is_directory:
            return
        place = self._upper.place(node)
        if node.lowers:
            redirect = self._redirect(node, is_same=is_same)
            if redirect != node.redirect:
                self._upper.set_mark(place, self._upper.xattrs.redirect, redirect)
                node.redirect = redirect
        elif new_parent.lowers:
            self._upper.make_opaque(place)

    def _redirect(self, node: Node, *, is_same: bool) -> bytes:
        """Where the lowers have a directory; a mere name is enough within one parent."""
        if node.redirect.startswith(b"/") or (is_same and node.redirect):
            return node.redirect
        if is_same:
            return node.names[0][1]
        components: list[bytes] = []
        at = node
        while at is not self._tree.root:
            parent, name = at.names[0]
            components.append(at.redirect or name)
            if at.redirect.startswith(b"/"):
                break
            at = parent
        components.reverse()
        path = b"/".join(components)
        if not path.startswith(b"/"):
            path = b"/" + path
        if len(path) > _MAX_REDIRECT:
            raise OSError(errno.EXDEV, "rename: the redirect would be too long", node.names[0][1])
        return path


def _is_inside(node: Node, directory: Node) -> bool:
    """Whether ``node`` is ``directory`` or below it."""
    while node is not directory:
        if not node.names:
            return False
        node = node.names[0][0]
    return True
