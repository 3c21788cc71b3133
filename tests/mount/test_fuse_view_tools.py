"""Programs on a fuse view: what they write is there, as on a disk."""

import os
import sqlite3
import subprocess
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.support.compare_trees import compare_scans, scan_tree
from tests.support.debian_image import LocalImage
from tests.support.product import CacheServer, NewProduct

pytestmark = [pytest.mark.mount, pytest.mark.real, pytest.mark.timeout(240)]
FILES = 50


@pytest.fixture
def view(five: LocalImage, cache_server: CacheServer, new_product: NewProduct) -> Path:
    return new_product(server=cache_server.socket).mount(five.reference, "view", "--view", "fuse")


def run(*arguments: str | os.PathLike[str]) -> str:
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout


def test_tar_packs_and_unpacks_the_same_tree(view: Path, tmp_path: Path) -> None:
    run("tar", "--xattrs", "-C", view, "-cf", tmp_path / "keep.tar", "keep")
    (view / "again").mkdir()
    run("tar", "--xattrs", "-C", view / "again", "-xpf", tmp_path / "keep.tar")
    unpacked, packed = scan_tree(view / "again/keep"), scan_tree(view / "keep")
    # One of them has another name, which is not below it.
    whole = {path: replace(node, links=(), nlink=1) for path, node in packed.items()}
    alone = {path: replace(node, links=(), nlink=1) for path, node in unpacked.items()}
    assert compare_scans(whole, alone) == []


def test_sqlite_with_a_write_ahead_log_and_mmap(view: Path) -> None:
    with sqlite3.connect(view / "base.db") as base:
        assert base.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
        base.execute("PRAGMA mmap_size=1048576")
        base.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, body BLOB)")
    for number in range(FILES):
        with base:
            base.execute("INSERT INTO t VALUES (?, ?)", (number, bytes([number]) * 5000))
    reader = sqlite3.connect(view / "base.db")
    assert reader.execute("SELECT count(*), sum(length(body)) FROM t").fetchone() == (
        FILES,
        FILES * 5000,
    )
    assert reader.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    reader.close()
    base.close()


def churn(directory: str, number: int) -> None:
    """Creates, renames and removes files of its own among those of others."""
    for index in range(FILES):
        path = f"{directory}/{number}-{index}"
        with open(path, "x") as file:
            file.write(path)
        os.rename(path, path + ".moved")
        if index % 2:
            os.unlink(path + ".moved")
        else:
            os.replace(path + ".moved", f"{directory}/shared-{index}")


def test_four_processes_change_one_directory(view: Path) -> None:
    shared = view / "shared"
    shared.mkdir()
    with ProcessPoolExecutor(4, get_context("spawn")) as pool:
        list(pool.map(churn, [str(shared)] * 4, range(4)))
    names = sorted(path.name for path in shared.iterdir())
    assert names == sorted(f"shared-{index}" for index in range(0, FILES, 2))
    for path in shared.iterdir():
        index = path.name.removeprefix("shared-")
        assert path.read_text().endswith(f"-{index}")
