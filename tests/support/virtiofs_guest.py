"""File systems as a guest sees them: served over vrings to a front end without a VM."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from snapshotter.fuse import wire
from snapshotter.fuse.server import Server
from snapshotter.fuse.virtiofs.device import Device
from snapshotter.fuse.virtiofs.requests import FuseRequests
from tests.support.fuse_client import Ask
from tests.support.vhost_user_front_end import FrontEnd

WRITE_HEAD_SIZE = 80
_PAGE_SIZE = 4096
_ROOM = 1 << 20


def asker(guest: FrontEnd) -> Ask:
    """Sends requests by a front end, in pieces as a guest's kernel has them.

    What gets no reply has the first queue to itself: it may come while a request is under way.
    """

    def ask(request: bytes) -> bytes | None:
        if wire.opcode_of(request) in wire.UNANSWERED:
            if guest.queues:  # else it is closed, and what it knew forgotten
                guest.exchange([request], [], slot=1, queue=0)
            return None
        parts = [request[: wire.HEADER_SIZE], request[wire.HEADER_SIZE :]]
        if wire.opcode_of(request) == wire.Opcode.WRITE:
            data = request[WRITE_HEAD_SIZE:]
            parts[1] = request[wire.HEADER_SIZE : WRITE_HEAD_SIZE]
            parts += [data[at : at + _PAGE_SIZE] for at in range(0, len(data), _PAGE_SIZE)]
        return guest.exchange([part for part in parts if part], [16, _ROOM])

    return ask


class Backend:
    """A device on a thread; ``faults`` are what its queues reported, as text."""

    def __init__(self, server: Server) -> None:
        self.socket, self._other = socket.socketpair()
        self.faults: list[str] = []
        self._device = Device(self._other, FuseRequests(server), self._report)
        self._thread = threading.Thread(target=self._device.serve, daemon=True)
        self._thread.start()

    def _report(self, what: str, error: Exception) -> None:
        self.faults.append(f"{what}: {error!r}")

    def join(self) -> None:
        """Hangs up and waits for the end."""
        self.socket.close()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._other.close()


@contextmanager
def guest_of(server: Server, **options: Any) -> Iterator[FrontEnd]:
    """A front end whose requests ``server`` answers; at its end nothing was reported."""
    backend = Backend(server)
    try:
        guest = FrontEnd(backend.socket, **options)
        try:
            yield guest
        finally:
            guest.close()
    finally:
        backend.join()
    assert not backend.faults


@contextmanager
def guest_asks(server: Server) -> Iterator[Ask]:
    """How a guest's kernel asks ``server``."""
    with guest_of(server) as guest:
        yield asker(guest)
