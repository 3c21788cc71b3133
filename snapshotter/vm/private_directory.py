"""Directories that belong to one process and are gone with it, at the latest at the next look."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_LOCK = ".directories.lock"


@contextlib.contextmanager
def private_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A new directory below ``parent``, removed at the end of the context.

    Those of processes that were killed are removed at its beginning and its end: each is locked by
    its owner (flock(2) on the directory itself), and what can be locked has none.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with _alone(parent):
        _sweep(parent, prefix)
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)
        with _alone(parent):
            _sweep(parent, prefix)


@contextlib.contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """Nobody else makes or sweeps directories meanwhile."""
    with (parent / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sweep(parent: Path, prefix: str) -> None:
    for directory in parent.glob(f"{prefix}*"):
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # gone already, or none of ours
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)
