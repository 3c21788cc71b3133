"""Companions on their way to becoming objects: in memory, published a few at a time.

A companion that is asked for meanwhile is taken from here at once, so it is never fetched again.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import structlog
import trio

from snapshotter.cache_v1.connection import Body
from snapshotter.errors import SnapshotterError
from snapshotter.names import ContentName
from snapshotter.telemetry import Counters

_BATCH = 16
MAX_WAITING_BYTES = 32 << 20
"""More than this is not kept: companions are a guess and must not fill the memory."""

_log = structlog.get_logger()


class Companions:
    """Verified companions that are not objects yet. Lives on one trio loop.

    ``publish`` makes one an object and raises SnapshotterError.
    """

    def __init__(self, publish: Callable[[ContentName, Body], None], *, counters: Counters) -> None:
        self._publish = publish
        self._counters = counters
        self._waiting: dict[ContentName, Body] = {}
        self._waiting_bytes = 0
        self._came = trio.Event()

    def offer(self, name: ContentName, body: Body) -> None:
        """Takes a companion in, or drops it when too many wait."""
        if name in self._waiting or self._waiting_bytes + len(body) > MAX_WAITING_BYTES:
            return
        self._waiting[name] = body
        self._waiting_bytes += len(body)
        self._came.set()

    def find(self, name: ContentName) -> Body | None:
        """The bytes of a companion that is not known to be an object yet."""
        return self._waiting.get(name)

    async def run(self) -> None:
        """Publishes what is offered until cancelled."""
        while True:
            await self._came.wait()
            batch = list(islice(self._waiting.items(), _BATCH))
            if not batch:
                self._came = trio.Event()
                continue
            # On the loop, a millisecond's worth: a thread of five short system calls each would
            # pass the interpreter's lock to and fro and take twice the CPU time.
            self._publish_batch(batch)
            await trio.lowlevel.checkpoint()
            for name, body in batch:
                del self._waiting[name]
                self._waiting_bytes -= len(body)

    def _publish_batch(self, batch: list[tuple[ContentName, Body]]) -> None:
        total_bytes = 0
        for name, body in batch:
            try:
                self._publish(name, body)
            except SnapshotterError as error:
                self._counters.add("companion_failures")
                _log.warning("companion not kept", object=str(name), error=str(error))
                return  # a full disk refuses the rest of the batch too
            total_bytes += len(body)
        self._counters.add("companions", len(batch))
        self._counters.add("companion_bytes", total_bytes)
