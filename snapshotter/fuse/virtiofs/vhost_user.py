"""The vhost-user protocol as a back end speaks it: messages on a Unix socket, with descriptors.

Layouts and numbers are those of QEMU's "Vhost-user Protocol" document; integers are little-endian.
What a message does is ``device``'s.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from enum import IntEnum, IntFlag

from snapshotter.errors import InvalidInputError
from snapshotter.fuse.virtiofs.memory import MAX_REGIONS, RegionLayout
from snapshotter.fuse.virtiofs.vring import RingAddresses


class Request(IntEnum):
    """What a front end asks for; others than these are for features that are not offered."""

    GET_FEATURES = 1
    SET_FEATURES = 2
    SET_OWNER = 3
    RESET_OWNER = 4
    SET_MEM_TABLE = 5
    SET_VRING_NUM = 8
    SET_VRING_ADDR = 9
    SET_VRING_BASE = 10
    GET_VRING_BASE = 11
    SET_VRING_KICK = 12
    SET_VRING_CALL = 13
    SET_VRING_ERR = 14
    GET_PROTOCOL_FEATURES = 15
    SET_PROTOCOL_FEATURES = 16
    GET_QUEUE_NUM = 17
    SET_VRING_ENABLE = 18


class Feature(IntFlag):
    """Features of the device, as virtio numbers them."""

    INDIRECT_DESC = 1 << 28
    PROTOCOL_FEATURES = 1 << 30
    VERSION_1 = 1 << 32


class ProtocolFeature(IntFlag):
    """Features of the protocol itself."""

    MQ = 1 << 0
    REPLY_ACK = 1 << 3


_VERSION = 1
_VERSION_MASK = 3
_IS_REPLY = 4
_NEED_REPLY = 8
_HEADER = struct.Struct("<III")
_U64 = struct.Struct("<Q")
_PAIR = struct.Struct("<II")
_REGION = struct.Struct("<QQQQ")
_ADDRESSES = struct.Struct("<IIQQQQ")
_MAX_BODY = 4096
_MAX_DESCRIPTORS = MAX_REGIONS
_INDEX_MASK = 0xFF
_NO_DESCRIPTOR = 0x100


class Message:
    """One request; who wants one of its descriptors takes it out."""

    __slots__ = ("body", "descriptors", "number", "wants_reply")

    def __init__(
        self, number: int, body: bytes, descriptors: list[int], *, wants_reply: bool
    ) -> None:
        self.number = number
        self.body = body
        self.descriptors = descriptors
        self.wants_reply = wants_reply

    def u64(self) -> int:
        """The body as one number; InvalidInputError if it is shorter."""
        value: int = self._fields(_U64)[0]
        return value

    def pair(self) -> tuple[int, int]:
        """The body as the index of a ring and a value."""
        index, value = self._fields(_PAIR)
        return index, value

    def ring_addresses(self) -> tuple[int, RingAddresses]:
        """The body of SET_VRING_ADDR: the index of a ring, and where its parts are."""
        index, _flags, descriptors, used, available, _log = self._fields(_ADDRESSES)
        return index, RingAddresses(descriptors, used, available)

    def ring_descriptor(self) -> tuple[int, int | None]:
        """The index of a ring and, taken, the descriptor for it (None: there is to be none)."""
        value = self.u64()
        index = value & _INDEX_MASK
        if value & _NO_DESCRIPTOR:
            return index, None
        if len(self.descriptors) != 1:
            raise InvalidInputError(
                f"vhost-user request {self.number}: {len(self.descriptors)} descriptors, not one"
            )
        return index, self.descriptors.pop()

    def regions(self) -> list[RegionLayout]:
        """The body of SET_MEM_TABLE; the descriptors stay, one for each region."""
        count, _padding = self._fields(_PAIR)
        end = _PAIR.size + count * _REGION.size
        if count > MAX_REGIONS or len(self.body) < end:
            raise InvalidInputError(f"vhost-user: {count} regions in {len(self.body)} bytes")
        return [RegionLayout(*row) for row in _REGION.iter_unpack(self.body[_PAIR.size : end])]

    def _fields(self, layout: struct.Struct) -> tuple[int, ...]:
        if len(self.body) < layout.size:
            raise InvalidInputError(
                f"vhost-user request {self.number}: a body of {len(self.body)} bytes, "
                f"not {layout.size}"
            )
        return layout.unpack_from(self.body)


@contextlib.contextmanager
def receive(connection: socket.socket) -> Iterator[Message | None]:
    """The next request, None at the end; closes what descriptors of it are not taken.

    Raises InvalidInputError for what is no request, OSError from the socket.
    """
    descriptors: list[int] = []
    try:
        header = _receive_header(connection, descriptors)
        if header is None:
            yield None
            return
        number, flags, size = _HEADER.unpack(header)
        if flags & _VERSION_MASK != _VERSION or flags & _IS_REPLY or size > _MAX_BODY:
            raise InvalidInputError(f"vhost-user: flags {flags:#x} and {size} bytes are no request")
        body = _receive_exactly(connection, size)
        yield Message(number, body, descriptors, wants_reply=bool(flags & _NEED_REPLY))
    finally:
        while descriptors:
            os.close(descriptors.pop())


def _receive_header(connection: socket.socket, descriptors: list[int]) -> bytes | None:
    header = b""
    while len(header) < _HEADER.size:
        data, received, flags, _ = socket.recv_fds(
            connection, _HEADER.size - len(header), _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        descriptors += received
        if flags & socket.MSG_CTRUNC:
            raise InvalidInputError(f"vhost-user: more than {_MAX_DESCRIPTORS} descriptors at once")
        if not data:
            if header:
                raise InvalidInputError("vhost-user: the connection ended within a header")
            return None
        header += data
    return header


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    body = b""
    while len(body) < size:
        data = connection.recv(size - len(body))
        if not data:
            raise InvalidInputError("vhost-user: the connection ended within a message")
        body += data
    return body


def encode_reply(number: int, body: bytes) -> bytes:
    """A whole reply to request ``number``."""
    return _HEADER.pack(number, _VERSION | _IS_REPLY, len(body)) + body


def encode_u64(value: int) -> bytes:
    """A body of one number: features, the number of queues, or 0 for an acknowledgement."""
    return _U64.pack(value)


def encode_pair(index: int, value: int) -> bytes:
    """A body of the index of a ring and a value."""
    return _PAIR.pack(index, value)
