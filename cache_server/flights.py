"""Single flight: work that several ask for at once is done once, and outlives any one asker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Flights(Generic[T]):
    """Work under way, by key. Lives on one event loop."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[T]] = {}

    def find(self, key: Hashable) -> asyncio.Task[T] | None:
        """The task that works on ``key`` now, if there is one."""
        return self._tasks.get(key)

    def join(self, key: Hashable, start: Callable[[], Coroutine[None, None, T]]) -> asyncio.Task[T]:
        """The task that works on ``key``, started here if there is none.

        Await it shielded (or by ``asyncio.wait``): cancelling it would cancel it for all.
        """
        task = self._tasks.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(start())
            self._tasks[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        return task

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way."""
        return not self._tasks

    async def aclose(self) -> None:
        """Cancels everything under way and waits for it to end."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, key: Hashable, task: asyncio.Task[T]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # seen, even if every asker has left
