"""The chunk table: what names content larger than one chunk (docs/formats).

8 bytes ``lzchunk1``, u64 LE chunk size (1,048,576), u64 LE file size, then the 32-byte SHA-256 of
each chunk. The table's own SHA-256 is the content id.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from snapshotter.digest import DIGEST_SIZE, sha256
from snapshotter.errors import CorruptError
from snapshotter.names import CHUNK_SIZE, ContentName

MAGIC = b"lzchunk1"
_HEADER = struct.Struct("<8sQQ")


def encode(chunk_digests: Iterable[bytes], size: int) -> bytes:
    """The table of a file of ``size`` bytes with these raw chunk digests."""
    return _HEADER.pack(MAGIC, CHUNK_SIZE, size) + b"".join(chunk_digests)


def content_name(chunk_digests: list[bytes], size: int) -> ContentName:
    """The name of content with these chunks: of one chunk its digest, of more the table's."""
    if size <= CHUNK_SIZE:
        return ContentName(chunk_digests[0], size)
    return ContentName(sha256(encode(chunk_digests, size)), size)


def decode(table: bytes, name: ContentName) -> list[bytes]:
    """The raw chunk digests, after checking the table against the name it was asked for by.

    Raises CorruptError for a table that is not that content's.
    """
    if sha256(table) != name.content_id:
        raise CorruptError(f"chunk table of {name}: its digest is not the content id")
    expected = _HEADER.size + DIGEST_SIZE * name.chunk_count
    if (
        not name.is_chunked
        or len(table) != expected
        or _HEADER.unpack_from(table) != (MAGIC, CHUNK_SIZE, name.size)
    ):
        raise CorruptError(f"chunk table of {name}: header or length is wrong")
    return [table[at : at + DIGEST_SIZE] for at in range(_HEADER.size, expected, DIGEST_SIZE)]


def chunk_length(name: ContentName, index: int) -> int:
    """Bytes in chunk ``index``: a whole chunk but for the last."""
    return min(CHUNK_SIZE, name.size - index * CHUNK_SIZE)
