"""Writes cpio archives of the "newc" form, the one that Linux unpacks as an initramfs.

Format: Documentation/driver-api/early-userspace/buffer-format.rst of Linux. An entry is a header of
110 characters (a magic and 13 numbers of 8 hex digits), the name with its NUL, and the data, each
padded to 4 bytes. Archives may follow one another in one initramfs. Pure.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from typing import NamedTuple

_MAGIC = b"070701"
_TRAILER = b"TRAILER!!!"
_ALIGNMENT = 4
_LONGEST = 0xFFFFFFFF


class CpioEntry(NamedTuple):
    """One file: ``name`` without leading slash, ``mode`` with its type bits, its bytes.

    ``data`` is a symbolic link's target; directories have none.
    """

    name: bytes
    mode: int
    data: bytes = b""


def directory(name: str) -> CpioEntry:
    """A directory that everybody may enter."""
    return CpioEntry(name.encode(), stat.S_IFDIR | 0o755)


def regular(name: str, data: bytes, *, executable: bool = False) -> CpioEntry:
    """A regular file of root."""
    return CpioEntry(name.encode(), stat.S_IFREG | (0o755 if executable else 0o644), data)


def encode(entries: Iterable[CpioEntry]) -> bytes:
    """The archive of ``entries``, all of them root's and as old as 1970.

    Raises ValueError for data of 4 GiB or more, which the form cannot hold.
    """
    archive = bytearray()
    for inode, entry in enumerate(entries, start=1):
        _append(archive, inode, entry)
    _append(archive, 0, CpioEntry(_TRAILER, 0))
    return bytes(archive)


def _append(archive: bytearray, inode: int, entry: CpioEntry) -> None:
    size = len(entry.data)
    if size > _LONGEST:
        raise ValueError(f"{entry.name!r} has {size} bytes; a cpio archive holds less than 4 GiB")
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    numbers = (inode, entry.mode, 0, 0, links, 0, size, 0, 0, 0, 0, len(entry.name) + 1, 0)
    archive += _MAGIC + b"".join(b"%08X" % number for number in numbers) + entry.name + b"\0"
    _pad(archive)
    archive += entry.data
    _pad(archive)


def _pad(archive: bytearray) -> None:
    archive += bytes(-len(archive) % _ALIGNMENT)
