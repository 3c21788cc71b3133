"""FUSE requests in chains of descriptors: what ``fuse.server`` answers, in a guest's memory.

Content goes straight between files and the guest's pages, by one preadv or pwritev; everything
else of a request is copied once and only the copy is looked at, since the guest can change its
memory at any time.
"""

from __future__ import annotations

import errno
from functools import partial

from snapshotter.errors import InvalidInputError
from snapshotter.fuse import replies, wire
from snapshotter.fuse.server import Answer, FileRange, Payload, Server
from snapshotter.fuse.virtiofs.queue import Queue
from snapshotter.fuse.virtiofs.vring import Chain

MAX_DEFERRED_BYTES = 64 << 20
"""Bytes that waiting requests of one queue may name. A guest reads ahead with a few dozen requests
of up to 1 MiB; beyond this, what would have to wait fails."""

_WRITE_HEAD_SIZE = wire.HEADER_SIZE + 40
"""Header and struct fuse_write_in; the content is behind it."""

_MAX_WHOLE_BYTES = 4096
"""A WRITE of no more than this is copied like any request: quicker than two views."""

_MAX_ARGUMENT_BYTES = 1 << 17
"""An extended attribute of 64 KiB with its name, and room."""

_REPLY_HEADER_SIZE = replies.REPLY_HEADER_SIZE


class FuseRequests:
    """A Handler that has ``server`` answer, INIT and DESTROY too."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def serve(self, chain: Chain, queue: Queue) -> int | None:
        """Serves one request; InvalidInputError for one without a header, or room for a reply."""
        request, data = _take_apart(chain)
        reply = None
        if queue.deferred_size < MAX_DEFERRED_BYTES:
            reply = partial(self._reply, chain, queue)
        served = self._server.serve(request, reply, data)
        if served is not None:
            return write_reply(chain, *served)
        return 0 if wire.opcode_of(request) in wire.UNANSWERED else None

    def abandon(self, chain: Chain) -> int:
        """EIO for what waits too long."""
        unique = wire.unique_of(memoryview(b"".join(chain.readable)))
        return write_reply(chain, unique or 0, errno.EIO)

    @staticmethod
    def _reply(chain: Chain, queue: Queue, unique: int, answer: Answer) -> None:
        assert answer is not None
        if queue.claim(chain):
            queue.finish(chain, write_reply(chain, unique, answer))


def _take_apart(chain: Chain) -> tuple[memoryview, list[memoryview]]:
    """A copy of the request; what a long WRITE writes is not in it, but as views behind it."""
    readable, size = chain.readable, chain.readable_size
    if size < wire.HEADER_SIZE:
        raise InvalidInputError(f"FUSE request of {size} bytes")
    if size <= _MAX_WHOLE_BYTES:
        return memoryview(b"".join(readable)), []
    head = b"".join(_within(readable, 0, _WRITE_HEAD_SIZE))
    if wire.opcode_of(head) == wire.Opcode.WRITE:
        return memoryview(head), _within(readable, _WRITE_HEAD_SIZE, size)
    if size > _MAX_ARGUMENT_BYTES:
        raise InvalidInputError(f"FUSE request of {size} bytes that is no WRITE")
    rest = b"".join(_within(readable, _WRITE_HEAD_SIZE, size))
    return memoryview(head + rest), []  # not joined anew: the head was looked at


def write_reply(chain: Chain, unique: int, answer: Payload | int) -> int:
    """Writes a reply into the chain; its length.

    What does not fit is EIO. Raises InvalidInputError if there is not even room for that.
    """
    room = chain.writable_size - _REPLY_HEADER_SIZE
    if room < 0:
        raise InvalidInputError(f"FUSE request with {chain.writable_size} bytes for its reply")
    if isinstance(answer, int):
        return _put(chain.writable, replies.encode_error(unique, answer))
    if isinstance(answer, FileRange):
        return _put_range(chain, unique, answer, room)
    if len(answer) > room:
        return _put(chain.writable, replies.encode_error(unique, errno.EIO))
    return _put(chain.writable, replies.encode_reply(unique, len(answer)) + answer)


def _put_range(chain: Chain, unique: int, content: FileRange, room: int) -> int:
    """Content first, straight from its file, then the header that says how much it was."""
    if content.size > room:
        return _put(chain.writable, replies.encode_error(unique, errno.EIO))
    try:
        end = _REPLY_HEADER_SIZE + content.size
        got = content.read_into(_within(chain.writable, _REPLY_HEADER_SIZE, end))
    except OSError as error:
        return _put(chain.writable, replies.encode_error(unique, error.errno or errno.EIO))
    except OverflowError:  # an offset that no file has
        return _put(chain.writable, replies.encode_error(unique, errno.EINVAL))
    _put(chain.writable, replies.encode_reply(unique, got))
    return _REPLY_HEADER_SIZE + got


def _put(views: list[memoryview], data: bytes) -> int:
    """Writes ``data``, for which there is room, at the front of ``views``; its length."""
    size = len(data)
    first = views[0]
    if size <= len(first):
        first[:size] = data
        return size
    at = 0
    for view in views:
        piece = data[at : at + len(view)]
        view[: len(piece)] = piece
        at += len(piece)
        if at == size:
            break
    return size


def _within(views: list[memoryview], begin: int, end: int) -> list[memoryview]:
    """The bytes [begin, end) of ``views``, as far as there are any."""
    found = []
    for view in views:
        size = len(view)
        if begin < size:
            piece = view[begin:end]
            if piece:
                found.append(piece)
        begin = max(0, begin - size)
        end -= size
        if end <= 0:
            break
    return found
