"""Length-prefixed frames, without I/O: what cache-v1 and the control sockets are made of.

A frame is a 4-byte big-endian length (1 to 1,048,576) and that many bytes of JSON. Some frames
announce a raw body that follows them; the reader of the frame then asks for it.
"""

from __future__ import annotations

import struct

from snapshotter.errors import InvalidInputError

MAX_FRAME_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")


def encode_frame(payload: bytes) -> bytes:
    """``payload`` with its length in front; InvalidInputError if it is empty or too long."""
    if not 1 <= len(payload) <= MAX_FRAME_BYTES:
        raise InvalidInputError(f"frame of {len(payload)} bytes (1 to {MAX_FRAME_BYTES})")
    return _LENGTH.pack(len(payload)) + payload


class FrameDecoder:
    """Cuts a byte stream into frames and bodies: feed it what came, ask for what is next."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Adds received bytes."""
        self._buffer += data

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left over: EOF here ends the stream cleanly."""
        return not self._buffer

    def next_frame(self) -> bytes | None:
        """The next frame's payload, or None until more was fed.

        Raises InvalidInputError for a length out of range; the stream is then beyond repair.
        """
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if not 1 <= length <= MAX_FRAME_BYTES:
            raise InvalidInputError(f"frame of {length} bytes (1 to {MAX_FRAME_BYTES})")
        if len(self._buffer) < _LENGTH.size + length:
            return None
        return self._take(_LENGTH.size, length)

    def next_body(self, length: int) -> bytes | None:
        """The next ``length`` raw bytes, or None until more was fed."""
        if len(self._buffer) < length:
            return None
        return self._take(0, length)

    def take(self, limit: int) -> bytes:
        """What was fed, at most ``limit`` bytes: the start of a body that is read on elsewhere."""
        return self._take(0, min(limit, len(self._buffer)))

    def _take(self, skip: int, length: int) -> bytes:
        with memoryview(self._buffer) as view:
            taken = bytes(view[skip : skip + length])
        del self._buffer[: skip + length]
        return taken
