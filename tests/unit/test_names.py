"""Names of content and of files in images."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.errors import InvalidInputError
from snapshotter.names import CHUNK_SIZE, MAX_CONTENT_SIZE, ContentName, check_component

NAME = ContentName(bytes(range(32)), 1234)


def test_an_object_name_spells_the_content_id_and_the_size():
    expected = "00/" + bytes(range(1, 32)).hex() + ".1234"
    assert NAME.path == expected == str(NAME)
    assert NAME.directory == "00"


@given(st.binary(min_size=32, max_size=32), st.integers(1, MAX_CONTENT_SIZE))
def test_parsing_undoes_spelling(content_id, size):
    name = ContentName(content_id, size)
    assert ContentName.parse_path(name.path) == name
    assert ContentName.parse(name.directory.encode(), name.file.encode()) == name


@pytest.mark.parametrize(
    ("directory", "file"),
    [
        (b"00", b"ab" * 31),
        (b"00", b"ab" * 31 + b"."),
        (b"00", b"ab" * 31 + b".0"),
        (b"00", b"ab" * 31 + b".01"),
        (b"00", b"ab" * 31 + b".-1"),
        (b"00", b"AB" * 31 + b".1"),
        (b"00", b"ab" * 30 + b".1"),
        (b"0", b"ab" * 31 + b".1"),
        (b"0g", b"ab" * 31 + b".1"),
        (b"00", b"ab" * 31 + b".1\n"),
        (b"00", b"ab" * 31 + b".9223372036854775808"),
    ],
)
def test_what_is_no_object_name_is_refused(directory, file):
    with pytest.raises(InvalidInputError):
        ContentName.parse(directory, file)


@pytest.mark.parametrize(
    ("size", "chunked", "chunks"),
    [(1, False, 1), (CHUNK_SIZE, False, 1), (CHUNK_SIZE + 1, True, 2), (3 * CHUNK_SIZE, True, 3)],
)
def test_the_size_decides_the_kind(size, chunked, chunks):
    name = ContentName(bytes(32), size)
    assert name.is_chunked is chunked
    assert name.chunk_count == chunks


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0b", b"x" * 256])
def test_what_is_no_file_name_is_refused(name):
    with pytest.raises(InvalidInputError):
        check_component(name)


@pytest.mark.parametrize("name", [b"a", b"...", b"\xff\n", b"x" * 255])
def test_any_other_bytes_are_a_file_name(name):
    assert check_component(name) == name
