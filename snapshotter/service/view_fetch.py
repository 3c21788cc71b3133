"""What a process that serves a view asks the store for: content that is not here.

Threads with a connection each wait for the store; what a view may have waiting is bounded by its
transport. A store that died is waited for as long as its successor may take.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import InvalidInputError, SnapshotterError, UnavailableError, from_code
from snapshotter.framing import FrameDecoder, encode_frame
from snapshotter.names import ContentName
from snapshotter.service import store_control
from snapshotter.vfs import Pending

THREADS = 16
_RECEIVE_BYTES = 65_536
_PATIENCE_S = 20.0
"""How long no store may answer before a read fails: one that died is started again in between."""

_RETRY_S = 0.1
_decoder: msgspec.json.Decoder[store_control.Response] = msgspec.json.Decoder(
    store_control.Response
)


class ViewFetch:
    """Fetches for the view of image number ``image``; a ``fuse.server.Fetch``.

    The store is at ``socket_path``; it answers or fails within ``deadline_s``.
    """

    def __init__(self, socket_path: Path, *, image: int, deadline_s: float) -> None:
        self._path = socket_path
        self._image = image
        self._deadline_s = deadline_s
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="fetch")
        self._idle: list[socket.socket] = []

    def __call__(self, pending: Pending, done: Callable[[Exception | None], None]) -> None:
        """Begins to fetch what is pending; ``done`` is told the end of it, from another thread."""
        self._pool.submit(self._run, pending, done)

    def fetch(self, name: ContentName, offset: int, size: int) -> None:
        """Returns once that range of the content is here; else raises the store's error.

        UnavailableError if there is no store for too long, or no answer.
        """
        request = store_control.Ensure(
            name=name.path, image=self._image, offset=offset, length=size
        )
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                response = self._exchange(request)
                break
            except (OSError, EOFError) as error:
                if isinstance(error, TimeoutError) or time.monotonic() > end:
                    raise UnavailableError(
                        f"fetch {name}: no answer from the store at {self._path}: {error}"
                    ) from error
                time.sleep(_RETRY_S)
        if isinstance(response, store_control.Failed):
            raise from_code(response.code, response.message)

    def close(self) -> None:
        """Waits for what is under way; nothing more is begun."""
        self._pool.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    def _run(self, pending: Pending, done: Callable[[Exception | None], None]) -> None:
        try:
            self.fetch(pending.content, pending.offset, pending.size)
        except SnapshotterError as error:
            done(error)
        else:
            done(None)

    def _exchange(self, request: store_control.Ensure) -> store_control.Response:
        """One request and its answer; a connection that failed is not used again."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            connection.sendall(encode_frame(msgspec.json.encode(request)))
            payload = _receive(connection)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        try:
            return _decoder.decode(payload)
        except DECODE_ERRORS as error:
            raise InvalidInputError(f"answer of the store at {self._path}: {error}") from error

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self._deadline_s)
            connection.connect(str(self._path))
        except BaseException:
            connection.close()
            raise
        return connection


def _receive(connection: socket.socket) -> bytes:
    frames = FrameDecoder()
    while (payload := frames.next_frame()) is None:
        data = connection.recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError("it hung up")
        frames.feed(data)
    return payload
