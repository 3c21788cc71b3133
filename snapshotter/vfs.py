"""The hub between file systems and whatever serves them: what a tree is, said once.

A *node* is a file system's own value for one of its files: hashable, equal for the same file, and
good for as long as somebody holds it. There are no lookup counts here: a server keeps the node
that stands behind a nodeid, and lets go of it when the kernel forgets.

All methods are synchronous and may be called from several threads. They raise OSError with the
errno that the application is to see. ``Pending`` is no failure: the call needs content that is not
here, has changed nothing, and is to be made again once the content was fetched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec

from snapshotter.names import ContentName

N = TypeVar("N")

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

TYPE_MASK = 0o170000


class Pending(Exception):  # noqa: N818 - it asks for something, it is no error
    """Fetch bytes ``[offset, offset + size)`` of ``content``, then make the same call again."""

    def __init__(self, content: ContentName, offset: int, size: int) -> None:
        super().__init__(f"content {content} is needed at {offset}, {size} bytes")
        self.content = content
        self.offset = offset
        self.size = size


class Attr(msgspec.Struct, frozen=True, gc=False):
    """The attributes of a file. ``mode`` has its type bits, ``blocks`` are of 512 bytes."""

    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int

    @property
    def type_bits(self) -> int:
        """The type bits of the mode (S_IFREG …)."""
        return self.mode & TYPE_MASK

    @classmethod
    def from_stat(cls, status: os.stat_result, *, ino: int, nlink: int | None = None) -> Attr:
        """From stat(2), under another inode number and, where given, another link count."""
        return cls(
            ino,
            status.st_mode,
            status.st_nlink if nlink is None else nlink,
            status.st_uid,
            status.st_gid,
            status.st_rdev,
            status.st_size,
            status.st_blocks,
            status.st_atime_ns,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )


class AttrChange(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What ``setattr`` is to change; None is left alone. Times are in ns, ``mode`` without type."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class Caller(msgspec.Struct, frozen=True, gc=False):
    """Who asks for a new file: its owner. ``umask`` holds where no default ACL says otherwise."""

    uid: int = 0
    gid: int = 0
    umask: int = 0


class DirEntry(msgspec.Struct, frozen=True, gc=False):
    """One name of a directory. ``next_offset`` is where ``entries`` goes on after it."""

    name: bytes
    ino: int
    type_bits: int
    next_offset: int


class Entry(NamedTuple, Generic[N]):
    """What a name stands for."""

    node: N
    attr: Attr


class Marks(msgspec.Struct, frozen=True, gc=False):
    """What overlayfs left on a directory of a tree that has been the upper of a mount."""

    opaque: bool = False
    """It hides those of the layers below."""
    redirect: bytes = b""
    """Where the layers below have it: a name, or an absolute path; b"" for the same place."""


NO_MARKS = Marks()


class File(Protocol):
    """An open regular file. Reads and writes are never short but at the end of the file."""

    def read(self, size: int, offset: int) -> bytes:
        """Up to ``size`` bytes at ``offset``, fewer only at the end. May raise Pending."""
        ...

    def write(self, data: bytes | memoryview, offset: int, *, append: bool = False) -> int:
        """Writes ``data`` at ``offset``, or at the end with ``append``; returns how much."""
        ...

    def seek(self, offset: int, whence: int) -> int:
        """Where data (SEEK_DATA) or a hole (SEEK_HOLE) begins, at or after ``offset``."""
        ...

    def allocate(self, mode: int, offset: int, size: int) -> None:
        """fallocate(2)."""
        ...

    def copy_from(self, source: File, source_offset: int, offset: int, size: int) -> int:
        """copy_file_range(2) into this file; returns how much was copied, if anything was."""
        ...

    def fsync(self, *, data_only: bool = False) -> None:
        """Returns once what was written is on disk."""
        ...

    def fileno(self) -> int | None:
        """A descriptor that has the same bytes now, if there is one; it stays this object's."""
        ...

    def close(self) -> None:
        """Lets go of what the file holds. Called once, after every other call has returned."""
        ...


