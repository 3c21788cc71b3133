"""File systems as a guest sees them: served over vrings to a front end without a VM."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from snapshotter.fuse.cache_policy import BRIEF, KernelCache
from snapshotter.fuse.file_system_server import FileSystemServer
from snapshotter.fuse.server import Server
from snapshotter.fuse.virtiofs.device import Device
from snapshotter.fuse.virtiofs.requests import FuseRequests
from snapshotter.vfs import Caller
from tests.support.fuse_client import FuseClient
from tests.support.vhost_user_front_end import FrontEnd


def asker(guest: FrontEnd, *, queue: int = 1) -> Any:
    """An ``Ask`` that sends its requests by a front end."""

    def ask(
        opcode: int, nodeid: int, body: bytes, caller: Caller, data: bytes, room: int
    ) -> bytes:
        number, payload = guest.fuse(
            opcode, body, nodeid=nodeid, uid=caller.uid, gid=caller.gid, data=data, room=room,
            queue=queue,
        )
        if number:
            raise OSError(number, os.strerror(number))
        return payload

    return ask


class Backend:
    """A device on a thread; ``faults`` are what its queues and requests reported, as text."""

    def __init__(self, server: Server, faults: list[str]) -> None:
        self.socket, self._other = socket.socketpair()
        device = Device(
            self._other, FuseRequests(server), lambda what, error: faults.append(f"{what}: {error}")
        )
        self._thread = threading.Thread(target=device.serve)
        self._thread.start()

    def join(self) -> None:
        """Once the front end has hung up."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._other.close()


@contextmanager
def guest_of(server: Server, **options: Any) -> Iterator[FrontEnd]:
    """A front end whose requests ``server`` answers; at its end nothing was reported."""
    faults: list[str] = []
    backend = Backend(server, faults)
    try:
        guest = FrontEnd(backend.socket, **options)
        try:
            yield guest
        finally:
            guest.close()
    finally:
        backend.socket.close()
        backend.join()
    assert not faults


@contextmanager
def seen_by_guest(fs: Any) -> Iterator[FuseClient]:
    """``fs``, writable, through a guest's requests."""
    faults: list[str] = []
    server = FileSystemServer(
        fs,
        KernelCache(BRIEF),
        writable=True,
        report_fault=lambda error, header: faults.append(f"{header}: {error!r}"),
    )
    with guest_of(server) as guest:
        yield FuseClient(asker(guest))
    server.connection.clear()
    assert not faults
