"""Decompresses a layer's blob as a stream: gzip (any number of members), zstd (frames), or plain.

The blob's first bytes decide, not the media type, which is often wrong. Output pieces are bounded
whatever the input expands to. Garbage behind the compressed data is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import IO, cast

import zstandard
from isal import isal_zlib

from snapshotter.errors import CorruptError

PIECE_BYTES = 512 << 10
"""The longest piece of output."""

_FEED_BYTES = 64 << 10
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW_BITS = 31
_GZIP_ERROR = cast("type[Exception]", isal_zlib.error)
_MAX_ZSTD_WINDOW_BYTES = 128 << 20


def decompress(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The decompressed bytes of a blob that comes in pieces of any length.

    Raises CorruptError for damaged, truncated or trailing data. One lack is not seen here: a zstd
    stream that is cut gives what is there and ends; the layer's digest tells.
    """
    rest = iter(blocks)
    head = b""
    while len(head) < 4 and (block := next(rest, None)) is not None:
        head += block
    whole = chain((head,), rest)
    match compression_of(head):
        case "gzip":
            return _gunzip(whole)
        case "zstd":
            return _unzstd(whole)
        case _:
            return whole


def compression_of(head: bytes) -> str:
    """``gzip`` or ``zstd``, as the first four bytes of a blob tell; else empty."""
    if head.startswith(_GZIP_MAGIC):
        return "gzip"
    return "zstd" if _is_zstd(head) else ""


def _is_zstd(head: bytes) -> bool:
    """Whether a zstd frame or a skippable frame begins (RFC 8878, 3.1)."""
    return head[:4] == b"\x28\xb5\x2f\xfd" or (
        head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50
    )


def _gunzip(blocks: Iterable[bytes]) -> Iterator[bytes]:
    member = isal_zlib.decompressobj(_GZIP_WINDOW_BITS)
    is_inside = True
    # Short feeds, since each member's end copies what is left of a feed: layers with one member
    # for each file (eStargz) would else copy every byte many times.
    for feed in _feeds(blocks):
        data = feed
        is_full = False
        while data or (is_full and is_inside):
            if not is_inside:
                if not _GZIP_MAGIC.startswith(data[:2]):
                    raise CorruptError("gzip: followed by other data")
                member = isal_zlib.decompressobj(_GZIP_WINDOW_BITS)
                is_inside = True
            try:
                output = member.decompress(data, PIECE_BYTES)
            except _GZIP_ERROR as error:
                raise CorruptError(f"gzip: {error}") from error
            if output:
                yield output
            # A full piece may have left more inside the decompressor.
            is_full = len(output) == PIECE_BYTES
            is_inside = not member.eof
            data = member.unconsumed_tail if is_inside else member.unused_data
    if is_inside:
        raise CorruptError("gzip: truncated")


def _unzstd(blocks: Iterable[bytes]) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_ZSTD_WINDOW_BYTES)
    # The reader asks for no more of a file than read().
    feeds = cast("IO[bytes]", _Feeds(blocks))
    try:
        with decompressor.stream_reader(feeds, read_across_frames=True) as reader:
            while output := reader.read(PIECE_BYTES):
                yield output
    except zstandard.ZstdError as error:
        raise CorruptError(f"zstd: {error}") from error


def _feeds(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in short pieces, none of them empty."""
    for block in blocks:
        for at in range(0, len(block), _FEED_BYTES):
            yield block[at : at + _FEED_BYTES]


class _Feeds:
    """What zstandard's stream reader reads from: a file, as far as it needs one."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._feeds = _feeds(blocks)

    def read(self, size: int) -> bytes:
        """The next bytes, empty at the end; ``size`` is at least a feed's length."""
        return next(self._feeds, b"")
