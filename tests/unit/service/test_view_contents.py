import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.digest import sha256
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.paths import Paths
from snapshotter.service.view_contents import ViewContents
from snapshotter.store import chunk_table
from snapshotter.store.descriptors import Descriptors
from snapshotter.store.objects import Objects
from snapshotter.store.partial import Partials
from snapshotter.vfs import File, Pending

SIZE = 6 * CHUNK_SIZE + 100
CONTENT = b"".join(bytes([number]) * CHUNK_SIZE for number in range(1, 7)) + b"z" * 100
PIECES = [CONTENT[at : at + CHUNK_SIZE] for at in range(0, SIZE, CHUNK_SIZE)]
TABLE = chunk_table.encode([sha256(piece) for piece in PIECES], SIZE)
LARGE = ContentName(sha256(TABLE), SIZE)
SMALL = ContentName(sha256(b"small"), 5)


class Kept:
    """What a store keeps, and a view's contents beside it."""

    def __init__(self, paths: Paths) -> None:
        self.descriptors = Descriptors()
        self.objects = Objects(paths, on_arrival=lambda _: None)
        self.partials = Partials(paths, descriptors=self.descriptors)
        self.contents = ViewContents(paths, large_file_bytes=CHUNK_SIZE)

    def close(self) -> None:
        self.contents.close()
        self.partials.close()
        self.objects.close()
        self.descriptors.close()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(Paths(tmp_path / "root", tmp_path / "run"))
    yield made
    made.close()


@pytest.fixture
def large(kept: Kept) -> Iterator[File]:
    file = kept.contents.open(LARGE)
    yield file
    file.close()


def wanted(file: File, size: int, offset: int) -> tuple[int, int]:
    with pytest.raises(Pending) as caught:
        file.read(size, offset)
    assert caught.value.content == LARGE
    return caught.value.offset, caught.value.size


def test_a_small_content_is_pending_until_it_is_an_object(kept: Kept) -> None:
    with pytest.raises(Pending) as caught:
        kept.contents.open(SMALL)
    assert (caught.value.content, caught.value.offset, caught.value.size) == (SMALL, 0, 5)
    kept.objects.publish(SMALL, b"small")
    file = kept.contents.open(SMALL)
    assert file.read(10, 1) == b"mall"
    file.close()


def test_a_large_content_is_asked_for_where_it_is_read(kept: Kept, large: File) -> None:
    assert wanted(large, 10, 5) == (0, 4 * CHUNK_SIZE)
    assert wanted(large, 10, 3 * CHUNK_SIZE + 1) == (3 * CHUNK_SIZE, 3 * CHUNK_SIZE + 100)
    assert wanted(large, 1 << 30, SIZE - 1) == (6 * CHUNK_SIZE, 100)
    assert large.read(10, SIZE) == large.read(0, 0) == b""


def test_chunks_are_read_as_soon_as_they_are_there_and_never_before(
    kept: Kept, large: File
) -> None:
    partial = kept.partials.create(LARGE, TABLE)
    assert wanted(large, 1, 0)[0] == 0
    partial.write_chunk(1, PIECES[1])
    assert large.read(100, CHUNK_SIZE) == PIECES[1][:100]
    assert large.fileno() is None
    assert wanted(large, 2, 2 * CHUNK_SIZE - 1)[0] == CHUNK_SIZE
    partial.write_chunk(2, PIECES[2])
    assert large.read(2, 2 * CHUNK_SIZE - 1) == b"\2\3"


def test_a_complete_content_is_read_from_its_object(kept: Kept, large: File) -> None:
    partial = kept.partials.create(LARGE, TABLE)
    for index, piece in enumerate(PIECES):
        partial.write_chunk(index, piece)
    assert large.read(SIZE, 0) == CONTENT
    partial.promote(kept.objects)
    descriptor = large.fileno()
    assert descriptor is not None
    assert os.pread(descriptor, 3, SIZE - 2) == b"zz"
    assert large.read(SIZE, 0) == CONTENT


def test_a_partial_file_in_the_place_of_one_that_was_dropped_is_found(
    kept: Kept, large: File
) -> None:
    kept.partials.create(LARGE, TABLE).write_chunk(0, PIECES[0])
    assert large.read(1, 0) == b"\1"
    kept.partials.create(LARGE, TABLE).write_chunk(3, PIECES[3])
    assert large.read(1, 3 * CHUNK_SIZE) == b"\4"
    assert wanted(large, 1, 0)[0] == 0


def test_content_has_no_holes_and_is_never_written(large: File) -> None:
    assert large.seek(5, os.SEEK_DATA) == 5
    assert large.seek(5, os.SEEK_HOLE) == SIZE
    with pytest.raises(OSError, match="behind the end") as caught:
        large.seek(SIZE, os.SEEK_DATA)
    assert caught.value.errno == errno.ENXIO
    for call in (lambda: large.write(b"x", 0), lambda: large.allocate(0, 0, 1)):
        with pytest.raises(OSError, match="open for reading"):
            call()
