"""A store process whose store is a directory of originals, with delays and failures to order.

``python -m tests.support.gate_process ROOT ORIGINALS`` serves the real gate. ``ORIGINALS/ab/NAME``
holds what can be fetched; ``ORIGINALS/fetched`` gets a line for each fetch. While
``ORIGINALS/hold`` exists fetches wait, while ``ORIGINALS/fail`` exists they fail.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import trio

from snapshotter.config import load_config
from snapshotter.errors import UnavailableError
from snapshotter.kernel_view.content_store import TakeLater
from snapshotter.names import ContentName
from snapshotter.paths import Paths
from snapshotter.service import store_service
from snapshotter.telemetry import Counters, configure_logging

_POLL_S = 0.01


class DirectoryStore:
    """Single flight for whole objects; ranges of large ones are read from the original."""

    def __init__(self, paths: Paths, originals: Path) -> None:
        self._paths = paths
        self._originals = originals
        self._flights: dict[ContentName, trio.Event] = {}
        self._failures: dict[ContentName, str] = {}
        self._ranges: set[tuple[ContentName, int]] = set()
        self._nursery: trio.Nursery | None = None
        self.on_complete: Callable[[ContentName], None] | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def has(self, name: ContentName) -> bool:
        return (self._paths.objects / name.path).exists()

    def read_ready(self, name: ContentName, offset: int, length: int) -> bytes | None:
        path = self._paths.objects / name.path
        if not path.exists():
            if (name, offset) not in self._ranges:
                return None
            path = self._originals / name.path
        with path.open("rb") as file:
            return os.pread(file.fileno(), length, offset)

    def read_later(self, name: ContentName, offset: int, length: int, take: TakeLater) -> bool:
        return False

    async def materialise(self, name: ContentName, *, image: int = 0) -> None:
        if self.has(name):
            return
        flight = self._flights.get(name)
        if flight is None:
            flight = self._flights[name] = trio.Event()
            assert self._nursery is not None
            self._nursery.start_soon(self._fetch, name, image)
        await flight.wait()
        if not self.has(name):
            raise UnavailableError(self._failures.get(name, "gone"))

    async def _fetch(self, name: ContentName, image: int) -> None:
        try:
            await self._wait_and_note("object", name, image)
            content = (self._originals / name.path).read_bytes()
            arrival = self._paths.arrivals / name.path
            arrival.with_suffix(".new").write_bytes(content)
            arrival.with_suffix(".new").rename(arrival)
            os.link(arrival, self._paths.objects / name.path)
        except (OSError, UnavailableError) as error:
            self._failures[name] = str(error)
        finally:
            self._flights.pop(name).set()

    async def prepare_partial(self, name: ContentName, *, image: int = 0) -> None:
        await self._wait_and_note("table", name, image)

    async def ensure(self, name: ContentName, offset: int, length: int, *, image: int = 0) -> None:
        await self._wait_and_note("range", name, image)
        self._ranges.add((name, offset))

    async def settle(self) -> None:
        for arrival in self._paths.arrivals.glob("??/*"):
            arrival.unlink()

    async def _wait_and_note(self, kind: str, name: ContentName, image: int) -> None:
        with (self._originals / "fetched").open("a") as log:
            log.write(f"{kind} {name} {image}\n")
        while (self._originals / "hold").exists():  # noqa: ASYNC110 - another process removes it
            await trio.sleep(_POLL_S)
        if (self._originals / "fail").exists():
            raise UnavailableError("told to fail")


async def _run(root: Path, originals: Path) -> None:
    paths = Paths(root, root / "run")
    config = load_config(root / "config.toml")
    store = DirectoryStore(paths, originals)
    await store_service.serve(store, paths, config, Counters())


if __name__ == "__main__":
    configure_logging("store")
    sys.setswitchinterval(0.0001)
    trio.run(_run, Path(sys.argv[1]), Path(sys.argv[2]))
