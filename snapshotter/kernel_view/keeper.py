"""The keeper: a small process that holds the gate's /dev/fuse descriptor while stores come and go.

The descriptor is the gate: with its last copy closed, every cold file of every view is lost until
a new gate is mounted. So it is held here, where nothing can go wrong: no threads, no loop, few
imports. A store that died is succeeded by one that takes the descriptor from here and makes the
kernel repeat what was unanswered. Without any store for ``patience`` seconds the descriptor is
closed, because whoever waits for the gate cannot die before that. The keeper never touches a view
or the gate's mount: it would wait for itself.

Protocol: a SOCK_SEQPACKET Unix socket; a request and its answer are one packet of JSON each, with
the descriptor beside it (SCM_RIGHTS) in ``register`` and in the answer to ``attach``. The client
is ``kernel_view.keeper_client``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import struct
import sys
import time
from typing import Any, NamedTuple

from snapshotter.errors import (
    AccessDeniedError,
    BusyError,
    InvalidInputError,
    SnapshotterError,
    UnavailableError,
)
from snapshotter.fuse.dev_fuse import Negotiated, is_connected, negotiate

PACKET_BYTES = 4096
GATE_ID_BYTES = 32
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_DESCRIPTOR = struct.Struct("i")
_READABLE = select.POLLIN | select.POLLHUP | select.POLLERR


class _Gate(NamedTuple):
    device: int
    gate_id: str
    negotiated: Negotiated


class Keeper:
    """Serves ``listener`` until told to stop; ``patience_s`` as in the module's description."""

    def __init__(self, listener: socket.socket, *, patience_s: float) -> None:
        self._listener = listener
        self._patience_s = patience_s
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)
        self._connections: dict[int, socket.socket] = {}
        self._gate: _Gate | None = None
        self._store: socket.socket | None = None
        self._alone_since_s = time.monotonic()
        self._is_stopping = False

    def run(self) -> None:
        """Returns after ``stop``, with the descriptor closed."""
        while not self._is_stopping:
            for descriptor, events in self._poll.poll(self._timeout_ms()):
                if descriptor == self._listener.fileno():
                    self._accept()
                elif self._gate is not None and descriptor == self._gate.device:
                    self._close_gate("its file system is gone")
                elif events & _READABLE and descriptor in self._connections:
                    self._serve(self._connections[descriptor])
            if self._gate is not None and self._store is None and self._remaining_s() <= 0:
                self._close_gate(f"no store came within {self._patience_s:g} s")
        self._close_gate("told to stop")
        for connection in list(self._connections.values()):
            self._drop(connection)

    def _remaining_s(self) -> float:
        return self._alone_since_s + self._patience_s - time.monotonic()

    def _timeout_ms(self) -> float | None:
        if self._gate is None or self._store is not None:
            return None
        return max(0.0, self._remaining_s()) * 1000 + 1

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _drop(self, connection: socket.socket) -> None:
        self._poll.unregister(connection)
        del self._connections[connection.fileno()]
        connection.close()
        if connection is self._store:
            self._store = None
            self._alone_since_s = time.monotonic()

    def _close_gate(self, why: str) -> None:
        if self._gate is None:
            return
        _log("gate closed", cause=why, gate=self._gate.gate_id[:8])
        self._poll.unregister(self._gate.device)
        os.close(self._gate.device)
        self._gate = None

    def _serve(self, connection: socket.socket) -> None:
        try:
            packet, descriptors = receive_packet(connection)
            if not packet:
                self._drop(connection)
                return
            answer, sent = self._answer(connection, packet, descriptors)
            socket.send_fds(connection, [json.dumps(answer).encode()], sent)
        except BlockingIOError:
            return  # the event was of a connection that had this number before
        except OSError:
            self._drop(connection)

    def _answer(
        self, connection: socket.socket, packet: bytes, descriptors: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """The answer to one packet, and the descriptors to send beside it."""
        try:
            _check_peer(connection)
            operation = _operation(packet)
            if operation == "register" and len(descriptors) == 1:
                return self._register(descriptors), []
            if operation == "attach":
                return self._attach(connection)
            if operation == "stop":
                self._is_stopping = True
                return {"ok": True}, []
            if operation == "status":
                return self._status(), []
            raise InvalidInputError(f"keeper: not a request: {packet[:100]!r}")
        except SnapshotterError as error:
            return {"ok": False, "code": error.code, "message": str(error)}, []
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _register(self, descriptors: list[int]) -> dict[str, Any]:
        """Takes the descriptor out of the list once it is kept."""
        if self._gate is not None and is_connected(self._gate.device):
            raise BusyError("keeper: holds a living gate already; unmount it first")
        self._close_gate("a new one is registered")
        try:
            negotiated = negotiate(descriptors[0])
        except OSError as error:
            raise InvalidInputError(f"keeper: register a gate: {error}") from error
        self._gate = _Gate(descriptors.pop(), os.urandom(GATE_ID_BYTES).hex(), negotiated)
        self._poll.register(self._gate.device, 0)  # tells its end, not its requests
        if self._store is not None:  # it serves the gate that is gone: make it attach anew
            self._drop(self._store)
        self._alone_since_s = time.monotonic()
        _log("gate registered", gate=self._gate.gate_id[:8])
        return {"ok": True, "gate_id": self._gate.gate_id}

    def _attach(self, connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
        if self._store is not None and not _is_closed(self._store):
            raise BusyError("keeper: a store is attached already; end it first")
        if self._gate is None or not is_connected(self._gate.device):
            raise UnavailableError("keeper: there is no gate; the daemon mounts and registers one")
        if self._store is not None:
            self._drop(self._store)
        self._store = connection
        answer = {
            "ok": True,
            "gate_id": self._gate.gate_id,
            "negotiated": self._gate.negotiated._asdict(),
        }
        return answer, [self._gate.device]

    def _status(self) -> dict[str, Any]:
        return {
            "ok": True,
            "pid": os.getpid(),
            "has_gate": self._gate is not None and is_connected(self._gate.device),
            "has_store": self._store is not None and not _is_closed(self._store),
        }


def _operation(packet: bytes) -> object:
    try:
        request = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"keeper: not JSON: {packet[:100]!r}") from error
    return request.get("op") if isinstance(request, dict) else None


def _check_peer(connection: socket.socket) -> None:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(raw)[1]
    if uid not in (0, os.geteuid()):
        raise AccessDeniedError(f"keeper: uid {uid} may not ask; only root and uid {os.geteuid()}")


def _is_closed(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


def _log(event: str, **fields: str) -> None:
    line = {"process": "keeper", "level": "info", "event": event, "time_s": time.time(), **fields}
    sys.stderr.write(json.dumps(line) + "\n")
    sys.stderr.flush()


def receive_packet(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One packet (empty at the end) and the descriptor beside it, closed on exec.

    socket.recv_fds will not do: Python 3.11's ignores its flags.
    """
    room = socket.CMSG_LEN(_DESCRIPTOR.size)
    packet, ancillary, _, _ = connection.recvmsg(PACKET_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            return packet, [each for (each,) in _DESCRIPTOR.iter_unpack(data)]
    return packet, []


def listen(path: str) -> socket.socket:
    """The keeper's socket, in place of one whose keeper is gone; BusyError if one lives."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with probe:
        if probe.connect_ex(path) == 0:
            raise BusyError(f"keeper: one is running already on {path}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mask = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(mask)
    listener.listen()
    return listener


def main() -> int:
    """Runs a keeper in a session of its own."""
    parser = argparse.ArgumentParser(prog="snapshotter.kernel_view.keeper")
    parser.add_argument("--socket", required=True, help="path of the Unix socket to serve")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds without a store")
    options = parser.parse_args()
    if os.getsid(0) != os.getpid():
        with contextlib.suppress(PermissionError):  # a group's leader has to stay where it is
            os.setsid()
    try:
        listener = listen(options.socket)
    except (OSError, SnapshotterError) as error:
        sys.stderr.write(f"keeper: listen on {options.socket}: {error}\n")
        return error.exit_code if isinstance(error, SnapshotterError) else 1
    with listener:
        Keeper(listener, patience_s=options.patience).run()
        os.unlink(options.socket)
    return 0


if __name__ == "__main__":
    sys.exit(main())
