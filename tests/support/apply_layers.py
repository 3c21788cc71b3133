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
        self._own_directory(self._root)

    def apply(self, layer: list[LayerEntry]) -> None:
        """One layer; RefusedError leaves it half applied."""
        own = {e.path for e in layer if e.kind != EntryKind.OPAQUE}
        markers = [e for e in layer if e.kind in (EntryKind.WHITEOUT, EntryKind.OPAQUE)]
        for path in [path for marker in markers for path in self._hidden(marker, own)]:
            self._remove(path)
        for entry in layer:
            if entry.kind == EntryKind.NODE:
                self._make(entry)
            elif entry.kind == EntryKind.HARD_LINK:
                self._link(entry)
        for directory, _, _ in os.walk(self._root):
            time_ns = self._times_ns[os.lstat(directory).st_ino]
            os.utime(directory, ns=(0, time_ns))

    # Paths ------------------------------------------------------------------------------------

    def _resolve(self, path: bytes) -> bytes:
        """The real path within the root of a directory, which need not exist."""
        self._hops = 0
        return self._follow(path, b"")

    def _follow(self, path: bytes, below: bytes) -> bytes:
        place = b"" if path.startswith(b"/") else below
        for part in path.split(b"/"):
            if part == b"..":
                place = place.rpartition(b"/")[0]
            elif part not in (b"", b"."):
                here = self._root + place + b"/" + part
                if os.path.islink(here):
                    if self._hops == 255:
                        raise RefusedError(path)
                    self._hops += 1
                    place = self._follow(os.readlink(here), place)
                elif os.path.lexists(here) and not os.path.isdir(here):
                    raise RefusedError(path)
                else:
                    place = place + b"/" + part
        return place

    def _parent(self, path: bytes) -> bytes:
        """The absolute path of an entry's parent, made where it is missing."""
        place = self._resolve(os.path.dirname(path))
        made = self._root
        for part in place.split(b"/")[1:]:
            made += b"/" + part
            if not os.path.lexists(made):
                os.mkdir(made)
                self._own_directory(made)
        return made

    def _own_directory(self, path: bytes) -> None:
        os.chown(path, 0, 0)
        os.chmod(path, 0o755)
        self._times_ns[os.lstat(path).st_ino] = 0

    # Entries ----------------------------------------------------------------------------------

    def _hidden(self, entry: LayerEntry, own: set[bytes]) -> list[bytes]:
        """The paths that a marker hides."""
        parts = entry.path.split(b"/") if entry.path else []
        followed = parts if entry.kind == EntryKind.OPAQUE else parts[:-1]
        try:
            for depth in range(1, len(followed) + 1):
                above = self._root + self._resolve(b"/".join(parts[: depth - 1]))
                is_link = os.path.islink(above + b"/" + parts[depth - 1])
                if is_link and b"/".join(parts[:depth]) in own:
                    return []
            directory = self._root + self._resolve(b"/".join(followed))
        except RefusedError:
            return []
        if not os.path.isdir(directory):
            return []
        hidden = os.listdir(directory) if followed is parts else parts[-1:]
        return [directory + b"/" + name for name in hidden]

    def _remove(self, path: bytes) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)

    def _make(self, entry: LayerEntry) -> None:
        path = self._root
        if entry.path:
            path = self._parent(entry.path) + b"/" + os.path.basename(entry.path)
        kind = stat.S_IFMT(entry.mode)
        is_update = kind == stat.S_IFDIR and os.path.isdir(path) and not os.path.islink(path)
        if not is_update:
            self._remove(path)
            self._create(path, kind, entry)
        os.lchown(path, entry.uid, entry.gid)
        if kind != stat.S_IFLNK:
            os.chmod(path, stat.S_IMODE(entry.mode))
        for name in os.listxattr(path, follow_symlinks=False):
            os.removexattr(path, name, follow_symlinks=False)
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
        target = self._root + self._resolve(os.path.dirname(entry.target))
        target += b"/" + os.path.basename(entry.target)
        if not os.path.lexists(target) or (os.path.isdir(target) and not os.path.islink(target)):
            raise RefusedError(entry.target)
        path = self._parent(entry.path) + b"/" + os.path.basename(entry.path)
        if target.startswith(path + b"/"):
            raise RefusedError(entry.target)
        if target != path:
            self._remove(path)
            os.link(target, path, follow_symlinks=False)

    # Back -------------------------------------------------------------------------------------

    def read_back(self) -> Inode:
        """The directory as a tree."""
        return read_tree(self._root)


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
