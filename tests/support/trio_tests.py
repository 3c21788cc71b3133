"""Runs coroutine tests under trio, without a pytest plugin."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import trio
import trio.testing


def trio_test(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A coroutine function as a plain test with the same fixtures, bounded to 20 s."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            with trio.fail_after(20):
                await test(*args, **kwargs)

        trio.run(bounded)

    return run


def autojump_test(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The same on a clock that jumps ahead as soon as everybody only waits."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def call() -> None:
            await test(*args, **kwargs)

        trio.run(call, clock=trio.testing.MockClock(autojump_threshold=0.02))

    return run
