"""One kernel's connection to one file system: the state that all operations share."""

from __future__ import annotations

import errno
from typing import Generic, TypeVar

from snapshotter.fuse import replies
from snapshotter.fuse.cache_policy import KernelCache
from snapshotter.fuse.handles import Handles
from snapshotter.fuse.inodes import Inodes
from snapshotter.fuse.replies import InitReply
from snapshotter.vfs import Attr, Directory, Entry, File, Lower

N = TypeVar("N")


class Connection(Generic[N]):
    """``fs`` as one kernel sees it. ``limit`` bounds its nodes and each kind of open files."""

    def __init__(self, fs: Lower[N], cache: KernelCache, *, limit: int | None = None) -> None:
        self.fs = fs
        self.cache = cache
        self.inodes: Inodes[N] = Inodes(fs.root, limit=limit)
        self.files: Handles[File] = Handles(limit=limit)
        self.directories: Handles[Directory] = Handles(limit=limit)
        self.settled: InitReply | None = None
        """What INIT came to; None before it."""

    def clear(self) -> None:
        """Forgets what the kernel knew and closes what it had open."""
        self.files.clear()
        self.directories.clear()
        self.inodes.clear()

    def entry(self, parent: int, name: bytes, entry: Entry[N], version: int) -> bytes:
        """The payload that tells the kernel of an entry, which it then knows.

        ``version`` is the cache's from before the entry was looked up.
        """
        return self.known_entry(self.inodes.look_up(entry.node), parent, name, entry.attr, version)

    def known_entry(self, nodeid: int, parent: int, name: bytes, attr: Attr, version: int) -> bytes:
        """As ``entry``, for a node that was looked up for it."""
        cache = self.cache
        return replies.encode_entry(
            nodeid,
            attr,
            entry_timeout_ns=cache.entry_ttl_ns(parent, name, version),
            attr_timeout_ns=cache.attr_ttl_ns(nodeid, version),
        )

    def attr(self, nodeid: int, attr: Attr, version: int) -> bytes:
        """The payload that tells the kernel of attributes; ``version`` as for ``entry``."""
        return replies.encode_attr(attr, timeout_ns=self.cache.attr_ttl_ns(nodeid, version))


def check_name(name: bytes) -> bytes:
    """``name``, which a sane kernel asks for; else OSError (EINVAL)."""
    if name in (b".", b"..") or b"/" in name:
        raise OSError(errno.EINVAL, "not a file name", name)
    return name
