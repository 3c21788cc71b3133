"""What each call of our overlay costs, beside the same system call on kernel overlayfs.

    python -m benchmarks.overlay [--rounds N] [--profile CALL]

No FUSE is between: the calls are made in this process, as the server makes them, and nodes are let
go of as after FORGET. Both sides have lowers and uppers of the same content on one file system.
Times are of the processor, in this process and in the kernel for it: others' load is no part of it.
``--profile`` shows where the time of one of the calls goes. The other table is the physical
metadata cache, on against off: lookups in an immutable directory lower, whose nodes were forgotten.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import machine
from snapshotter.overlay.directory_lower import DirectoryLower
from snapshotter.overlay.merged import Merged
from snapshotter.overlay.metadata_cache import MetadataCache
from snapshotter.vfs import AttrChange, Caller
from tests.support.overlay_trees import fill, kernel_overlay, merged, new_upper
from tests.support.scratch import scratch_directory

COUNT = 400
SMALL = 32
_CALLER = Caller(0, 0, 0o022)
_BLOCK = bytes(64 << 10)

Phases = dict[str, Callable[[], int]]
"""By name, in order: each does so many calls and says how many."""


class Native:
    """The phases as system calls on a mounted tree."""

    def __init__(self, root: Path) -> None:
        self._base = os.fsencode(root)

    def phases(self) -> Phases:
        return {
            "mkdir": lambda: self._each("new", lambda path: os.mkdir(path, 0o755), "d"),
            "create": lambda: self._each("new", self._create),
            "lookup": lambda: self._each("lower", os.lstat),
            "stat": lambda: self._each("new", os.lstat),
            "open": lambda: self._each("new", self._open),
            "open lower": lambda: self._each("lower", self._open),
            "readdir": lambda: len(os.listdir(self._base + b"/lower")),
            "rename": lambda: self._each("new", lambda path: os.rename(path, path + "x")),
            "rename directory": lambda: self._each("new", lambda p: os.rename(p, p + "x"), "d"),
            "unlink": lambda: self._each("new", os.unlink, suffix="x"),
            "rmdir": lambda: self._each("new", os.rmdir, "d", "x"),
            "unlink lower": lambda: self._each("lower", os.unlink),
            "create over whiteout": lambda: self._each("lower", self._create),
            "small copy-up": lambda: self._each("small", lambda p: os.chmod(p, 0o600), "", "", 32),
            "rename lower": lambda: self._each(
                "copied", lambda p: os.rename(p, p + "x"), "", "", 32
            ),
            "write 64 KiB": self._write,
        }

    def _each(
        self,
        directory: str,
        call: Callable[[str], Any],
        kind: str = "",
        suffix: str = "",
        count: int = COUNT,
    ) -> int:
        for number in range(count):
            call(f"{os.fsdecode(self._base)}/{directory}/{kind}{number}{suffix}")
        return count

    def _create(self, path: str) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644))

    def _open(self, path: str) -> None:
        os.close(os.open(path, os.O_RDONLY))

    def _write(self) -> int:
        file = os.open(self._base + b"/new/large", os.O_CREAT | os.O_RDWR, 0o644)
        for number in range(256):
            os.pwrite(file, _BLOCK, number * len(_BLOCK))
        os.close(file)
        return 256


class Ours:
    """The phases as calls of the file system; of nodes only those of directories are kept."""

    def __init__(self, fs: Merged) -> None:
        self._fs = fs
        self._new = fs.lookup(fs.root, b"new").node
        self._lower = fs.lookup(fs.root, b"lower").node
        self._small = fs.lookup(fs.root, b"small").node
        self._copied = fs.lookup(fs.root, b"copied").node

    def phases(self) -> Phases:
        fs, new, lower = self._fs, self._new, self._lower
        return {
            "mkdir": lambda: _each(lambda n: fs.mkdir(new, b"d" + n, 0o755, _CALLER)),
            "create": lambda: _each(lambda n: fs.create(new, n, 0o644, _CALLER, 0)[1].close()),
            "lookup": lambda: _each(lambda n: fs.lookup(lower, n)),
            "stat": lambda: _each(lambda n: fs.getattr(fs.lookup(new, n).node)),
            "open": lambda: _each(lambda n: self._open(new, n)),
            "open lower": lambda: _each(lambda n: self._open(lower, n)),
            "readdir": lambda: len(list(fs.opendir(lower).entries())),
            "rename": lambda: _each(lambda n: self._rename(new, n)),
            "rename directory": lambda: _each(lambda n: self._rename(new, b"d" + n)),
            "unlink": lambda: _each(lambda n: self._unlink(new, n + b"x")),
            "rmdir": lambda: _each(lambda n: self._rmdir(new, b"d" + n + b"x")),
            "unlink lower": lambda: _each(lambda n: self._unlink(lower, n)),
            "create over whiteout": lambda: _each(
                lambda n: fs.create(lower, n, 0o644, _CALLER, 0)[1].close()
            ),
            "small copy-up": lambda: _each(self._copy_up, SMALL),
            "rename lower": lambda: _each(lambda n: self._rename(self._copied, n), SMALL),
            "write 64 KiB": self._write,
        }

    def _open(self, parent: Any, name: bytes) -> None:
        self._fs.open(self._fs.lookup(parent, name).node, os.O_RDONLY).close()

    def _rename(self, parent: Any, name: bytes) -> None:
        held = self._fs.lookup(parent, name)
        self._fs.rename(parent, name, parent, name + b"x", 0)
        del held

    def _unlink(self, parent: Any, name: bytes) -> None:
        held = self._fs.lookup(parent, name)
        self._fs.unlink(parent, name)
        del held

    def _rmdir(self, parent: Any, name: bytes) -> None:
        held = self._fs.lookup(parent, name)
        self._fs.rmdir(parent, name)
        del held

    def _copy_up(self, name: bytes) -> None:
        self._fs.setattr(self._fs.lookup(self._small, name).node, AttrChange(mode=0o600))

    def _write(self) -> int:
        file = self._fs.create(self._new, b"large", 0o644, _CALLER, 0)[1]
        for number in range(256):
            file.write(_BLOCK, number * len(_BLOCK))
        file.close()
        return 256


def _each(call: Callable[[bytes], Any], count: int = COUNT) -> int:
    for number in range(count):
        call(b"%d" % number)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", metavar="CALL")
    options = parser.parse_args()
    with scratch_directory() as base:
        lower = base / "lower"
        files: dict[str, bytes | None] = {"lower": None, "small": None, "copied": None}
        files |= {f"lower/{number}": b"x" for number in range(COUNT)}
        for name in ("small", "copied"):
            files |= {f"{name}/{number}": bytes(4096) for number in range(SMALL)}
        fill(lower, files)
        seconds: dict[str, list[tuple[float, float]]] = {}
        for number in range(options.rounds):
            for call, pair in _round(base, lower, number, options.profile).items():
                seconds.setdefault(call, []).append(pair)
        if options.profile is None:
            _print_calls(seconds)
            _print_cache(lower, options.rounds)
            print("\nTaken on:", ", ".join(f"{k} {v}" for k, v in machine.describe().items()))


def _round(
    base: Path, lower: Path, number: int, profiled: str | None
) -> dict[str, tuple[float, float]]:
    """µs for each call, ours and the kernel's."""
    taken = {}
    ours_at, kernel_at = (new_upper(base, f"{side}{number}") for side in ("ours", "kernel"))
    with ExitStack() as stack:
        mounted = stack.enter_context(kernel_overlay([lower], *kernel_at, base / "mnt"))
        fs = stack.enter_context(merged([lower], *ours_at))
        (mounted / "new").mkdir()
        fs.mkdir(fs.root, b"new", 0o755, _CALLER)
        native = Native(mounted).phases()
        ours = Ours(fs).phases()
        for call, phase in ours.items():
            time_ours = _profile if call == profiled else _time
            taken[call] = (time_ours(phase), _time(native[call]))
        stack.callback(gc.collect)
    return taken


