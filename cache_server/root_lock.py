"""One process at a time works on a root; others learn who it is and where it listens."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import BusyError


class Holder(msgspec.Struct, frozen=True):
    """Who holds a root: its process id, and its socket if it is a server."""

    pid: int
    socket: str | None = None


class RootInUseError(BusyError):
    """Another process works on the root; ``holder`` says who, where that is known."""

    def __init__(self, root: Path, holder: Holder | None) -> None:
        who = "another process"
        if holder is not None:
            who = f"process {holder.pid}"
        if holder is not None and holder.socket is not None:
            who = f"the server with process id {holder.pid} on {holder.socket}"
        super().__init__(f"root {root} is in use by {who}")
        self.holder = holder


class RootLock:
    """Holds ``root`` (made if it is not there) until it is closed or the process ends."""

    def __init__(self, root: Path, *, socket: Path | None = None) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._read_holder()
            os.close(self._descriptor)
            raise RootInUseError(root, holder) from None
        holder = Holder(os.getpid(), str(socket) if socket else None)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, msgspec.json.encode(holder), 0)

    def __enter__(self) -> RootLock:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _read_holder(self) -> Holder | None:
        """What the holder wrote; None in the instant before it has."""
        try:
            return msgspec.json.decode(os.pread(self._descriptor, 4096, 0), type=Holder)
        except DECODE_ERRORS:
            return None
