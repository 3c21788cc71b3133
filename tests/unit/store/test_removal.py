"""Eviction and the removal of corrupt content, with the real store."""

from __future__ import annotations

import os
from pathlib import Path

import trio
from msgspec.structs import replace

from snapshotter.cache_v1.protocol import MetadataImage
from snapshotter.digest import format_digest
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.paths import Paths
from snapshotter.store import images
from snapshotter.telemetry import Counters
from tests.support.fake_cache_server import fake_cache_server
from tests.support.trio_tests import trio_test
from tests.unit.store.conftest import OpenStore
from tests.unit.store.test_store import add_image, content

LARGE = 9 * CHUNK_SIZE


def spoil(path: Path, offset: int = 0) -> None:
    """Flips a byte behind the store's back."""
    os.chmod(path, 0o600)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


@trio_test
async def test_evicted_content_is_gone_and_fetched_again(
    paths: Paths, socket_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    async with fake_cache_server(socket_path) as server, open_store(settle_s=0.0) as store:
        names = [server.add(content(size, size)) for size in (5, 3 * CHUNK_SIZE, LARGE)]
        for name in names:
            await store.materialise(name)
        assert store.read_ready(names[2], 0, 1) is not None  # its descriptor is open now
        unknown = ContentName(b"u" * 32, 7)
        evicted = await store.evict([*names, unknown])
        assert (evicted.removed, evicted.kept) == (3, 1)
        assert LARGE + 3 * CHUNK_SIZE <= evicted.freed_bytes <= LARGE + 4 * CHUNK_SIZE
        assert counters.snapshot()["evicted_objects"] == 3
        for name in names:
            assert not store.has(name)
            assert store.read_ready(name, 0, 1) is None
            assert not (paths.partial / name.path).exists()
            await store.materialise(name)
            assert store.has(name)


@trio_test
async def test_open_files_outlive_their_eviction(
    paths: Paths, socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store(settle_s=0.0) as store:
        name = server.add(content(100))
        await store.materialise(name)
        with (paths.objects / name.path).open("rb") as file:
            assert (await store.evict([name])).removed == 1
            assert file.read() == content(100)


@trio_test
async def test_what_just_arrived_and_metadata_images_are_kept(
    paths: Paths, socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server:
        metadata, young = server.add(content(4096, 1)), server.add(content(10, 2))
        add_image(paths, 3, "h")
        record = images.load(paths.images, 3)
        assert record is not None
        image = MetadataImage(format_digest(metadata.content_id), metadata.size)
        prepared = replace(record.prepared, metadata_image=image)
        images.save(paths.images, replace(record, prepared=prepared))
        async with open_store(settle_s=3600.0) as store:
            await store.materialise(young)
            await store.materialise(metadata)
            assert (await store.evict([young])).kept == 1
            assert store.has(young)
        for name in (metadata, young):
            os.utime(paths.objects / name.path, (0, 0))
        async with open_store(settle_s=3600.0) as store:
            assert (await store.evict([young, metadata])).removed == 1
            assert store.has(metadata)
            assert not store.has(young)


@trio_test
async def test_a_large_file_is_not_evicted_while_it_fills(
    socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store(settle_s=0.0) as store:
        name = server.add(content(LARGE))
        await store.ensure(name, 0, 1)
        server.gate, server.arrived = trio.Event(), trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.ensure, name, CHUNK_SIZE, 1)
            await server.arrived.wait()
            assert (await store.evict([name])).kept == 1
            server.gate.set()
        for offset in (0, CHUNK_SIZE):
            assert store.read_ready(name, offset, 10) == content(LARGE)[offset:][:10]
        assert (await store.evict([name])).removed == 1
        assert store.read_ready(name, 0, 1) is None


@trio_test
async def test_only_what_is_corrupt_is_discarded(
    paths: Paths, socket_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        good, bad, short = (server.add(content(size, size)) for size in (50, 60, 3 * CHUNK_SIZE))
        for name in (good, bad, short):
            await store.materialise(name)
        assert await store.discard([good, bad, short, ContentName(b"u" * 32, 7)]) == []
        spoil(paths.objects / bad.path)
        os.truncate(paths.arrivals / short.path, 10)
        assert await store.discard([good, bad, short]) == [bad, short]
        assert counters.snapshot()["corrupt_objects"] == 2
        assert store.has(good)
        for name in (bad, short):
            assert not store.has(name)
            await store.materialise(name)
            assert store.read_ready(name, 0, name.size) == content(name.size, name.size)


@trio_test
async def test_a_corrupt_chunk_of_a_partial_file_discards_it(
    paths: Paths, socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        name = server.add(content(LARGE))
        await store.ensure(name, 2 * CHUNK_SIZE, 1)
        spoil(paths.partial / name.path, 0)  # a chunk that is not here: nothing to be wrong
        assert await store.discard([name]) == []
        spoil(paths.partial / name.path, 2 * CHUNK_SIZE + 5)
        assert await store.discard([name]) == [name]
        assert store.read_ready(name, 2 * CHUNK_SIZE, 1) is None
        await store.materialise(name)
        assert (paths.objects / name.path).read_bytes() == content(LARGE)
