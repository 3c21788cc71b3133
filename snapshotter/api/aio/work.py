"""Blocking work for the event loop, in threads: it ends when its asker is cancelled.

The work is a task of a group, which waits for its tasks whatever happens to it. So it is waited
for when the asker is cancelled by asyncio's own means too (``Task.cancel``, ``asyncio.timeout``),
which a shield of anyio's does not keep out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from snapshotter.api.cancelling import Cancellation
from snapshotter.api.options import ProgressCallback, PullOptions
from snapshotter.service.control import Progress

Result = TypeVar("Result")
Options = TypeVar("Options", bound=PullOptions)


class _Outcome(Generic[Result]):
    """What comes of the work: a result or an error."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.error: BaseException | None = None
        self.is_there = anyio.Event()

    async def get(self, work: Callable[[], Result]) -> None:
        """Does the work to its end, cancelled or not."""
        with anyio.CancelScope(shield=True):
            try:
                # A waiting command must never be what another's end waits for: no limit.
                limiter = anyio.CapacityLimiter(math.inf)
                self.results.append(await anyio.to_thread.run_sync(work, limiter=limiter))
            except BaseException as error:  # noqa: BLE001 - raised by the asker, out of the group
                self.error = error
        self.is_there.set()

    def take(self) -> Result:
        """The result; raises the error."""
        if self.error is not None:
            raise self.error
        return self.results[0]


async def in_thread(
    work: Callable[[Cancellation], Result], *, undo: Callable[[Result], object] | None = None
) -> Result:
    """The result of blocking ``work``; raises what it raises.

    When the asker is cancelled, the work is told by its Cancellation and waited for; a result that
    nobody is left to take is given to ``undo``, in a thread.
    """
    outcome: _Outcome[Result] = _Outcome()
    cancellation = Cancellation()
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(outcome.get, lambda: work(cancellation))
            try:
                await outcome.is_there.wait()
            finally:
                cancellation.cancel()
        await anyio.lowlevel.checkpoint_if_cancelled()
    except BaseException:
        if undo is not None and outcome.results:
            await to_its_end(lambda: undo(outcome.results[0]))
        raise
    return outcome.take()


async def to_its_end(work: Callable[[], Result]) -> Result:
    """The result of blocking ``work``, which is done to its end even if the asker is cancelled."""
    outcome: _Outcome[Result] = _Outcome()
    async with anyio.create_task_group() as group:
        group.start_soon(outcome.get, work)
    return outcome.take()


def relayed(options: Options) -> Options:
    """The options, with their callback called in the event loop's thread."""
    if "on_progress" not in options or (on_progress := options["on_progress"]) is None:
        return options
    changed = options.copy()
    changed["on_progress"] = _relay(on_progress)
    return changed


def _relay(on_progress: ProgressCallback) -> ProgressCallback:
    def tell(progress: Progress) -> None:
        anyio.from_thread.run_sync(on_progress, progress)

    return tell
