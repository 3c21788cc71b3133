"""Keeps views at kernel speed: what became an object is read as one, what is idle is let go of."""

from __future__ import annotations

import math

import structlog
import trio

from snapshotter.errors import SnapshotterError
from snapshotter.paths import Paths
from snapshotter.service import views
from snapshotter.service.backing import Backing
from snapshotter.service.gate_mount import let_go_of_idle_nodes
from snapshotter.service.mounts import MountTable

_log = structlog.get_logger()
_DEBOUNCE_S = 0.5
_RESUBSCRIBE_S = 0.5
_REFRESH_DEADLINE_S = 60.0
_TIDY_INTERVAL_S = 5.0


class _Flag:
    """Set and awaited on one loop, and cleared again."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event = trio.Event()

    async def wait(self) -> None:
        await self._event.wait()


class Freshness:
    """Remounts kernel views, and the gate, when that is of use. On the daemon's trio loop."""

    def __init__(self, paths: Paths, backing: Backing, table: MountTable) -> None:
        self._paths = paths
        self._backing = backing
        self._table = table
        self._is_stale = _Flag()
        self._is_untidy = _Flag()

    async def run(self) -> None:
        """Refreshes views when the store says that content became an object; never returns.

        After mounts have gone, and after a refresh, what no view holds of the gate is let go of.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._listen)
            nursery.start_soon(self._tidy_gate)
            while True:
                await self._is_stale.wait()
                await trio.sleep(_DEBOUNCE_S)
                self._is_stale.clear()
                await self.refresh()

    def note_dropped(self) -> None:
        """A view has gone: what it held of the gate is idle."""
        self._is_untidy.set()

    async def refresh(self) -> None:
        """Lets idle files of all views resolve anew; what takes more than 60 s goes on behind."""
        mounts = [each.mount for each in self._table.all() if each.mount.view == "kernel"]
        with trio.move_on_after(_REFRESH_DEADLINE_S) as scope:
            await trio.to_thread.run_sync(views.refresh, mounts, abandon_on_cancel=True)
        if scope.cancelled_caught:
            _log.warning("refresh of views takes too long; it goes on", mounts=len(mounts))
        self._is_untidy.set()

    async def _listen(self) -> None:
        while True:
            try:
                await self._backing.wait_for_store(math.inf)
                async with self._backing.store.subscribe() as events:
                    self._is_stale.set()  # what was said while nobody listened
                    async for _ in events:
                        self._is_stale.set()
            except (SnapshotterError, OSError) as error:
                _log.warning("not listening to the store", error=str(error))
            await trio.sleep(_RESUBSCRIBE_S)

    async def _tidy_gate(self) -> None:
        while True:
            await self._is_untidy.wait()
            await trio.sleep(_TIDY_INTERVAL_S)
            self._is_untidy.clear()
            with trio.move_on_after(_REFRESH_DEADLINE_S):
                try:
                    await trio.to_thread.run_sync(
                        let_go_of_idle_nodes, self._paths, abandon_on_cancel=True
                    )
                except OSError as error:
                    _log.warning("idle nodes of the gate are kept", error=str(error))
