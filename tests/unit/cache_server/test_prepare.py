"""Preparing images: shared work, cancellation, what is known afterwards, failures."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from cache_server.library import Library
from cache_server.prepare import Preparer
from cache_server.sources.reference import Reference
from cache_server.sources.source import Source
from snapshotter.cache_v1.protocol import Open, Prepare, Prepared
from snapshotter.errors import (
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from tests.support.held_source import HeldSource
from tests.support.images import MANIFEST, Image, Layer, descriptor, file

LAYERS = [Layer([file(f"f{n}", bytes([n]) * 2_000_000)], compression="none") for n in range(3)]


Scenario = Callable[[Preparer, HeldSource, Library], Coroutine[Any, Any, None]]


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario with a preparer over a fresh library."""

    async def play(scenario: Scenario) -> None:
        source = HeldSource(Image(LAYERS))
        with Library(tmp_path / "root") as library:

            def open_source(reference: Reference, authfile: str | None) -> Source:
                return source

            preparer = Preparer(library, open_source, workers=1, queue=1)
            try:
                await scenario(preparer, source, library)
            finally:
                await preparer.aclose()

    return lambda scenario: asyncio.run(asyncio.wait_for(play(scenario), 30))


def request(image: str = "localhost/a:v1", **fields: Any) -> Prepare:
    return Prepare(image=image, architecture="amd64", **fields)


def test_two_askers_share_one_download(run: Callable[[Scenario], None]) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        first = preparer.start(request())
        await source.reached.wait()
        second = preparer.start(request())
        source.release.set()
        assert await first.task == await second.task
        assert sorted(source.opened) == sorted(x.descriptor["digest"] for x in LAYERS)

    run(scenario)


def test_different_requests_share_layers(run: Callable[[Scenario], None]) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        preparer._slots = asyncio.Semaphore(2)
        first = preparer.start(request())
        await source.reached.wait()
        second = preparer.start(request("localhost/b:v1"))
        await source.resolved_twice.wait()
        source.release.set()
        await asyncio.gather(first.task, second.task)
        assert len(source.opened) == len(LAYERS)
        found = library.find_image(first.task.result().image_handle)
        assert found is not None
        assert set(found.references) == {"docker://localhost/a:v1", "docker://localhost/b:v1"}

    run(scenario)


def test_asker_that_leaves_does_not_end_the_work(run: Callable[[Scenario], None]) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        preparation = preparer.start(request())

        async def wait() -> Prepared:
            return await asyncio.shield(preparation.task)

        waiter = asyncio.create_task(wait())
        await source.reached.wait()
        waiter.cancel()
        await asyncio.wait({waiter})
        source.release.set()
        assert (await preparation.task).metadata_image is not None

    run(scenario)


def test_known_image_is_answered_without_its_source(run: Callable[[Scenario], None]) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        source.release.set()
        first = await preparer.start(request()).task
        assert await preparer.start(request()).task == first
        assert source.resolved == 1
        assert await preparer.start(request(refresh=True)).task == first
        assert source.resolved == 2
        assert len(source.opened) == len(LAYERS)

    run(scenario)


