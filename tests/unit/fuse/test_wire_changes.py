import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.errors import InvalidInputError
from snapshotter.fuse import wire
from snapshotter.fuse import wire_changes as changes
from snapshotter.fuse.wire import Opcode
from tests.support.fuse_requests import request


def decode(opcode: int, body: bytes) -> object:
    raw = memoryview(request(opcode, body))
    return changes.ALL_DECODERS[opcode](wire.body(wire.decode_header(raw), raw))


BODIES = [
    (Opcode.SETATTR, struct.pack("=IIQQQQQqIIIIIIII", 9, 0, 1, 2, 3, 4, 5, -6, 7, 8, 9, 10, 0, 11,
                                 12, 0),
     changes.SetAttr(9, 1, 2, 3, 4, 5, -6, 7, 8, 9, 10, 11, 12)),
    (Opcode.MKNOD, struct.pack("=IIII", 1, 2, 3, 0) + b"n\0", changes.Mknod(1, 2, 3, b"n")),
    (Opcode.MKDIR, struct.pack("=II", 1, 2) + b"n\0", changes.Mkdir(1, 2, b"n")),
    (Opcode.SYMLINK, b"n\0to\0", changes.Symlink(b"n", b"to")),
    (Opcode.UNLINK, b"n\0", changes.Remove(b"n")),
    (Opcode.RMDIR, b"n\0", changes.Remove(b"n")),
    (Opcode.RENAME, struct.pack("=Q", 5) + b"a\0b\0", changes.Rename(5, 0, b"a", b"b")),
    (Opcode.RENAME2, struct.pack("=QII", 5, 1, 0) + b"a\0b\0", changes.Rename(5, 1, b"a", b"b")),
    (Opcode.LINK, struct.pack("=Q", 5) + b"n\0", changes.Link(5, b"n")),
    (Opcode.CREATE, struct.pack("=IIII", 1, 2, 3, 4) + b"n\0", changes.Create(1, 2, 3, 4, b"n")),
    (Opcode.FSYNC, struct.pack("=QII", 1, 1, 0), changes.Fsync(1, 1)),
    (Opcode.FSYNCDIR, struct.pack("=QII", 1, 0, 0), changes.Fsync(1, 0)),
    (Opcode.REMOVEXATTR, b"user.a\0", changes.RemoveXattr(b"user.a")),
    (Opcode.FALLOCATE, struct.pack("=QQQII", 1, 2, 3, 4, 0), changes.Allocate(1, 2, 3, 4)),
    (Opcode.LSEEK, struct.pack("=QqII", 1, -2, 3, 0), changes.Seek(1, -2, 3)),
    (Opcode.COPY_FILE_RANGE, struct.pack("=7Q", *range(7)), changes.CopyRange(*range(7))),
    (Opcode.COPY_FILE_RANGE_64, struct.pack("=7Q", *range(7)), changes.CopyRange(*range(7))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("opcode", "body", "message"), BODIES, ids=lambda v: getattr(v, "name", "")
)
def test_bodies(opcode: Opcode, body: bytes, message: object) -> None:
    assert decode(opcode, body) == message
    for length in range(len(body)):
        with pytest.raises(InvalidInputError):
            decode(opcode, body[:length])


def test_a_write_refers_to_its_data() -> None:
    head = struct.pack("=QQIIQII", 1, 2, 3, 4, 5, 6, 0)
    message = decode(Opcode.WRITE, head + b"abc")
    assert isinstance(message, changes.Write)
    assert message[:6] == (1, 2, 3, 4, 5, 6)
    assert [bytes(piece) for piece in message.data] == [b"abc"]
    with pytest.raises(InvalidInputError):
        decode(Opcode.WRITE, head[:-1])


def test_setxattr_in_both_layouts() -> None:
    short, long = (changes.setxattr_decoder(extended=extended) for extended in (False, True))
    rest = b"user.a\0va\0"
    expected = changes.SetXattr(1, 0, b"user.a", b"va\0")
    assert short(memoryview(struct.pack("=II", 3, 1) + rest)) == expected
    assert long(memoryview(struct.pack("=IIII", 3, 1, 1, 0) + rest)) == expected._replace(
        xattr_flags=1
    )
    for wrong in (b"", b"\0val", b"user.a", b"user.a\0v", b"user.a\0four"):
        with pytest.raises(InvalidInputError):
            short(memoryview(struct.pack("=II", 3, 1) + wrong))


@pytest.mark.parametrize("names", [b"a\0b", b"a\0\0", b"\0b\0", b"a\0b\0c\0", b"a\0"])
def test_two_names_are_two_names(names: bytes) -> None:
    with pytest.raises(InvalidInputError):
        decode(Opcode.SYMLINK, names)


@given(opcode=st.sampled_from(sorted(changes.ALL_DECODERS)), body=st.binary(max_size=200))
def test_any_body_decodes_or_is_refused(opcode: int, body: bytes) -> None:
    try:
        decode(opcode, body)
    except InvalidInputError:
        pass
