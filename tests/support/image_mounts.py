"""Mounts metadata images, alone and below overlayfs, for tests."""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path

from snapshotter.kernel_view import loop_device, syscalls
from snapshotter.projection.image_writer import write_image
from snapshotter.projection.tree import Inode


class Mounts:
    """Images written below one directory, and everything mounted there until ``close``."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._stack = ExitStack()
        self._count = 0
        self.close = self._stack.close

    def erofs(self, tree: Inode) -> Path:
        """Where the image of a tree is mounted, after fsck.erofs had no objection to it."""
        file, target = self._new("erofs"), self._new("mounted")
        file.write_bytes(write_image(tree))
        checked = subprocess.run(["fsck.erofs", file], capture_output=True, text=True)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
        target.mkdir()
        try:
            syscalls.mount(file, target, "erofs", syscalls.MS_RDONLY)
        except OSError as error:
            if error.errno != errno.ENOTBLK:  # the file system here cannot back EROFS by a file
                raise
            descriptor, device = loop_device.attach(str(file))
            self._stack.callback(os.close, descriptor)
            syscalls.mount(device, target, "erofs", syscalls.MS_RDONLY)
        self._stack.callback(syscalls.umount, target)
        return target

    def overlay(self, lower: Path, objects: Path) -> Path:
        """A read-only overlayfs of a mounted image and a directory of objects."""
        target = self._new("overlay")
        target.mkdir()
        options = [("metacopy", "on"), ("lowerdir+", str(lower)), ("datadir+", str(objects))]
        descriptor = syscalls.make_mount("overlay", options)
        try:
            syscalls.move_mount(descriptor, target)
        finally:
            os.close(descriptor)
        self._stack.callback(syscalls.umount, target)
        return target

    def _new(self, suffix: str) -> Path:
        self._count += 1
        return self._place / f"{self._count}.{suffix}"
