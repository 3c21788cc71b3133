"""Ranges of files as memory, for answers that are large.

A large range is mapped, not read: whoever writes it to a device then has the kernel copy it from
the page cache, once, and no memory has to be found for it. A page that cannot be read from the disk
makes that write fail with EFAULT; nothing else may look at the bytes.
"""

from __future__ import annotations

import mmap
import os

_MAPPED_BYTES = 64 << 10
"""Below this, copying is quicker than mapping."""


def read_range(descriptor: int, offset: int, length: int) -> bytes | memoryview:
    """What is in the file there, short at its end; OSError."""
    if length < _MAPPED_BYTES:
        return os.pread(descriptor, length, offset)
    length = min(length, os.fstat(descriptor).st_size - offset)
    if length <= 0:
        return b""
    start = offset % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(
        descriptor,
        start + length,
        flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
        prot=mmap.PROT_READ,
        offset=offset - start,
    )
    return memoryview(mapped)[start:]
