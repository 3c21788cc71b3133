"""FUSE requests as the kernel would send them."""

import struct

_HEADER = struct.Struct("=IIQQIIIHxx")


def request(
    opcode: int,
    body: bytes = b"",
    *,
    unique: int = 2,
    nodeid: int = 1,
    pid: int = 0,
    extension_words: int = 0,
) -> bytes:
    length = _HEADER.size + len(body)
    return _HEADER.pack(length, opcode, unique, nodeid, 0, 0, pid, extension_words) + body
