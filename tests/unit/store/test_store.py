"""The store as the gate uses it, in front of a server that misbehaves on purpose."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from snapshotter.cache_v1.protocol import Prepared
from snapshotter.config import Config
from snapshotter.digest import format_digest, sha256
from snapshotter.errors import (
    BusyError,
    CorruptError,
    DiskFullError,
    InvalidInputError,
    NotFoundError,
    SnapshotterError,
    UnavailableError,
)
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.paths import Paths
from snapshotter.store import arrivals as arrivals_module
from snapshotter.store import images
from snapshotter.store.objects import Objects
from snapshotter.store.store import Store
from snapshotter.telemetry import Counters
from tests.support.fake_cache_server import fake_cache_server
from tests.support.trio_tests import trio_test
from tests.unit.store.conftest import OpenStore


def content(size: int, seed: int = 0) -> bytes:
    """``size`` bytes without repetition of whole chunks."""
    block = sha256(b"%d" % seed)
    return b"".join(
        (b"%d " % at + block)[:40].ljust(4096, b".") for at in range(0, size + 4096, 4096)
    )[:size]


def add_image(paths: Paths, number: int, handle: str) -> None:
    paths.images.mkdir(parents=True, exist_ok=True)
    prepared = Prepared(
        image_handle=handle,
        metadata_generation="1",
        digest=None,
        architecture="amd64",
        env={},
        entrypoint=None,
        cmd=None,
        config=None,
        totals=None,
        layers=[],
        metadata_image=None,
    )
    record = images.ImageRecord(number=number, references=[], pulled_at_s=0.0, prepared=prepared)
    images.save(paths.images, record)


async def until(is_so: Callable[[], bool]) -> None:
    """Waits for what a thread is doing; the test's own time limit ends it."""
    while not is_so():  # noqa: ASYNC110 - a thread sets no trio event
        await trio.sleep(0.001)


def object_bytes(paths: Paths, name: ContentName) -> bytes:
    return (paths.objects / name.path).read_bytes()


