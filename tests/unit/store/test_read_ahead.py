"""What is fetched ahead of a reader, and when nothing is."""

from hypothesis import given
from hypothesis import strategies as st

from snapshotter.names import CHUNK_SIZE
from snapshotter.store.read_ahead import LEAST_BYTES, ReadAhead

SIZE = 64 * CHUNK_SIZE + 5
MOST_BYTES = 16 * CHUNK_SIZE


def ranges(
    reads: list[tuple[int, int]], size: int = SIZE, most_bytes: int = MOST_BYTES
) -> list[tuple[int, int]]:
    run = ReadAhead(size, most_bytes)
    noted = (run.note(offset, length) for offset, length in reads)
    return [found for found in noted if found is not None]


def sequence(length: int, start: int = 0, size: int = SIZE) -> list[tuple[int, int]]:
    return [(offset, length) for offset in range(start, size, length)]


def test_a_sequential_reader_has_everything_fetched_once_and_in_order() -> None:
    found = ranges(sequence(CHUNK_SIZE))
    assert found[0] == (2 * CHUNK_SIZE, 2 * CHUNK_SIZE)
    ends = [offset + length for offset, length in found]
    assert [offset for offset, _ in found[1:]] == ends[:-1]
    assert ends[-1] == SIZE
    assert max(length for _, length in found) <= MOST_BYTES
    assert len(found) < 15


def test_requests_of_a_window_may_come_in_any_order() -> None:
    reads = sequence(CHUNK_SIZE)
    reads[4:8] = reversed(reads[4:8])
    assert ranges(reads)[-1][1]
    assert sum(length for _, length in ranges(reads)) == SIZE - 2 * CHUNK_SIZE


def test_nothing_is_fetched_ahead_of_a_reader_that_jumps_or_reads_little() -> None:
    assert ranges([(at * 7 * CHUNK_SIZE % SIZE, CHUNK_SIZE) for at in range(50)]) == []
    assert ranges(sequence(4096, size=CHUNK_SIZE)) == []
    assert ranges(list(reversed(sequence(CHUNK_SIZE)))) == []


def test_no_more_is_fetched_ahead_than_was_set() -> None:
    assert ranges(sequence(CHUNK_SIZE), most_bytes=LEAST_BYTES - 1) == []
    few = ranges(sequence(CHUNK_SIZE), most_bytes=LEAST_BYTES)
    assert max(length for _, length in few) == LEAST_BYTES
    assert sum(length for _, length in few) == SIZE - LEAST_BYTES


def test_a_run_begins_anywhere() -> None:
    start = 20 * CHUNK_SIZE
    found = ranges([(0, CHUNK_SIZE), *sequence(CHUNK_SIZE, start)])
    assert found[0] == (start + 2 * CHUNK_SIZE, 2 * CHUNK_SIZE)
    assert sum(length for _, length in found) == SIZE - start - 2 * CHUNK_SIZE


@given(
    st.lists(st.tuples(st.integers(0, 3 * SIZE), st.integers(0, 2 * CHUNK_SIZE)), max_size=30),
    st.integers(1, SIZE),
)
def test_ranges_are_never_empty_outside_the_file_or_too_long(
    reads: list[tuple[int, int]], size: int
) -> None:
    for offset, length in ranges([(min(at, size - 1), count) for at, count in reads], size):
        assert 0 < length <= MOST_BYTES
        assert offset > 0
        assert offset + length <= size
