"""What is timed: operations of a program on a tree, the same for every arm, each with its check."""

import hashlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import fixture

_LARGE_BYTES = 1 << 20
REWRITTEN = b"seventeen bytes!\n"


def traverse(root: Path) -> int:
    """Lists every directory and stats every entry; how many there are."""
    count = 0
    stack = [os.fspath(root)]
    while stack:
        with os.scandir(stack.pop()) as entries:
            for entry in entries:
                count += 1
                entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    stack.append(entry.path)
    return count


def read_all(paths: list[str]) -> int:
    """Opens, reads and closes each file; the total size."""
    total = 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        total += len(os.read(descriptor, 4096))
        os.close(descriptor)
    return total


def reader_of_all(root: Path) -> Callable[[], int]:
    """``read_all`` of the small files below a root, with their paths made beforehand."""
    return partial(read_all, small_paths(root))


def digest(path: Path) -> str:
    """The SHA-256 of a file, read sequentially."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rewrite(paths: list[str]) -> None:
    """Replaces each file's content by 17 bytes and reads them back."""
    for path in paths:
        with open(path, "r+b", buffering=0) as file:
            file.truncate()
            file.write(REWRITTEN)
        with open(path, "rb", buffering=0) as file:
            if file.read() != REWRITTEN:
                raise AssertionError(f"{path} does not have what was written")


def small_paths(root: Path) -> list[str]:
    """The small files' paths below a root."""
    return [os.path.join(root, path) for path in fixture.small_names()]


def check_small_contents(root: Path) -> None:
    """Raises when any small file is not what the fixture says."""
    for path, content in fixture.small_files():
        if (root / path).read_bytes() != content:
            raise AssertionError(f"{root / path}: wrong content")


def forget_names() -> None:
    """Makes the kernel drop cached names and attributes (not pages) of every file system."""
    Path("/proc/sys/vm/drop_caches").write_text("2")


def uncache(root: Path) -> None:
    """Gives the page cache of the large files below ``root`` back, for the next sample to use.

    Memory that a virtual machine uses for the first time has to be found by its host: as samples
    leave their files, they would soon wait for that alone, five times as long as for writing.
    """
    for directory, _, files in os.walk(root):
        for file in files:
            path = os.path.join(directory, file)
            if os.lstat(path).st_size < _LARGE_BYTES:
                continue
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
