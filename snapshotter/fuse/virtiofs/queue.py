"""One virtqueue at work: its descriptors, its thread, and its orderly end.

The thread answers at once whatever needs no waiting. What must wait is *deferred*: whoever has the
answer later finishes it, from any thread and in any order.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import Protocol

from snapshotter.fuse.virtiofs.memory import GuestMemory
from snapshotter.fuse.virtiofs.vring import Chain, RingAddresses, Vring

DRAIN_DEADLINE_S = 5.0
"""How long a queue that is to stop waits for what was deferred, before it answers EIO."""


class Handler(Protocol):
    """What a chain means."""

    def serve(self, chain: Chain, queue: Queue) -> int | None:
        """Serves a request: the number of bytes written, or None if it was deferred.

        Raises InvalidInputError for a chain that breaks the rules of the device.
        """
        ...

    def abandon(self, chain: Chain) -> int:
        """Writes into a deferred request that it failed; the number of bytes written."""
        ...


Report = Callable[[str, Exception], None]
"""Told why a queue was broken, and by what."""


class Queue:
    """One ring. The control thread sets it up and stops it; it has a thread while it runs."""

    def __init__(self, index: int, handler: Handler, report: Report) -> None:
        self.index = index
        self.size = 0
        self.addresses: RingAddresses | None = None
        self.next_available = 0
        self.is_enabled = False
        self._handler = handler
        self._report = report
        self._kick = self._call = self._error = -1
        self._stop = -1
        self._thread: threading.Thread | None = None
        self._ring: Vring | None = None
        self._deferred: dict[int, Chain] = {}
        self._deferred_size = 0
        self._claimed = 0
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)

    # What the front end sets

    def set_kick(self, descriptor: int | None) -> None:
        """Where the guest says that there are requests; this object's from now on."""
        self._kick = _replace(self._kick, descriptor)

    def set_call(self, descriptor: int | None) -> None:
        """Where the guest is told of answers; it may be replaced while the queue runs."""
        with self._lock:
            self._call = _replace(self._call, descriptor)

    def set_error(self, descriptor: int | None) -> None:
        """Where the front end is told that the queue is broken."""
        with self._lock:
            self._error = _replace(self._error, descriptor)

    @property
    def deferred_size(self) -> int:
        """Bytes that the deferred requests name, in both directions."""
        return self._deferred_size

    @property
    def is_running(self) -> bool:
        """Whether it has its thread (which waits for its end once the ring is broken)."""
        return self._thread is not None

    def start(self, memory: GuestMemory, *, has_indirect: bool) -> None:
        """Starts the thread once everything is there; InvalidInputError for a ring that cannot be.

        Does nothing while something is missing.
        """
        if self.is_running or not self.is_enabled or self._kick < 0 or self.addresses is None:
            return
        ring = Vring(
            memory,
            self.addresses,
            self.size,
            has_indirect=has_indirect,
            next_available=self.next_available,
            in_flight=len(self._deferred) + self._claimed,
        )
        with self._lock:
            self._ring = ring
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=f"queue {self.index}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, once every request has its answer; deferred ones get EIO in the end."""
        if self._ring is None:
            return
        self.pause()
        self._drain()
        with self._lock:
            self._ring = None  # with it goes the last view of the memory

    def pause(self) -> None:
        """Ends the thread alone: ``start`` goes on, and what was deferred is still to be answered.

        The memory of deferred requests must stay what it is for the guest.
        """
        if self._thread is None or self._ring is None:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._thread, self._stop = None, -1
        self.next_available = self._ring.next_available

    def close(self) -> None:
        """Stops, and lets go of the descriptors."""
        self.stop()
        self.set_kick(None)
        self.set_call(None)
        self.set_error(None)

    def _drain(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._deferred, DRAIN_DEADLINE_S)
            abandoned = list(self._deferred.values())
        for chain in abandoned:
            if self.claim(chain):
                self.finish(chain, self._handler.abandon(chain))
        with self._condition:
            self._condition.wait_for(lambda: not self._claimed)

    # What handlers call

    def claim(self, chain: Chain) -> bool:
        """Whether ``chain`` still wants its answer; then the caller must finish it.

        Between the two the guest's memory is there to be written; if False, it is not. It may come
        even before ``serve`` has said that the chain is deferred.
        """
        with self._lock:
            if chain.is_claimed:
                return False
            chain.is_claimed = True
            self._claimed += 1
            if self._deferred.pop(id(chain), None) is not None:
                self._deferred_size -= chain.readable_size + chain.writable_size
            return True

    def finish(self, chain: Chain, written: int) -> None:
        """Gives a claimed chain back to the guest; from any thread."""
        with self._condition:
            assert self._ring is not None, "a queue waits for what was claimed"
            self._ring.push(chain.head, written)
            _signal(self._call)
            self._claimed -= 1
            self._condition.notify_all()

    # The thread

    def _run(self) -> None:
        try:
            self._serve_until_stopped()
        except Exception as error:  # noqa: BLE001 - a thread that died silently hangs the guest
            self._break(error)

    def _serve_until_stopped(self) -> None:
        # Edge-triggered: each kick wakes once, whatever the counter, which nobody needs to read.
        with select.epoll(2) as poller:
            poller.register(self._kick, select.EPOLLIN | select.EPOLLET)
            poller.register(self._stop, select.EPOLLIN)
            poll, stop, serve_available = poller.poll, self._stop, self._serve_available
            while True:
                serve_available()  # at first, what came before there was a thread
                for descriptor, _ in poll():
                    if descriptor == stop:
                        return

    def _serve_available(self) -> None:
        ring, serve, lock = self._ring, self._handler.serve, self._lock
        assert ring is not None
        pop, push = ring.pop, ring.push
        while (chain := pop()) is not None:
            written = serve(chain, self)
            if written is None:
                self._defer(chain)
                continue
            with lock:
                push(chain.head, written)
                _signal(self._call)

    def _defer(self, chain: Chain) -> None:
        with self._lock:
            if not chain.is_claimed:
                self._deferred[id(chain)] = chain
                self._deferred_size += chain.readable_size + chain.writable_size

    def _break(self, error: Exception) -> None:
        """Nothing in the ring can be trusted any more: it rests until it is set up anew."""
        self._report(f"queue {self.index} is stopped", error)
        with self._lock:
            _signal(self._error)
        poller = select.poll()
        poller.register(self._stop, select.POLLIN)
        poller.poll()


def _signal(descriptor: int) -> None:
    if descriptor >= 0:
        try:
            os.eventfd_write(descriptor, 1)
        except OSError:
            pass  # full: its reader is told already; no eventfd: its owner hears nothing


def _replace(old: int, new: int | None) -> int:
    if old >= 0:
        os.close(old)
    return -1 if new is None else new
