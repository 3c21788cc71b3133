from __future__ import annotations

import gzip
import random
import tracemalloc

import pytest
import zstandard

from cache_server.formats.compression import PIECE_BYTES, decompress
from snapshotter.errors import CorruptError

PLAIN = b"plain bytes of a tar " * 500 + random.Random(7).randbytes(3000)


def zstd(data: bytes, **options: bool) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


SKIPPABLE = b"\x5a\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"12345"

STREAMS = {
    "plain": PLAIN,
    "gzip": gzip.compress(PLAIN),
    "gzip members": b"".join(
        gzip.compress(PLAIN[at : at + 700]) for at in range(0, len(PLAIN), 700)
    ),
    "gzip with an empty member": gzip.compress(PLAIN) + gzip.compress(b""),
    "zstd": zstd(PLAIN, write_checksum=True),
    "zstd without size": zstd(PLAIN, write_content_size=False),
    "zstd frames": zstd(PLAIN[:999]) + zstd(PLAIN[999:]),
    "zstd with skippable frames": SKIPPABLE + zstd(PLAIN) + SKIPPABLE,
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
def test_gives_the_plain_bytes_however_the_stream_is_split(stream: bytes) -> None:
    assert b"".join(decompress([stream])) == PLAIN
    assert b"".join(decompress(stream[at : at + 1] for at in range(len(stream)))) == PLAIN
    assert b"".join(decompress([b"", stream[:5], b"", stream[5:], b""])) == PLAIN


@pytest.mark.parametrize("plain", [b"", b"\x1f", b"ab", b"(\xb5/"])
def test_short_blobs_are_plain(plain: bytes) -> None:
    assert b"".join(decompress([plain])) == plain


@pytest.mark.parametrize("size", [PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_output_beyond_a_piece_is_not_lost(size: int) -> None:
    member = gzip.compress(bytes(size))
    assert b"".join(decompress([member, member])) == bytes(2 * size)


@pytest.mark.parametrize("compress", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_memory_is_bounded_whatever_the_input_expands_to(compress: object) -> None:
    assert callable(compress)
    bomb = compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        total = sum(len(piece) for piece in decompress([bomb]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert total == 64 << 20
    assert peak < 8 << 20


GZIP = gzip.compress(PLAIN)
ZSTD = zstd(PLAIN, write_checksum=True)
BAD = {
    "gzip cut": GZIP[:-20],
    "gzip without its sum": GZIP[:-8],
    "gzip cut in its size": GZIP[:-1],
    "gzip header only": GZIP[:5],
    "gzip second member cut": GZIP + GZIP[:1],
    "gzip wrong sum": GZIP[:-5] + bytes([GZIP[-5] ^ 1]) + GZIP[-4:],
    "gzip damaged": GZIP[:40] + bytes([GZIP[40] ^ 0xFF]) + GZIP[41:],
    "gzip then zeros": GZIP + bytes(4),
    "gzip then garbage": GZIP + b"garbage",
    "gzip then zstd": GZIP + ZSTD,
    "zstd then garbage": ZSTD + b"garbage!",
    "zstd then zeros": ZSTD + bytes(8),
    "zstd then gzip": ZSTD + GZIP,
    "zstd wrong sum": ZSTD[:-1] + bytes([ZSTD[-1] ^ 1]),
    "zstd window too long": b"\x28\xb5\x2f\xfd\x00\xf0" + bytes(20),
}


@pytest.mark.parametrize("stream", BAD.values(), ids=BAD.keys())
def test_refuses_damage_and_what_does_not_belong(stream: bytes) -> None:
    with pytest.raises(CorruptError):
        list(decompress([stream]))
    with pytest.raises(CorruptError):
        list(decompress(stream[at : at + 1] for at in range(len(stream))))
