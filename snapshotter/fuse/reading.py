"""The FUSE operations that every tree has: names, attributes, content, directories."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from snapshotter.fuse import replies, wire
from snapshotter.fuse.connection import Connection, check_name
from snapshotter.fuse.handles import Opened
from snapshotter.fuse.negotiation import MAX_READ_BYTES, Terms, settle
from snapshotter.fuse.replies import OpenFlag
from snapshotter.fuse.server import Answer, FileRange, Operation
from snapshotter.fuse.wire import Header, Opcode
from snapshotter.vfs import Directory, DirEntry, File

N = TypeVar("N")

READING_FLAGS = os.O_ACCMODE | os.O_TRUNC | os.O_SYNC | os.O_DSYNC
"""What an open file of ``vfs`` is told of the flags."""
_KEPT_FILES = 512
_MAX_OFFSET = (1 << 63) - 1
_DOTS = 2
"""Offsets 1 and 2 are after ``.`` and ``..``; those of the file system follow, so much higher."""
_DIRECTORY_TYPE = stat.S_IFDIR >> 12


class Reading(Generic[N]):
    """Operations on ``connection``. ``terms`` are what INIT is answered with."""

    def __init__(self, connection: Connection[N], terms: Terms) -> None:
        self._connection = connection
        self._fs = connection.fs
        self._cache = connection.cache
        self._inodes = connection.inodes
        self._terms = terms
        self._kept: OrderedDict[int, Opened[File]] = OrderedDict()
        self._kept_lock = threading.Lock()

    def operations(self) -> dict[Opcode, Operation]:
        """The rows for a ``Server``."""
        rows: dict[Opcode, Operation] = {
            Opcode.INIT: self._init,
            Opcode.DESTROY: self._destroy,
            Opcode.LOOKUP: self._lookup,
            Opcode.FORGET: self._forget,
            Opcode.BATCH_FORGET: self._batch_forget,
            Opcode.GETATTR: self._getattr,
            Opcode.READLINK: self._readlink,
            Opcode.GETXATTR: self._getxattr,
            Opcode.LISTXATTR: self._listxattr,
            Opcode.STATFS: self._statfs,
            Opcode.READ: self._read,
            Opcode.LSEEK: self._seek,
            Opcode.READDIR: self._readdir,
            Opcode.READDIRPLUS: self._readdirplus,
        }
        if not self._cache.policy.is_stateless:
            rows[Opcode.OPEN] = self._open
            rows[Opcode.RELEASE] = self._release
            rows[Opcode.OPENDIR] = self._opendir
            rows[Opcode.RELEASEDIR] = self._releasedir
        return rows

    # The connection -----------------------------------------------------------------------------

    def _init(self, _header: Header, message: wire.Init) -> Answer:
        self._clear()
        self._connection.settled = reply = settle(message, self._terms)
        return replies.encode_init(reply)

    def _destroy(self, _header: Header, _message: wire.Nothing) -> Answer:
        self._clear()
        return b""

    def _clear(self) -> None:
        self._connection.clear()
        with self._kept_lock:
            self._kept.clear()

    # Names and attributes -----------------------------------------------------------------------

    def _lookup(self, header: Header, message: wire.Lookup) -> Answer:
        parent, name, cache = header.nodeid, message.name, self._cache
        version = cache.version
        try:
            found = self._fs.lookup(self._inodes.node(parent), check_name(name))
        except FileNotFoundError:
            timeout_ns = cache.absence_ttl_ns(parent, name, version)
            return replies.encode_absence(timeout_ns) if timeout_ns else errno.ENOENT
        return self._connection.entry(parent, name, found, version)

    def _forget(self, header: Header, message: wire.Forget) -> Answer:
        self._inodes.forget(((header.nodeid, message.lookups),))
        return None

    def _batch_forget(self, _header: Header, message: wire.BatchForget) -> Answer:
        self._inodes.forget(message.forgets)
        return None

    def _getattr(self, header: Header, _message: wire.GetAttr) -> Answer:
        nodeid, version = header.nodeid, self._cache.version
        attr = self._fs.getattr(self._inodes.node(nodeid))
        return self._connection.attr(nodeid, attr, version)

    def _readlink(self, header: Header, _message: wire.Nothing) -> Answer:
        return self._fs.readlink(self._inodes.node(header.nodeid))

    def _getxattr(self, header: Header, message: wire.GetXattr) -> Answer:
        value = self._fs.getxattr(self._inodes.node(header.nodeid), message.name)
        return _sized(value, message.size)

    def _listxattr(self, header: Header, message: wire.ListXattr) -> Answer:
        names = self._fs.listxattr(self._inodes.node(header.nodeid))
        return _sized(b"".join(name + b"\0" for name in names), message.size)

    def _statfs(self, _header: Header, _message: wire.Nothing) -> Answer:
        found = self._fs.statfs()
        return replies.encode_statfs(
            blocks=found.f_blocks,
            free=found.f_bfree,
            available=found.f_bavail,
            files=found.f_files,
            free_files=found.f_ffree,
            block_size=found.f_bsize,
            name_max=found.f_namemax,
            fragment_size=found.f_frsize,
        )

    # Content ------------------------------------------------------------------------------------

    def _open(self, header: Header, message: wire.Open) -> Answer:
        file = self._fs.open(self._inodes.node(header.nodeid), message.flags & READING_FLAGS)
        handle = self._connection.files.add(file, header.nodeid)
        return replies.encode_open(handle, open_flags(self._connection))

    def _release(self, _header: Header, message: wire.Release) -> Answer:
        self._connection.files.remove(message.fh)
        return b""

    def _read(self, header: Header, message: wire.Read) -> Answer:
        if message.offset > _MAX_OFFSET:
            return errno.EINVAL
        opened = self._opened(header, message.fh)
        size = min(message.size, MAX_READ_BYTES)
        descriptor = opened.item.fileno()
        if descriptor is None:
            return opened.item.read(size, message.offset)
        return FileRange(descriptor, message.offset, size, opened)

    def _seek(self, header: Header, message: Any) -> Answer:
        if message.whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            return errno.EINVAL
        file = self._opened(header, message.fh).item
        return replies.encode_offset(file.seek(message.offset, message.whence))

    def _opened(self, header: Header, handle: int) -> Opened[File]:
        if not self._cache.policy.is_stateless:
            return self._connection.files.get(handle)
        nodeid = header.nodeid
        opened = self._kept.get(nodeid)
        if opened is None:
            opened = Opened(self._fs.open(self._inodes.node(nodeid), os.O_RDONLY), nodeid)
            with self._kept_lock:
                self._kept[nodeid] = opened
                if len(self._kept) > _KEPT_FILES:
                    self._kept.popitem(last=False)
        return opened

    # Directories --------------------------------------------------------------------------------

    def _opendir(self, header: Header, _message: wire.Open) -> Answer:
        directory = self._fs.opendir(self._inodes.node(header.nodeid))
        handle = self._connection.directories.add(directory, header.nodeid)
        keep = OpenFlag.KEEP_CACHE | OpenFlag.CACHE_DIR
        return replies.encode_open(handle, keep if self._cache.policy.keeps_listings else 0)

    def _releasedir(self, _header: Header, message: wire.Release) -> Answer:
        self._connection.directories.remove(message.fh)
        return b""

    def _readdir(self, header: Header, message: wire.Read) -> Answer:
        def no_entry(_name: bytes) -> bytes:
            return b""

        return self._list(header, message, no_entry, 0)

    def _readdirplus(self, header: Header, message: wire.Read) -> Answer:
        parent = header.nodeid
        node = self._inodes.node(parent)
        connection, lookup, cache = self._connection, self._fs.lookup, self._cache

        def entry(name: bytes) -> bytes:
            version = cache.version
            try:
                return connection.entry(parent, name, lookup(node, name), version)
            except OSError:
                return replies.NO_ENTRY  # gone meanwhile, or its lookup is to say what is wrong

        return self._list(header, message, entry, replies.ENTRY_SIZE)

    def _list(
        self, header: Header, message: wire.Read, entry: Callable[[bytes], bytes], entry_size: int
    ) -> Answer:
        """Names from an offset on, before each what ``entry`` gives: ``entry_size`` bytes."""
        parts: list[bytes] = []
        room = min(message.size, MAX_READ_BYTES)
        directory, offset = self._directory(header, message.fh), message.offset
        if offset < _DOTS:
            ino = self._fs.getattr(self._inodes.node(header.nodeid)).ino
            # Where ".." is, only the kernel knows; nobody may rely on its number here.
            for number, name in enumerate((b".", b"..")[offset:], offset + 1):
                dot = replies.encode_dirent(ino, number, _DIRECTORY_TYPE, name)
                if entry_size + len(dot) > room:
                    return b"".join(parts) if parts else errno.EINVAL
                room -= entry_size + len(dot)
                parts += (bytes(entry_size), dot)
            offset = _DOTS
        found: DirEntry
        for found in directory.entries(offset - _DOTS):
            made = replies.encode_dirent(
                found.ino, found.next_offset + _DOTS, found.type_bits >> 12, found.name
            )
            room -= entry_size + len(made)
            if room < 0:
                return b"".join(parts) if parts else errno.EINVAL
            parts += (entry(found.name), made)
        return b"".join(parts)

    def _directory(self, header: Header, handle: int) -> Directory:
        if self._cache.policy.is_stateless:
            return self._fs.opendir(self._inodes.node(header.nodeid))
        return self._connection.directories.get(handle).item


def open_flags(connection: Connection[Any]) -> int:
    """How the kernel is to treat a file that it opened."""
    keeps = connection.cache.policy.keeps_data
    return OpenFlag.NOFLUSH | (OpenFlag.KEEP_CACHE if keeps else 0)


def _sized(value: bytes, size: int) -> Answer:
    if not size:
        return replies.encode_xattr_size(len(value))
    return value if len(value) <= size else errno.ERANGE
