"""One piece of work under way, for all who wait for it: what single flight is made of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable

import trio

from snapshotter.errors import SnapshotterError, UnavailableError


class Flight:
    """Ends once, well or with an error that every waiter gets. Lives on one trio loop."""

    __slots__ = ("_ended", "_error")

    def __init__(self) -> None:
        self._ended = trio.Event()
        self._error: SnapshotterError | None = None

    @property
    def has_ended(self) -> bool:
        """Whether ``end`` was called."""
        return self._ended.is_set()

    def end(self, error: SnapshotterError | None = None) -> None:
        """Lets the waiters go on, with ``error`` if there is one; later calls change nothing."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    async def wait(self) -> None:
        """Returns at the end, or raises its error. Cancelling a waiter leaves the work alone."""
        if not self._ended.is_set():
            await self._ended.wait()
        if self._error is not None:
            # An instance for each waiter: raising one in many tasks would grow its traceback.
            raise type(self._error)(*self._error.args) from self._error


class Flights:
    """What is under way, by key. ``run`` is the owner of the tasks that ``start`` makes."""

    def __init__(self) -> None:
        self._flights: dict[Hashable, Flight] = {}
        self._nursery: trio.Nursery | None = None

    def get(self, key: Hashable) -> Flight | None:
        """The flight of ``key``, if there is one."""
        return self._flights.get(key)

    def take_off(self, key: Hashable) -> Flight:
        """A new flight; whoever takes it off also calls ``land``."""
        flight = self._flights[key] = Flight()
        return flight

    def land(self, key: Hashable, flight: Flight, error: SnapshotterError | None = None) -> None:
        """Ends a flight; the next one who asks for ``key`` begins anew."""
        if self._flights.get(key) is flight:
            del self._flights[key]
        flight.end(error)

    def start(self, key: Hashable, work: Callable[[], Awaitable[None]]) -> Flight:
        """The flight of ``key``, or a new one that a task of its own carries to its end."""
        flight = self._flights.get(key)
        if flight is None:
            if self._nursery is None:
                raise UnavailableError(f"{key}: the store is not running")
            flight = self.take_off(key)
            self._nursery.start_soon(self._carry, key, flight, work)
        return flight

    async def _carry(
        self, key: Hashable, flight: Flight, work: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            await work()
        except SnapshotterError as error:
            self.land(key, flight, error)
        else:
            self.land(key, flight)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carries flights until cancelled; those still in the air then end with an error."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None
            for flight in self._flights.values():
                flight.end(UnavailableError("the store is stopping; try again"))
            self._flights.clear()
