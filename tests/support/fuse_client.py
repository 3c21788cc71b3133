"""A file system behind a FUSE server, seen through its requests and replies: a kernel in Python.

It counts what it was told of a node, and forgets the node when nobody uses it any more.
"""

from __future__ import annotations

import itertools
import os
import struct
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from snapshotter.fuse import wire
from snapshotter.fuse.negotiation import WRITABLE
from snapshotter.fuse.wire import Opcode
from snapshotter.fuse.wire_changes import AttrField
from snapshotter.vfs import NO_MARKS, Attr, AttrChange, Caller, DirEntry, Entry, Marks

Ask = Callable[[bytes], bytes | None]
"""Gives a request to the server; the whole reply, None for requests that get none."""

_HEADER = struct.Struct("=IIQQIIIHxx")
_ATTR = struct.Struct("=QQQqqqIIIIIIIIII")
_ENTRY_SIZE = 40 + _ATTR.size
_ROOT = Caller()


class Node:
    """What the kernel knows by a nodeid, once for each."""

    def __init__(self, nodeid: int) -> None:
        self.nodeid = nodeid
        self.lookups = [0]  # outlives the node


class FuseClient:
    """A FileSystem over the server behind ``ask``. OSError for replies that are errors."""

    identity = b"fuse"
    is_immutable = False

    def __init__(self, ask: Ask, *, flags: int = WRITABLE, minor: int = wire.MAX_MINOR) -> None:
        self._ask = ask
        self._uniques = itertools.count(2, 2)
        self._nodes: weakref.WeakValueDictionary[int, Node] = weakref.WeakValueDictionary()
        offer = struct.pack("=IIIII44x", 7, minor, 1 << 17, flags & 0xFFFFFFFF, flags >> 32)
        settled = self.ask(Opcode.INIT, 0, offer)
        self.minor, _, low = struct.unpack_from("=III", settled, 4)
        self.flags = low | struct.unpack_from("=I", settled, 32)[0] << 32
        self.root = Node(wire.ROOT_NODEID)
        self._nodes[wire.ROOT_NODEID] = self.root

    def ask(self, opcode: int, nodeid: int, body: bytes = b"", caller: Caller = _ROOT) -> bytes:
        """The payload of the reply to a request."""
        unique = next(self._uniques)
        head = _HEADER.pack(
            _HEADER.size + len(body), opcode, unique, nodeid, caller.uid, caller.gid, 0, 0
        )
        reply = self._ask(head + body)
        if opcode in wire.UNANSWERED:
            assert reply is None, "a reply to a request that gets none"
            return b""
        assert reply is not None, "no reply"
        length, error, answered = struct.unpack_from("=IiQ", reply)
        assert (length, answered) == (len(reply), unique), "an ill-formed reply"
        if error:
            assert length == 16, "an error with a payload"
            assert -4096 < error < 0, "an error that is none"
            raise OSError(-error, f"{Opcode(opcode).name}: {os.strerror(-error)}")
        return reply[16:]

    # Reading ------------------------------------------------------------------------------------

    def lookup(self, parent: Node, name: bytes) -> Entry[Node]:
        return self._entry(self.ask(Opcode.LOOKUP, parent.nodeid, name + b"\0"))

    def getattr(self, node: Node) -> Attr:
        return _attr(self.ask(Opcode.GETATTR, node.nodeid, bytes(16)), 16)

    def marks(self, node: Node) -> Marks:
        return NO_MARKS

    def readlink(self, node: Node) -> bytes:
        return self.ask(Opcode.READLINK, node.nodeid)

    def getxattr(self, node: Node, name: bytes) -> bytes:
        body = name + b"\0"
        (size,) = struct.unpack_from(
            "=I", self.ask(Opcode.GETXATTR, node.nodeid, struct.pack("=II", 0, 0) + body)
        )
        if not size:
            return b""
        return self.ask(Opcode.GETXATTR, node.nodeid, struct.pack("=II", size, 0) + body)

    def listxattr(self, node: Node) -> list[bytes]:
        names = self.ask(Opcode.LISTXATTR, node.nodeid, struct.pack("=II", 65536, 0))
        return names.split(b"\0")[:-1]

    def open(self, node: Node, flags: int) -> OpenFile:
        reply = self.ask(Opcode.OPEN, node.nodeid, struct.pack("=II", flags, 0))
        return OpenFile(self, node, struct.unpack_from("=Q", reply)[0], flags)

    def opendir(self, node: Node) -> OpenDirectory:
        reply = self.ask(Opcode.OPENDIR, node.nodeid, bytes(8))
        return OpenDirectory(self, node, struct.unpack_from("=Q", reply)[0])

    def statfs(self) -> os.statvfs_result:
        raise NotImplementedError

    # Changing -----------------------------------------------------------------------------------

    def create(
        self, parent: Node, name: bytes, mode: int, caller: Caller, flags: int
    ) -> tuple[Entry[Node], OpenFile]:
        body = struct.pack("=IIII", flags, mode, caller.umask, 0) + name + b"\0"
        reply = self.ask(Opcode.CREATE, parent.nodeid, body, caller)
        entry = self._entry(reply)
        (handle,) = struct.unpack_from("=Q", reply, _ENTRY_SIZE)
        return entry, OpenFile(self, entry.node, handle, flags)

    def mknod(self, parent: Node, name: bytes, mode: int, rdev: int, caller: Caller) -> Entry[Node]:
        body = struct.pack("=III4x", mode, rdev, caller.umask) + name + b"\0"
        return self._entry(self.ask(Opcode.MKNOD, parent.nodeid, body, caller))

    def mkdir(self, parent: Node, name: bytes, mode: int, caller: Caller) -> Entry[Node]:
        body = struct.pack("=II", mode, caller.umask) + name + b"\0"
        return self._entry(self.ask(Opcode.MKDIR, parent.nodeid, body, caller))

    def symlink(self, parent: Node, name: bytes, target: bytes, caller: Caller) -> Entry[Node]:
        body = name + b"\0" + target + b"\0"
        return self._entry(self.ask(Opcode.SYMLINK, parent.nodeid, body, caller))

    def link(self, node: Node, parent: Node, name: bytes) -> Entry[Node]:
        body = struct.pack("=Q", node.nodeid) + name + b"\0"
        return self._entry(self.ask(Opcode.LINK, parent.nodeid, body))

    def unlink(self, parent: Node, name: bytes) -> None:
        self.ask(Opcode.UNLINK, parent.nodeid, name + b"\0")

    def rmdir(self, parent: Node, name: bytes) -> None:
        self.ask(Opcode.RMDIR, parent.nodeid, name + b"\0")

    def rename(
        self, parent: Node, name: bytes, new_parent: Node, new_name: bytes, flags: int
    ) -> None:
        names = name + b"\0" + new_name + b"\0"
        if flags:
            body = struct.pack("=QI4x", new_parent.nodeid, flags) + names
            self.ask(Opcode.RENAME2, parent.nodeid, body)
        else:
            self.ask(Opcode.RENAME, parent.nodeid, struct.pack("=Q", new_parent.nodeid) + names)

    def setattr(self, node: Node, change: AttrChange) -> Attr:
        valid = 0
        for field, value in (
            (AttrField.MODE, change.mode),
            (AttrField.UID, change.uid),
            (AttrField.GID, change.gid),
            (AttrField.SIZE, change.size),
            (AttrField.ATIME, change.atime_ns),
            (AttrField.MTIME, change.mtime_ns),
        ):
            if value is not None:
                valid |= field
        atime, mtime = (divmod(t or 0, 10**9) for t in (change.atime_ns, change.mtime_ns))
        body = struct.pack(
            "=I4xQQQqqqIIII4xII4x",
            valid, 0, change.size or 0, 0, atime[0], mtime[0], 0, atime[1], mtime[1], 0,
            change.mode or 0, change.uid or 0, change.gid or 0,
        )  # fmt: skip
        return _attr(self.ask(Opcode.SETATTR, node.nodeid, body), 16)

    def setxattr(self, node: Node, name: bytes, value: bytes, flags: int) -> None:
        body = struct.pack("=IIII", len(value), flags, 0, 0) + name + b"\0" + value
        self.ask(Opcode.SETXATTR, node.nodeid, body)

    def removexattr(self, node: Node, name: bytes) -> None:
        self.ask(Opcode.REMOVEXATTR, node.nodeid, name + b"\0")

    def fsyncdir(self, node: Node) -> None:
        self.ask(Opcode.FSYNCDIR, node.nodeid, bytes(16))

    # --------------------------------------------------------------------------------------------

    def _entry(self, payload: bytes) -> Entry[Node]:
        (nodeid,) = struct.unpack_from("=Q", payload)
        assert nodeid, "an entry of nothing"
        return Entry(self.told(nodeid), _attr(payload, 40))

    def told(self, nodeid: int) -> Node:
        """The node of an entry, told once more."""
        node = self._nodes.get(nodeid)
        if node is None:
            node = self._nodes[nodeid] = Node(nodeid)
            weakref.finalize(node, self._forget, nodeid, node.lookups).atexit = False
        node.lookups[0] += 1
        return node

    def _forget(self, nodeid: int, lookups: list[int]) -> None:
        self.ask(Opcode.FORGET, nodeid, struct.pack("=Q", lookups[0]))


