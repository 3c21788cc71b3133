"""Serves a file system of ours on /dev/fuse, by several threads that each read and answer.

Facts of the device are told in ``dev_fuse``, whose ``Session`` is for a gate: it has successors.
"""

from __future__ import annotations

import errno
import os
import threading

from snapshotter.fuse import replies
from snapshotter.fuse.negotiation import MAX_READ_BYTES
from snapshotter.fuse.server import Answer, FileRange, Payload, Server, encode_answer

_GONE = frozenset((errno.ENODEV, errno.ECONNABORTED))
_NOBODY_WAITS = frozenset((errno.ENOENT, errno.ENODEV, errno.ENOTCONN, errno.EBADF))
_HEAD = replies.REPLY_HEADER_SIZE
_REQUEST_BYTES = MAX_READ_BYTES + 4096
"""A WRITE of the largest size that is negotiated, with its header."""


class DeviceThreads:
    """``threads`` threads serve ``device``, a descriptor of /dev/fuse that stays the caller's.

    One that copies a file up or syncs does not hold up the others.
    """

    def __init__(self, device: int, server: Server, *, threads: int) -> None:
        self._device = device
        self._server = server
        self._count = threads
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Serves until the file system is unmounted or its connection aborted.

        Blocks; OSError if the device fails otherwise.
        """
        others = [
            threading.Thread(target=self._serve_or_note, name=f"fuse-{number}", daemon=True)
            for number in range(1, self._count)
        ]
        for thread in others:
            thread.start()
        self._serve_or_note()
        for thread in others:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def reply(self, unique: int, answer: Answer) -> None:
        """Answers a request that had to wait; from any thread."""
        assert answer is not None
        self._write(encode_answer(unique, answer))

    def _serve_or_note(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 - raised by ``run``
            self._failure = error

    def _serve(self) -> None:
        device, serve, reply = self._device, self._server.serve, self.reply
        request = memoryview(bytearray(_REQUEST_BYTES))
        room = memoryview(bytearray(_HEAD + MAX_READ_BYTES))
        targets, readv = [request], os.readv
        while True:
            try:
                size = readv(device, targets)
            except OSError as error:
                if error.errno in _GONE:
                    return
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue  # the request went away while it was read
                raise
            served = serve(request[:size], reply)
            if served is not None:
                self._answer(served[0], served[1], room)

    def _answer(self, unique: int, answer: Payload | int, room: memoryview) -> None:
        if type(answer) is FileRange:
            try:
                size = answer.read_into([room[_HEAD : _HEAD + answer.size]])
            except OSError as error:
                self._write(encode_answer(unique, error.errno or errno.EIO))
                return
            room[:_HEAD] = replies.encode_reply(unique, size)
            self._write((room[: _HEAD + size],))
        else:
            assert not isinstance(answer, FileRange)
            self._write(encode_answer(unique, answer))

    def _write(self, buffers: tuple[bytes | memoryview, ...]) -> None:
        try:
            os.writev(self._device, buffers)
        except OSError as error:
            # Nobody waits for it any more. (The kernel itself forgets nodes that it was told of
            # in a reply that came too late.)
            if error.errno not in _NOBODY_WAITS:
                raise
