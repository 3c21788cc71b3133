"""The blocking side of the control socket, for the command line and for scripts.

It imports no event loop, so that a command starts quickly. One client is one connection: any
number of requests in order, each answered before the next is sent.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import InvalidInputError, UnavailableError, from_code
from snapshotter.framing import FrameDecoder, encode_frame
from snapshotter.service import control

QUICK_TIMEOUT_S = 30.0
"""How long the daemon may be silent about anything but a pull or a mount."""

_RECEIVE_BYTES = 1 << 16
_MAX_DESCRIPTORS = 4

_CHAINS = control.CheckChain | control.Lend

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[control.Response] = msgspec.json.Decoder(control.Response)

Answer = TypeVar("Answer", bound=msgspec.Struct)
ProgressCallback = Callable[[control.Progress], None]


class ControlClient:
    """A connection to the daemon; a context manager that closes it."""

    def __init__(self, socket_path: Path) -> None:
        """Connects. Raises UnavailableError when no daemon listens at ``socket_path``."""
        self._path = socket_path
        self._frames = FrameDecoder()
        self._descriptors: list[int] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(os.fspath(socket_path))
        except OSError as error:
            self._socket.close()
            raise UnavailableError(
                f"connect to the daemon at {socket_path}: {error.strerror or error}; "
                "start it with `snapshotter daemon start`"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection and closes every descriptor that nobody took."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def interrupt(self) -> None:
        """Ends, from another thread, what a thread waits for here: with UnavailableError."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed, or the daemon went away: it has ended

    def is_alive(self) -> bool:
        """Whether the daemon still holds its end, between two requests."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def ask(
        self,
        request: control.Request,
        answer: type[Answer],
        *,
        on_progress: ProgressCallback | None = None,
    ) -> Answer:
        """Sends ``request`` and returns its answer, telling ``on_progress`` of each progress.

        Raises the error that a ``failed`` answer stands for, and UnavailableError when the daemon
        goes away, is silent for too long or answers something that was not asked.
        """
        is_slow = isinstance(request, control.Pull | control.Mount | _CHAINS)
        self._socket.settimeout(None if is_slow else QUICK_TIMEOUT_S)
        what = f"ask the daemon for {request.__struct_config__.tag}"
        try:
            self._socket.sendall(encode_frame(_encoder.encode(request)))
            while isinstance(response := self._receive(), control.Progress):
                if on_progress is not None:
                    on_progress(response)
        except (OSError, EOFError, InvalidInputError) as error:
            raise UnavailableError(f"{what}: {error} (socket {self._path})") from error
        if isinstance(response, control.Failed):
            raise from_code(response.code, response.message)
        if not isinstance(response, answer):
            kind = response.__struct_config__.tag
            raise UnavailableError(f"{what}: the daemon answered {kind!r}; is it of this version?")
        return response

    def mount(
        self, request: control.Mount, *, on_progress: ProgressCallback | None = None
    ) -> tuple[control.Mounted, int]:
        """The answer to a mount request and the descriptor of its detached mount.

        The caller owns the descriptor. Raises as ``ask`` does.
        """
        mounted = self.ask(request, control.Mounted, on_progress=on_progress)
        if not self._descriptors:
            raise UnavailableError(
                f"mount {request.image}: the daemon's answer came without its mount; try again"
            )
        return mounted, self._descriptors.pop(0)

    def _receive(self) -> control.Response:
        response = _decode(self._await(self._frames.next_frame))
        if isinstance(response, control.Long):
            length = response.length_bytes
            response = _decode(self._await(lambda: self._frames.next_body(length)))
        return response

    def _await(self, cut: Callable[[], bytes | None]) -> bytes:
        """What ``cut`` takes from the stream, once enough of it has come."""
        while (payload := cut()) is None:
            data, descriptors, _flags, _address = socket.recv_fds(
                self._socket, _RECEIVE_BYTES, _MAX_DESCRIPTORS
            )
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)  # recv_fds passes no flags on
            self._descriptors += descriptors
            if not data:
                raise EOFError("the daemon closed the connection; its log says why")
            self._frames.feed(data)
        return payload


def _decode(payload: bytes) -> control.Response:
    try:
        return _decoder.decode(payload)
    except DECODE_ERRORS as error:
        raise InvalidInputError(f"its answer is none: {error}") from error
