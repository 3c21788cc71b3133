"""Tar headers made by hand, field by field, for what the standard library cannot write."""

from __future__ import annotations

import struct

from cache_server.formats.tar import read_tar
from snapshotter.projection.tree import LayerEntry

END = bytes(1024)


def header(
    name: bytes = b"file",
    *,
    kind: bytes = b"0",
    size: int | bytes = 0,
    mode: bytes = b"0000644",
    uid: bytes = b"0000000",
    gid: bytes = b"0000000",
    mtime: bytes = b"00000000000",
    link: bytes = b"",
    magic: bytes = b"ustar\x0000",
    major: bytes = b"",
    minor: bytes = b"",
    prefix: bytes = b"",
    checksum: bytes | None = None,
) -> bytes:
    size_field = b"%011o" % size if isinstance(size, int) else size
    fields = [
        (name, 100), (mode, 8), (uid, 8), (gid, 8), (size_field, 12), (mtime, 12), (b" " * 8, 8),
        (kind, 1), (link, 100), (magic, 8), (b"", 32), (b"", 32), (major, 8), (minor, 8),
        (prefix, 155), (b"", 12),
    ]  # fmt: skip
    block = b"".join(value.ljust(width, b"\0") for value, width in fields)
    assert len(block) == 512
    stated = b"%06o\0 " % sum(block) if checksum is None else checksum
    return block[:148] + stated + block[156:]


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def member(name: bytes, data: bytes, **fields: bytes) -> bytes:
    return header(name, size=len(data), **fields) + padded(data)


def pax(records: dict[bytes, bytes], *, kind: bytes = b"x") -> bytes:
    data = b"".join(pax_record(key, value) for key, value in records.items())
    return member(b"pax", data, kind=kind)


def pax_record(key: bytes, value: bytes) -> bytes:
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(b"%d" % length) + len(rest) != length:
        length += 1
    return b"%d" % length + rest


def make_acl(*entries: tuple[int, int, int]) -> bytes:
    """A POSIX ACL of (tag, permissions, id), as its xattr has it."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def read(*blocks: bytes) -> list[tuple[LayerEntry, bytes]]:
    """Every entry with the content that followed it."""
    found: list[tuple[LayerEntry, bytes]] = []
    for event in read_tar(blocks):
        if isinstance(event, LayerEntry):
            found.append((event, b""))
        else:
            entry, content = found.pop()
            found.append((entry, content + event))
    return found


def read_one(*blocks: bytes) -> LayerEntry:
    ((entry, _),) = read(*blocks)
    return entry
