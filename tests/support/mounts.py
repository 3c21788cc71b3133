"""What is mounted below a directory, and how to take all of it away whatever state it is in."""

import contextlib
import ctypes
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_MNT_DETACH = 0x2
_UMOUNT_NOFOLLOW = 0x8
_FUSE_CONNECTIONS = Path("/sys/fs/fuse/connections")
_ESCAPE = re.compile(r"\\([0-7]{3})")
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class StandingMount:
    """One line of /proc/self/mountinfo."""

    target: str
    fs_type: str
    device: str


def mounts_below(directory: Path) -> list[StandingMount]:
    """The mounts at or below ``directory`` in this mount namespace, oldest first."""
    prefix = str(directory).rstrip("/") + "/"
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    found = (_parse(line) for line in lines)
    return [mount for mount in found if (mount.target + "/").startswith(prefix)]


def detach_all(directory: Path, *, before: Callable[[], None] = lambda: None) -> None:
    """Ends every mount at or below ``directory``; FUSE connections are aborted, so nobody waits.

    ``before`` runs between the two, to end processes that an abort has set free.
    """
    standing = mounts_below(directory)
    for mount in standing:
        if mount.fs_type.startswith("fuse"):
            abort_connection(mount.device)
    before()
    for mount in reversed(standing):
        _libc.umount2(os.fsencode(mount.target), _MNT_DETACH | _UMOUNT_NOFOLLOW)


def abort_connection(device: str) -> None:
    """Aborts the FUSE connection of a mount (``0:MINOR``): whoever waits on it gets an error."""
    if not any(_FUSE_CONNECTIONS.iterdir()):
        _libc.mount(b"none", os.fsencode(_FUSE_CONNECTIONS), b"fusectl", 0, None)
    minor = device.partition(":")[2]
    with contextlib.suppress(OSError):  # the connection has ended by itself
        (_FUSE_CONNECTIONS / minor / "abort").write_text("1")


def _parse(line: str) -> StandingMount:
    front, _, back = line.partition(" - ")
    columns = front.split(" ")
    target = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), columns[4])
    return StandingMount(target, back.split(" ")[0], columns[2])
