"""The root directory: made, its layout's version checked, and held by one daemon at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from snapshotter.errors import BusyError, CorruptError, UnsupportedError
from snapshotter.paths import LAYOUT_VERSION, Paths
from snapshotter.service.leftovers import clear_leftovers


def open_root(paths: Paths) -> int:
    """Makes what is missing of root and run directory; returns the descriptor of the lock.

    Raises BusyError when another daemon has the root, UnsupportedError when a newer version of
    this program made it; nothing is changed then.
    """
    paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(paths.root / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(lock, paths.root)
        _check_version(paths.root)
        for directory in (
            paths.run,
            paths.objects,
            paths.arrivals,
            paths.partial,
            paths.images,
            paths.mounts,
        ):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_mount_point(paths.gate)
        clear_leftovers(paths)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _take(lock: int, root: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(lock, 20, 0).decode(errors="replace").strip() or "?"
        message = f"root {root}: daemon {holder} serves it already; stop that one first"
        raise BusyError(message) from error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _check_version(root: Path) -> None:
    path = root / "version"
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        path.write_text(f"{LAYOUT_VERSION}\n")
        return
    if not text.isdecimal():
        raise CorruptError(f"{path}: {text[:40]!r} is no layout version; restore or remove it")
    if int(text) > LAYOUT_VERSION:
        raise UnsupportedError(
            f"root {root} has layout {text}, this program knows up to {LAYOUT_VERSION}: "
            "use a newer version or another --root"
        )


def _make_mount_point(path: Path) -> None:
    """Does not look at it when it exists: a dead gate may stand there."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
