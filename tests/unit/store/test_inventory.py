from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshotter.digest import sha256
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.store import chunk_table
from snapshotter.store.inventory import find_object_fault, find_partial_fault, list_files


def put(directory: Path, body: bytes) -> ContentName:
    pieces = [body[at : at + CHUNK_SIZE] for at in range(0, len(body), CHUNK_SIZE)]
    name = chunk_table.content_name([sha256(piece) for piece in pieces], len(body))
    (directory / name.directory).mkdir(exist_ok=True)
    (directory / name.path).write_bytes(body)
    return name


def put_partial(directory: Path, body: bytes, present: bytes) -> ContentName:
    name = put(directory, body)
    pieces = [body[at : at + CHUNK_SIZE] for at in range(0, len(body), CHUNK_SIZE)]
    table = chunk_table.encode([sha256(piece) for piece in pieces], len(body))
    Path(f"{directory / name.path}.table").write_bytes(table)
    Path(f"{directory / name.path}.map").write_bytes(present)
    return name


def test_files_are_listed_with_what_they_take(tmp_path: Path) -> None:
    small, large = put(tmp_path, b"x" * 10), put_partial(tmp_path, b"y" * (CHUNK_SIZE + 1), b"\1\1")
    os.utime(tmp_path / small.path, (0, 1_000_000))
    os.link(tmp_path / small.path, tmp_path / "elsewhere")
    (tmp_path / small.directory / "stranger").write_bytes(b"")
    found = {file.name: file for file in list_files(tmp_path)}
    assert found.keys() == {small, large}
    assert (found[small].arrived_at_s, found[small].links) == (1_000_000, 2)
    assert found[large].links == 1
    assert found[large].disk_bytes >= CHUNK_SIZE + 1
    assert list(list_files(tmp_path / "nothing")) == []


@pytest.mark.parametrize("size", [1, CHUNK_SIZE, CHUNK_SIZE + 1])
def test_faults_of_objects_are_found(tmp_path: Path, size: int) -> None:
    name = put(tmp_path, b"z" * size)
    path = tmp_path / name.path
    assert find_object_fault(tmp_path, name) is None
    path.write_bytes(b"z" * (size - 1) + b"a")
    assert find_object_fault(tmp_path, name) == "its bytes are not those of its name"
    path.write_bytes(b"z" * (size + 1))
    assert find_object_fault(tmp_path, name) == f"it has {size + 1} bytes"
    path.unlink()
    assert find_object_fault(tmp_path, name) is None


def test_faults_of_partial_files_are_found_by_the_chunk_table(tmp_path: Path) -> None:
    body = b"1" * CHUNK_SIZE + b"2" * CHUNK_SIZE + b"3"
    name = put_partial(tmp_path, body, b"\1\0\1")
    path = tmp_path / name.path
    assert find_partial_fault(tmp_path, name) is None
    path.write_bytes(body.replace(b"2", b"0"))  # is not here yet
    assert find_partial_fault(tmp_path, name) is None
    os.truncate(path, 2 * CHUNK_SIZE)
    assert find_partial_fault(tmp_path, name) == "its chunk 2 is not what the chunk table says"
    Path(f"{path}.table").write_bytes(b"?")
    assert "chunk table" in (find_partial_fault(tmp_path, name) or "")
    Path(f"{path}.map").unlink()
    assert find_partial_fault(tmp_path, name) is None
