"""Applies layers to a real directory with system calls alone: the model that merging must match.

Needs root, and a file system with user and trusted xattrs and nanosecond times.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from snapshotter.projection.tree import EntryKind, Inode, LayerEntry

_CONTENT = b"trusted.test.content"
"""Files get their size as a hole, and their content id as this xattr."""


class RefusedError(Exception):
    """The layer cannot be applied."""


class Applier:
    """One root directory and what the file system would not keep for us: directories' times."""

    def __init__(self, root: Path) -> None:
        self._root = os.fsencode(root)
        self._times_ns: dict[int, int] = {}
        self._hops = 0
        self._own: set[int] = set()
        """Inode numbers of what the layer itself has put in place."""
        self._own_directory(self._root)

    def apply(self, layer: list[LayerEntry]) -> None:
        """One layer; RefusedError leaves it half applied."""
        self._own = set() if os.listdir(self._root) else _Everything()
        markers = [e for e in layer if e.kind in (EntryKind.WHITEOUT, EntryKind.OPAQUE)]
        for path in [path for marker in markers for path in self._hidden(marker)]:
            self._remove(path)
        for entry in layer:
            if entry.kind == EntryKind.NODE:
                self._make(entry)
            elif entry.kind == EntryKind.HARD_LINK:
                self._link(entry)
            elif not self._is_hidden(entry, layer):
                self._hide(entry)
        for directory, _, _ in os.walk(self._root):
            time_ns = self._times_ns[os.lstat(directory).st_ino]
            os.utime(directory, ns=(0, time_ns))

    # Paths ------------------------------------------------------------------------------------

    def _resolve(self, path: bytes, own: set[int]) -> bytes:
        """The real path within the root of a directory, which need not exist.

        What is in the way and neither a directory nor ``own`` counts as missing.
        """
        self._hops = 0
        return self._root + b"".join(b"/" + part for part in self._follow(path, [], own))

    def _follow(self, path: bytes, below: list[bytes], own: set[int]) -> list[bytes]:
        place = [] if path.startswith(b"/") else list(below)
        for part in path.split(b"/"):
            if part == b"..":
                del place[-1:]
                continue
            if part in (b"", b"."):
                continue
            here = self._root + b"".join(b"/" + name for name in place)
            found = here + b"/" + part
            is_there = _is_directory(here) and os.path.realpath(here) == here
            is_end = not is_there or not os.path.lexists(found) or _is_directory(found)
            if is_end or os.lstat(found).st_ino not in own:
                place.append(part)
            elif os.path.islink(found):
                if self._hops == 255:
                    raise RefusedError(path)
                self._hops += 1
                place = self._follow(os.readlink(found), place, own)
            else:
                raise RefusedError(path)
        return place

    def _directory(self, path: bytes) -> bytes:
        """The real path of a directory in the image, made where it is missing."""
        made = self._root
        for part in self._resolve(path, self._own).removeprefix(self._root).split(b"/")[1:]:
            made += b"/" + part
            if not _is_directory(made):
                self._remove(made)
                os.mkdir(made)
                self._own_directory(made)
            self._own.add(os.lstat(made).st_ino)
        return made

    def _own_directory(self, path: bytes) -> None:
        os.chown(path, 0, 0)
        os.chmod(path, 0o755)
        self._times_ns[os.lstat(path).st_ino] = 0

    # Entries ----------------------------------------------------------------------------------

    def _hidden(self, entry: LayerEntry) -> list[bytes]:
        """The paths that a marker hides, no link followed."""
        path = self._root + b"/" + entry.path if entry.path else self._root
        directory = path if entry.kind == EntryKind.OPAQUE else os.path.dirname(path)
        if not _is_directory(directory) or os.path.realpath(directory) != directory:
            return []
        return (
            [directory + b"/" + name for name in os.listdir(directory)]
            if (entry.kind == EntryKind.OPAQUE)
            else [path]
        )

    def _is_hidden(self, entry: LayerEntry, layer: list[LayerEntry]) -> bool:
        """Whether a marker lies in what the same layer hides as a whole."""
        whole = [e.path for e in layer if e.kind == EntryKind.WHITEOUT]
        is_opaque = entry.kind == EntryKind.OPAQUE
        return any(
            entry.path.startswith(path + b"/") or (is_opaque and entry.path == path)
            for path in whole
        )

    def _hide(self, entry: LayerEntry) -> None:
        """What a marker does in its turn: parents, and what links of its own layer lead it to."""
        if entry.kind == EntryKind.OPAQUE:
            directory = self._directory(entry.path)
            names = os.listdir(directory)
        else:
            directory = self._directory(os.path.dirname(entry.path))
            names = [os.path.basename(entry.path)]
        for name in names:
            path = directory + b"/" + name
            if os.path.lexists(path) and os.lstat(path).st_ino not in self._own:
                self._remove(path)

    def _remove(self, path: bytes) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)

    def _make(self, entry: LayerEntry) -> None:
        path = self._root
        if entry.path:
            path = (
                self._directory(os.path.dirname(entry.path)) + b"/" + os.path.basename(entry.path)
            )
        kind = stat.S_IFMT(entry.mode)
        is_update = kind == stat.S_IFDIR and _is_directory(path)
        if not is_update:
            self._remove(path)
            self._create(path, kind, entry)
        os.lchown(path, entry.uid, entry.gid)
        if kind != stat.S_IFLNK:
            os.chmod(path, stat.S_IMODE(entry.mode))
        if path == self._root or os.lstat(path).st_ino not in self._own:
            for name in os.listxattr(path, follow_symlinks=False):
                os.removexattr(path, name, follow_symlinks=False)
        self._own.add(os.lstat(path).st_ino)
        for xattr, value in entry.xattrs.items():
            os.setxattr(path, xattr, value, follow_symlinks=False)
        if entry.content:
            os.setxattr(path, _CONTENT, entry.content)
        os.utime(path, ns=(0, entry.mtime_ns), follow_symlinks=False)
        if kind == stat.S_IFDIR:
            self._times_ns[os.lstat(path).st_ino] = entry.mtime_ns

    def _create(self, path: bytes, kind: int, entry: LayerEntry) -> None:
        if kind == stat.S_IFDIR:
            os.mkdir(path)
        elif kind == stat.S_IFLNK:
            os.symlink(entry.target, path)
        else:
            minor = entry.rdev & 0xFF | entry.rdev >> 12 & 0xFFF00
            os.mknod(path, kind | 0o600, os.makedev(entry.rdev >> 8 & 0xFFF, minor))
            if kind == stat.S_IFREG:
                os.truncate(path, entry.size)

    def _link(self, entry: LayerEntry) -> None:
        target = self._resolve(os.path.dirname(entry.target), _Everything())
        target += b"/" + os.path.basename(entry.target)
        if not os.path.lexists(target) or _is_directory(target):
            raise RefusedError(entry.target)
        path = self._directory(os.path.dirname(entry.path)) + b"/" + os.path.basename(entry.path)
        if target == path or target.startswith(path + b"/") or _is_directory(target):
            raise RefusedError(entry.target)
        self._remove(path)
        os.link(target, path, follow_symlinks=False)
        os.lchown(path, entry.uid, entry.gid)
        if not os.path.islink(path):
            os.chmod(path, stat.S_IMODE(entry.mode))
        os.utime(path, ns=(0, entry.mtime_ns), follow_symlinks=False)
        self._own.add(os.lstat(path).st_ino)

    # Back -------------------------------------------------------------------------------------

    def read_back(self) -> Inode:
        """The directory as a tree."""
        return read_tree(self._root)


