"""A FUSE server as a function: request bytes in, reply bytes out. No I/O.

A transport hands each request to ``Server.handle`` and writes what comes back. What an operation
cannot answer at once it answers later: it returns ``None``, keeps the header's ``unique`` (as it
is: a repeated request has a bit set in it that the reply must carry), and whoever has the answer
writes ``encode_answer(unique, answer)``.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Any

from snapshotter.errors import InvalidInputError, SnapshotterError
from snapshotter.fuse import replies, wire
from snapshotter.fuse.wire import Header, Opcode

Answer = bytes | memoryview | int | None
"""A payload, a positive errno, or None: the answer comes later."""

Operation = Callable[[Header, Any], Answer]
"""Serves one kind of request; the second argument is its message of ``wire``.

It may raise OSError or SnapshotterError, whose errno becomes the answer.
"""

Buffers = tuple[bytes] | tuple[bytes, bytes | memoryview]
"""One reply, to be written by one writev(2)."""

FaultReport = Callable[[Exception, Header | None], None]
"""Told of a request that was malformed or made an operation fail unforeseen (then EIO)."""


def encode_answer(unique: int, answer: bytes | memoryview | int) -> Buffers:
    """The reply to request ``unique``."""
    if isinstance(answer, int):
        return (replies.encode_error(unique, answer),)
    return (replies.encode_reply(unique, len(answer)), answer)


class Server:
    """Dispatches requests by a table of operations; what has no row is answered ENOSYS.

    No request, however malformed, raises out of ``handle``.
    """

    def __init__(
        self, operations: Mapping[Opcode, Operation], *, report_fault: FaultReport
    ) -> None:
        self._operations: Mapping[int, Operation] = {
            int(key): run for key, run in operations.items()
        }
        self._report_fault = report_fault

    def handle(self, request: memoryview) -> Buffers | None:
        """The reply to ``request``, or None if none is due (now).

        ``request`` may be overwritten as soon as this returns.
        """
        try:
            header = wire.decode_header(request)
        except InvalidInputError as error:
            self._report_fault(error, None)
            unique = wire.unique_of(request)
            return None if unique is None else encode_answer(unique, errno.EINVAL)
        answer = self._answer(header, request)
        if answer is None or header.opcode in wire.UNANSWERED:
            return None
        return encode_answer(header.unique, answer)

    def _answer(self, header: Header, request: memoryview) -> Answer:
        operation = self._operations.get(header.opcode)
        if operation is None:
            return errno.ENOSYS
        try:
            message = wire.decode_body(header, request)
        except InvalidInputError as error:
            self._report_fault(error, header)
            return errno.EINVAL
        try:
            return operation(header, message)
        except OSError as error:
            return error.errno or errno.EIO
        except SnapshotterError as error:
            return error.errno
        except Exception as error:  # noqa: BLE001 - one bad request must not end the session
            self._report_fault(error, header)
            return errno.EIO
