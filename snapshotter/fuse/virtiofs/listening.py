"""The socket at which a VMM finds a virtio-fs back end. Whoever connects gets the tree."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Self

from snapshotter.errors import AccessDeniedError, BusyError, InvalidInputError

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Listener:
    """A socket at ``path`` that only this user, and one peer, can connect to; a context manager.

    It appears when it listens and is gone once somebody connected. A socket that nobody listens at
    any more is replaced; BusyError if somebody does, InvalidInputError for anything else there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        _make_way(path)
        self._directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            _bind(self._socket, temporary)
            self._socket.listen(1)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def accept(self) -> socket.socket:
        """The first connection, the caller's to close.

        AccessDeniedError if it is another user's, who is not root.
        """
        connection, _ = self._socket.accept()
        self.close()
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        uid = _CREDENTIALS.unpack(raw)[1]
        if uid not in (0, os.geteuid()):
            connection.close()
            raise AccessDeniedError(f"socket {self._path}: user {uid} connected, and may not")
        return connection

    def close(self) -> None:
        """Ends listening and removes the socket."""
        if self._directory < 0:
            return
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path.name, dir_fd=self._directory)
        os.close(self._directory)
        self._directory = -1


def _bind(listener: socket.socket, path: Path) -> None:
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise InvalidInputError(
            f"socket {path}: {error}; give a short path in a directory that exists"
        ) from error
    finally:
        os.umask(mask)


def _make_way(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidInputError(f"socket {path}: something else is there; give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise BusyError(f"socket {path}: another process listens there; give another path")
