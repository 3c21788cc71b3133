"""Roots and stores for the tests of this package."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
import trio

from snapshotter.config import Config
from snapshotter.paths import Paths
from snapshotter.store.store import Store
from snapshotter.telemetry import Counters

OpenStore = Callable[..., AbstractAsyncContextManager[Store]]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "root", tmp_path / "run")


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "cache.sock"


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def open_store(paths: Paths, socket_path: Path, counters: Counters) -> OpenStore:
    """Opens and runs a store on ``paths``; settings as keywords."""

    @asynccontextmanager
    async def opened(**settings: object) -> AsyncIterator[Store]:
        config = Config(cache_socket=str(socket_path), **settings)
        with Store(paths, config, counters=counters) as store:
            async with trio.open_nursery() as nursery:
                await nursery.start(store.run)
                yield store
                nursery.cancel_scope.cancel()

    return opened