def _time(phase: Callable[[], int]) -> float:
    begun = time.process_time()
    count = phase()
    return (time.process_time() - begun) / count * 1e6


def _profile(phase: Callable[[], int]) -> float:
    profile = cProfile.Profile()
    count: int = profile.runcall(phase)
    print(f"{count} calls:")
    pstats.Stats(profile).sort_stats("tottime").print_stats(18)
    return 0.0


def _print_calls(seconds: dict[str, list[tuple[float, float]]]) -> None:
    print("| call | ours, µs | kernel overlayfs, µs | ratio |")
    print("|---|---:|---:|---:|")
    for call, pairs in seconds.items():
        ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(mine / theirs for mine, theirs in pairs)
        print(f"| {call} | {ours:.1f} | {theirs:.1f} | {ratio:.1f} |")


def _print_cache(lower: Path, rounds: int) -> None:
    """Looks every file up ten times, without keeping its node, with the cache and without."""
    print("\n| physical metadata cache | hits | misses | saved stats | time, on / off |")
    print("|---|---:|---:|---:|---:|")
    ratios, caches = [], []
    for _ in range(rounds):
        sides = [_walk(lower, MetadataCache(enabled=enabled)) for enabled in (True, False)]
        ratios.append(sides[0][0] / sides[1][0])
        caches = [cache for _, cache in sides]
    for title, cache in zip(("on", "off"), caches, strict=True):
        counted = cache.counters
        ratio = f"{statistics.median(ratios):.2f}" if title == "on" else "1"
        print(f"| {title} | {counted.hits} | {counted.misses} | {counted.saved_stats} | {ratio} |")


def _walk(lower: Path, cache: MetadataCache) -> tuple[float, MetadataCache]:
    directory = DirectoryLower(lower, immutable=True, cache=cache, layer=1)
    fs = Merged([directory])
    parent = fs.lookup(fs.root, b"lower").node
    begun = time.process_time()
    for _ in range(10):
        _each(lambda name: fs.lookup(parent, name))
    taken = time.process_time() - begun
    directory.close()
    return taken, cache


if __name__ == "__main__":
    main()
