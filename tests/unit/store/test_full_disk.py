"""A disk that is nearly full: what is served, what is kept, and what is evicted for it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog

from snapshotter.errors import CorruptError, DiskFullError, UnavailableError
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.paths import Paths
from snapshotter.store import reclaim
from snapshotter.store.space import Space, is_in_use
from snapshotter.telemetry import Counters
from tests.support.fake_cache_server import fake_cache_server
from tests.support.trio_tests import trio_test
from tests.unit.store.conftest import OpenStore
from tests.unit.store.test_store import content, until

FLOOR = 16 << 20
SIZES = (7, CHUNK_SIZE, 3 * CHUNK_SIZE + 1, 9 * CHUNK_SIZE)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how much is free on a disk of 1 TiB."""
    now = {"bytes": 0}

    def stat(_descriptor: int) -> os.statvfs_result:
        return os.statvfs_result((1, 1, 1 << 40, now["bytes"], now["bytes"], 9, 9, 9, 0, 255))

    monkeypatch.setattr(os, "fstatvfs", stat)
    return lambda count: now.update(bytes=count)


@trio_test
async def test_below_the_floor_everything_is_served_and_nothing_kept(
    socket_path: Path,
    paths: Paths,
    open_store: OpenStore,
    counters: Counters,
    free: Callable[[int], None],
) -> None:
    free(FLOOR - 1)
    with structlog.testing.capture_logs() as logs:
        async with (
            fake_cache_server(socket_path) as server,
            open_store(min_free_bytes=FLOOR) as store,
        ):
            for size in SIZES:
                body = content(size, size)
                name = server.add(body)
                with pytest.raises(DiskFullError, match="bytes of free space are missing"):
                    await store.materialise(name)
                if size > 8 * CHUNK_SIZE:
                    await store.prepare_partial(name)
                assert store.read_ready(name, 0, 1) is None
                for offset, length in ((0, 100), (size // 2, CHUNK_SIZE), (size - 1, 9)):
                    await store.ensure(name, offset, length)
                    assert store.read_ready(name, offset, length) == body[offset:][:length]
                assert not store.has(name)
            assert all(not files for _, _, files in os.walk(paths.objects))
            assert all(not files for _, _, files in os.walk(paths.partial))
            assert counters.snapshot()["unkept_reads"] == 3 * len(SIZES)
            # What has no other way of being served may use what is to be left free.
            vital = server.add(b"metadata image")
            await store.materialise(vital, is_vital=True)
            assert store.has(vital)
            free(2 * FLOOR)
            await store.materialise(name)
            assert store.has(name)
    told = [entry["event"] for entry in logs if entry["log_level"] == "error"]
    assert told == ["disk is full: content is served without being kept"]
    assert "there is room again; content is kept" in [entry["event"] for entry in logs]


@trio_test
async def test_unkept_content_is_verified_and_its_failures_are_told(
    socket_path: Path, open_store: OpenStore, free: Callable[[int], None]
) -> None:
    free(0)
    async with fake_cache_server(socket_path) as server, open_store(min_free_bytes=FLOOR) as store:
        bad, away = server.add(content(100)), server.add(content(9 * CHUNK_SIZE))
        server.corrupt(bad.content_id)
        with pytest.raises(CorruptError):
            await store.ensure(bad, 0, 100)
        assert store.read_ready(bad, 0, 100) is None
        server.stop()
        with pytest.raises(UnavailableError):
            await store.ensure(away, 0, 100)


@trio_test
async def test_memory_for_unkept_content_is_bounded(
    socket_path: Path,
    open_store: OpenStore,
    free: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("snapshotter.store.unkept._MOST_BYTES", 2 * CHUNK_SIZE)
    free(0)
    async with fake_cache_server(socket_path) as server, open_store(min_free_bytes=FLOOR) as store:
        name = server.add(content(9 * CHUNK_SIZE))
        for index in range(9):
            await store.ensure(name, index * CHUNK_SIZE, 1)
        held = [store.read_ready(name, index * CHUNK_SIZE, 1) for index in range(9)]
        assert [byte is not None for byte in held] == [False] * 7 + [True] * 2


@trio_test
async def test_room_is_made_of_the_oldest_that_nobody_has_open(
    socket_path: Path,
    paths: Paths,
    open_store: OpenStore,
    free: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reclaim, "_PAUSE_S", 0)
    free(2 * FLOOR)
    async with (
        fake_cache_server(socket_path) as server,
        open_store(min_free_bytes=FLOOR, settle_s=0.0) as store,
    ):
        told: list[ContentName] = []
        store.on_complete = told.append
        names = [server.add(content(CHUNK_SIZE, seed)) for seed in range(8)]
        for age, name in enumerate(names):
            await store.materialise(name)
            os.utime(paths.objects / name.path, (0, 1000 + age))
        with (paths.objects / names[1].path).open("rb") as held:
            told.clear()
            free(FLOOR - 1)  # one byte and a quarter of the floor are wanted: five files of 1 MiB
            with pytest.raises(DiskFullError):
                await store.materialise(server.add(b"wanted"))
            await until(lambda: sum(store.has(name) for name in names) <= 3)
            await until(lambda: bool(told))
            free(2 * FLOOR)
            assert [name for name in names if store.has(name)] == [names[1], *names[6:]]
            assert held.read(3) == content(3, 1)
        await store.materialise(server.add(b"wanted"))


def test_a_small_disk_leaves_a_twentieth_free(tmp_path: Path, free: Callable[[int], None]) -> None:
    free(1 << 40)
    space = Space(0, min_free_bytes=1 << 39)
    assert space.floor_bytes == (1 << 40) // 20
    assert space.missing_bytes() == 0
    assert Space(0, min_free_bytes=0).floor_bytes == 1 << 20


def test_whether_a_file_is_in_use(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        assert not is_in_use("file", directory)
        assert not is_in_use("gone", directory)
        with path.open("rb") as file:
            assert is_in_use("file", directory)
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert is_in_use("file", directory)  # mapped still
        mapping.close()
        assert not is_in_use("file", directory)
    finally:
        os.close(directory)
