"""One connection to a cache server: frames and bodies over a Unix socket.

It works on a plain socket with trio's wait_readable rather than on a trio stream: a call that
need not wait then costs no turn of the scheduler, which is a third of a small fetch. The loop's
calls say MSG_DONTWAIT; the socket itself blocks, for the thread that takes a large body from it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from snapshotter.cache_v1.protocol import Request, Response, decode_response, encode_request
from snapshotter.framing import FrameDecoder, encode_frame
from snapshotter.names import CHUNK_SIZE

Body = bytes | bytearray | memoryview
"""What was received. A memoryview is of a buffer that serves again: valid during the call alone."""

_RECEIVE_BYTES = 64 << 10
_HEADER_BYTES = 4 << 10
"""Enough for the frame before a large chunk, with little of the chunk, which is copied then."""
_CONNECT_PAUSE_S = 0.01


class TransportError(Exception):
    """The connection could not be made, or broke."""


async def connect(path: str) -> Connection:
    """A new connection; TransportError if nobody listens. Waits while the backlog is full."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
                sock.setblocking(True)
                return Connection(sock)
            except BlockingIOError:
                await trio.sleep(_CONNECT_PAUSE_S)
    except OSError as error:
        sock.close()
        raise TransportError(f"cannot connect: {error.strerror or error}") from error
    except BaseException:
        sock.close()
        raise


class Connection:
    """``has_heard``: bytes came since the exchange began; ``has_ended``: it ended in order."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = FrameDecoder()
        self._chunk = bytearray()
        self._patience_s = 0.0
        self.patience = trio.CancelScope()
        self.has_heard = False
        self.has_ended = True

    def close(self) -> None:
        """Closes the socket; harmless when it is closed."""
        self._sock.close()

    def begin(self, patience_s: float) -> None:
        """Starts an exchange in which the peer has ``patience_s`` for each answer."""
        self._patience_s = patience_s
        self.patience = trio.CancelScope(deadline=trio.current_time() + patience_s)
        self.has_heard = False
        self.has_ended = False

    def end(self) -> None:
        """The last answer of the exchange was read: the connection may serve another."""
        self.has_ended = self._decoder.is_empty

    async def ask(self, request: Request, *, token: str | None) -> None:
        """Sends a request. A broken pipe shows when the answer is read: there may be one yet."""
        view = memoryview(encode_frame(encode_request(request, token=token)))
        while view:
            try:
                view = view[self._sock.send(view, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._sock)
            except (BrokenPipeError, ConnectionResetError):
                return
            except OSError as error:
                raise TransportError(f"sending failed: {error.strerror or error}") from error

    async def response(self) -> Response:
        """The next response; InvalidInputError if it is none, TransportError at the end."""
        while (payload := self._decoder.next_frame()) is None:
            self._decoder.feed(await self._receive())
        self.heard()
        return decode_response(payload)

    def heard(self) -> None:
        """An answer came: the peer has its patience again for the next."""
        self.patience.deadline = trio.current_time() + self._patience_s

    async def body(self, length: int) -> bytes | bytearray:
        """The ``length`` raw bytes that follow a response."""
        body = self._decoder.next_body(length)
        if body is not None:
            return body
        # Straight into place: a chunk is not copied again and again while it grows.
        whole = bytearray(length)
        start = self._decoder.take(length)
        whole[: len(start)] = start
        with memoryview(whole) as view:
            at = len(start)
            while at < length:
                try:
                    at += self._receive_into(view[at:], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    await trio.lowlevel.wait_readable(self._sock)
        return whole

    async def in_thread(self, work: Callable[[], None]) -> None:
        """Runs an exchange, or a part of one, that uses ``send``, ``receive`` and ``chunk``.

        A turn of the loop for each piece that comes, and fresh memory for each chunk, would take
        as long as the chunk's digest. Returns, also when cancelled, only once ``work`` has ended.
        """
        is_done = threading.Event()

        def run() -> None:
            try:
                work()
            finally:
                is_done.set()

        try:
            await trio.to_thread.run_sync(run, abandon_on_cancel=True)
        except trio.Cancelled:
            self._sock.shutdown(socket.SHUT_RDWR)
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(is_done.wait)
            raise

    def send(self, request: Request, *, token: str | None) -> None:
        """``ask`` for a thread of ``in_thread``."""
        try:
            self._sock.sendall(encode_frame(encode_request(request, token=token)))
        except (BrokenPipeError, ConnectionResetError):
            pass  # shows when the answer is read
        except OSError as error:
            raise TransportError(f"sending failed: {error.strerror or error}") from error

    def receive(self) -> Response:
        """``response`` for a thread of ``in_thread``; whoever is on the loop calls ``heard``."""
        while (payload := self._decoder.next_frame()) is None:
            self._decoder.feed(self._receive_now(_HEADER_BYTES, 0))
        return decode_response(payload)

    @contextmanager
    def chunk(self, length: int) -> Iterator[memoryview]:
        """The ``length`` (at most a chunk's) raw bytes that follow, for a thread of ``in_thread``.

        In a buffer that every chunk of this connection goes through.
        """
        if not self._chunk:
            self._chunk = bytearray(CHUNK_SIZE)
        start = self._decoder.take(length)
        with memoryview(self._chunk) as whole, whole[:length] as view:
            view[: len(start)] = start
            at = len(start)
            while at < length:
                at += self._receive_into(view[at:], socket.MSG_WAITALL)
            yield view

    def _receive_into(self, view: memoryview, flags: int) -> int:
        """How many bytes came; BlockingIOError with MSG_DONTWAIT if there are none."""
        try:
            count = self._sock.recv_into(view, 0, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise TransportError(f"receiving failed: {error.strerror or error}") from error
        if count == 0:
            raise TransportError("it closed the connection in the middle of an answer")
        self.has_heard = True
        return count

    async def _receive(self) -> bytes:
        has_waited = False
        while True:
            try:
                data = self._receive_now(_RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                await trio.lowlevel.wait_readable(self._sock)
                has_waited = True
                continue
            if not has_waited:
                await trio.lowlevel.checkpoint()  # a long stream of frames lets others run
            return data

    def _receive_now(self, limit: int, flags: int) -> bytes:
        try:
            data = self._sock.recv(limit, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise TransportError(f"receiving failed: {error.strerror or error}") from error
        if not data:
            raise TransportError("it closed the connection without an answer")
        self.has_heard = True
        return data
