"""Ranges of files, read or mapped: the same bytes either way."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.store.reading import read_range

BODY = os.urandom(300_000)


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(BODY)
    opened = os.open(path, os.O_RDWR)
    yield opened
    os.close(opened)


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 131_072, 299_999, 300_000, 300_001])
@pytest.mark.parametrize("length", [1, 4096, 65_535, 65_536, 200_000, 1 << 20])
def test_a_range_is_what_the_file_has_there(descriptor: int, offset: int, length: int) -> None:
    assert read_range(descriptor, offset, length) == BODY[offset : offset + length]


def test_a_range_outlives_its_descriptor(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(BODY)
    opened = os.open(tmp_path / "file", os.O_RDONLY)
    data = read_range(opened, 5, 100_000)
    os.close(opened)
    assert data == BODY[5:100_005]


def test_what_the_file_no_longer_has_is_an_error_of_who_writes_it(descriptor: int) -> None:
    data = read_range(descriptor, 0, 200_000)
    os.truncate(descriptor, 0)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there, pytest.raises(OSError, match="Bad address"):
        os.writev(here.fileno(), [b"head", data])
