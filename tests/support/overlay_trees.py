"""Lowers, uppers and kernel overlayfs mounts for tests of the overlay."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from snapshotter.overlay.directory_lower import DirectoryLower
from snapshotter.overlay.merged import Merged
from snapshotter.overlay.upper import Upper
from tests.support.compare_trees import Node

LONG_AGO_NS = 1_000_000_000 * 10**9
_NOW_FROM_NS = 1_600_000_000 * 10**9
KERNEL_OPTIONS = "index=off,redirect_dir=on,metacopy=off,xino=off"


def fill(root: Path, layout: dict[str, bytes | None]) -> None:
    """Makes directories (None) and files with old times and modes that tell them apart."""
    for number, (name, content) in enumerate(layout.items()):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content)
            os.setxattr(path, "user.from", root.name.encode())
        path.chmod(0o755 if content is None else 0o600 + number)
        os.chown(path, number, 0)
    for path in [*sorted(root.rglob("*"), reverse=True), root]:
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS), follow_symlinks=False)


def make_lowers(base: Path) -> list[Path]:
    """Two lowers, the topmost first, with every relation that two layers can have."""
    below, above = base / "below", base / "above"
    below.mkdir()
    above.mkdir()
    fill(
        below,
        {
            "a": None, "a/a": b"below a/a", "a/b": b"below a/b", "a/c": None, "a/c/a": b"x" * 5000,
            "b": None, "b/a": None, "b/a/b": b"deep", "b/b": b"hidden by an opaque directory",
            "c": b"below c", "d": b"whited out above",
        },
    )  # fmt: skip
    os.symlink("nowhere", below / "a" / "d")
    os.mkfifo(below / "b" / "d", 0o640)
    os.mknod(below / "b" / "c", stat.S_IFBLK | 0o600, os.makedev(7, 300))
    fill(above, {"a": None, "a/b": b"above a/b", "a/c": None, "b": None, "b/a": None, "e": b""})
    os.mknod(above / "d", stat.S_IFCHR, 0)
    os.mknod(above / "a" / "a", stat.S_IFCHR, 0)
    os.setxattr(above / "b" / "a", "trusted.overlay.opaque", b"y")
    for path in (below, below / "a", below / "b", above, above / "a", above / "b"):
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return [above, below]


def new_upper(base: Path, name: str) -> tuple[Path, Path]:
    upper, work = base / name / "upper", base / name / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    os.utime(upper, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return upper, work


@contextmanager
def kernel_overlay(
    lowers: list[Path],
    upper: Path,
    work: Path,
    target: Path,
    *,
    metacopy: bool = False,
    volatile: bool = False,
) -> Iterator[Path]:
    """Kernel overlayfs of the same layers, mounted on ``target``."""
    target.mkdir(exist_ok=True)
    layers = f"lowerdir={':'.join(map(str, lowers))},upperdir={upper},workdir={work}"
    options = f"{layers},{KERNEL_OPTIONS}"
    if metacopy:
        options = options.replace("metacopy=off", "metacopy=on")
    if volatile:
        options += ",volatile"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, target], check=True)
    try:
        yield target
    finally:
        subprocess.run(["umount", target], check=True)


@contextmanager
def merged(
    lowers: list[Path],
    upper: Path | None = None,
    work: Path | None = None,
    *,
    immutable: bool = True,
) -> Iterator[Merged]:
    """Our overlay of the same layers."""
    opened = [DirectoryLower(lower, immutable=immutable) for lower in lowers]
    top = None if upper is None or work is None else Upper(upper, work)
    try:
        yield Merged(opened, top)
    finally:
        if top is not None:
            top.close()
        for lower in opened:
            lower.close()


def without_clock(scan: dict[bytes, Node]) -> dict[bytes, Node]:
    """Times that a clock set are all the same; those of the lowers and of utime stay."""
    return {
        path: dataclasses.replace(node, mtime_ns=min(node.mtime_ns, _NOW_FROM_NS))
        for path, node in scan.items()
    }
