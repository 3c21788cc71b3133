"""Uses a FileSystem by paths, as the system calls of a program would, and scans it."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from typing import Any

from snapshotter.vfs import Attr, AttrChange, Caller, Entry, FileSystem, Lower
from tests.support.compare_trees import Node

_UMASK = 0o022


class VfsPaths:
    """``fs`` for a program of root's with umask 022. No path is followed through a link."""

    def __init__(self, fs: FileSystem[Any], *, uid: int = 0) -> None:
        self.fs = fs
        self._caller = Caller(uid, uid, _UMASK)

    def find(self, path: bytes) -> Any:
        return find(self.fs, path)

    def lstat(self, path: bytes) -> Attr:
        return self.fs.getattr(self.find(path))

    def create(self, path: bytes, mode: int, data: bytes) -> None:
        parent, name = self._parent(path)
        _, file = self.fs.create(parent, name, mode, self._caller, 0)
        try:
            if data:
                file.write(data, 0)
        finally:
            file.close()

    def read(self, path: bytes) -> bytes:
        node = self._regular(path)
        file = self.fs.open(node, os.O_RDONLY)
        try:
            return file.read(1 << 20, 0)
        finally:
            file.close()

    def write(self, path: bytes, data: bytes, offset: int, flags: int) -> None:
        file = self.fs.open(self._regular(path), os.O_WRONLY | flags & ~os.O_APPEND)
        try:
            file.write(data, offset, append=bool(flags & os.O_APPEND))
        finally:
            file.close()

    def allocate(self, path: bytes, mode: int, offset: int, size: int) -> None:
        file = self.fs.open(self._regular(path), os.O_WRONLY)
        try:
            file.allocate(mode, offset, size)
        finally:
            file.close()

    def truncate(self, path: bytes, size: int) -> None:
        self.fs.setattr(self._regular(path), AttrChange(size=size))

    def mkdir(self, path: bytes, mode: int) -> None:
        self.fs.mkdir(*self._parent(path), mode, self._caller)

    def mknod(self, path: bytes, mode: int, rdev: int) -> None:
        self.fs.mknod(*self._parent(path), mode, rdev, self._caller)

    def symlink(self, path: bytes, target: bytes) -> None:
        self.fs.symlink(*self._parent(path), target, self._caller)

    def link(self, path: bytes, new_path: bytes) -> None:
        node = self.find(path)
        self.fs.link(node, *self._parent(new_path))

    def unlink(self, path: bytes) -> None:
        self.fs.unlink(*self._parent(path))

    def rmdir(self, path: bytes) -> None:
        self.fs.rmdir(*self._parent(path))

    def rename(self, path: bytes, new_path: bytes, flags: int) -> None:
        self.fs.rename(*self._parent(path), *self._parent(new_path), flags)

    def chmod(self, path: bytes, mode: int) -> None:
        self.fs.setattr(self.find(path), AttrChange(mode=mode))

    def chown(self, path: bytes, uid: int, gid: int) -> None:
        self.fs.setattr(self.find(path), AttrChange(uid=uid, gid=gid))

    def utime(self, path: bytes, time_ns: int) -> None:
        self.fs.setattr(self.find(path), AttrChange(atime_ns=time_ns, mtime_ns=time_ns))

    def setxattr(self, path: bytes, name: bytes, value: bytes) -> None:
        self.fs.setxattr(self.find(path), name, value, 0)

    def removexattr(self, path: bytes, name: bytes) -> None:
        self.fs.removexattr(self.find(path), name)

    def listdir(self, path: bytes) -> list[bytes]:
        directory = self.fs.opendir(self.find(path))
        try:
            return sorted(entry.name for entry in directory.entries())
        finally:
            directory.close()

    def _parent(self, path: bytes) -> tuple[Any, bytes]:
        parent, _, name = path.rpartition(b"/")
        node = self.find(parent)
        mode = self.fs.getattr(node).mode
        if stat.S_ISLNK(mode):
            raise FileNotFoundError(errno.ENOENT, "walk", path)
        if not stat.S_ISDIR(mode):
            raise NotADirectoryError(errno.ENOTDIR, "walk", path)
        return node, name

    def _regular(self, path: bytes) -> Any:
        node = self.find(path)
        if stat.S_ISLNK(self.fs.getattr(node).mode):
            raise OSError(errno.ELOOP, "open", path)
        return node


def find(fs: Lower[Any], path: bytes) -> Any:
    """The node at ``path`` (relative; b"" is the root); links in it lead nowhere."""
    entry = Entry(fs.root, fs.getattr(fs.root))
    for name in path.split(b"/") if path else []:
        if stat.S_ISLNK(entry.attr.mode):
            raise FileNotFoundError(errno.ENOENT, "walk", path)
        if not stat.S_ISDIR(entry.attr.mode):
            raise NotADirectoryError(errno.ENOTDIR, "walk", path)
        entry = fs.lookup(entry.node, name)
    return entry.node


def scan_file_system(fs: Lower[Any]) -> dict[bytes, Node]:
    """Every path with what it is, as ``compare_trees.scan_tree`` says it."""
    found: dict[bytes, tuple[Any, Attr]] = {b".": (fs.root, fs.getattr(fs.root))}
    stack = [(b"", fs.root)]
    while stack:
        prefix, node = stack.pop()
        directory = fs.opendir(node)
        for entry in directory.entries():
            child, attr = fs.lookup(node, entry.name)
            assert attr.type_bits == entry.type_bits, (prefix, entry)
            assert attr.ino == entry.ino, (prefix, entry, attr)
            found[prefix + entry.name] = (child, attr)
            if stat.S_ISDIR(attr.mode):
                stack.append((prefix + entry.name + b"/", child))
        directory.close()
    names: dict[int, list[bytes]] = {}
    for path, (_, attr) in found.items():
        if not stat.S_ISDIR(attr.mode):
            names.setdefault(attr.ino, []).append(path)
    groups = {p: tuple(sorted(g)) for g in names.values() if len(g) > 1 for p in g}
    return {p: _describe(fs, n, groups.get(p, ())) for p, (n, _) in found.items()}


def _describe(fs: Lower[Any], node: Any, links: tuple[bytes, ...]) -> Node:
    attr = fs.getattr(node)
    is_directory = stat.S_ISDIR(attr.mode)
    is_device = stat.S_ISCHR(attr.mode) or stat.S_ISBLK(attr.mode)
    return Node(
        mode=f"{stat.filemode(attr.mode)} ({stat.S_IMODE(attr.mode):04o})",
        uid=attr.uid,
        gid=attr.gid,
        mtime_ns=attr.mtime_ns,
        size=0 if is_directory else attr.size,
        rdev=f"{os.major(attr.rdev)}:{os.minor(attr.rdev)}" if is_device else "",
        xattrs=tuple(
            (os.fsdecode(name), fs.getxattr(node, name)) for name in sorted(fs.listxattr(node))
        ),
        target=fs.readlink(node) if stat.S_ISLNK(attr.mode) else b"",
        links=links,
        nlink=0 if is_directory else attr.nlink,
        sha256=_digest(fs, node, attr) if stat.S_ISREG(attr.mode) else "",
    )


def _digest(fs: Lower[Any], node: Any, attr: Attr) -> str:
    file = fs.open(node, os.O_RDONLY)
    try:
        return hashlib.sha256(file.read(attr.size + 1, 0)).hexdigest()
    finally:
        file.close()
