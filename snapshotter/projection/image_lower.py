"""A metadata image and the content it names, as a lower.

A node is a nid, and names are found by binary search in the image: nothing is kept for an entry.
Content is somebody else's concern, see ``Contents``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from typing import Protocol

from snapshotter.descriptor_file import DescriptorFile
from snapshotter.errors import CorruptError
from snapshotter.names import ContentName
from snapshotter.projection import erofs
from snapshotter.projection.image_reader import ImageInode, ImageReader
from snapshotter.vfs import NO_MARKS, TYPE_MASK, Attr, DirEntry, Entry, File, Marks, Pending

_SECTOR_SIZE = 512
_NAME_MAX = 255
_ST_RDONLY = 1
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC


class Contents(Protocol):
    """Where the content of files comes from."""

    def open(self, name: ContentName) -> File:
        """The content, verified; Pending if it is not here. Its reads may raise Pending too."""
        ...


class ObjectDirectory:
    """Contents in a directory of objects; one that is not there is Pending, whole."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY)

    def open(self, name: ContentName) -> File:
        """The object ``name``."""
        try:
            descriptor = os.open(name.path, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._descriptor)
        except FileNotFoundError as error:
            raise Pending(name, 0, name.size) from error
        return DescriptorFile(descriptor)

    def close(self) -> None:
        """Lets go of the directory."""
        os.close(self._descriptor)


class ImageLower:
    """The tree of ``image``, with the content of its files from ``contents``.

    What makes no sense in the image is EIO, so that a damaged one never looks like an empty one.
    """

    is_immutable = True

    def __init__(self, image: ImageReader, contents: Contents) -> None:
        self._image = image
        self._contents = contents
        self.root = image.root
        self.identity = image.superblock.uuid

    def lookup(self, parent: int, name: bytes) -> Entry[int]:
        """Finds ``name`` in a directory."""
        if len(name) > _NAME_MAX:
            raise OSError(errno.ENAMETOOLONG, "lookup: name is too long", name)
        self._expect_directory(parent)
        try:
            nid = self._image.lookup(parent, name)
        except CorruptError as error:
            raise _unreadable(error) from error
        if nid is None:
            raise FileNotFoundError(errno.ENOENT, "lookup: not in the image", name)
        return Entry(nid, self.getattr(nid))

    def getattr(self, node: int) -> Attr:
        """As the image has them; atime and ctime are its mtime."""
        inode = self._inode(node)
        time = inode.mtime_ns
        blocks = -(-inode.size // _SECTOR_SIZE)
        return Attr(
            node, inode.mode, inode.nlink, inode.uid, inode.gid, inode.rdev, inode.size, blocks,
            time, time, time,
        )  # fmt: skip

    def marks(self, node: int) -> Marks:
        """None: an image is merged, what looks like a mark in it is a file's own attribute."""
        return NO_MARKS

    def readlink(self, node: int) -> bytes:
        """The target of a symbolic link."""
        if not stat.S_ISLNK(self._inode(node).mode):
            raise OSError(errno.EINVAL, f"readlink: nid {node} is no symbolic link")
        try:
            return self._image.readlink(node)
        except CorruptError as error:
            raise _unreadable(error) from error

    def getxattr(self, node: int, name: bytes) -> bytes:
        """One of the file's own xattrs."""
        value = self._xattrs(node).get(name)
        if value is None:
            raise OSError(errno.ENODATA, f"getxattr: nid {node} has no such attribute", name)
        return value

    def listxattr(self, node: int) -> list[bytes]:
        """The names of the file's own xattrs."""
        return list(self._xattrs(node))

    def open(self, node: int, flags: int) -> File:
        """Opens the content of a regular file."""
        if flags & _WRITING:
            raise OSError(errno.EROFS, f"open: nid {node} is in an image")
        inode = self._inode(node)
        if inode.is_directory:
            raise OSError(errno.EISDIR, f"open: nid {node} is a directory")
        if not stat.S_ISREG(inode.mode):
            raise OSError(errno.EINVAL, f"open: nid {node} is no regular file")
        try:
            name = self._image.content(node)
        except CorruptError as error:
            raise _unreadable(error) from error
        if name is None:
            return DescriptorFile(os.open("/dev/null", os.O_RDONLY))
        return self._contents.open(name)

    def opendir(self, node: int) -> ImageDirectory:
        """Opens a directory; costs nothing."""
        self._expect_directory(node)
        return ImageDirectory(self._image, node)

    def statfs(self) -> os.statvfs_result:
        """The image's own size, nothing free."""
        block = self._image.superblock
        return os.statvfs_result(
            (
                erofs.BLOCK_SIZE, erofs.BLOCK_SIZE, block.block_count, 0, 0,
                block.inode_count, 0, 0, _ST_RDONLY, _NAME_MAX,
            )
        )  # fmt: skip

    def _inode(self, node: int) -> ImageInode:
        try:
            return self._image.inode(node)
        except CorruptError as error:
            raise _unreadable(error) from error

    def _expect_directory(self, node: int) -> None:
        if not self._inode(node).is_directory:
            raise NotADirectoryError(errno.ENOTDIR, f"nid {node} is no directory")

    def _xattrs(self, node: int) -> dict[bytes, bytes]:
        try:
            return self._image.xattrs(node)
        except CorruptError as error:
            raise _unreadable(error) from error


class ImageDirectory:
    """Reads a directory of an image. Offsets are places in it, good for ever."""

    __slots__ = ("_image", "_node")

    def __init__(self, image: ImageReader, node: int) -> None:
        self._image = image
        self._node = node

    def entries(self, offset: int = 0) -> Iterator[DirEntry]:
        """The names in order."""
        try:
            for entry in self._image.entries(self._node, offset):
                kind = entry.type_bits & TYPE_MASK
                yield DirEntry(entry.name, entry.nid, kind, entry.next_offset)
        except CorruptError as error:
            raise _unreadable(error) from error

    def close(self) -> None:
        """Nothing to let go of."""


def _unreadable(error: CorruptError) -> OSError:
    return OSError(errno.EIO, str(error))
