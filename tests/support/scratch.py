"""A directory for tests that make many files: in memory, so that a busy disk cannot stall them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MEMORY = "/dev/shm"


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """A new directory, removed at the end: on tmpfs where that keeps xattrs, else on disk."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _keeps_xattrs(_MEMORY) else None) as made:
        yield Path(made)


def _keeps_xattrs(directory: str) -> bool:
    """Whether files there take xattrs of users (tmpfs does since Linux 6.6)."""
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            os.setxattr(probe.fileno(), "user.test", b"")
    except OSError:
        return False
    return True
