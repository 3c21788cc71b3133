"""Ways to read a large file, each compared with the original byte by byte.

``python -m tests.support.large_readers WAY FILE ORIGINAL``: run as a process of its own, since one
that waits for a view cannot be killed from within. Prints ``same``.
"""

import hashlib
import mmap
import os
import random
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_THREADS = 8
_READS = 40
_LONGEST_BYTES = 300_000
_BLOCK_BYTES = 4096


def _is_same_everywhere(read: Callable[[int, int], bytes], original: bytes) -> bool:
    """Reads at places of each thread's own choice; short at the end of the file."""

    def check(seed: int) -> bool:
        source = random.Random(seed)
        for _ in range(_READS):
            offset = source.randrange(len(original))
            length = source.randrange(_LONGEST_BYTES)
            if read(offset, length) != original[offset : offset + length]:
                return False
        return True

    with ThreadPoolExecutor(_THREADS) as threads:
        return all(threads.map(check, range(_THREADS)))


def random_preads(path: str, original: bytes) -> bool:
    """pread(2) by eight threads."""
    descriptor = os.open(path, os.O_RDONLY)
    return _is_same_everywhere(
        lambda offset, length: os.pread(descriptor, length, offset), original
    )


def random_faults(path: str, original: bytes) -> bool:
    """Page faults of one mapping by eight threads."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    return _is_same_everywhere(lambda offset, length: mapping[offset : offset + length], original)


def direct(path: str, original: bytes) -> bool:
    """O_DIRECT, which goes past the page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, 64 * _BLOCK_BYTES)
    for offset in range(0, len(original), 3 * len(buffer) + _BLOCK_BYTES):
        count = os.preadv(descriptor, [buffer], offset)
        if buffer[:count] != original[offset : offset + len(buffer)]:
            return False
    return True


def sendfile(path: str, original: bytes) -> bool:
    """sendfile(2) of the whole file."""
    source = os.open(path, os.O_RDONLY)
    with tempfile.TemporaryFile() as target:
        while os.sendfile(target.fileno(), source, None, 1 << 20):
            pass
        target.seek(0)
        return target.read() == original


def read_ahead(path: str, original: bytes) -> bool:
    """A part that the kernel was told to read ahead."""
    descriptor = os.open(path, os.O_RDONLY)
    offset, length = 5 << 20, 3 << 20
    os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)
    return os.pread(descriptor, length, offset) == original[offset : offset + length]


def backwards(path: str, original: bytes) -> bool:
    """From the end to the start, which nobody reads ahead."""
    descriptor, length = os.open(path, os.O_RDONLY), 700_001
    return all(
        os.pread(descriptor, length, offset) == original[offset : offset + length]
        for offset in reversed(range(0, len(original), length))
    )


def sequentially(path: str, original: bytes) -> bool:
    """From the start to the end."""
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return digest == hashlib.sha256(original).digest()


WAYS = {
    way.__name__: way
    for way in (
        random_preads,
        random_faults,
        direct,
        sendfile,
        read_ahead,
        backwards,
        sequentially,
    )
}

if __name__ == "__main__":
    _, chosen, file, expected = sys.argv
    print("same" if WAYS[chosen](file, Path(expected).read_bytes()) else "other bytes")
