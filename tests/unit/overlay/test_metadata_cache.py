from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from snapshotter.overlay.directory_lower import DirectoryLower
from snapshotter.overlay.merged import Merged
from snapshotter.overlay.metadata_cache import CAPACITY, MetadataCache
from tests.support.vfs_paths import find


@pytest.fixture
def cache() -> MetadataCache:
    return MetadataCache()


def test_holds_what_was_found_and_nothing_else(tmp_path: Path, cache: MetadataCache) -> None:
    (tmp_path / "file").write_bytes(b"")
    os.mknod(tmp_path / "whiteout", stat.S_IFCHR, 0)
    lower = DirectoryLower(tmp_path, immutable=True, cache=cache, layer=1)
    for _ in range(2):
        lower.lookup(b"", b"file")
        lower.lookup(b"", b"whiteout")
        with pytest.raises(FileNotFoundError):
            lower.lookup(b"", b"absent")
        with pytest.raises(NotADirectoryError):
            lower.lookup(b"file", b"x")
    assert len(cache) == 1
    assert (cache.counters.hits, cache.counters.misses, cache.counters.saved_stats) == (1, 7, 1)
    lower.close()


def test_a_mutable_lower_does_not_use_it(tmp_path: Path, cache: MetadataCache) -> None:
    (tmp_path / "file").write_bytes(b"")
    lower = DirectoryLower(tmp_path, cache=cache)
    lower.lookup(b"", b"file")
    (tmp_path / "file").write_bytes(b"longer")
    assert lower.lookup(b"", b"file").attr.size == 6
    assert len(cache) == cache.counters.misses == 0
    lower.close()


def test_is_bounded_and_forgets_the_longest_unused(tmp_path: Path) -> None:
    lower = DirectoryLower(tmp_path)
    attr = lower.getattr(b"")
    cache = MetadataCache()
    for number in range(CAPACITY):
        cache.put(1, b"%d" % number, attr)
    assert cache.get(1, b"0") == attr
    cache.put(1, b"one more", attr)
    assert len(cache) == CAPACITY
    assert cache.get(1, b"0") == attr
    assert cache.get(1, b"1") is None
    lower.close()


def test_can_be_switched_off(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = MetadataCache(enabled=False)
    lower = DirectoryLower(tmp_path, immutable=True, cache=cache, layer=1)
    lower.lookup(b"", b"file")
    lower.lookup(b"", b"file")
    assert (len(cache), cache.counters.hits, cache.counters.misses) == (0, 0, 2)
    lower.close()


def test_layers_do_not_share_paths(tmp_path: Path, cache: MetadataCache) -> None:
    lowers = []
    for layer, size in ((1, 10), (2, 20)):
        (tmp_path / str(layer) / "dir").mkdir(parents=True)
        (tmp_path / str(layer) / "dir" / f"file{layer}").write_bytes(bytes(size))
        lowers.append(
            DirectoryLower(tmp_path / str(layer), immutable=True, cache=cache, layer=layer)
        )
    fs = Merged(lowers)
    assert fs.getattr(find(fs, b"dir/file1")).size == 10
    assert fs.getattr(find(fs, b"dir/file2")).size == 20
    for lower in lowers:
        lower.close()
