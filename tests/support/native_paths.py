"""The operations of ``VfsPaths`` as plain system calls below a directory: the model to compare."""

from __future__ import annotations

import os
from pathlib import Path

from snapshotter.descriptor_file import allocate
from snapshotter.overlay import syscalls


class NativePaths:
    def __init__(self, root: Path) -> None:
        self._root = os.fsencode(root)

    def _at(self, path: bytes) -> bytes:
        return os.path.join(self._root, path) if path else self._root

    def lstat(self, path: bytes) -> os.stat_result:
        return os.lstat(self._at(path))

    def create(self, path: bytes, mode: int, data: bytes) -> None:
        fd = os.open(self._at(path), os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)

    def read(self, path: bytes) -> bytes:
        fd = os.open(self._at(path), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return os.read(fd, 1 << 20)
        finally:
            os.close(fd)

    def write(self, path: bytes, data: bytes, offset: int, flags: int) -> None:
        fd = os.open(self._at(path), os.O_WRONLY | os.O_NOFOLLOW | flags)
        try:
            os.pwrite(fd, data, offset)
        finally:
            os.close(fd)

    def allocate(self, path: bytes, mode: int, offset: int, size: int) -> None:
        fd = os.open(self._at(path), os.O_WRONLY | os.O_NOFOLLOW)
        try:
            allocate(fd, mode, offset, size)
        finally:
            os.close(fd)

    def truncate(self, path: bytes, size: int) -> None:
        fd = os.open(self._at(path), os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)

    def mkdir(self, path: bytes, mode: int) -> None:
        os.mkdir(self._at(path), mode)

    def mknod(self, path: bytes, mode: int, rdev: int) -> None:
        os.mknod(self._at(path), mode, rdev)

    def symlink(self, path: bytes, target: bytes) -> None:
        os.symlink(target, self._at(path))

    def link(self, path: bytes, new_path: bytes) -> None:
        os.link(self._at(path), self._at(new_path), follow_symlinks=False)

    def unlink(self, path: bytes) -> None:
        os.unlink(self._at(path))

    def rmdir(self, path: bytes) -> None:
        os.rmdir(self._at(path))

    def rename(self, path: bytes, new_path: bytes, flags: int) -> None:
        syscalls.rename(
            syscalls.AT_FDCWD, self._at(path), syscalls.AT_FDCWD, self._at(new_path), flags
        )

    def chmod(self, path: bytes, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def chown(self, path: bytes, uid: int, gid: int) -> None:
        os.chown(self._at(path), uid, gid, follow_symlinks=False)

    def utime(self, path: bytes, time_ns: int) -> None:
        os.utime(self._at(path), ns=(time_ns, time_ns), follow_symlinks=False)

    def setxattr(self, path: bytes, name: bytes, value: bytes) -> None:
        os.setxattr(self._at(path), name, value, follow_symlinks=False)

    def removexattr(self, path: bytes, name: bytes) -> None:
        os.removexattr(self._at(path), name, follow_symlinks=False)

    def listdir(self, path: bytes) -> list[bytes]:
        fd = os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            return sorted(os.fsencode(name) for name in os.listdir(fd))
        finally:
            os.close(fd)
