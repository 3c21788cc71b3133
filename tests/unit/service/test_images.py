from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from snapshotter.cache_v1.protocol import MetadataImage, Prepared, Progress
from snapshotter.errors import BusyError, NotFoundError, UnavailableError, UnsupportedError
from snapshotter.names import ContentName
from snapshotter.platforms import host_architecture
from snapshotter.service.images import ImageCatalog, OnProgress, metadata_name
from snapshotter.store import images as records


def prepared(handle: str, architecture: str | None = None) -> Prepared:
    return Prepared(
        image_handle=handle,
        metadata_generation="1",
        digest="sha256:" + handle.encode().hex().zfill(64),
        architecture=architecture or host_architecture(),
        env={},
        entrypoint=None,
        cmd=None,
        config=None,
        totals=None,
        layers=[],
        metadata_image=MetadataImage("sha256:" + "ab" * 32, 4096),
    )


class FakeServer:
    """Answers prepare from a table, once ``gate`` is open; counts what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Prepared | Exception] = {}
        self.asked: list[str] = []
        self.authfiles: list[str | None] = []
        self.ensured: list[ContentName] = []
        self.gate = trio.Event()
        self.gate.set()

    async def prepare(
        self,
        image: str,
        *,
        architecture: str,
        refresh: bool = False,
        authfile: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Prepared:
        self.asked.append(image)
        self.authfiles.append(authfile)
        if on_progress is not None:
            on_progress(Progress(phase="resolve"))
        await self.gate.wait()
        answer = self.answers[image]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def open(
        self, *, handle: str | None, architecture: str, merge: bool, documents: bool
    ) -> Prepared:
        assert (documents, merge) == (True, False)
        texts = ["manifest"] if handle == "kept" else None
        return msgspec.structs.replace(prepared(str(handle)), documents=texts)

    async def ensure(self, name: ContentName) -> None:
        self.ensured.append(name)


def run(tmp_path: Path, server: FakeServer, use: Callable[[ImageCatalog], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                await use(ImageCatalog(tmp_path, server, server.ensure, nursery))

    trio.run(main)


def test_pull_has_the_metadata_image_here_and_records_it(tmp_path: Path) -> None:
    server = FakeServer()
    server.answers["a:1"] = prepared("h")

    async def use(catalog: ImageCatalog) -> None:
        assert catalog.find("a:1") is None
        record = await catalog.pull("a:1")
        assert (record.number, record.references) == (1, ["a:1"])
        assert server.ensured == [metadata_name(record.prepared)]
        assert catalog.find("a:1") == record
        assert records.load_all(tmp_path) == [record]

    run(tmp_path, server, use)


def test_same_image_keeps_its_record_and_its_newest_name_comes_last(tmp_path: Path) -> None:
    server = FakeServer()
    server.answers = {"a:1": prepared("h"), "a:2": prepared("h")}

    async def use(catalog: ImageCatalog) -> None:
        for name in ("a:1", "a:2", "a:1"):
            record = await catalog.pull(name)
        assert (record.number, record.references) == (1, ["a:2", "a:1"])
        assert catalog.all() == [record]

    run(tmp_path, server, use)


def test_documents_are_the_servers_and_their_absence_is_told(tmp_path: Path) -> None:
    server = FakeServer()
    server.answers = {"a": prepared("kept"), "b": prepared("old")}

    async def use(catalog: ImageCatalog) -> None:
        assert await catalog.documents(await catalog.pull("a")) == ["manifest"]
        with pytest.raises(UnsupportedError, match=r"image b: .* pull it once more"):
            await catalog.documents(await catalog.pull("b"))

    run(tmp_path, server, use)


def test_name_that_moved_leaves_the_older_image(tmp_path: Path) -> None:
    server = FakeServer()

    async def use(catalog: ImageCatalog) -> None:
        for handle in ("old", "new"):
            server.answers["a:1"] = prepared(handle)
            await catalog.pull("a:1")
        found = catalog.find("a:1")
        assert found is not None
        assert (found.handle, found.number) == ("new", 2)
        assert catalog.inspect("1").references == []
        assert catalog.find("old") is not None

    run(tmp_path, server, use)


def test_one_name_for_two_architectures(tmp_path: Path) -> None:
    server = FakeServer()

    async def use(catalog: ImageCatalog) -> None:
        server.answers["a:1"] = prepared("mine")
        await catalog.pull("a:1")
        server.answers["a:1"] = prepared("other", "riscv64/v1")
        await catalog.pull("a:1", "riscv64")
        mine, other = catalog.find("a:1"), catalog.find("a:1", "riscv64")
        assert mine is not None
        assert other is not None
        assert (mine.handle, other.handle) == ("mine", "other")

    run(tmp_path, server, use)


def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    server = FakeServer()
    server.answers = {"a": prepared("1"), "b": prepared("2")}

    async def first(catalog: ImageCatalog) -> None:
        await catalog.pull("a")

    async def second(catalog: ImageCatalog) -> None:
        assert catalog.find("a") is not None
        assert (await catalog.pull("b")).number == 2

    run(tmp_path, server, first)
    run(tmp_path, server, second)


def test_askers_of_one_pull_share_it_and_one_that_leaves_does_not_end_it(tmp_path: Path) -> None:
    server = FakeServer()
    server.answers["a"] = prepared("h")
    server.gate = trio.Event()

    async def use(catalog: ImageCatalog) -> None:
        seen: list[int] = []

        async def ask(scope: trio.CancelScope) -> None:
            with scope:
                seen.append((await catalog.pull("a")).number)

        scopes = [trio.CancelScope() for _ in range(3)]
        async with trio.open_nursery() as nursery:
            for scope in scopes:
                nursery.start_soon(ask, scope)
            await trio.testing.wait_all_tasks_blocked()
            scopes[0].cancel()
            await trio.testing.wait_all_tasks_blocked()
            server.gate.set()
        assert server.asked == ["a"]
        assert seen == [1, 1]

    run(tmp_path, server, use)


def test_progress_reaches_who_listens(tmp_path: Path) -> None:
    server = FakeServer()
    server.answers["a"] = prepared("h")

    async def use(catalog: ImageCatalog) -> None:
        said: list[Progress] = []
        await catalog.pull("a", on_progress=said.append)
        assert [progress.phase for progress in said] == ["resolve"]

    run(tmp_path, server, use)


def test_failed_pull_is_told_to_each_and_not_kept(tmp_path: Path) -> None:
    server = FakeServer()
    server.answers["a"] = UnavailableError("registry away")

    async def use(catalog: ImageCatalog) -> None:
        with pytest.raises(UnavailableError, match="registry away"):
            await catalog.pull("a")
        assert catalog.all() == []
        server.answers["a"] = prepared("h")
        assert (await catalog.pull("a")).number == 1

    run(tmp_path, server, use)


def test_image_whose_metadata_cannot_be_had_is_not_recorded(tmp_path: Path) -> None:
    server = FakeServer()
    server.answers["a"] = prepared("h")

    async def fail(name: ContentName) -> None:
        raise BusyError("store is busy")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            catalog = ImageCatalog(tmp_path, server, fail, nursery)
            with pytest.raises(BusyError):
                await catalog.pull("a")
            assert catalog.all() == []

    trio.run(main)


def test_known_image_needs_no_server_without_refresh(tmp_path: Path) -> None:
    server = FakeServer()
    server.answers["a"] = prepared("h")

    async def use(catalog: ImageCatalog) -> None:
        record = await catalog.pull("a")
        assert await catalog.pull("a", refresh=False) == record
        assert server.asked == ["a"]
        assert len(server.ensured) == 2

    run(tmp_path, server, use)


def test_inspect_finds_by_every_name_and_says_how_to_pull(tmp_path: Path) -> None:
    server = FakeServer()
    server.answers["a"] = prepared("h")

    async def use(catalog: ImageCatalog) -> None:
        record = await catalog.pull("a")
        for name in ("a", "h", record.prepared.digest or "", "1"):
            assert catalog.inspect(name) == record
        with pytest.raises(NotFoundError, match="snapshotter pull b"):
            catalog.inspect("b")

    run(tmp_path, server, use)


def test_pulls_with_different_credentials_are_different_pulls(tmp_path: Path) -> None:
    server = FakeServer()
    server.answers["a:1"] = prepared("h")
    server.gate = trio.Event()

    async def use(catalog: ImageCatalog) -> None:
        async def pull(authfile: str | None) -> None:
            await catalog.pull("a:1", authfile=authfile)

        async with trio.open_nursery() as nursery:
            for authfile in ("/one", "/one", "/two", None):
                nursery.start_soon(pull, authfile)
            await trio.testing.wait_all_tasks_blocked()
            server.gate.set()
        assert sorted(map(str, server.authfiles)) == ["/one", "/two", "None"]

    run(tmp_path, server, use)


def test_an_image_that_is_being_mounted_is_not_removed(tmp_path: Path) -> None:
    server = FakeServer()
    server.answers = {"a:1": prepared("h"), "a:2": prepared("h")}

    async def use(catalog: ImageCatalog) -> None:
        for name in ("a:1", "a:2"):
            record = await catalog.pull(name)
        with catalog.hold(record):
            assert await catalog.remove(record, "a:1") is False  # a name of several may go
            record = catalog.inspect("a:2")
            with pytest.raises(BusyError, match="being mounted"):
                await catalog.remove(record, "a:2")
            assert records.load_all(tmp_path) == catalog.all() != []
        assert await catalog.remove(record, "a:2") is True
        with pytest.raises(NotFoundError, match="snapshotter pull a:2"), catalog.hold(record):
            pass

    run(tmp_path, server, use)
