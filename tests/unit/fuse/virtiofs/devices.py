"""A device with a handler made for tests, on a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from snapshotter.errors import InvalidInputError
from snapshotter.fuse.virtiofs.device import Device
from snapshotter.fuse.virtiofs.queue import Handler, Queue
from snapshotter.fuse.virtiofs.vring import Chain
from tests.support.vhost_user_front_end import FrontEnd


class Upper:
    """Answers in capitals; what begins with ``later`` when ``release`` is called."""

    def __init__(self) -> None:
        self.deferred: list[tuple[Chain, Queue]] = []
        self.has_deferred = threading.Semaphore(0)

    def serve(self, chain: Chain, queue: Queue) -> int | None:
        request = b"".join(chain.readable)
        if request.startswith(b"refuse"):
            raise InvalidInputError("refused")
        if request.startswith(b"flaw"):
            raise KeyError("flaw")
        if request.startswith(b"later"):
            self.deferred.append((chain, queue))
            self.has_deferred.release()
            return None
        return self.answer(chain)

    def answer(self, chain: Chain) -> int:
        reply = b"".join(chain.readable).upper()
        chain.writable[0][: len(reply)] = reply
        return len(reply)

    def release(self, number: int) -> bool:
        """Answers the ``number``-th deferred request; whether it still wanted an answer."""
        chain, queue = self.deferred.pop(number)
        if not queue.claim(chain):
            return False
        queue.finish(chain, self.answer(chain))
        return True

    def abandon(self, chain: Chain) -> int:
        chain.writable[0][:4] = b"GONE"
        return 4


class Running:
    """A served connection. ``end`` is what ``serve`` raised, after ``join``.

    Errors are kept as text: their tracebacks would keep the guest's memory.
    """

    def __init__(self, handler: Handler) -> None:
        self.socket, self._other = socket.socketpair()
        self.reports: list[str] = []
        self.end = ""
        self._device = Device(self._other, handler, self._report)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._device.serve()
        except InvalidInputError as error:
            self.end = str(error)
        self._other.close()

    def _report(self, what: str, error: Exception) -> None:
        self.reports.append(f"{what}: {error!r}")

    def join(self) -> None:
        self.socket.close()
        self._thread.join(20)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def running(handler: Handler) -> Iterator[Running]:
    served = Running(handler)
    try:
        yield served
    finally:
        served.join()


@contextlib.contextmanager
def guest_of(handler: Handler, **options: object) -> Iterator[tuple[FrontEnd, Running]]:
    with running(handler) as served:
        guest = FrontEnd(served.socket, **options)  # type: ignore[arg-type]
        try:
            yield guest, served
        finally:
            guest.close()
    if isinstance(handler, Upper):
        handler.deferred.clear()