class _Everything(set[int]):
    """The set of all inode numbers."""

    def __contains__(self, _: object) -> bool:
        return True


def _is_directory(path: bytes) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def read_tree(path: bytes) -> Inode:
    """A directory on disk as a tree, hard links shared, its content ids from our own xattr."""
    made: dict[int, Inode] = {}
    root = _read_inode(path, os.lstat(path))
    stack = [(path, root)]
    while stack:
        parent, inode = stack.pop()
        assert inode.children is not None
        with os.scandir(parent) as listing:
            for found in listing:
                status = found.stat(follow_symlinks=False)
                child = made.get(status.st_ino)
                if child is None:
                    child = made[status.st_ino] = _read_inode(found.path, status)
                inode.children[found.name] = child
                if child.children is not None:
                    stack.append((found.path, child))
    return root


def _read_inode(path: bytes, status: os.stat_result) -> Inode:
    xattrs = {
        os.fsencode(name): os.getxattr(path, name, follow_symlinks=False)
        for name in os.listxattr(path, follow_symlinks=False)
    }
    major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    return Inode(
        status.st_mode,
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
        size=status.st_size if stat.S_ISREG(status.st_mode) else 0,
        rdev=minor & 0xFF | major << 8 | (minor & ~0xFF) << 12,
        target=os.readlink(path) if stat.S_ISLNK(status.st_mode) else b"",
        content=xattrs.pop(_CONTENT, b""),
        xattrs=xattrs,
    )
