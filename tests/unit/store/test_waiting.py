"""Reads that wait for chunks: each hears once, and as soon as it can."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from snapshotter.store.waiting import Chunk, WaitingReads

CHUNKS = 4


class Read:
    """Registers itself; keeps what it hears."""

    def __init__(self, reads: WaitingReads, first: int, end: int) -> None:
        self.first, self.end = first, end
        self.heard: list[str] = []
        self.last: Chunk | None = None
        self.is_taken = reads.add(first, end, self._answer, lambda: self.heard.append("refused"))

    def _answer(self, last: Chunk | None) -> None:
        self.last = last
        self.heard.append("answered")


def test_a_read_is_answered_with_the_chunk_that_came_last() -> None:
    present = bytearray(CHUNKS)
    reads = WaitingReads(present)
    reads.expect(1)
    reads.expect(2)
    read = Read(reads, 1, 3)
    present[2] = 1
    reads.arrived(2, memoryview(b"two"))
    assert read.heard == []
    present[1] = 1
    reads.arrived(1, memoryview(b"one"))
    assert read.last == (1, b"one")
    assert read.heard == ["answered"]


def test_what_is_here_is_answered_at_once_and_what_is_not_coming_never() -> None:
    reads = WaitingReads(bytearray([1, 0, 0, 0]))
    assert Read(reads, 0, 1).heard == ["answered"]
    assert not Read(reads, 0, 2).is_taken


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["expect", "bring", "fail", "read"]),
            st.integers(0, CHUNKS - 1),
            st.integers(1, CHUNKS),
        ),
        max_size=40,
    )
)
def test_each_read_hears_once_and_none_is_forgotten(steps: list[tuple[str, int, int]]) -> None:
    present = bytearray(CHUNKS)
    reads = WaitingReads(present)
    coming: set[int] = set()
    taken: list[Read] = []

    def end(index: int, *, is_brought: bool) -> None:
        if is_brought:
            present[index] = 1
            reads.arrived(index, memoryview(b"body"))
        reads.ended(index)
        coming.discard(index)

    for step, index, end_of_read in steps:
        if step == "expect" and not present[index]:
            coming.add(index)
            reads.expect(index)
        elif step in ("bring", "fail") and index in coming:
            end(index, is_brought=step == "bring")
        elif step == "read" and index < end_of_read:
            wanted = set(range(index, end_of_read))
            read = Read(reads, index, end_of_read)
            assert read.is_taken == wanted.issubset(coming | {i for i in wanted if present[i]})
            taken += [read] * read.is_taken
        for read in taken:
            is_here = all(present[read.first : read.end])
            assert read.heard in ([["answered"]] if is_here else [[], ["refused"]]) or (
                is_here and read.heard == ["refused"]  # before it was fetched another time
            )
    for index in list(coming):
        end(index, is_brought=False)
    assert all(len(read.heard) == 1 for read in taken)
