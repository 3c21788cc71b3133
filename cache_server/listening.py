"""The socket file: made with its final mode at once, and only where nobody answers already."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from snapshotter.errors import BusyError, InvalidInputError

_MAX_PATH_BYTES = 107  # sun_path holds 108 bytes with its NUL


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket and the file that names it."""

    socket: socket.socket
    path: Path
    inode: int

    def unlink(self) -> None:
        """Removes the file, unless another server has put its own in its place."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self.inode:
                self.path.unlink()


def listen_on(path: Path) -> Listener:
    """A listening socket at ``path`` with mode 0600; a dead one there is replaced.

    Raises BusyError if a server answers at ``path``, InvalidInputError if something other than a
    socket is there or the path is too long.
    """
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise InvalidInputError(f"socket path {path}: longer than {_MAX_PATH_BYTES} bytes")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_living(path)
    listener = socket.socket(socket.AF_UNIX)
    try:
        # bound where nobody else can reach, so that it never has another mode in its place
        with tempfile.TemporaryDirectory(prefix=".socket-", dir=path.parent) as private:
            directory = os.open(private, os.O_PATH | os.O_DIRECTORY)
            try:
                listener.bind(f"/proc/self/fd/{directory}/s")
            finally:
                os.close(directory)
            made = Path(private) / "s"
            made.chmod(0o600)
            listener.listen(128)
            inode = made.lstat().st_ino
            made.replace(path)
    except BaseException:
        listener.close()
        raise
    return Listener(listener, path, inode)


def _refuse_living(path: Path) -> None:
    if not os.path.lexists(path):
        return
    if not path.is_socket():
        raise InvalidInputError(f"{path} is there and is not a socket; move it away")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError:
            pass  # whoever is too busy to accept is alive
    raise BusyError(f"a server answers on {path} already")