@pytest.mark.parametrize("size", [1, 65_536, 65_537, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE])
@trio_test
async def test_content_of_every_kind_becomes_an_object(
    paths: Paths, socket_path: Path, open_store: OpenStore, size: int
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        body = content(size)
        name = server.add(body)
        assert not store.has(name)
        assert store.read_ready(name, 0, 1) is None
        await store.materialise(name)
        assert store.has(name)
        assert object_bytes(paths, name) == body
        assert (paths.objects / name.path).samefile(paths.arrivals / name.path)
        assert store.read_ready(name, 0, size + 5) == body
        assert store.read_ready(name, size, 5) == b""
        requests = len(server.requests)
        await store.materialise(name)
        assert len(server.requests) == requests


@pytest.mark.parametrize("size", [10, 3 * CHUNK_SIZE, 9 * CHUNK_SIZE])
@trio_test
async def test_64_askers_make_one_fetch(
    socket_path: Path, open_store: OpenStore, size: int
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        name = server.add(content(size))
        async with trio.open_nursery() as nursery:
            for _ in range(64):
                nursery.start_soon(store.materialise, name)
                nursery.start_soon(store.ensure, name, 0, size)
        assert store.has(name)
        assert set(server.fetched.values()) == {1}


@trio_test
async def test_a_cancelled_asker_leaves_the_fetch_to_the_others(
    socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        server.gate = trio.Event()
        names = [server.add(content(size)) for size in (5, 3 * CHUNK_SIZE, 10 * CHUNK_SIZE)]
        for name in names:
            with trio.move_on_after(0):
                await store.materialise(name)
        async with trio.open_nursery() as others:
            for name in names:
                others.start_soon(store.materialise, name)
            await server.arrived.wait()
            server.gate.set()
        assert all(store.has(name) for name in names)
        assert set(server.fetched.values()) == {1}


@trio_test
async def test_what_is_asked_in_one_tick_goes_into_one_request(
    socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        names = [server.add(b"%d" % number) for number in range(300)]
        await trio.testing.wait_all_tasks_blocked()  # the workers stand ready
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(store.materialise, name)
        assert sorted(len(fetch.chunks) for fetch in server.fetches) == [44, 256]


@trio_test
async def test_neighbouring_chunks_travel_on_several_connections(
    socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        name = server.add(content(12 * CHUNK_SIZE))
        await store.ensure(name, CHUNK_SIZE, 4 * CHUNK_SIZE)
        asked = [[server.place(text, name) for text in fetch.chunks] for fetch in server.fetches]
        assert sorted(asked) == [[1, 3], [2, 4]]


@trio_test
async def test_small_files_overtake_the_chunks_of_large_ones(
    socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        large, small = server.add(content(20 * CHUNK_SIZE)), server.add(b"small")
        await store.prepare_partial(large)
        server.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.ensure, large, 0, large.size)
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(store.materialise, small)
            await trio.testing.wait_all_tasks_blocked(0.01)
            server.gate.set()
        asked = [fetch.chunks for fetch in server.fetches]
        assert asked.index([format_digest(small.content_id)]) <= 4
        assert sum(map(len, asked)) == 21


@pytest.mark.parametrize("size", [10, 100_000, 2 * CHUNK_SIZE, 9 * CHUNK_SIZE])
@trio_test
async def test_corrupt_bytes_are_an_error_for_all_and_never_kept(
    paths: Paths, socket_path: Path, open_store: OpenStore, size: int
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        body = content(size)
        name = server.add(body)
        last = body[(name.chunk_count - 1) * CHUNK_SIZE :]
        server.corrupt(sha256(last))
        errors = []

        async def ask() -> None:
            try:
                await store.materialise(name)
            except CorruptError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask)
        assert len(errors) == len({id(error) for error in errors}) == 8
        assert not store.has(name)
        assert os.listdir(paths.arrivals / "tmp") == []
        assert store.read_ready(name, size - 1, 1) is None
        server.add(body)
        await store.materialise(name)
        assert object_bytes(paths, name) == body


@trio_test
async def test_a_wrong_chunk_table_is_refused(socket_path: Path, open_store: OpenStore) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        name = server.add(content(9 * CHUNK_SIZE))
        lying = ContentName(name.content_id, name.size - 1)
        with pytest.raises(CorruptError):
            await store.prepare_partial(lying)
        with pytest.raises(InvalidInputError):
            await store.prepare_partial(server.add(b"a single chunk"))
        with pytest.raises(NotFoundError):
            await store.prepare_partial(ContentName(sha256(b"?"), name.size))


@trio_test
async def test_an_object_of_another_size_than_its_name_says_is_refused(
    socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        name = server.add(b"four")
        lying = ContentName(name.content_id, 5)
        with pytest.raises(CorruptError):
            await store.materialise(lying)
        assert not store.has(lying)


@trio_test
async def test_a_server_that_is_away_is_unavailable_until_it_is_back(
    socket_path: Path, open_store: OpenStore
) -> None:
    async with trio.open_nursery() as nursery, open_store() as store:
        names = [ContentName(sha256(b"x"), 1), ContentName(sha256(b"?"), 9 * CHUNK_SIZE)]
        for name in names:
            with pytest.raises(UnavailableError, match="cache-server serve"):
                await store.materialise(name)
        async with fake_cache_server(socket_path) as server:
            for body in (b"x", content(9 * CHUNK_SIZE)):
                name = server.add(body)
                await store.materialise(name)
                assert store.read_ready(name, 0, len(body)) == body
            server.stop()
        nursery.cancel_scope.cancel()


@trio_test
async def test_a_large_file_is_read_while_it_fills_and_then_becomes_an_object(
    paths: Paths, socket_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        body = content(9 * CHUNK_SIZE + 77)
        name = server.add(body)
        completed: list[ContentName] = []
        store.on_complete = completed.append
        await store.prepare_partial(name)
        assert store.read_ready(name, 0, 1) is None
        await store.ensure(name, 2 * CHUNK_SIZE - 1, 2)
        assert store.read_ready(name, 2 * CHUNK_SIZE - 1, 2) == body[2 * CHUNK_SIZE - 1 :][:2]
        assert store.read_ready(name, 3 * CHUNK_SIZE - 1, 2) is None
        assert len(server.fetched) <= 3  # the first chunk comes with the chunk table
        await store.ensure(name, name.size - 1, 100)
        assert store.read_ready(name, name.size - 10, 100) == body[-10:]
        assert completed == []
        await store.ensure(name, 0, name.size)
        assert completed == [name]
        assert store.has(name)
        assert object_bytes(paths, name) == body
        assert set(server.fetched.values()) == {1}
        assert counters.snapshot()["partials_completed"] == 1
        await store.ensure(name, name.size, 10)
        assert store.read_ready(name, 5, 10) == body[5:15]
        assert os.listdir(paths.partial / name.directory) == []


@trio_test
async def test_who_comes_when_a_partial_file_is_an_object_already_fetches_nothing(
    paths: Paths, socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        name = server.add(content(9 * CHUNK_SIZE))
        await store.materialise(name)
        await store._filling.ensure(name, 0, name.size, is_ahead=True)
        assert set(server.fetched.values()) == {1}
        assert os.listdir(paths.partial / name.directory) == []


@trio_test
async def test_a_sequential_reader_finds_what_it_did_not_ask_for(
    socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        body = content(20 * CHUNK_SIZE)
        name = server.add(body)
        for offset in range(0, 4 * CHUNK_SIZE, CHUNK_SIZE):
            if store.read_ready(name, offset, CHUNK_SIZE) is None:
                await store.ensure(name, offset, CHUNK_SIZE)
        await trio.testing.wait_all_tasks_blocked(0.01)
        ahead = sum(chunk in server.fetched for chunk in server.chunks)
        assert 6 <= ahead < 20
        assert server.fetched[list(server.chunks)[5]] == 1
        await store.ensure(name, 5 * CHUNK_SIZE, 9)  # it was sent; a thread may be taking it still
        assert server.fetched[list(server.chunks)[5]] == 1
        assert store.read_ready(name, 5 * CHUNK_SIZE, 9) == body[5 * CHUNK_SIZE :][:9]


@trio_test
async def test_nothing_is_fetched_ahead_where_it_is_set_to_nothing(
    socket_path: Path, open_store: OpenStore
) -> None:
    async with (
        fake_cache_server(socket_path) as server,
        open_store(fetch_ahead_bytes=0, large_file_bytes=CHUNK_SIZE) as store,
    ):
        name = server.add(content(8 * CHUNK_SIZE))
        await store.prepare_partial(name)
        for offset in range(CHUNK_SIZE, 5 * CHUNK_SIZE, CHUNK_SIZE):
            assert store.read_ready(name, offset, CHUNK_SIZE) is None
            await store.ensure(name, offset, CHUNK_SIZE)
        await trio.testing.wait_all_tasks_blocked(0.01)
        fetched = [chunk in server.fetched for chunk in server.chunks]
        assert fetched.count(True) == 4


@trio_test
async def test_a_read_of_what_is_on_its_way_is_answered_when_it_has_come(
    socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        body = content(9 * CHUNK_SIZE)
        name = server.add(body)
        await store.prepare_partial(name)
        got: list[bytes | None] = []

        def take(data: bytes | memoryview | None) -> None:
            got.append(None if data is None else bytes(data))

        assert not store.read_later(name, 3 * CHUNK_SIZE, 9, take)  # nobody asked for it
        server.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.ensure, name, 3 * CHUNK_SIZE, 2 * CHUNK_SIZE)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert store.read_later(name, 4 * CHUNK_SIZE - 5, 10, take)
            assert store.read_later(name, 3 * CHUNK_SIZE, 7, take)
            assert not store.read_later(name, 5 * CHUNK_SIZE - 1, 2, take)
            assert got == []
            server.gate.set()
        assert sorted(map(len, filter(None, got))) == [7, 10]
        assert body[4 * CHUNK_SIZE - 5 :][:10] in got
        assert body[3 * CHUNK_SIZE :][:7] in got


@trio_test
async def test_a_read_of_what_proves_corrupt_is_told_to_ask_for_it(
    socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        name = server.add(content(9 * CHUNK_SIZE))
        await store.prepare_partial(name)
        file = await store._filling.prepare(name)
        assert file is not None
        server.corrupt(file.digests[3])
        server.gate = trio.Event()
        got: list[object] = []

        async def fetch() -> None:
            with pytest.raises(CorruptError):
                await store.ensure(name, 2 * CHUNK_SIZE, 2 * CHUNK_SIZE)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert store.read_later(name, 3 * CHUNK_SIZE - 9, 99, got.append)
            server.gate.set()
        assert got == [None]
        assert not store.read_later(name, 3 * CHUNK_SIZE, 9, got.append)


@trio_test
async def test_a_partial_file_is_taken_up_by_the_next_process(
    socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server:
        body = content(9 * CHUNK_SIZE)
        name = server.add(body)
        async with open_store() as store:
            await store.ensure(name, 0, 5 * CHUNK_SIZE)
        server.requests.clear()
        async with open_store() as store:
            assert store.read_ready(name, 0, 10) is None
            await store.ensure(name, 0, 5 * CHUNK_SIZE)
            assert store.read_ready(name, 0, 5 * CHUNK_SIZE) == body[: 5 * CHUNK_SIZE]
            assert server.requests == []
            await store.ensure(name, 0, name.size)
            assert set(server.fetched.values()) == {1}


@trio_test
async def test_a_complete_partial_file_is_published_by_the_next_process(
    socket_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "no link today")

    async with fake_cache_server(socket_path) as server:
        name = server.add(content(9 * CHUNK_SIZE))
        async with open_store() as store:
            with monkeypatch.context() as patched:
                patched.setattr(Objects, "link", fail)
                with pytest.raises(SnapshotterError, match="no link today"):
                    await store.materialise(name)
            assert not store.has(name)
            assert store.read_ready(name, 5, 10) == content(name.size)[5:15]
        completed: list[ContentName] = []
        async with open_store() as store:
            store.on_complete = completed.append
            await store.materialise(name)
            assert store.has(name)
        assert completed == [name]
        assert set(server.fetched.values()) == {1}


@trio_test
async def test_after_a_reboot_nothing_unsettled_is_trusted(
    paths: Paths, socket_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_cache_server(socket_path) as server:
        settled, unsettled = server.add(b"settled"), server.add(b"unsettled")
        large = server.add(content(9 * CHUNK_SIZE))
        async with open_store() as store:
            await store.materialise(settled)
            await store.settle()
            assert not (paths.arrivals / settled.path).exists()
            await store.materialise(unsettled)
            await store.ensure(large, 0, CHUNK_SIZE)
        monkeypatch.setattr(arrivals_module, "read_boot_id", lambda: "another boot")
        async with open_store() as store:
            assert store.has(settled)
            assert not store.has(unsettled)
            await store.ensure(large, 0, CHUNK_SIZE)
            assert max(server.fetched.values()) == 2


@trio_test
async def test_a_full_disk_is_told_and_leaves_nothing_torn(
    socket_path: Path, tmp_path: Path
) -> None:
    root = tmp_path / "small"
    root.mkdir()
    options = "size=4m,mode=0700"
    subprocess.run(  # noqa: ASYNC221 - takes no time
        ["mount", "-t", "tmpfs", "-o", options, "none", root], check=True
    )
    try:
        config = Config(cache_socket=str(socket_path), min_free_bytes=0)
        with Store(Paths(root, tmp_path / "run"), config, counters=Counters()) as store:
            async with fake_cache_server(socket_path) as server, trio.open_nursery() as nursery:
                await nursery.start(store.run)
                names = [server.add(content(size)) for size in (CHUNK_SIZE * 5, CHUNK_SIZE * 9)]
                for name in names:
                    with pytest.raises(
                        DiskFullError, match=r"(No space left|are missing).*cache purge"
                    ):
                        await store.materialise(name)
                    assert not store.has(name)
                    await store.ensure(name, CHUNK_SIZE, 1)
                    assert (
                        store.read_ready(name, CHUNK_SIZE, 9) == content(name.size)[CHUNK_SIZE:][:9]
                    )
                assert os.listdir(root / "arrivals/tmp") == []
                os.truncate(root / "partial" / names[1].path, 0)
                small = server.add(b"small")
                await store.materialise(small)
                assert store.read_ready(small, 0, 10) == b"small"
                nursery.cancel_scope.cancel()
    finally:
        subprocess.run(["umount", "--lazy", root], check=True)  # noqa: ASYNC221 - takes no time


@trio_test
async def test_companions_become_objects_without_being_asked_for(
    paths: Paths, socket_path: Path, open_store: OpenStore, counters: Counters
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        add_image(paths, 7, "handle")
        asked = server.add(b"asked")
        near = [(server.add(b"near %d" % number), b"near %d" % number) for number in range(100)]
        server.companions = near
        await store.materialise(asked, image=7)
        (fetch,) = server.fetches
        assert (fetch.handle, fetch.companions_bytes) == ("handle", Config().companions_bytes)
        await until(lambda: counters.snapshot().get("companions", 0) == 100)
        assert all(object_bytes(paths, name) == body for name, body in near)
        assert len(server.fetches) == 1


@trio_test
async def test_one_who_waits_does_not_wait_for_companions(
    paths: Paths, socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        add_image(paths, 1, "handle")
        first, second, near = (server.add(body) for body in (b"1", b"2", b"near"))
        server.companions = [(near, b"near")]
        server.companion_gate = trio.Event()
        await store.materialise(first, image=1)
        # A second request for companions of the same image would only bring the same ones.
        await store.materialise(second, image=1)
        assert [fetch.handle for fetch in server.fetches] == ["handle", None]
        server.companion_gate.set()
        await store.materialise(near)


@trio_test
async def test_a_companion_serves_those_who_asked_for_it_meanwhile(
    paths: Paths, socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        add_image(paths, 1, "handle")
        asked, near = server.add(b"asked"), server.add(b"near")
        server.companions = [(near, b"near")]
        server.companion_gate = trio.Event()
        await store.materialise(asked, image=1)
        server.gate = trio.Event()  # the fetch of its own never gets an answer
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.materialise, near)
            await trio.testing.wait_all_tasks_blocked(0.01)
            server.companion_gate.set()
        assert object_bytes(paths, near) == b"near"
        server.gate.set()


@trio_test
async def test_an_image_that_the_server_forgot_costs_only_the_companions(
    paths: Paths, socket_path: Path, open_store: OpenStore
) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        add_image(paths, 1, "gone")
        add_image(paths, 2, "broken")
        (paths.images / "2.json").write_text("no record")
        names = [server.add(b"%d" % number) for number in range(4)]
        server.answer = lambda request: (
            [images_error()] if getattr(request, "handle", None) == "gone" else None
        )
        for image, name in enumerate(names):  # image 3 has no record
            await store.materialise(name, image=image)
        assert all(store.has(name) for name in names)


def images_error():
    from snapshotter.cache_v1.protocol import Error

    return Error(code="not_found", message="no such image")


@trio_test
async def test_a_chunk_of_two_files_serves_both(socket_path: Path, open_store: OpenStore) -> None:
    async with fake_cache_server(socket_path) as server, open_store() as store:
        shared, tail = content(CHUNK_SIZE), b"tail"
        first = server.add(shared * 9 + tail)  # the same chunk nine times over
        second = server.add(b"x" * CHUNK_SIZE * 9 + tail)
        small = server.add(tail)
        async with trio.open_nursery() as nursery:
            for name in (first, second, small):
                nursery.start_soon(store.materialise, name)
        assert store.read_ready(first, 0, first.size) == shared * 9 + tail
        assert store.read_ready(second, second.size - 4, 4) == tail
        assert store.read_ready(small, 0, 4) == tail


@trio_test
async def test_stopping_tells_those_who_wait(socket_path: Path, open_store: OpenStore) -> None:
    async with fake_cache_server(socket_path) as server, trio.open_nursery() as nursery:
        server.gate = trio.Event()
        names = [server.add(content(size)) for size in (5, 3 * CHUNK_SIZE, 10 * CHUNK_SIZE)]
        stopped = 0

        async def ask(store: Store, name: ContentName) -> None:
            nonlocal stopped
            with pytest.raises(UnavailableError, match="stopping"):
                await store.materialise(name)
            stopped += 1

        async with open_store() as store:
            for name in names:
                nursery.start_soon(ask, store, name)
            await server.arrived.wait()
            await trio.testing.wait_all_tasks_blocked(0.01)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert stopped == 3


@trio_test
async def test_there_is_only_one_writer(paths: Paths, open_store: OpenStore) -> None:
    async with open_store():
        with pytest.raises(BusyError, match="another store process"):
            Store(paths, Config(), counters=Counters())
    Store(paths, Config(), counters=Counters()).close()


@trio_test
async def test_arrivals_are_settled_in_time_and_errors_do_not_end_that(
    paths: Paths,
    socket_path: Path,
    open_store: OpenStore,
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = arrivals_module.sync_file_system, 0

    def fail_first(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError(errno.EIO, "broken disk")
        real(descriptor)

    monkeypatch.setattr(arrivals_module, "sync_file_system", fail_first)
    async with fake_cache_server(socket_path) as server, open_store(settle_s=0.0) as store:
        name = server.add(b"x")
        await store.materialise(name)
        await until(lambda: not (paths.arrivals / name.path).exists())
        assert store.has(name)
        assert counters.snapshot()["settle_failures"] == 1
