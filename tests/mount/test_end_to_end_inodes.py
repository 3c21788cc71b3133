"""Inode numbers behave as on a plain file system, and a view can be a lower itself."""

import os
import stat
from pathlib import Path

import pytest

from snapshotter.kernel_view import syscalls
from tests.support.debian_image import LocalImage
from tests.support.five_layers import MIDDLE_BYTES, noise
from tests.support.product import CacheServer, NewProduct, Product

pytestmark = [pytest.mark.mount, pytest.mark.real]


@pytest.fixture
def product(cache_server: CacheServer, new_product: NewProduct) -> Product:
    return new_product(server=cache_server.socket)


def identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def everything(view: Path) -> list[Path]:
    return [view, *view.rglob("*")]


def test_inode_numbers_are_unique_and_small_enough_for_every_language(
    five: LocalImage, product: Product
) -> None:
    view = product.mount(five.reference, "view")
    links: dict[tuple[int, int], int] = {}
    for path in everything(view):
        links[identity(path)] = links.get(identity(path), 0) + 1
        assert path.lstat().st_ino < 1 << 53
    shared = sorted(count for count in links.values() if count > 1)
    assert shared == [2, 2, 3]  # the hard links that the image has


def test_inode_numbers_survive_copy_up(five: LocalImage, product: Product) -> None:
    view = product.mount(five.reference, "view")
    path = view / "keep/middle"
    before = identity(path)
    with path.open("ab") as file:
        file.write(b"more")
        assert (os.fstat(file.fileno()).st_dev, os.fstat(file.fileno()).st_ino) == before
    assert identity(path) == before
    assert path.read_bytes() == noise(MIDDLE_BYTES, 3) + b"more"
    os.chown(view / "keep/large", 1, 1)
    moved = view / "keep/moved"
    directory = identity(view / "was-file")
    (view / "was-file").rename(moved)
    assert identity(moved) == directory


def test_inode_numbers_are_the_same_in_every_mount(five: LocalImage, product: Product) -> None:
    first, second = (product.mount(five.reference, name) for name in ("first", "second"))
    for path in everything(first):
        if not stat.S_ISDIR(path.lstat().st_mode):
            assert path.lstat().st_ino == (second / path.relative_to(first)).lstat().st_ino


def test_a_view_is_the_lower_of_another_overlay(five: LocalImage, product: Product) -> None:
    view = product.mount(five.reference, "view", "--read-only")
    upper, work, merged = (product.base / name for name in ("upper", "work", "merged"))
    for directory in (upper, work, merged):
        directory.mkdir()
    syscalls.mount(
        "overlay", merged, "overlay", 0, f"lowerdir={view},upperdir={upper},workdir={work}"
    )
    try:
        assert (merged / "keep/middle").read_bytes() == noise(MIDDLE_BYTES, 3)
        with (merged / "keep/chunk-and-one").open("r+b") as file:
            file.write(b"changed")
        assert (merged / "keep/chunk-and-one").read_bytes()[:8] == b"changed" + noise(8, 2)[7:8]
        assert (view / "keep/chunk-and-one").read_bytes()[:8] == noise(8, 2)
    finally:
        syscalls.umount(merged)
