"""Puts a file system, a cache policy and a way to fetch together: a server for any transport."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar, cast

from snapshotter.fuse import wire
from snapshotter.fuse.cache_policy import KernelCache
from snapshotter.fuse.changing import Changing
from snapshotter.fuse.connection import Connection
from snapshotter.fuse.negotiation import READ_ONLY, WRITABLE, Terms
from snapshotter.fuse.reading import Reading
from snapshotter.fuse.server import Answer, FaultReport, Fetch, Operation, Server
from snapshotter.fuse.wire import Header, Opcode
from snapshotter.fuse.wire_changes import ALL_DECODERS
from snapshotter.vfs import FileSystem, Lower

N = TypeVar("N")


class FileSystemServer(Server):
    """Serves ``fs``. It answers INIT itself, and a new INIT begins anew.

    With ``writable``, ``fs`` is a FileSystem. ``is_being_killed`` is asked about the thread behind
    a request that waits for content and that the kernel calls interrupted; if it is, the request
    ends with EINTR. ``limit`` bounds the nodes and open files that a kernel may keep here.
    """

    def __init__(
        self,
        fs: Lower[N],
        cache: KernelCache,
        *,
        writable: bool,
        report_fault: FaultReport,
        fetch: Fetch | None = None,
        is_being_killed: Callable[[int], bool] = lambda _tid: False,
        terms: Terms | None = None,
        limit: int | None = None,
    ) -> None:
        self.connection: Connection[Any] = Connection(fs, cache, limit=limit)
        self._is_being_killed = is_being_killed
        if terms is None:
            terms = Terms(features=WRITABLE if writable else READ_ONLY)
        rows: dict[Opcode, Operation] = Reading(self.connection, terms).operations()
        if writable:
            rows |= Changing(self.connection, cast("FileSystem[Any]", fs)).operations()
        rows[Opcode.INTERRUPT] = self._interrupt
        super().__init__(rows, report_fault=report_fault, decoders=ALL_DECODERS, fetch=fetch)

    def _interrupt(self, _header: Header, message: wire.Interrupt) -> Answer:
        """A process with a handler for its signal waits on: else its call would fail."""
        waiting = self.waiting(message.unique)
        if waiting is not None and self._is_being_killed(waiting.pid):
            self.give_up(message.unique, errno.EINTR)
        return None
