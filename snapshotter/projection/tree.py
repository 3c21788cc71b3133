"""A layer as a list of entries, and a merged tree of inodes. Values only: no I/O, no rules.

Names, paths, targets and xattrs are bytes. Modes carry their type bits. Times are signed
nanoseconds since the epoch.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from enum import IntEnum

import msgspec

from snapshotter.names import ContentName


class EntryKind(IntEnum):
    """What one entry of a layer asks for."""

    NODE = 0
    """Make this file, directory, link or device."""
    HARD_LINK = 1
    """Give the existing entry ``target`` (a path in the image) this further name."""
    WHITEOUT = 2
    """Hide ``path`` of the layers below."""
    OPAQUE = 3
    """Hide everything that the layers below have in the directory ``path``."""


class LayerEntry(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    """One entry of a layer, in the order of its tar.

    ``path`` is relative to the root without ``.``, ``..`` or empty parts; empty for the root.
    ``content`` is the raw content id of a non-empty regular file.
    """

    kind: int
    path: bytes
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size: int = 0
    rdev: int = 0
    target: bytes = b""
    content: bytes = b""
    xattrs: dict[bytes, bytes] = {}


class Inode:
    """One file, directory, link or device of a tree. Hard links are one Inode under several names.

    ``rdev`` is encoded as in Linux's new_encode_dev (what stat and EROFS use); ``children`` is
    None unless this is a directory.
    """

    __slots__ = (
        "children",
        "content",
        "gid",
        "mode",
        "mtime_ns",
        "rdev",
        "size",
        "target",
        "uid",
        "xattrs",
    )

    def __init__(
        self,
        mode: int,
        *,
        uid: int = 0,
        gid: int = 0,
        mtime_ns: int = 0,
        size: int = 0,
        rdev: int = 0,
        target: bytes = b"",
        content: bytes = b"",
        xattrs: dict[bytes, bytes] | None = None,
    ) -> None:
        self.mode = mode
        self.uid = uid
        self.gid = gid
        self.mtime_ns = mtime_ns
        self.size = size
        self.rdev = rdev
        self.target = target
        self.content = content
        self.xattrs = xattrs or {}
        self.children: dict[bytes, Inode] | None = {} if stat.S_ISDIR(mode) else None

    @property
    def content_name(self) -> ContentName | None:
        """The name of a non-empty regular file's content, else None."""
        if stat.S_ISREG(self.mode) and self.size:
            return ContentName(self.content, self.size)
        return None


def walk(root: Inode) -> Iterator[tuple[bytes, Inode]]:
    """Every (path, inode) of a tree, parents before children, names sorted by bytes.

    The root's path is empty; a hard-linked inode comes once for each name.
    """
    stack: list[tuple[bytes, Inode]] = [(b"", root)]
    while stack:
        path, inode = stack.pop()
        yield path, inode
        if inode.children:
            prefix = path + b"/" if path else b""
            stack.extend(
                (prefix + name, inode.children[name])
                for name in sorted(inode.children, reverse=True)
            )
