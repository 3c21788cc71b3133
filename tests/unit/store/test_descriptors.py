"""Open files: bounded, and never closed under a reader."""

from __future__ import annotations

import os

import pytest

from snapshotter.store.descriptors import Descriptors


def test_the_least_recently_used_is_closed(tmp_path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")
    files = Descriptors(limit=2)
    opens = 0

    def open_file() -> int:
        nonlocal opens
        opens += 1
        return os.open(path, os.O_RDONLY)

    files.get("a", open_file)
    evicted = files.get("b", open_file).descriptor
    files.get("a", open_file)
    files.get("c", open_file)
    assert (len(files), opens) == (2, 3)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(evicted)
    files.close()


def test_a_dropped_file_stays_open_while_it_is_used(tmp_path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")
    files = Descriptors()
    held = files.get("a", lambda: os.open(path, os.O_RDONLY))
    files.drop("a")
    assert len(files) == 0
    assert os.read(held.descriptor, 1) == b"x"
    descriptor = held.descriptor
    del held
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_closing_closes_at_once(tmp_path) -> None:
    files = Descriptors()
    held = files.get("a", lambda: os.open(tmp_path, os.O_RDONLY))
    descriptor = held.descriptor
    files.close()
    held.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_an_error_in_opening_passes_through() -> None:
    files = Descriptors()
    with pytest.raises(FileNotFoundError):
        files.get("a", lambda: os.open("/nowhere", os.O_RDONLY))
    assert len(files) == 0
