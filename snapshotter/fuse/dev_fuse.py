"""The /dev/fuse transport: one thread reads requests from the descriptor, any thread replies.

Facts of the device: one read(2) gives one whole request, one write(2) or writev(2) takes one whole
reply; ENODEV from read means that the file system is unmounted or its connection aborted; ENOENT
from write means that nobody waits for that reply any more; ENOENT from read, that the request went
away while it was being read.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from typing import NamedTuple

import structlog

from snapshotter.errors import SnapshotterError, UnavailableError, UnsupportedError
from snapshotter.fuse import replies, wire
from snapshotter.fuse.server import Answer, Server, encode_answer
from snapshotter.fuse.wire import Init, InitFlag, Opcode

_log = structlog.get_logger()

_MAX_WRITE = 4096
"""The least that the kernel takes. What is served here is read-only."""

_BUFFER_BYTES = 1 << 17
"""Room for the longest request that can come: a 64 KiB extended attribute with its name."""

_MAX_PAGES = 256
"""A READ may ask for 1 MiB: one chunk."""

_MAX_BACKGROUND = 128
"""Read-ahead of many files at once must not queue in the kernel behind 12, its default."""

READ_ONLY_FEATURES = (
    InitFlag.ASYNC_READ
    | InitFlag.BIG_WRITES
    | InitFlag.NO_OPEN_SUPPORT
    | InitFlag.NO_OPENDIR_SUPPORT
    | InitFlag.PARALLEL_DIROPS  # else lookups in one directory wait for one another
    | InitFlag.MAX_PAGES
    | InitFlag.CACHE_SYMLINKS
    | InitFlag.EXPLICIT_INVAL_DATA  # content never changes: only we could drop pages
    | InitFlag.INIT_EXT
    | InitFlag.HAS_RESEND
)
"""Features of a file system whose content never changes.

Not among them: request timeouts (the kernel would abort the whole connection) and passthrough
(which forbids overlays over overlays).
"""


class Negotiated(NamedTuple):
    """What INIT settled for a connection; a successor on the same descriptor needs to know it."""

    minor: int
    flags: int
    max_readahead: int
    max_write: int


def negotiate(device: int, *, features: InitFlag = READ_ONLY_FEATURES) -> Negotiated:
    """Reads INIT from the descriptor of a fresh mount and answers it.

    Raises UnsupportedError if the kernel speaks too old a protocol, UnavailableError if no INIT
    comes (the descriptor is not of a fresh mount), OSError from the device.
    """
    buffer = bytearray(_BUFFER_BYTES)
    if not _is_readable(device, timeout_s=5.0):
        raise UnavailableError("FUSE INIT: nothing to read; the descriptor is not of a fresh mount")
    size = os.readv(device, [buffer])
    with memoryview(buffer)[:size] as request:
        header = wire.decode_header(request)
        if header.opcode != Opcode.INIT:
            raise UnavailableError(
                f"FUSE INIT: the first request is {header.opcode}; mount the file system anew"
            )
        offer: Init = wire.decode_body(header, request)
    if offer.major != wire.MAJOR or offer.minor < wire.MIN_MINOR:
        os.writev(device, encode_answer(header.unique, errno.EPROTO))
        raise UnsupportedError(
            f"FUSE INIT: the kernel speaks {offer.major}.{offer.minor}; 7.{wire.MIN_MINOR} "
            "(Linux 5.4) or newer is needed"
        )
    reply = replies.InitReply(
        minor=min(offer.minor, wire.MAX_MINOR),
        max_readahead=offer.max_readahead,
        flags=offer.flags & features,
        max_background=_MAX_BACKGROUND,
        congestion_threshold=_MAX_BACKGROUND * 3 // 4,
        max_write=_MAX_WRITE,
        max_pages=_MAX_PAGES,
    )
    os.writev(device, encode_answer(header.unique, replies.encode_init(reply)))
    return Negotiated(reply.minor, reply.flags, reply.max_readahead, reply.max_write)


def _is_readable(device: int, *, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(device, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def is_connected(device: int) -> bool:
    """Whether the descriptor's file system still stands (poll tells an error once it does not)."""
    poll = select.poll()
    poll.register(device, 0)
    return not poll.poll(0)


def resend(device: int) -> None:
    """Makes the kernel repeat what a dead predecessor on this descriptor left unanswered.

    To be called before the first read: what this process has read already would come again.
    Raises UnsupportedError where the kernel (before Linux 6.9) cannot, OSError from the device.
    """
    try:
        os.write(device, replies.encode_notify(replies.Notify.RESEND))
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise UnsupportedError(
                "FUSE RESEND: this kernel cannot repeat requests (Linux 6.9 can); what a dead "
                "store left unanswered stays so until the gate is unmounted"
            ) from error
        raise


class Session:
    """One process's service of one descriptor, which stays the caller's to close."""

    def __init__(self, device: int, server: Server) -> None:
        self._device = device
        self._server = server
        self._lock = threading.Lock()
        self._is_stopped = False

    def stop(self) -> None:
        """Once this returns no further request is served; from any thread but the session's.

        The session's thread may stay in read(2) until the process ends. What it reads then is lost
        to this process, but not to a successor (``resend``).
        """
        with self._lock:
            self._is_stopped = True

    def run(self) -> None:
        """Serves until the file system is unmounted, its connection aborted, or ``stop``.

        Blocks its thread; OSError if the device fails otherwise.
        """
        buffer = bytearray(_BUFFER_BYTES)
        view = memoryview(buffer)
        read, device, handle = os.readv, self._device, self._server.handle
        targets = [buffer]
        while True:
            try:
                size = read(device, targets)
            except OSError as error:
                if error.errno in (errno.ENODEV, errno.ECONNABORTED):
                    return
                if error.errno == errno.ENOENT:
                    continue
                raise
            with self._lock:
                if self._is_stopped:
                    return
                buffers = handle(view[:size])
                if buffers is not None:
                    self._write(buffers)

    def reply(self, unique: int, answer: Answer) -> None:
        """Answers a request that was left pending; from any thread, once for each request."""
        if answer is None:
            raise SnapshotterError(f"FUSE reply to request {unique}: there is no answer in it")
        self._write(encode_answer(unique, answer))

    def drop_pages(self, nodeid: int) -> None:
        """Makes the kernel read a file anew; never from the session's thread.

        It waits for reads of the file that are under way.
        """
        self._write((replies.encode_inval_inode(nodeid, 0, 0),))

    def _write(self, buffers: tuple[bytes | memoryview, ...]) -> None:
        try:
            os.writev(self._device, buffers)
        except OSError as error:
            if error.errno == errno.EFAULT:
                # The payload is a part of a file that the disk does not give; see store.reading.
                unique = replies.unique_of(buffers[0])
                _log.error("reply failed", operation="reply", unique=unique, cause=str(error))
                self._write((replies.encode_error(unique, errno.EIO),))
                return
            # ENOENT: the asker is gone; ENODEV and EBADF: so is the file system or the session.
            if error.errno not in (errno.ENOENT, errno.ENODEV, errno.ENOTCONN, errno.EBADF):
                raise
