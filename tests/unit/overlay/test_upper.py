"""Descriptors and whiteouts of an upper; the rest is seen through the merged tree."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotter.overlay.upper import Upper
from snapshotter.vfs import Caller
from tests.support.overlay_trees import fill, merged, new_upper
from tests.support.scratch import scratch_directory
from tests.support.vfs_paths import VfsPaths


@pytest.fixture
def base() -> Iterator[Path]:
    with scratch_directory() as made:
        (made / "lower").mkdir()
        yield made


def test_whiteouts_are_links_to_one_while_there_can_be_more(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(base / "lower", dict.fromkeys("abcd", b"x"))
    upper, work = new_upper(base, "top")
    link = os.link

    def link_up_to_three(source: Any, target: Any, **at: Any) -> None:
        if os.stat(source, dir_fd=at["src_dir_fd"], follow_symlinks=False).st_nlink == 3:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
        link(source, target, **at)

    monkeypatch.setattr(os, "link", link_up_to_three)
    with merged([base / "lower"], upper, work) as fs:
        for name in (b"a", b"b", b"c", b"d"):
            VfsPaths(fs).unlink(name)
        assert VfsPaths(fs).listdir(b"") == []
    found = [(upper / name).lstat() for name in "abcd"]
    assert all(stat.S_ISCHR(status.st_mode) and not status.st_rdev for status in found)
    assert found[0].st_ino == found[1].st_ino != found[2].st_ino == found[3].st_ino
    assert os.listdir(work / "work") == []


def test_open_directories_are_bounded(base: Path) -> None:
    """Also those of directories that could not be removed, all of which somebody holds."""
    with merged([base / "lower"], *new_upper(base, "top")) as fs:
        caller, held = Caller(), []
        before = len(os.listdir("/proc/self/fd"))
        for number in range(300):
            held.append(fs.mkdir(fs.root, b"%d" % number, 0o755, caller).node)
            fs.create(held[-1], b"file", 0o644, caller, 0)[1].close()
        for number in range(300):
            with pytest.raises(OSError, match="not empty"):
                fs.rmdir(fs.root, b"%d" % number)
        assert len(os.listdir("/proc/self/fd")) - before <= 130


def test_new_files_inherit_nothing_from_the_work_directory(base: Path) -> None:
    upper, work = new_upper(base, "top")
    acl = bytes.fromhex("02000000") + b"".join(
        tag.to_bytes(2, "little") + (7).to_bytes(2, "little") + b"\xff" * 4 for tag in (1, 4, 32)
    )
    (work / "work").mkdir()
    os.setxattr(work / "work", "system.posix_acl_default", acl)
    top = Upper(upper, work)
    top.close()
    assert "system.posix_acl_default" not in os.listxattr(work / "work")
