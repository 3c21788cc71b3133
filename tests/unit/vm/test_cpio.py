from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from snapshotter.vm import cpio
from snapshotter.vm.cpio import CpioEntry
from tests.support.debian_image import required_tool


def test_another_program_unpacks_the_same(tmp_path: Path) -> None:
    entries = [
        cpio.directory("bin"),
        cpio.regular("bin/tool", b"#!/bin/sh\n", executable=True),
        cpio.regular("bin/odd size", b"12345"),
        cpio.regular("empty", b""),
        CpioEntry(b"link", stat.S_IFLNK | 0o777, b"bin/tool"),
    ]
    busybox = required_tool("busybox", "busybox-static")
    subprocess.run([busybox, "cpio", "-i"], input=cpio.encode(entries), cwd=tmp_path, check=True)
    assert (tmp_path / "bin/tool").read_bytes() == b"#!/bin/sh\n"
    assert (tmp_path / "bin/tool").stat().st_mode == stat.S_IFREG | 0o755
    assert (tmp_path / "bin/odd size").read_bytes() == b"12345"
    assert (tmp_path / "empty").stat().st_size == 0
    assert os.readlink(tmp_path / "link") == "bin/tool"
    assert sorted(os.listdir(tmp_path)) == ["bin", "empty", "link"]


def test_every_part_is_aligned_and_numbers_are_hex() -> None:
    archive = cpio.encode([cpio.regular("f", b"x" * 17)])
    assert len(archive) % 4 == 0
    assert archive[:6] == b"070701"
    assert int(archive[54:62], 16) == 17
    assert archive[110:112] == b"f\0"
    assert archive[112:129] == b"x" * 17
    assert archive[129:132] == b"\0\0\0"
    assert b"TRAILER!!!\0" in archive


def test_what_is_too_large_is_refused() -> None:
    class Endless(bytes):
        def __len__(self) -> int:
            return 1 << 32

    with pytest.raises(ValueError, match="4 GiB"):
        cpio.encode([CpioEntry(b"big", stat.S_IFREG | 0o644, Endless())])
