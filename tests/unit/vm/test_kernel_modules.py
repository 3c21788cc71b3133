from __future__ import annotations

import lzma
from pathlib import Path

import pytest
import zstandard

from snapshotter.errors import InvalidInputError, NotFoundError
from snapshotter.vm.kernel_modules import KernelModules


def module(depends: str) -> bytes:
    return b"\x7fELF\0license=GPL\0depends=" + depends.encode() + b"\0intree=Y\0"


@pytest.fixture
def modules(tmp_path: Path) -> KernelModules:
    base = tmp_path / "kernel"
    base.mkdir()
    (base / "erofs.ko.xz").write_bytes(lzma.compress(module("libcrc32c")))
    (base / "libcrc32c.ko").write_bytes(module("crc32c-intel,built_in"))
    (base / "crc32c-intel.ko.zst").write_bytes(zstandard.compress(module("")))
    (base / "one.ko").write_bytes(module("two"))
    (base / "two.ko").write_bytes(module("one"))
    (base / "torn.ko.xz").write_bytes(b"no xz at all")
    (base / "notes.kofi").write_bytes(b"")
    (tmp_path / "modules.builtin").write_text("kernel/lib/built-in.ko\n")
    return KernelModules(tmp_path)


def test_what_a_module_needs_comes_before_it_and_unpacked(modules: KernelModules) -> None:
    found = modules.closure(["erofs", "built_in", "crc32c_intel"])
    assert [each.name for each in found] == ["crc32c_intel", "libcrc32c", "erofs"]
    assert all(each.data.startswith(b"\x7fELF") for each in found)


def test_what_cannot_be_loaded_is_said(modules: KernelModules) -> None:
    with pytest.raises(NotFoundError, match="module virtiofs"):
        modules.closure(["virtiofs"])
    with pytest.raises(InvalidInputError, match="needs itself"):
        modules.closure(["one"])
    with pytest.raises(InvalidInputError, match=r"torn\.ko\.xz cannot be unpacked"):
        modules.closure(["torn"])
