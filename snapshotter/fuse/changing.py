"""The FUSE operations that change a tree or its files."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from snapshotter.fuse import replies
from snapshotter.fuse import wire_changes as wire
from snapshotter.fuse.cache_policy import KernelCache
from snapshotter.fuse.connection import Connection, check_name
from snapshotter.fuse.reading import READING_FLAGS, open_flags
from snapshotter.fuse.server import Answer, Operation
from snapshotter.fuse.wire import Header, InitFlag, Opcode, Open
from snapshotter.fuse.wire_changes import AttrField
from snapshotter.vfs import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    AttrChange,
    Caller,
    Entry,
    File,
    FileSystem,
)

N = TypeVar("N")

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
_MAX_COPY_BYTES = 1 << 30
"""At once, so that one copy does not hold a thread for ever; the caller asks for the rest."""


class _Change:
    """Tells the cache that something changes, and when that is over."""

    __slots__ = ("_cache", "_names", "_nodeids")

    def __init__(
        self,
        cache: KernelCache,
        nodeids: tuple[int, ...],
        names: tuple[tuple[int, bytes], ...] = (),
    ) -> None:
        self._cache = cache
        self._nodeids = nodeids
        self._names = names

    def __enter__(self) -> None:
        self._cache.changing(self._nodeids, self._names)

    def __exit__(self, *_error: object) -> None:
        self._cache.changed(self._nodeids, self._names)


class Changing(Generic[N]):
    """Operations on ``connection``, whose file system is ``fs``."""

    def __init__(self, connection: Connection[N], fs: FileSystem[N]) -> None:
        self._connection = connection
        self._fs = fs
        self._cache = connection.cache
        self._inodes = connection.inodes
        self._decode_xattr = {
            extended: wire.setxattr_decoder(extended=extended) for extended in (False, True)
        }

    def operations(self) -> dict[Opcode, Operation]:
        """The rows for a ``Server``."""
        return {
            Opcode.OPEN: self._open,
            Opcode.CREATE: self._create,
            Opcode.MKNOD: self._mknod,
            Opcode.MKDIR: self._mkdir,
            Opcode.SYMLINK: self._symlink,
            Opcode.LINK: self._link,
            Opcode.UNLINK: self._unlink,
            Opcode.RMDIR: self._rmdir,
            Opcode.RENAME: self._rename,
            Opcode.RENAME2: self._rename,
            Opcode.SETATTR: self._setattr,
            Opcode.SETXATTR: self._setxattr,
            Opcode.REMOVEXATTR: self._removexattr,
            Opcode.WRITE: self._write,
            Opcode.FALLOCATE: self._allocate,
            Opcode.COPY_FILE_RANGE: self._copy_range,
            Opcode.COPY_FILE_RANGE_64: self._copy_range_64,
            Opcode.FSYNC: self._fsync,
            Opcode.FSYNCDIR: self._fsyncdir,
        }

    # Names --------------------------------------------------------------------------------------

    def _create(self, header: Header, message: wire.Create) -> Answer:
        parent, name, version = header.nodeid, message.name, self._cache.version
        node, caller = self._directory(parent, name), _caller(header, message.umask)
        with _Change(self._cache, (parent,), ((parent, name),)):
            entry, file = self._fs.create(
                node, name, message.mode, caller, message.flags & READING_FLAGS
            )
        try:
            nodeid = self._inodes.look_up(entry.node)
        except OSError:
            file.close()
            raise
        handle = self._connection.files.add(file, nodeid)
        made = self._connection.known_entry(nodeid, parent, name, entry.attr, version)
        return made + replies.encode_open(handle, open_flags(self._connection))

    def _mknod(self, header: Header, message: wire.Mknod) -> Answer:
        parent, name, version = header.nodeid, message.name, self._cache.version
        node, caller = self._directory(parent, name), _caller(header, message.umask)
        with _Change(self._cache, (parent,), ((parent, name),)):
            entry = self._fs.mknod(node, name, message.mode, message.rdev, caller)
        return self._connection.entry(parent, name, entry, version)

    def _mkdir(self, header: Header, message: wire.Mkdir) -> Answer:
        parent, name, version = header.nodeid, message.name, self._cache.version
        node, caller = self._directory(parent, name), _caller(header, message.umask)
        with _Change(self._cache, (parent,), ((parent, name),)):
            entry = self._fs.mkdir(node, name, message.mode, caller)
        return self._connection.entry(parent, name, entry, version)

    def _symlink(self, header: Header, message: wire.Symlink) -> Answer:
        parent, name, version = header.nodeid, message.name, self._cache.version
        node, caller = self._directory(parent, name), _caller(header, 0)
        with _Change(self._cache, (parent,), ((parent, name),)):
            entry = self._fs.symlink(node, name, message.target, caller)
        return self._connection.entry(parent, name, entry, version)

    def _link(self, header: Header, message: wire.Link) -> Answer:
        parent, name, version = header.nodeid, message.name, self._cache.version
        node, directory = self._inodes.node(message.nodeid), self._directory(parent, name)
        with _Change(self._cache, (parent, message.nodeid), ((parent, name),)):
            entry: Entry[N] = self._fs.link(node, directory, name)
        return self._connection.entry(parent, name, entry, version)

    def _unlink(self, header: Header, message: wire.Remove) -> Answer:
        parent, name = header.nodeid, message.name
        node = self._directory(parent, name)
        with _Change(self._cache, (parent,), ((parent, name),)):
            self._fs.unlink(node, name)
        return b""

    def _rmdir(self, header: Header, message: wire.Remove) -> Answer:
        parent, name = header.nodeid, message.name
        node = self._directory(parent, name)
        with _Change(self._cache, (parent,), ((parent, name),)):
            self._fs.rmdir(node, name)
        return b""

    def _rename(self, header: Header, message: wire.Rename) -> Answer:
        parent, name, new_parent, new_name = (
            header.nodeid, message.name, message.new_parent, message.new_name
        )  # fmt: skip
        if message.flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE):
            return errno.EINVAL
        node, new_node = self._directory(parent, name), self._directory(new_parent, new_name)
        with _Change(self._cache, (parent, new_parent), ((parent, name), (new_parent, new_name))):
            self._fs.rename(node, name, new_node, new_name, message.flags)
        return b""

    def _directory(self, nodeid: int, name: bytes) -> N:
        check_name(name)
        return self._inodes.node(nodeid)

    # Attributes ---------------------------------------------------------------------------------

    def _setattr(self, header: Header, message: wire.SetAttr) -> Answer:
        nodeid, version = header.nodeid, self._cache.version
        node, valid = self._inodes.node(nodeid), message.valid
        with _Change(self._cache, (nodeid,)):
            change = _attr_change(message)
            if valid & AttrField.KILL_SUIDGID and change.mode is None:
                mode = without_set_ids(self._fs.getattr(node).mode)
                if mode is not None:
                    change = _attr_change(message, mode)
            attr = self._fs.setattr(node, change)
        return self._connection.attr(nodeid, attr, version)

    def _setxattr(self, header: Header, body: Any) -> Answer:
        settled = self._connection.settled
        extended = settled is not None and bool(settled.flags & InitFlag.SETXATTR_EXT)
        message = self._decode_xattr[extended](body)
        node = self._inodes.node(header.nodeid)
        with _Change(self._cache, (header.nodeid,)):
            self._fs.setxattr(node, message.name, message.value, message.flags)
            if message.xattr_flags & wire.SETXATTR_ACL_KILL_SGID:
                mode = self._fs.getattr(node).mode
                if mode & stat.S_ISGID:
                    self._fs.setattr(node, AttrChange(mode=stat.S_IMODE(mode) & ~stat.S_ISGID))
        return b""

    def _removexattr(self, header: Header, message: wire.RemoveXattr) -> Answer:
        node = self._inodes.node(header.nodeid)
        with _Change(self._cache, (header.nodeid,)):
            self._fs.removexattr(node, message.name)
        return b""

    def _take_set_ids(self, nodeid: int) -> None:
        """Takes the set-id bits of a file that somebody unprivileged writes to."""
        node = self._inodes.node(nodeid)
        mode = without_set_ids(self._fs.getattr(node).mode)
        if mode is not None:
            self._fs.setattr(node, AttrChange(mode=mode))

    # Content ------------------------------------------------------------------------------------

    def _open(self, header: Header, message: Open) -> Answer:
        nodeid, flags = header.nodeid, message.flags & READING_FLAGS
        node = self._inodes.node(nodeid)
        if flags & _WRITING:
            with _Change(self._cache, (nodeid,)):  # it may be copied up
                file = self._fs.open(node, flags)
                if message.open_flags & wire.OPEN_KILL_SUIDGID:
                    self._take_set_ids(nodeid)
        else:
            file = self._fs.open(node, flags)
        handle = self._connection.files.add(file, nodeid)
        return replies.encode_open(handle, open_flags(self._connection))

    def _write(self, _header: Header, message: wire.Write) -> Answer:
        data = message.data
        if sum(map(len, data)) != message.size:
            return errno.EINVAL
        opened = self._connection.files.get(message.fh)
        with _Change(self._cache, (opened.nodeid,)):
            if message.write_flags & wire.WRITE_KILL_SUIDGID:
                self._take_set_ids(opened.nodeid)
            append = bool(message.flags & os.O_APPEND)
            return replies.encode_written(_write(opened.item, data, message.offset, append=append))

    def _allocate(self, _header: Header, message: wire.Allocate) -> Answer:
        opened = self._connection.files.get(message.fh)
        with _Change(self._cache, (opened.nodeid,)):
            opened.item.allocate(message.mode, message.offset, message.length)
        return b""

    def _copy_range(self, _header: Header, message: wire.CopyRange) -> Answer:
        return replies.encode_written(self._copy(message))

    def _copy_range_64(self, _header: Header, message: wire.CopyRange) -> Answer:
        return replies.encode_offset(self._copy(message))

    def _copy(self, message: wire.CopyRange) -> int:
        if message.flags:
            raise OSError(errno.EINVAL, "copy_file_range: flags")
        source = self._connection.files.get(message.fh)
        target = self._connection.files.get(message.to_fh)
        with _Change(self._cache, (target.nodeid,)):
            size = min(message.length, _MAX_COPY_BYTES)
            return target.item.copy_from(source.item, message.offset, message.to_offset, size)

    def _fsync(self, _header: Header, message: wire.Fsync) -> Answer:
        file = self._connection.files.get(message.fh).item
        file.fsync(data_only=bool(message.fsync_flags & wire.FSYNC_DATA_ONLY))
        return b""

    def _fsyncdir(self, header: Header, _message: wire.Fsync) -> Answer:
        self._fs.fsyncdir(self._inodes.node(header.nodeid))
        return b""


def _caller(header: Header, umask: int) -> Caller:
    return Caller(header.uid, header.gid, umask & 0o777)


def without_set_ids(mode: int) -> int | None:
    """The permissions without set-id bits as a write takes them; None if there are none to take.

    Set-gid without execution by the group marks mandatory locking, and stays.
    """
    left = mode & ~stat.S_ISUID
    if mode & stat.S_IXGRP:
        left &= ~stat.S_ISGID
    return None if left == mode else stat.S_IMODE(left)


def _attr_change(message: wire.SetAttr, mode: int | None = None) -> AttrChange:
    valid = message.valid
    now = time.time_ns() if valid & (AttrField.ATIME_NOW | AttrField.MTIME_NOW) else 0
    atime = message.atime_s * 10**9 + message.atime_ns
    mtime = message.mtime_s * 10**9 + message.mtime_ns
    return AttrChange(
        mode=stat.S_IMODE(message.mode) if valid & AttrField.MODE else mode,
        uid=message.uid if valid & AttrField.UID else None,
        gid=message.gid if valid & AttrField.GID else None,
        size=message.size if valid & AttrField.SIZE else None,
        atime_ns=_time(valid, AttrField.ATIME, AttrField.ATIME_NOW, atime, now),
        mtime_ns=_time(valid, AttrField.MTIME, AttrField.MTIME_NOW, mtime, now),
    )


def _time(valid: int, given: int, is_now: int, time_ns: int, now_ns: int) -> int | None:
    if not valid & given:
        return None
    return now_ns if valid & is_now else time_ns


def _write(file: File, pieces: Sequence[memoryview], offset: int, *, append: bool) -> int:
    """Writes the pieces one after the other; an error counts only if nothing was written."""
    written = 0
    for piece in pieces:
        while piece:
            try:
                count = file.write(piece, offset + written, append=append)
            except OSError:
                if written:
                    return written
                raise
            written += count
            piece = piece[count:]  # noqa: PLW2901 - what is left of it
    return written
