"""A FUSE server as a function: request bytes in, reply bytes out. No I/O but that of operations.

A transport hands each request to ``Server.serve`` (or ``handle``) and writes what comes back. What
cannot be answered at once is answered later: by whoever an operation left it to (it returned
``None`` and kept the header's ``unique`` as it is: a repeated request has a bit set in it that the
reply must carry), or, when an operation raised ``Pending``, once the content was fetched.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snapshotter.errors import InvalidInputError, SnapshotterError
from snapshotter.fuse import replies, wire
from snapshotter.fuse.wire import Decoder, Header, Opcode
from snapshotter.vfs import Pending

_MAX_ROUNDS = 16
"""Fetches for one request: a READ may need several pieces. Content that is not here after so many
is evicted faster than it is read."""


class FileRange:
    """An answer to READ: bytes of a descriptor, for the transport to read to where it wants them.

    ``holder`` keeps the descriptor open as long as this lives.
    """

    __slots__ = ("descriptor", "holder", "offset", "size")

    def __init__(self, descriptor: int, offset: int, size: int, holder: object) -> None:
        self.descriptor = descriptor
        self.offset = offset
        self.size = size
        self.holder = holder

    def read_into(self, buffers: Sequence[memoryview]) -> int:
        """Fills ``buffers``, which are of ``size`` bytes together; less only at the file's end."""
        got = os.preadv(self.descriptor, buffers, self.offset)
        while 0 < got < self.size:
            more = os.preadv(self.descriptor, _after(buffers, got), self.offset + got)
            if not more:
                break
            got += more
        return got

    def read(self) -> memoryview:
        """The bytes."""
        data = memoryview(bytearray(self.size))
        return data[: self.read_into([data])]


def _after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    left = []
    for buffer in buffers:
        if count < len(buffer):
            left.append(buffer[count:])
        count = max(0, count - len(buffer))
    return left


Payload = bytes | memoryview | FileRange
Answer = Payload | int | None
"""A payload, a positive errno, or None: the answer comes later."""

Operation = Callable[[Header, Any], Answer]
"""Serves one kind of request; the second argument is its message of ``wire``.

It may raise OSError or SnapshotterError, whose errno becomes the answer, and ``Pending``.
"""

Buffers = tuple[bytes] | tuple[bytes, bytes | memoryview]
"""One reply, to be written by one writev(2)."""

FaultReport = Callable[[Exception, Header | None], None]
"""Told of a request that was malformed, that made an operation fail unforeseen, or whose content
could not be fetched (EIO, both)."""

Reply = Callable[[int, Answer], None]
"""Answers the request with this ``unique``, once, from any thread; the answer is never None."""

Fetch = Callable[[Pending, Callable[[Exception | None], None]], None]
"""Begins to fetch what is pending and returns. The second argument is called once, from a thread
that may block in file systems: with None when the content is here, else with why it is not."""


def encode_answer(unique: int, answer: Payload | int) -> Buffers:
    """The reply to request ``unique``."""
    if isinstance(answer, int):
        return (replies.encode_error(unique, answer),)
    if isinstance(answer, FileRange):
        try:
            answer = answer.read()
        except OSError as error:
            return (replies.encode_error(unique, error.errno or errno.EIO),)
    return (replies.encode_reply(unique, len(answer)), answer)


class Server:
    """Dispatches requests by a table of operations; what has no row is answered ENOSYS.

    No request, however malformed, raises out of ``serve`` and ``handle``, which any number of
    threads may call. ``decoders`` has a row for each operation. Without ``fetch``, what is pending
    is EIO.
    """

    def __init__(
        self,
        operations: Mapping[Opcode, Operation],
        *,
        report_fault: FaultReport,
        decoders: Mapping[int, Decoder] = wire.DECODERS,
        fetch: Fetch | None = None,
    ) -> None:
        self._table = {int(key): (decoders[key], run) for key, run in operations.items()}
        self._report_fault = report_fault
        self._fetch = fetch
        self._waiting: dict[int, tuple[Header, Reply]] = {}

    def handle(self, request: memoryview, reply: Reply | None = None) -> Buffers | None:
        """As ``serve``, the reply as bytes; None if none is due (now)."""
        served = self.serve(request, reply)
        return None if served is None else encode_answer(*served)

    def serve(
        self,
        request: memoryview,
        reply: Reply | None = None,
        data: Sequence[memoryview] = (),
    ) -> tuple[int, Payload | int] | None:
        """The ``unique`` of ``request`` and its answer, or None if none is due (now).

        ``request`` may be overwritten as soon as this returns. ``reply`` answers what had to wait
        for content; without it that is EIO. ``data`` are further pieces of the same request, if
        the transport has it in pieces: a WRITE takes what it writes from where they are.
        """
        try:
            header = wire.decode_header(request, sum(map(len, data)) if data else 0)
        except InvalidInputError as error:
            self._report_fault(error, None)
            unique = wire.unique_of(request)
            return None if unique is None else (unique, errno.EINVAL)
        if data and header.opcode != Opcode.WRITE:
            request, data = memoryview(b"".join((request, *data))), ()
        try:
            answer = self._answer(header, request, data)
        except Pending as pending:
            if self._fetch is None or reply is None or header.unique in self._waiting:
                return header.unique, errno.EIO
            self._wait(header, b"".join((request, *data)), pending, reply)
            return None
        if answer is None or header.opcode in wire.UNANSWERED:
            return None
        return header.unique, answer

    def waiting(self, unique: int) -> Header | None:
        """The header of a request that waits for content."""
        waiting = self._waiting.get(unique)
        return None if waiting is None else waiting[0]

    def give_up(self, unique: int, answer: Answer) -> None:
        """Answers a request that waits for content now, whatever becomes of the fetch."""
        waiting = self._waiting.pop(unique, None)
        if waiting is not None:
            waiting[1](unique, answer)

    def _answer(
        self, header: Header, request: memoryview, data: Sequence[memoryview] = ()
    ) -> Answer:
        row = self._table.get(header.opcode)
        if row is None:
            return errno.ENOSYS
        try:
            message = row[0](wire.body(header, request))
        except InvalidInputError as error:
            self._report_fault(error, header)
            return errno.EINVAL
        if data:
            message = message._replace(data=(*message.data, *data))
        try:
            return row[1](header, message)
        except Pending:
            raise
        except OSError as error:
            return error.errno or errno.EIO
        except SnapshotterError as error:
            return error.errno
        except OverflowError:
            return errno.EINVAL  # a number that no system call takes
        except Exception as error:  # noqa: BLE001 - one bad request must not end the session
            self._report_fault(error, header)
            return errno.EIO

    # Requests that wait for content -------------------------------------------------------------

    def _wait(self, header: Header, request: bytes, pending: Pending, reply: Reply) -> None:
        """Has the request served again once its content is here."""
        rounds = 0

        def start(pending: Pending) -> None:
            assert self._fetch is not None
            try:
                self._fetch(pending, done)
            except Exception as error:  # noqa: BLE001 - as in _answer
                self._report_fault(error, header)
                self.give_up(header.unique, errno.EIO)

        def done(error: Exception | None) -> None:
            nonlocal rounds
            rounds += 1
            if header.unique not in self._waiting:
                return  # given up meanwhile
            answer: Answer = errno.EIO
            if error is None:
                try:
                    answer = self._answer(header, memoryview(request))
                except Pending as again:
                    if rounds < _MAX_ROUNDS:
                        start(again)
                        return
            else:
                self._report_fault(error, header)
            self.give_up(header.unique, answer)

        self._waiting[header.unique] = header, reply
        start(pending)
