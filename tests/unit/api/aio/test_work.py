"""Work in threads under both event loops, cancelled by anyio's means and by asyncio's own."""

import asyncio
import threading

import anyio
import pytest

from snapshotter.api.aio.work import in_thread, relayed, to_its_end
from snapshotter.api.cancelling import Cancellation
from snapshotter.errors import UnavailableError
from snapshotter.service.control import Progress

pytestmark = pytest.mark.parametrize("loop", ["asyncio", "trio"])


class Waiting:
    """Blocking work that waits until it is cancelled."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.ended = threading.Event()

    def do(self, cancellation: Cancellation) -> str:
        stop = threading.Event()
        with cancellation.ended_by(stop.set):
            self.began.set()
            stop.wait(60)
        self.ended.set()
        return "result"


def test_results_and_errors_come_back(loop: str) -> None:
    def fail(_: Cancellation) -> None:
        raise UnavailableError("it is gone")

    async def main() -> None:
        assert await in_thread(lambda _: 7) == 7
        assert await to_its_end(lambda: 8) == 8
        with pytest.raises(UnavailableError, match="gone"):
            await in_thread(fail)

    anyio.run(main, backend=loop)


def test_cancelled_work_is_ended_waited_for_and_undone(loop: str) -> None:
    work = Waiting()
    undone: list[str] = []

    async def main() -> None:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                await to_its_end(lambda: work.began.wait(60))
                group.cancel_scope.cancel()

            group.start_soon(cancel)
            try:
                await in_thread(work.do, undo=undone.append)
            finally:
                assert work.ended.is_set()
        assert group.cancel_scope.cancelled_caught
        assert undone == ["result"]

    anyio.run(main, backend=loop)


def test_work_is_done_to_its_end_in_a_cancelled_scope(loop: str) -> None:
    done: list[int] = []

    async def main() -> None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await to_its_end(lambda: done.append(1))
        assert done == [1]

    anyio.run(main, backend=loop)


def test_a_cancelled_task_of_asyncio_waits_too(loop: str) -> None:
    work = Waiting()
    undone: list[str] = []

    async def main() -> None:
        task = asyncio.create_task(in_thread(work.do, undo=undone.append))
        await asyncio.to_thread(work.began.wait, 60)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # again, while it waits for the work
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (work.ended.is_set(), undone) == (True, ["result"])

    if loop == "asyncio":
        anyio.run(main, backend=loop)


def test_progress_is_told_in_the_thread_of_the_loop(loop: str) -> None:
    told: list[tuple[Progress, int]] = []
    progress = Progress(phase="merge")

    async def main() -> None:
        options = relayed({"on_progress": lambda said: told.append((said, threading.get_ident()))})
        tell = options["on_progress"]
        assert tell is not None
        await in_thread(lambda _: tell(progress))
        assert relayed({"platform": "arm64"}) == {"platform": "arm64"}
        assert relayed({"on_progress": None}) == {"on_progress": None}

    anyio.run(main, backend=loop)
    assert told == [(progress, threading.get_ident())]
