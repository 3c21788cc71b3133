"""How the asynchronous half ends what one of its threads waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from snapshotter.errors import UnavailableError


class Cancellation:
    """Given to work in a thread; ``cancel``, from another thread, makes that end soon."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: Callable[[], None] | None = None
        self._is_cancelled = False

    def check(self) -> None:
        """Raises UnavailableError once it was cancelled."""
        if self._is_cancelled:
            raise UnavailableError("it was cancelled")

    @contextmanager
    def ended_by(self, end: Callable[[], None]) -> Iterator[None]:
        """Within this block a cancellation calls ``end``, from another thread, and never after."""
        with self._lock:
            self.check()
            self._end = end
        try:
            yield
        finally:
            with self._lock:
                self._end = None

    def cancel(self) -> None:
        """Ends the work; done already or not."""
        with self._lock:
            self._is_cancelled = True
            if self._end is not None:
                self._end()
