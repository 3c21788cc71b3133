import errno
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.errors import NotFoundError
from snapshotter.fuse import wire
from snapshotter.fuse.server import Answer, Server, encode_answer
from snapshotter.fuse.wire import Header, Opcode
from tests.support.fuse_requests import request


class Recorder:
    """Answers LOOKUP with what it was given (raising exceptions), and notes what it was asked."""

    def __init__(self, answer: Answer | Exception) -> None:
        self.answer = answer
        self.seen: list[tuple[int, Any]] = []
        self.faults: list[Exception] = []
        operations = dict.fromkeys((Opcode.LOOKUP, Opcode.FORGET, Opcode.INTERRUPT), self.serve)
        self.server = Server(operations, report_fault=lambda error, _: self.faults.append(error))

    def serve(self, header: Header, message: Any) -> Answer:
        self.seen.append((header.unique, message))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def ask(self, raw: bytes) -> bytes | None:
        buffers = self.server.handle(memoryview(raw))
        return None if buffers is None else b"".join(buffers)


def error_reply(unique: int, number: int) -> bytes:
    return struct.pack("=IiQ", 16, -number, unique)


LOOKUP = request(Opcode.LOOKUP, b"name\0", unique=wire.RESENT | 8)
UNIQUE = wire.RESENT | 8


def test_a_payload_follows_its_header_and_the_resent_bit_is_kept() -> None:
    recorder = Recorder(b"payload")
    assert recorder.ask(LOOKUP) == struct.pack("=IiQ", 23, 0, UNIQUE) + b"payload"
    assert recorder.seen == [(UNIQUE, wire.Lookup(b"name"))]


def test_a_pending_request_gets_its_reply_later() -> None:
    assert Recorder(None).ask(LOOKUP) is None
    assert b"".join(encode_answer(UNIQUE, b"late")) == struct.pack("=IiQ", 20, 0, UNIQUE) + b"late"


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (errno.ESTALE, errno.ESTALE),
        (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
        (OSError("no number"), errno.EIO),
        (NotFoundError("proven"), errno.ENOENT),
    ],
)
def test_failures_become_an_errno(answer: int | Exception, number: int) -> None:
    recorder = Recorder(answer)
    assert recorder.ask(LOOKUP) == error_reply(UNIQUE, number)
    assert not recorder.faults


def test_an_unforeseen_error_is_reported_and_fails_its_request_alone() -> None:
    recorder = Recorder(KeyError("flaw"))
    assert recorder.ask(LOOKUP) == error_reply(UNIQUE, errno.EIO)
    assert [type(fault) for fault in recorder.faults] == [KeyError]


@pytest.mark.parametrize("opcode", [4, 999, Opcode.READ])
def test_what_has_no_operation_is_not_implemented(opcode: int) -> None:
    assert Recorder(b"").ask(request(opcode, b"?", unique=4)) == error_reply(4, errno.ENOSYS)


def test_forget_and_interrupt_get_no_reply_whatever_the_operation_says() -> None:
    recorder = Recorder(errno.EIO)
    assert recorder.ask(request(Opcode.FORGET, struct.pack("=Q", 1))) is None
    assert recorder.ask(request(Opcode.INTERRUPT, struct.pack("=Q", 1))) is None
    assert recorder.ask(request(Opcode.FORGET, b"")) is None
    assert len(recorder.seen) == 2


def test_a_malformed_body_is_refused_to_its_asker() -> None:
    recorder = Recorder(b"")
    assert recorder.ask(request(Opcode.LOOKUP, b"no end", unique=6)) == error_reply(6, errno.EINVAL)
    assert not recorder.seen
    assert len(recorder.faults) == 1


def test_a_false_length_is_refused_to_its_asker() -> None:
    raw = LOOKUP + b"more"
    assert Recorder(b"").ask(raw) == error_reply(UNIQUE, errno.EINVAL)


@given(raw=st.binary(max_size=120))
def test_no_bytes_make_the_server_raise(raw: bytes) -> None:
    """Invariant: whatever comes, a reply names the unique that came, or there is none."""
    reply = Recorder(b"").ask(raw)
    assert reply is None or reply[8:16] == raw[8:16]
