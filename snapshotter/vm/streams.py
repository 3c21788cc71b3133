"""The command's streams between a guest's virtio-serial ports and this process, in threads."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

_BLOCK = 65536


class Output(threading.Thread):
    """Copies a port to a descriptor until the end mark, which is not copied, or the port's end.

    When nobody reads the descriptor any more the rest is dropped, so that the guest goes on.
    """

    def __init__(self, port: socket.socket, descriptor: int, mark: bytes) -> None:
        super().__init__(name=f"output-{descriptor}", daemon=True)
        self._port = port
        self._descriptor = descriptor
        self._mark = mark
        self._has_reader = True

    def run(self) -> None:
        """The copying."""
        held = b""
        while True:
            block = _receive(self._port)
            text = held + block
            at = text.find(self._mark)
            if at >= 0 or not block:
                self._write(text[:at] if at >= 0 else text)
                return
            keep = _start_of(self._mark, text)
            held = text[len(text) - keep :]
            self._write(text[: len(text) - keep])

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self._has_reader:
            try:
                view = view[os.write(self._descriptor, view) :]
            except OSError:
                self._has_reader = False


class Input(threading.Thread):
    """Copies a descriptor to a port, and its end with it. Ends with the process, if not before."""

    def __init__(self, descriptor: int, port: socket.socket) -> None:
        super().__init__(name="input", daemon=True)
        self._descriptor = descriptor
        self._port = port

    def run(self) -> None:
        """The copying."""
        try:
            while block := os.read(self._descriptor, _BLOCK):
                self._port.sendall(block)
            self._port.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the guest has gone, or stdin was none: there is nothing to pass on


class Lines(threading.Thread):
    """Calls ``hear`` with each line that comes on a port."""

    def __init__(self, port: socket.socket, hear: Callable[[str], None]) -> None:
        super().__init__(name="status", daemon=True)
        self._port = port
        self._hear = hear

    def run(self) -> None:
        """The reading."""
        rest = b""
        while block := _receive(self._port):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._hear(line.decode(errors="replace"))


def _receive(port: socket.socket) -> bytes:
    try:
        return port.recv(_BLOCK)
    except OSError:
        return b""


def _start_of(mark: bytes, text: bytes) -> int:
    """How many bytes at the end of ``text`` may be the beginning of the mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
