from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from snapshotter.descriptor_file import DescriptorFile, copy_range
from snapshotter.names import ContentName
from snapshotter.vfs import Pending


class _Breaking(DescriptorFile):
    """Gives its first bytes, then an error; it has no descriptor to copy from."""

    def __init__(self, descriptor: int, good: int, error: Exception) -> None:
        super().__init__(descriptor)
        self._good, self._error = good, error

    def fileno(self):
        return None

    def read(self, size: int, offset: int) -> bytes:
        if offset >= self._good:
            raise self._error
        return super().read(min(size, self._good - offset), offset)


@pytest.fixture
def target(tmp_path: Path):
    file = DescriptorFile(os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT))
    yield file
    file.close()


ERRORS = [OSError(errno.EIO, "broken"), Pending(ContentName(bytes(32), 9), 4, 5)]


@pytest.mark.parametrize("error", ERRORS, ids=["EIO", "Pending"])
def test_a_partial_copy_says_what_was_written(
    tmp_path: Path, target: DescriptorFile, error: Exception
) -> None:
    (tmp_path / "source").write_bytes(b"123456789")
    source = _Breaking(os.open(tmp_path / "source", os.O_RDONLY), 4, error)
    assert target.copy_from(source, 0, 2, 9) == 4
    assert target.read(100, 0) == b"\0\0" + b"1234"
    with pytest.raises(type(error)):
        target.copy_from(source, 4, 0, 5)
    source.close()


def test_copies_in_the_kernel_and_stops_at_the_end(tmp_path: Path, target: DescriptorFile) -> None:
    (tmp_path / "source").write_bytes(b"123456789")
    source = DescriptorFile(os.open(tmp_path / "source", os.O_RDONLY))
    assert copy_range(source, 3, target.fileno(), 0, 100) == 6
    assert target.read(100, 0) == b"456789"
    source.close()


def test_allocating_tells_the_kernels_error(target: DescriptorFile) -> None:
    target.allocate(0, 0, 100)
    assert target.seek(0, os.SEEK_END) == 100
    with pytest.raises(OSError, match="fallocate") as caught:
        target.allocate(0, -1, 100)
    assert caught.value.errno == errno.EINVAL
