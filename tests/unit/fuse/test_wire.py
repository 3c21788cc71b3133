import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.errors import InvalidInputError
from snapshotter.fuse import wire
from snapshotter.fuse.wire import Header, Opcode
from tests.support.fuse_requests import request


def decode(raw: bytes) -> tuple[Header, object]:
    header = wire.decode_header(memoryview(raw))
    return header, wire.decode_body(header, memoryview(raw))


def test_a_lookup_as_the_kernel_sends_it() -> None:
    raw = bytes.fromhex(
        "2f000000 01000000 0200000000000080 0100000000000000"
        "e8030000 e9030000 39300000 0000 0000 6e616d65616200"
    )
    header, message = decode(raw)
    assert header == Header(47, 1, wire.RESENT | 2, 1, 1000, 1001, 12345, 0)
    assert message == wire.Lookup(b"nameab")


BODIES = [
    (Opcode.FORGET, struct.pack("=Q", 7), wire.Forget(7)),
    (Opcode.BATCH_FORGET, struct.pack("=IIQQQQ", 2, 0, 5, 1, 6, 9),
     wire.BatchForget(((5, 1), (6, 9)))),
    (Opcode.GETATTR, struct.pack("=IIQ", 1, 0, 8), wire.GetAttr(1, 8)),
    (Opcode.OPEN, struct.pack("=II", 0o100000, 1), wire.Open(0o100000, 1)),
    (Opcode.OPENDIR, struct.pack("=II", 3, 0), wire.Open(3, 0)),
    (Opcode.READ, struct.pack("=QQIIQII", 1, 1 << 40, 4096, 2, 5, 6, 0),
     wire.Read(1, 1 << 40, 4096, 2, 5, 6)),
    (Opcode.READDIR, struct.pack("=QQIIQII", 0, 3, 4096, 0, 0, 0, 0),
     wire.Read(0, 3, 4096, 0, 0, 0)),
    (Opcode.RELEASE, struct.pack("=QIIQ", 1, 2, 3, 4), wire.Release(1, 2, 3, 4)),
    (Opcode.FLUSH, struct.pack("=QIIQ", 1, 0, 0, 4), wire.Flush(1, 4)),
    (Opcode.ACCESS, struct.pack("=II", 4, 0), wire.Access(4)),
    (Opcode.GETXATTR, struct.pack("=II", 10, 0) + b"user.a\0", wire.GetXattr(10, b"user.a")),
    (Opcode.LISTXATTR, struct.pack("=II", 64, 0), wire.ListXattr(64)),
    (Opcode.INTERRUPT, struct.pack("=Q", 99), wire.Interrupt(99)),
    (Opcode.IOCTL, struct.pack("=QIIQII", 1, 2, 0x5401, 4, 5, 6),
     wire.Ioctl(1, 2, 0x5401, 4, 5, 6)),
    (Opcode.READLINK, b"", wire.Nothing()),
    (Opcode.STATFS, b"", wire.Nothing()),
    (Opcode.DESTROY, b"", wire.Nothing()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("opcode", "body", "message"), BODIES, ids=lambda v: getattr(v, "name", "")
)
def test_bodies(opcode: Opcode, body: bytes, message: object) -> None:
    raw = request(opcode, body)
    assert decode(raw)[1] == message
    for length in range(len(body)):
        with pytest.raises(InvalidInputError):
            decode(request(opcode, body[:length]))


def test_init_with_both_words_of_flags() -> None:
    body = struct.pack("=IIIII44x", 7, 45, 131072, wire.InitFlag.INIT_EXT | 1, 0x80)
    assert decode(request(Opcode.INIT, body))[1] == wire.Init(
        7, 45, 131072, wire.InitFlag.INIT_EXT | wire.InitFlag.HAS_RESEND | 1
    )


def test_init_of_an_old_kernel_has_one_word_of_flags() -> None:
    body = struct.pack("=IIII", 7, 31, 4096, 1)
    assert decode(request(Opcode.INIT, body))[1] == wire.Init(7, 31, 4096, 1)


@pytest.mark.parametrize("body", [b"", b"\0", b"name", b"a\0b\0", b"a\0\0"])
def test_a_lookup_without_one_proper_name_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidInputError):
        decode(request(Opcode.LOOKUP, body))


def test_extensions_are_no_part_of_the_body() -> None:
    raw = request(Opcode.LOOKUP, b"name\0" + bytes(8), extension_words=1)
    assert decode(raw)[1] == wire.Lookup(b"name")
    with pytest.raises(InvalidInputError):
        decode(request(Opcode.LOOKUP, b"name\0", extension_words=4))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_request_that_lies_about_its_length_is_refused(change: int) -> None:
    raw = bytearray(request(Opcode.LOOKUP, b"name\0"))
    raw[:4] = struct.pack("=I", len(raw) + change)
    with pytest.raises(InvalidInputError):
        wire.decode_header(memoryview(raw))


@given(opcode=st.sampled_from(sorted(wire.DECODERS)), body=st.binary(max_size=200))
def test_any_body_decodes_or_is_refused(opcode: int, body: bytes) -> None:
    try:
        decode(request(opcode, body))
    except InvalidInputError:
        pass


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_a_request_or_refused(raw: bytes) -> None:
    try:
        wire.decode_header(memoryview(raw))
    except InvalidInputError:
        pass
