"""What the daemon and the store say to the keeper. Synchronous; every call may wait for it.

All raise UnavailableError when no keeper answers, and the keeper's refusals as their own errors.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotter.errors import UnavailableError, from_code
from snapshotter.fuse.dev_fuse import Negotiated
from snapshotter.kernel_view.keeper import receive_packet

_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Attachment:
    """A store's hold on the gate: while ``connection`` is open the keeper refuses other stores.

    ``gate_id`` is a secret of this gate mount, 32 bytes, the same for every store that serves it.
    """

    device: int
    negotiated: Negotiated
    gate_id: bytes
    connection: socket.socket

    def close(self) -> None:
        """Lets go of the gate; the keeper then waits for the next store."""
        os.close(self.device)
        self.connection.close()


@dataclass(frozen=True, slots=True)
class KeeperStatus:
    """Whether the keeper holds a living gate, and whether a store serves it."""

    pid: int
    has_gate: bool
    has_store: bool


def register(socket_path: str | Path, device_fd: int) -> None:
    """Gives the keeper the /dev/fuse descriptor of a fresh mount, whose INIT it answers.

    The caller keeps its own copy and should close it. BusyError while the keeper's gate lives.
    """
    with _connect(socket_path) as connection:
        _ask(connection, socket_path, "register", [device_fd])


def attach(socket_path: str | Path) -> Attachment:
    """Takes the gate's descriptor, to serve it.

    Raises UnavailableError while there is no gate, BusyError while another store has it.
    """
    connection = _connect(socket_path)
    try:
        answer, descriptors = _ask(connection, socket_path, "attach")
        connection.settimeout(None)
        return Attachment(
            descriptors[0],
            Negotiated(**answer["negotiated"]),
            bytes.fromhex(answer["gate_id"]),
            connection,
        )
    except BaseException:
        connection.close()
        raise


def status(socket_path: str | Path) -> KeeperStatus:
    """What the keeper holds."""
    with _connect(socket_path) as connection:
        answer, _ = _ask(connection, socket_path, "status")
    return KeeperStatus(answer["pid"], answer["has_gate"], answer["has_store"])


def stop(socket_path: str | Path) -> None:
    """Makes the keeper close the gate and end; views then fail to open cold files (ENOTCONN)."""
    with _connect(socket_path) as connection:
        _ask(connection, socket_path, "stop")


def _connect(path: str | Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_TIMEOUT_S)
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise UnavailableError(f"keeper at {path}: {error}; the daemon starts it") from error
    return connection


def _ask(
    connection: socket.socket,
    path: str | Path,
    operation: str,
    descriptors: list[int] | None = None,
) -> tuple[dict[str, Any], list[int]]:
    try:
        socket.send_fds(connection, [json.dumps({"op": operation}).encode()], descriptors or [])
        packet, received = receive_packet(connection)
    except OSError as error:
        raise UnavailableError(f"keeper at {path}: {operation}: {error}") from error
    if not packet:
        raise UnavailableError(f"keeper at {path}: {operation}: it closed the connection")
    answer: dict[str, Any] = json.loads(packet)
    if not answer["ok"]:
        raise from_code(answer["code"], answer["message"])
    return answer, received