class OpenFile:
    def __init__(self, client: FuseClient, node: Node, handle: int, flags: int) -> None:
        self._client = client
        self.node = node
        self.handle = handle
        self._flags = flags

    def read(self, size: int, offset: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = min(size - len(data), 1 << 17)
            body = struct.pack("=QQIIQI4x", self.handle, offset + len(data), piece, 0, 0, 0)
            got = self._client.ask(Opcode.READ, self.node.nodeid, body)
            data += got
            if len(got) < piece:
                break
        return data

    def write(self, data: bytes | memoryview, offset: int, *, append: bool = False) -> int:
        flags = self._flags | (os.O_APPEND if append else 0)
        head = struct.pack("=QQIIQI4x", self.handle, offset, len(data), 0, 0, flags)
        reply = self._client.ask(Opcode.WRITE, self.node.nodeid, head + bytes(data))
        return int(struct.unpack_from("=I", reply)[0])

    def seek(self, offset: int, whence: int) -> int:
        body = struct.pack("=QqI4x", self.handle, offset, whence)
        return int(struct.unpack("=q", self._client.ask(Opcode.LSEEK, self.node.nodeid, body))[0])

    def allocate(self, mode: int, offset: int, size: int) -> None:
        body = struct.pack("=QQQI4x", self.handle, offset, size, mode)
        self._client.ask(Opcode.FALLOCATE, self.node.nodeid, body)

    def copy_from(self, source: Any, source_offset: int, offset: int, size: int) -> int:
        body = struct.pack(
            "=QqQQqQQ", source.handle, source_offset, self.node.nodeid, self.handle, offset, size, 0
        )
        reply = self._client.ask(Opcode.COPY_FILE_RANGE, source.node.nodeid, body)
        return int(struct.unpack_from("=I", reply)[0])

    def fsync(self, *, data_only: bool = False) -> None:
        body = struct.pack("=QI4x", self.handle, int(data_only))
        self._client.ask(Opcode.FSYNC, self.node.nodeid, body)

    def fileno(self) -> None:
        return None

    def close(self) -> None:
        body = struct.pack("=QIIQ", self.handle, 0, 0, 0)
        self._client.ask(Opcode.RELEASE, self.node.nodeid, body)


class OpenDirectory:
    """Reads by READDIRPLUS, and forgets at once what it was told by it."""

    def __init__(self, client: FuseClient, node: Node, handle: int) -> None:
        self._client = client
        self._node = node
        self._handle = handle

    def entries(self, offset: int = 0) -> Iterator[DirEntry]:
        while True:
            body = struct.pack("=QQIIQI4x", self._handle, offset, 4096, 0, 0, 0)
            reply = self._client.ask(Opcode.READDIRPLUS, self._node.nodeid, body)
            if not reply:
                return
            for nodeid, entry in _parse(reply):
                offset = entry.next_offset
                if nodeid:
                    self._client.told(nodeid)
                if entry.name not in (b".", b".."):
                    yield entry

    def close(self) -> None:
        body = struct.pack("=QIIQ", self._handle, 0, 0, 0)
        self._client.ask(Opcode.RELEASEDIR, self._node.nodeid, body)


def _parse(reply: bytes) -> Iterator[tuple[int, DirEntry]]:
    position = 0
    while position < len(reply):
        (nodeid,) = struct.unpack_from("=Q", reply, position)
        position += _ENTRY_SIZE
        ino, next_offset, size, kind = struct.unpack_from("=QQII", reply, position)
        name = reply[position + 24 : position + 24 + size]
        assert len(name) == size, "an entry beyond the end"
        position += 24 + size + -size % 8
        yield nodeid, DirEntry(name, ino, kind << 12, next_offset)
    assert position == len(reply), "entries end beside the end"


def _attr(payload: bytes, position: int) -> Attr:
    ino, size, blocks, *times = _ATTR.unpack_from(payload, position)[:9]
    mode, nlink, uid, gid, rdev = _ATTR.unpack_from(payload, position)[9:14]
    atime, mtime, ctime = (times[n] * 10**9 + times[n + 3] for n in range(3))
    return Attr(ino, mode, nlink, uid, gid, rdev, size, blocks, atime, mtime, ctime)
