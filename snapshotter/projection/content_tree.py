"""All content there may be, as a tree: ``ab/<62 hex>.<size>``, to be read under its own names.

It is the data-only layer of an overlayfs that runs in a guest. A name carries all that its
attributes need, so every well-formed one exists; whether its content can be had shows at its
first read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from snapshotter.errors import InvalidInputError
from snapshotter.names import ContentName
from snapshotter.projection.image_lower import Contents
from snapshotter.vfs import NO_MARKS, Attr, DirEntry, Entry, File, Marks

ContentNode = int | ContentName
"""0: the root; 256 + byte: a fan-out directory; a name: a file."""

_ROOT = 0
_FAN_OUT = 256
_ROOT_INO = 1
_FILE_INO = 1 << 62
_SECTOR_SIZE = 512
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
_BLOCK_SIZE = 4096
_NAME_MAX = 255
_ST_RDONLY = 1


class ContentTree:
    """The tree over ``contents``. Directories list nothing: what could be there is endless."""

    is_immutable = True
    identity = b"contents by name"

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self.root: ContentNode = _ROOT

    def lookup(self, parent: ContentNode, name: bytes) -> Entry[ContentNode]:
        """A fan-out directory below the root, a file below that one; else FileNotFoundError."""
        node = self._find(parent, name)
        return Entry(node, self.getattr(node))

    def getattr(self, node: ContentNode) -> Attr:
        """Of root, to be read by all, as old as 1970."""
        if isinstance(node, int):
            return Attr(_inode_of(node), stat.S_IFDIR | 0o555, 2, 0, 0, 0, 0, 0, 0, 0, 0)
        blocks = -(-node.size // _SECTOR_SIZE)
        mode = stat.S_IFREG | 0o444
        return Attr(_inode_of(node), mode, 1, 0, 0, 0, node.size, blocks, 0, 0, 0)

    def marks(self, node: ContentNode) -> Marks:
        """None."""
        return NO_MARKS

    def readlink(self, node: ContentNode) -> bytes:
        """There are no symbolic links: EINVAL."""
        raise OSError(errno.EINVAL, f"readlink: {node} is no symbolic link")

    def getxattr(self, node: ContentNode, name: bytes) -> bytes:
        """There are none: ENODATA."""
        raise OSError(errno.ENODATA, f"getxattr: {node} has no such attribute", name)

    def listxattr(self, node: ContentNode) -> list[bytes]:
        """There are none."""
        return []

    def open(self, node: ContentNode, flags: int) -> File:
        """The content; Pending if it is not here yet."""
        if flags & _WRITING:
            raise OSError(errno.EROFS, f"open: content {node} never changes")
        if isinstance(node, int):
            raise OSError(errno.EISDIR, "open: a directory of contents")
        return self._contents.open(node)

    def opendir(self, node: ContentNode) -> NoEntries:
        """An empty directory."""
        if not isinstance(node, int):
            raise NotADirectoryError(errno.ENOTDIR, f"{node} is no directory")
        return NoEntries()

    def statfs(self) -> os.statvfs_result:
        """Nothing free."""
        return os.statvfs_result(
            (_BLOCK_SIZE, _BLOCK_SIZE, 0, 0, 0, 0, 0, 0, _ST_RDONLY, _NAME_MAX)
        )

    def _find(self, parent: ContentNode, name: bytes) -> ContentNode:
        if not isinstance(parent, int):
            raise NotADirectoryError(errno.ENOTDIR, f"{parent} is no directory")
        if parent == _ROOT:
            if len(name) == 2 and not name.strip(b"0123456789abcdef"):
                return _FAN_OUT + int(name, 16)
            raise FileNotFoundError(errno.ENOENT, "lookup: no directory of contents", name)
        try:
            return ContentName.parse(b"%02x" % (parent - _FAN_OUT), name)
        except InvalidInputError as error:
            raise FileNotFoundError(errno.ENOENT, str(error), name) from error


class NoEntries:
    """An open directory of contents."""

    def entries(self, offset: int = 0) -> Iterator[DirEntry]:
        """Nothing."""
        return iter(())

    def close(self) -> None:
        """Nothing to let go of."""


def _inode_of(node: ContentNode) -> int:
    """62 bits of the content id tell files apart, as far as a kernel needs to."""
    if isinstance(node, int):
        return node or _ROOT_INO
    return _FILE_INO | int.from_bytes(node.content_id[:8], "big") >> 2
