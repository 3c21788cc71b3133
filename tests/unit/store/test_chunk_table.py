"""The chunk table, byte by byte."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.digest import sha256
from snapshotter.errors import CorruptError
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.store import chunk_table

DIGESTS = [sha256(b"a"), sha256(b"b"), sha256(b"c")]
SIZE = 2 * CHUNK_SIZE + 5


def test_the_bytes_are_the_documented_ones():
    expected = b"lzchunk1" + struct.pack("<QQ", CHUNK_SIZE, SIZE) + b"".join(DIGESTS)
    assert chunk_table.encode(DIGESTS, SIZE) == expected
    assert chunk_table.content_name(DIGESTS, SIZE) == ContentName(sha256(expected), SIZE)


def test_content_of_one_chunk_is_named_by_its_own_digest():
    assert chunk_table.content_name(DIGESTS[:1], CHUNK_SIZE) == ContentName(DIGESTS[0], CHUNK_SIZE)


def test_decoding_undoes_encoding():
    name = chunk_table.content_name(DIGESTS, SIZE)
    assert chunk_table.decode(chunk_table.encode(DIGESTS, SIZE), name) == DIGESTS
    assert [chunk_table.chunk_length(name, i) for i in range(3)] == [CHUNK_SIZE, CHUNK_SIZE, 5]


@given(st.data())
def test_any_changed_byte_is_noticed(data):
    table = bytearray(chunk_table.encode(DIGESTS, SIZE))
    name = chunk_table.content_name(DIGESTS, SIZE)
    at = data.draw(st.integers(0, len(table) - 1))
    table[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptError):
        chunk_table.decode(bytes(table), name)


@pytest.mark.parametrize("size", [SIZE - CHUNK_SIZE, SIZE + 1])
def test_a_table_that_hashes_right_but_speaks_of_another_size_is_refused(size):
    table = chunk_table.encode(DIGESTS, SIZE)
    with pytest.raises(CorruptError):
        chunk_table.decode(table, ContentName(sha256(table), size))


def test_a_table_of_content_that_has_none_is_refused() -> None:
    encoded = chunk_table.encode([bytes(32)], CHUNK_SIZE)
    with pytest.raises(CorruptError):
        chunk_table.decode(encoded, ContentName(sha256(encoded), CHUNK_SIZE))
