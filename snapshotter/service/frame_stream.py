"""Frames over a Unix socket on trio, with a descriptor beside a frame where one is sent."""

from __future__ import annotations

import array
import os
import socket
import struct
from pathlib import Path

import trio

from snapshotter.errors import InvalidInputError, UnavailableError
from snapshotter.framing import FrameDecoder, encode_frame

_RECEIVE_BYTES = 65_536
_CREDENTIALS = struct.Struct("iII")


class FrameStream:
    """One connection. Receiving and sending may each be used by one task at a time."""

    def __init__(self, connection: trio.socket.SocketType) -> None:
        self._socket = connection
        self._decoder = FrameDecoder()

    async def receive(self) -> bytes | None:
        """The next frame's payload, or None at the end of the stream.

        Raises InvalidInputError for a bad length or an end within a frame, and
        trio.BrokenResourceError when the connection breaks.
        """
        while (payload := self._decoder.next_frame()) is None:
            try:
                data = await self._socket.recv(_RECEIVE_BYTES)
            except OSError as error:
                raise trio.BrokenResourceError(f"receive: {error.strerror}") from error
            if not data:
                if self._decoder.is_empty:
                    return None
                raise InvalidInputError("the connection ended within a frame")
            self._decoder.feed(data)
        return payload

    async def send(
        self, payload: bytes, *, descriptor: int | None = None, body: bytes = b""
    ) -> None:
        """Sends one frame, and ``body`` after it; the descriptor stays the caller's too.

        Raises trio.BrokenResourceError when the other side is gone.
        """
        ancillary: list[tuple[int, int, bytes]] = []
        if descriptor is not None:
            rights = array.array("i", [descriptor]).tobytes()
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        try:
            for part in (encode_frame(payload), body):
                data, sent = memoryview(part), 0
                while sent < len(data):
                    sent += await self._socket.sendmsg([data[sent:]], ancillary)
                    ancillary = []
        except OSError as error:
            raise trio.BrokenResourceError(f"send: {error.strerror}") from error

    def peer(self) -> tuple[int, int]:
        """(pid, uid) of the process at the other end, as the kernel knows them."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return pid, uid

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def __enter__(self) -> FrameStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def connect(path: Path) -> FrameStream:
    """A connection to a Unix socket; UnavailableError if nobody listens there."""
    connection = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        await connection.connect(os.fspath(path))
    except OSError as error:
        connection.close()
        raise UnavailableError(f"connect to {path}: {error.strerror}") from error
    except BaseException:
        connection.close()
        raise
    return FrameStream(connection)


def listen(path: Path) -> trio.socket.SocketType:
    """A listening Unix socket at ``path`` for this user alone; it replaces what stood there.

    The caller knows (by a lock) that nobody else listens there.
    """
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(temporary))
        temporary.chmod(0o600)
        listener.listen(128)
        temporary.replace(path)
        return trio.socket.from_stdlib_socket(listener)
    except BaseException:
        listener.close()
        raise


def peer_pid(path: Path) -> int | None:
    """The process that listens on a Unix socket, or None when none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return None
        raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid: int = _CREDENTIALS.unpack(raw)[0]
        return pid