class Directory(Protocol):
    """An open directory."""

    def entries(self, offset: int = 0) -> Iterator[DirEntry]:
        """The names without ``.`` and ``..``, from 0 or some entry's ``next_offset`` on.

        While the directory is open an offset means the same place, and a name that was neither
        made nor removed comes once. From 0 the names are those of now.
        """
        ...

    def close(self) -> None:
        """Lets go of what the directory holds."""
        ...


class Lower(Protocol[N]):
    """A tree to read: all that a lower must be able to do."""

    @property
    def root(self) -> N:
        """The root directory."""
        ...

    @property
    def identity(self) -> bytes:
        """Names what the inode numbers belong to; it is the same at the next mount."""
        ...

    @property
    def is_immutable(self) -> bool:
        """Whether the tree is promised never to change."""
        ...

    def lookup(self, parent: N, name: bytes) -> Entry[N]:
        """The entry ``name`` of a directory; FileNotFoundError only if it is not there."""
        ...

    def getattr(self, node: N) -> Attr:
        """The attributes of now."""
        ...

    def marks(self, node: N) -> Marks:
        """What overlayfs left on this directory."""
        ...

    def readlink(self, node: N) -> bytes:
        """The target of a symbolic link."""
        ...

    def getxattr(self, node: N, name: bytes) -> bytes:
        """The value of an extended attribute; ENODATA if there is none of that name."""
        ...

    def listxattr(self, node: N) -> list[bytes]:
        """The names of the extended attributes."""
        ...

    def open(self, node: N, flags: int) -> File:
        """Opens a regular file; access mode, O_TRUNC and O_SYNC of ``flags`` count."""
        ...

    def opendir(self, node: N) -> Directory:
        """Opens a directory for reading."""
        ...

    def statfs(self) -> os.statvfs_result:
        """What df shows."""
        ...


class FileSystem(Lower[N], Protocol[N]):
    """A tree that may be written to; every method raises EROFS where it may not.

    Permissions are checked by the kernel, before it asks. Names that exist must still be refused
    where POSIX says so.
    """

    def create(
        self, parent: N, name: bytes, mode: int, caller: Caller, flags: int
    ) -> tuple[Entry[N], File]:
        """Makes a regular file and opens it; EEXIST if there is one."""
        ...

    def mknod(self, parent: N, name: bytes, mode: int, rdev: int, caller: Caller) -> Entry[N]:
        """Makes a regular file, device, fifo or socket, as the type bits of ``mode`` say."""
        ...

    def mkdir(self, parent: N, name: bytes, mode: int, caller: Caller) -> Entry[N]:
        """Makes a directory."""
        ...

    def symlink(self, parent: N, name: bytes, target: bytes, caller: Caller) -> Entry[N]:
        """Makes a symbolic link."""
        ...

    def link(self, node: N, parent: N, name: bytes) -> Entry[N]:
        """Gives a file that is no directory one more name."""
        ...

    def unlink(self, parent: N, name: bytes) -> None:
        """Takes a name away from a file, which lives on while its node is held."""
        ...

    def rmdir(self, parent: N, name: bytes) -> None:
        """Removes an empty directory."""
        ...

    def rename(self, parent: N, name: bytes, new_parent: N, new_name: bytes, flags: int) -> None:
        """renameat2(2) with 0, RENAME_NOREPLACE or RENAME_EXCHANGE."""
        ...

    def setattr(self, node: N, change: AttrChange) -> Attr:
        """Changes attributes; returns all of them as they are then."""
        ...

    def setxattr(self, node: N, name: bytes, value: bytes, flags: int) -> None:
        """setxattr(2), with XATTR_CREATE and XATTR_REPLACE."""
        ...

    def removexattr(self, node: N, name: bytes) -> None:
        """removexattr(2)."""
        ...

    def fsyncdir(self, node: N) -> None:
        """Returns once the names of a directory are on disk."""
        ...
