"""What is mounted where, read from /proc without touching the file systems themselves.

A stat of a dead or waiting FUSE mount may hang; /proc/<pid>/mountinfo never does. Its format:
proc_pid_mountinfo(5).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(rb"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class MountLine:
    """One mount: its file system's st_dev, where it stands, and what it is.

    ``root`` is the directory of the file system that it shows: for a bind, what was bound.
    """

    device: int
    target: str
    fs_type: str
    source: str
    root: str = "/"


def parse(text: bytes) -> list[MountLine]:
    """The mounts of a mountinfo file; a line that is not one is left out."""
    lines = []
    for raw in text.splitlines():
        left, separator, right = raw.partition(b" - ")
        fields, rest = left.split(b" "), right.split(b" ")
        if not separator or len(fields) < 6 or len(rest) < 2:
            continue
        major, _, minor = fields[2].partition(b":")
        device = os.makedev(int(major), int(minor))
        root, target = _unescape(fields[3]), _unescape(fields[4])
        lines.append(MountLine(device, target, _unescape(rest[0]), _unescape(rest[1]), root))
    return lines


def mounts(pid: int | str = "self") -> list[MountLine]:
    """The mounts that a process sees, by default this one; targets are relative to its root.

    Raises OSError when the process is gone.
    """
    return parse(Path(f"/proc/{pid}/mountinfo").read_bytes())


def mount_at(target: Path) -> MountLine | None:
    """The topmost mount that stands exactly at ``target``, or None."""
    wanted = os.fspath(target)
    return next((line for line in reversed(mounts()) if line.target == wanted), None)


def sources_everywhere() -> set[str]:
    """The sources of everything mounted in any mount namespace that a visible process is in."""
    return {line.source for line in everywhere()}


def everywhere() -> list[MountLine]:
    """Everything mounted in any mount namespace that a visible process is in."""
    lines: list[MountLine] = []
    namespaces: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            if namespace not in namespaces:
                lines += mounts(pid)
                namespaces.add(namespace)
        except OSError:  # the process ended
            continue
    return lines


def _unescape(raw: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), raw))
