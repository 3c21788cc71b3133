from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from snapshotter.overlay.directory_lower import DirectoryLower
from tests.support.scratch import scratch_directory


@pytest.fixture
def base():
    with scratch_directory() as made:
        (made / "lower" / "dir").mkdir(parents=True)
        (made / "lower" / "dir" / "file").write_bytes(b"inside")
        (made / "outside").mkdir()
        (made / "outside" / "file").write_bytes(b"secret")
        yield made


@pytest.fixture
def lower(base: Path):
    made = DirectoryLower(base / "lower")
    yield made
    made.close()


def test_a_link_in_place_of_a_directory_leads_nowhere(base: Path, lower: DirectoryLower) -> None:
    node = lower.lookup(b"dir", b"file").node
    os.rename(base / "lower" / "dir", base / "lower" / "was")
    os.symlink(base / "outside", base / "lower" / "dir")
    for call in (
        lambda: lower.lookup(b"dir", b"file"),
        lambda: lower.getattr(node),
        lambda: lower.open(node, os.O_RDONLY),
        lambda: lower.listxattr(node),
        lambda: lower.opendir(b"dir"),
    ):
        with pytest.raises(OSError) as caught:  # noqa: PT011 - any of these refuses it
            call()
        assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR)


def test_a_link_or_fifo_in_place_of_a_file_is_not_opened(base: Path, lower: DirectoryLower) -> None:
    file = base / "lower" / "dir" / "file"
    file.unlink()
    os.symlink(base / "outside" / "file", file)
    with pytest.raises(OSError, match="open") as caught:
        lower.open(b"dir/file", os.O_RDONLY)
    assert caught.value.errno == errno.ELOOP
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(OSError, match="no regular file"):
        lower.open(b"dir/file", os.O_RDONLY)


def test_dot_dot_does_not_lead_out(lower: DirectoryLower) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011
        lower.lookup(b"../outside", b"file")
    assert caught.value.errno == errno.EXDEV


def test_paths_longer_than_one_system_call_takes(base: Path, lower: DirectoryLower) -> None:
    name = b"n" * 200
    depth = 60
    at = os.open(base / "lower", os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open(b"end", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)
    deep = b"/".join([name] * depth)
    assert len(deep) > 12_000
    entry = lower.lookup(deep, b"end")
    assert lower.getattr(entry.node) == entry.attr
    lower.open(entry.node, os.O_RDONLY).close()


def test_a_metacopy_is_refused_instead_of_read_as_zeros(base: Path, lower: DirectoryLower) -> None:
    os.setxattr(base / "lower" / "dir" / "file", "trusted.overlay.metacopy", b"")
    with pytest.raises(OSError, match="metacopy") as caught:
        lower.open(b"dir/file", os.O_RDONLY)
    assert caught.value.errno == errno.EIO


def test_marks_are_told_and_not_shown_as_attributes(base: Path, lower: DirectoryLower) -> None:
    directory = base / "lower" / "dir"
    os.setxattr(directory, "trusted.overlay.opaque", b"y")
    os.setxattr(directory, "trusted.overlay.redirect", b"/else")
    os.setxattr(directory, "trusted.overlay.overlay.opaque", b"own")
    marks = lower.marks(b"dir")
    assert (marks.opaque, marks.redirect) == (True, b"/else")
    assert lower.listxattr(b"dir") == [b"trusted.overlay.opaque"]
    assert lower.getxattr(b"dir", b"trusted.overlay.opaque") == b"own"
