"""What a daemon that was killed left half done: temporary files, and mounts for a moment's use.

The store and the cache server clear up their own directories when they open them, and records of
mounts are looked through by ``mounts.MountTable``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import structlog

from snapshotter.kernel_view import mountinfo, syscalls
from snapshotter.paths import Paths

PROBE = ".probe-"
"""Begins the name of the directory in the root where the host's abilities are tried."""
VIEW = ".view-"
"""Begins the name of a directory in the run directory on which a view stands while it is made."""

_log = structlog.get_logger()


def clear_leftovers(paths: Paths) -> None:
    """Removes leftovers of earlier daemons. For the one that has the root, before it serves.

    What cannot be removed is logged: it costs some space and nothing else.
    """
    scratch = [*paths.root.glob(f"{PROBE}*"), *paths.run.glob(f"{VIEW}*")]
    for directory in scratch:
        _attempt(directory, _remove_scratch)
    for unfinished in paths.images.glob(".*.new"):
        _attempt(unfinished, Path.unlink)


def _attempt(path: Path, remove: Callable[[Path], None]) -> None:
    try:
        remove(path)
    except OSError as error:
        _log.warning("leftover not removed", path=str(path), cause=str(error))


def _remove_scratch(directory: Path) -> None:
    """Never removes anything through a mount: where one is left the directory stays, too."""
    for line in reversed(mountinfo.mounts()):
        if line.target == str(directory) or line.target.startswith(f"{directory}/"):
            syscalls.umount(line.target, syscalls.MNT_DETACH)
    if directory.name.startswith(VIEW):
        directory.rmdir()
    else:
        shutil.rmtree(directory)
