"""Partial files: their maps never promise what is not there, whatever stops them."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from snapshotter.digest import sha256
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.paths import Paths
from snapshotter.store import chunk_table
from snapshotter.store import partial as partial_module
from snapshotter.store.descriptors import Descriptors
from snapshotter.store.objects import Objects
from snapshotter.store.partial import PartialFile, Partials
from tests.support.scratch import scratch_directory

SIZE = 2 * CHUNK_SIZE + 100
CONTENT = bytes(range(256)) * (SIZE // 256) + b"z" * (SIZE % 256)
PIECES = [CONTENT[at : at + CHUNK_SIZE] for at in range(0, SIZE, CHUNK_SIZE)]
TABLE = chunk_table.encode([sha256(piece) for piece in PIECES], SIZE)
NAME = ContentName(sha256(TABLE), SIZE)


@pytest.fixture
def descriptors():
    opened = Descriptors()
    yield opened
    opened.close()


@pytest.fixture
def partials(paths: Paths, descriptors: Descriptors):
    opened = Partials(paths, descriptors=descriptors)
    yield opened
    opened.close()


@pytest.fixture
def objects(paths: Paths):
    opened = Objects(paths, on_arrival=lambda _: None)
    yield opened
    opened.close()


def fill(file: PartialFile) -> PartialFile:
    for index, piece in enumerate(PIECES):
        file.write_chunk(index, piece)
    return file


def test_a_new_file_has_nothing_and_reads_nothing(partials: Partials) -> None:
    file = partials.create(NAME, TABLE)
    assert file.missing(0, SIZE) == [0, 1, 2]
    assert file.read(0, 1) is None
    assert file.read(SIZE - 1, 1) is None
    assert not file.is_complete


@pytest.mark.parametrize(
    ("offset", "length", "chunks"),
    [
        (0, 1, [0]),
        (CHUNK_SIZE - 1, 1, [0]),
        (CHUNK_SIZE - 1, 2, [0, 1]),
        (CHUNK_SIZE, CHUNK_SIZE, [1]),
        (SIZE - 1, 10_000_000, [2]),
        (SIZE, 1, []),
        (0, 0, []),
        (-1, 1, []),
    ],
)
def test_which_chunks_a_range_needs(
    partials: Partials, offset: int, length: int, chunks: list[int]
) -> None:
    assert partials.create(NAME, TABLE).missing(offset, length) == chunks


def test_a_range_is_read_when_its_chunks_are_here(partials: Partials) -> None:
    file = partials.create(NAME, TABLE)
    file.write_chunk(2, PIECES[2])
    assert file.read(2 * CHUNK_SIZE + 50, 1000) == CONTENT[2 * CHUNK_SIZE + 50 :]
    assert file.read(2 * CHUNK_SIZE - 1, 2) is None
    file.write_chunk(1, bytearray(PIECES[1]))
    assert file.read(2 * CHUNK_SIZE - 1, 2) == CONTENT[2 * CHUNK_SIZE - 1 : 2 * CHUNK_SIZE + 1]


def test_a_table_of_other_content_is_refused_and_makes_nothing(
    paths: Paths, partials: Partials
) -> None:
    with pytest.raises(CorruptError):
        partials.create(NAME, TABLE[:-1] + b"\0")
    assert os.listdir(paths.partial) == []


def test_a_chunk_of_another_length_is_refused(partials: Partials) -> None:
    file = partials.create(NAME, TABLE)
    with pytest.raises(InvalidInputError):
        file.write_chunk(2, PIECES[0])
    assert file.missing(0, SIZE) == [0, 1, 2]


def test_what_was_written_is_found_again_by_another_process(
    paths: Paths, partials: Partials
) -> None:
    partials.create(NAME, TABLE).write_chunk(1, PIECES[1])
    descriptors = Descriptors()
    successor = Partials(paths, descriptors=descriptors)
    file = successor.load(NAME)
    assert file is not None
    assert file.missing(0, SIZE) == [0, 2]
    assert file.read(CHUNK_SIZE, CHUNK_SIZE) == PIECES[1]
    assert file.digests == [sha256(piece) for piece in PIECES]
    descriptors.close()
    successor.close()


@pytest.mark.parametrize("call", ["pwrite data", "pwrite map"])
def test_a_write_that_fails_leaves_the_chunk_missing(
    partials: Partials, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = partials.create(NAME, TABLE)
    real = os.pwrite

    def fail(descriptor: int, data: bytes, offset: int) -> int:
        if (len(data) > 1) == (call == "pwrite data"):
            raise OSError(errno.ENOSPC, "full")
        return real(descriptor, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="full"):
            file.write_chunk(0, PIECES[0])
    assert file.missing(0, 1) == [0]
    again = partials.load(NAME)
    assert again is not None
    assert again.missing(0, 1) == [0]
    file.write_chunk(0, PIECES[0])
    assert file.read(0, 10) == PIECES[0][:10]


@pytest.mark.parametrize("fails_at", range(1, 4))
def test_a_creation_that_fails_leaves_nothing(
    paths: Paths, partials: Partials, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    real = os.open

    def fail(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise OSError(errno.ENOSPC, "full")
        return real(path, flags, mode, dir_fd=dir_fd)

    with monkeypatch.context() as patched:
        patched.setattr(partial_module.os, "open", fail)
        with pytest.raises(OSError, match="full"):
            partials.create(NAME, TABLE)
    assert os.listdir(paths.partial / NAME.directory) == []
    assert partials.load(NAME) is None


@pytest.mark.parametrize("suffix", ["", ".table", ".map"])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_a_damaged_file_is_not_taken_up(
    paths: Paths, partials: Partials, suffix: str, damage: str
) -> None:
    fill(partials.create(NAME, TABLE))
    victim = paths.partial / (NAME.path + suffix)
    if damage == "missing":
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size - 1)
    assert partials.load(NAME) is None
    assert partials.create(NAME, TABLE).missing(0, SIZE) == [0, 1, 2]


def test_a_complete_file_becomes_the_object_itself(
    paths: Paths, partials: Partials, objects: Objects
) -> None:
    file = fill(partials.create(NAME, TABLE))
    assert file.is_complete
    inode = (paths.partial / NAME.path).stat().st_ino
    file.promote(objects)
    there = paths.objects / NAME.path
    assert there.stat().st_ino == inode
    assert stat.S_IMODE(there.stat().st_mode) == 0o444
    assert there.read_bytes() == CONTENT
    assert os.listdir(paths.partial / NAME.directory) == []
    assert partials.load(NAME) is None
    with pytest.raises(FileNotFoundError):
        file.read(5, 10)


def test_creating_anew_never_touches_the_inode_of_an_object(
    paths: Paths, partials: Partials, objects: Objects
) -> None:
    fill(partials.create(NAME, TABLE))
    partials.link(NAME, objects)  # and the process ends before the partial file is forgotten
    os.unlink(paths.partial / (NAME.path + ".map"))
    partials.create(NAME, TABLE)
    assert (paths.objects / NAME.path).read_bytes() == CONTENT


def test_what_became_an_object_is_removed_at_the_start(
    paths: Paths, partials: Partials, objects: Objects
) -> None:
    fill(partials.create(NAME, TABLE))
    partials.drop_unfinished()
    assert partials.load(NAME) is not None
    partials.link(NAME, objects)
    partials.drop_unfinished()
    assert os.listdir(paths.partial / NAME.directory) == []
    assert (paths.objects / NAME.path).read_bytes() == CONTENT
    partials.forget(NAME)  # nothing is left to remove


def test_dropping_all(paths: Paths, partials: Partials) -> None:
    partials.create(NAME, TABLE)
    partials.drop_all()
    assert os.listdir(paths.partial) == []
    assert partials.load(NAME) is None


class PartialFileMachine(RuleBasedStateMachine):
    """Writes, failures and restarts in any order, against a set of chunk numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = ExitStack()
        self.root = self.scratch.enter_context(scratch_directory())
        self.paths = Paths(self.root, self.root)
        self.here: set[int] = set()
        self._open()

    def _open(self) -> None:
        self.descriptors = Descriptors(limit=1)  # every access opens its file anew
        self.partials = Partials(self.paths, descriptors=self.descriptors)

    @initialize()
    def create(self) -> None:
        self.file = self.partials.create(NAME, TABLE)
        self.here = set()

    @rule(index=st.integers(0, 2))
    def write(self, index: int) -> None:
        self.file.write_chunk(index, PIECES[index])
        self.here.add(index)

    @rule(index=st.integers(0, 2), is_data=st.booleans())
    def fail_to_write(self, index: int, is_data: bool) -> None:
        real = os.pwrite

        def torn(descriptor: int, data: bytes, offset: int) -> int:
            if (len(data) > 1) == is_data:
                real(descriptor, data[: len(data) // 2], offset)
                raise OSError(errno.EIO, "torn")
            return real(descriptor, data, offset)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "pwrite", torn)
            try:
                self.file.write_chunk(index, PIECES[index])
            except OSError:
                assert index not in self.here
            else:
                assert index in self.here

    @rule()
    def restart(self) -> None:
        self.descriptors.close()
        self.partials.close()
        self._open()
        file = self.partials.load(NAME)
        assert file is not None
        self.file = file

    @precondition(lambda self: len(self.here) == len(PIECES))
    @rule()
    def promote(self) -> None:
        objects = Objects(self.paths, on_arrival=lambda _: None)
        self.file.promote(objects)
        objects.close()
        assert (self.paths.objects / NAME.path).read_bytes() == CONTENT
        self.create()

    @rule(offset=st.integers(0, SIZE - 1), length=st.integers(1, SIZE))
    def read(self, offset: int, length: int) -> None:
        end = min(offset + length, SIZE)
        needed = set(range(offset // CHUNK_SIZE, (end - 1) // CHUNK_SIZE + 1))
        expected = CONTENT[offset:end] if needed <= self.here else None
        assert self.file.read(offset, length) == expected

    @invariant()
    def says_what_is_missing(self) -> None:
        if hasattr(self, "file"):
            assert self.file.missing(0, SIZE) == sorted(set(range(3)) - self.here)
            assert self.file.is_complete == (len(self.here) == 3)

    def teardown(self) -> None:
        self.descriptors.close()
        self.partials.close()
        self.scratch.close()


TestPartialFileMachine = PartialFileMachine.TestCase
TestPartialFileMachine.settings = settings(max_examples=15, stateful_step_count=20)


def test_what_a_making_that_was_cut_short_left_is_removed(paths: Paths, partials: Partials) -> None:
    name = NAME
    partials.create(name, TABLE)
    whole = set(os.listdir(paths.partial / name.directory))
    base = paths.partial / name.directory / ("0" * 62 + ".2000000")
    for leftover in (base, Path(f"{base}.map"), Path(f"{paths.partial / name.path}.table.new")):
        leftover.write_bytes(b"x")
    partials.drop_unfinished()
    assert set(os.listdir(paths.partial / name.directory)) == whole
    assert partials.load(name) is not None