def test_documents_are_told_to_who_asks_and_follow_the_registry(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        source.release.set()
        first = await preparer.start(request()).task
        assert first.documents is None
        asked = Open(handle=first.image_handle, architecture="amd64", documents=True)
        assert (await preparer.open(asked)).documents == [source.image.manifest.decode()]
        manifest = source.image.manifest
        listed = {**descriptor(manifest, MANIFEST), "platform": source.image.platform}
        source.index = json.dumps({"manifests": [listed]}).encode()
        assert (await preparer.start(request(refresh=True)).task) == first
        texts = [source.index.decode(), manifest.decode()]
        assert (await preparer.open(asked)).documents == texts

    run(scenario)


def test_refresh_follows_a_moved_tag(run: Callable[[Scenario], None]) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        source.release.set()
        old = await preparer.start(request()).task
        source.image = Image(LAYERS[:2])
        new = await preparer.start(request(refresh=True)).task
        assert new.image_handle != old.image_handle
        assert len(source.opened) == len(LAYERS)
        assert await preparer.start(request()).task == new
        handle = Open(handle=old.image_handle, architecture="amd64")
        assert await preparer.open(handle) == old

    run(scenario)


def test_refresh_of_a_known_image_fails_when_its_source_is_away(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        source.release.set()
        await preparer.start(request()).task
        source.error = UnavailableError("away")
        with pytest.raises(UnavailableError, match="away"):
            await preparer.start(request(refresh=True)).task
        await preparer.start(request()).task

    run(scenario)


def test_merge_is_left_out_and_made_up_for_later(run: Callable[[Scenario], None]) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        source.release.set()
        bare = await preparer.start(request(merge=False)).task
        assert bare.metadata_image is None
        stored = library.find_image(bare.image_handle)
        assert stored is not None
        assert stored.prepared.metadata_image is None
        opened = await preparer.open(Open(handle=bare.image_handle, architecture="amd64"))
        assert opened.metadata_image is not None
        assert opened.image_handle == bare.image_handle

    run(scenario)


def test_broken_download_fails_all_askers_and_the_next_try_works(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        first, second = preparer.start(request()), preparer.start(request())
        await source.reached.wait()
        source.error = UnavailableError("cut")
        source.release.set()
        for preparation in (first, second):
            with pytest.raises(UnavailableError, match="cut"):
                await preparation.task
        source.error = None
        await preparer.start(request()).task

    run(scenario)


def test_retry_gets_no_error_of_what_the_failed_prepare_left_behind(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        loop = asyncio.get_running_loop()
        ends = [loop.create_future() for _ in LAYERS]
        digests = [layer.descriptor["digest"] for layer in LAYERS]
        source.held_apart = dict(zip(digests, ends, strict=True))
        failing = preparer.start(request())
        await source.reached_all.wait()
        ends[0].set_exception(UnavailableError("cut"))
        with pytest.raises(UnavailableError, match="cut"):
            await failing.task
        left_behind = list(preparer._layers._tasks.values())
        assert len(left_behind) == len(LAYERS) - 1
        again = preparer.start(request())
        await source.resolved_twice.wait()
        for end in ends[1:]:
            end.set_exception(UnavailableError("cut later"))
        await asyncio.wait(left_behind)
        source.release.set()
        assert (await again.task).metadata_image is not None

    run(scenario)


def test_failed_prepare_leaves_no_attempt_that_begins_later(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        preparer._slots = asyncio.Semaphore(2)
        first = preparer.start(request())
        await source.reached.wait()
        second = preparer.start(request("localhost/b:v1"))
        await source.resolved_twice.wait()
        source.error = UnavailableError("cut")
        source.release.set()
        for preparation in (first, second):
            with pytest.raises(UnavailableError, match="cut"):
                await preparation.task
        while flights := list(preparer._layers._tasks.values()):
            await asyncio.wait(flights)
        assert len(source.opened) <= 2 * len(LAYERS)

    run(scenario)


def test_wrong_blob_is_corrupt_and_nothing_is_known(run: Callable[[Scenario], None]) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        source.release.set()
        wrong = Layer([file("f", b"x" * 600_000)], compression="none")
        wrong.blob = wrong.blob[:-1] + b"\1"
        source.image = Image([wrong])
        with pytest.raises(CorruptError):
            await preparer.start(request()).task
        assert library.layer(wrong.diff_id) is None
        assert library.images() == []

    run(scenario)


def test_closing_ends_downloads_under_way(run: Callable[[Scenario], None]) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        preparation = preparer.start(request())
        await source.reached.wait()
        await preparer.aclose()
        assert preparation.task.cancelled()
        assert all(library.layer(layer.diff_id) is None for layer in LAYERS)

    run(scenario)


def test_too_many_waiting_images_are_busy(run: Callable[[Scenario], None]) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        held = [preparer.start(request(f"localhost/{n}:v1")) for n in range(2)]
        await source.reached.wait()
        with pytest.raises(BusyError):
            await preparer.start(request("localhost/2:v1")).task
        source.release.set()
        for preparation in held:
            await preparation.task

    run(scenario)


def test_progress_counts_blobs_of_missing_layers(run: Callable[[Scenario], None]) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        preparation = preparer.start(request())
        assert preparation.progress.phase == "resolve"
        await source.reached.wait()
        progress = preparation.progress
        assert progress.phase == "download"
        assert progress.total_bytes == sum(len(layer.blob) for layer in LAYERS)
        assert progress.layer in {layer.descriptor["digest"] for layer in LAYERS}
        source.release.set()
        await preparation.task
        assert preparation.progress.phase == "merge"

    run(scenario)


@pytest.mark.parametrize(
    "bad",
    [
        {"image": "oci:relative"},
        {"architecture": "x y"},
        {"architecture": ""},
        {"authfile": "relative"},
    ],
)
def test_bad_requests_are_refused_at_once(
    run: Callable[[Scenario], None], bad: dict[str, str]
) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        fields = {"image": "localhost/a", "architecture": "amd64", **bad}
        with pytest.raises(InvalidInputError):
            preparer.start(Prepare(**fields))

    run(scenario)


def test_open_of_what_was_never_prepared_is_not_found(run: Callable[[Scenario], None]) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        with pytest.raises(NotFoundError):
            await preparer.open(Open(handle="sha256:0", architecture="amd64"))

    run(scenario)


def test_work_alone_is_refused_while_an_image_is_prepared_and_holds_up_the_next(
    run: Callable[[Scenario], None],
) -> None:
    async def scenario(preparer: Preparer, source: HeldSource, library: Library) -> None:
        first = preparer.start(request())
        await source.reached.wait()
        with pytest.raises(BusyError, match="being prepared"):
            await preparer.run_alone(lambda: None)
        source.release.set()
        await first.task
        may_end = threading.Event()
        alone = asyncio.create_task(preparer.run_alone(may_end.wait))
        await asyncio.sleep(0)
        with pytest.raises(BusyError):
            await preparer.run_alone(lambda: None)
        second = preparer.start(request(refresh=True))
        known = preparer.start(request())
        assert (await known.task).image_handle == first.task.result().image_handle
        assert not second.task.done()
        may_end.set()
        assert await alone
        assert (await second.task).image_handle == first.task.result().image_handle

    run(scenario)
