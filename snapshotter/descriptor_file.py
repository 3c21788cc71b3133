"""An open file of the host as the File of a file system. The commonest of them, so it is here."""

from __future__ import annotations

import ctypes
import errno
import os

from snapshotter.vfs import File, Pending

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_NOT_COPIED_IN_THE_KERNEL = frozenset((errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS))
_BUFFER_SIZE = 1 << 20


class DescriptorFile:
    """Reads and writes by ``descriptor``, which becomes this object's and is not O_APPEND."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, size: int, offset: int) -> bytes:
        """As pread(2), but short only at the end."""
        data = os.pread(self._descriptor, size, offset)
        while data and len(data) < size:
            more = os.pread(self._descriptor, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def write(self, data: bytes | memoryview, offset: int, *, append: bool = False) -> int:
        """As pwrite(2); with ``append`` at the end, wherever that is when it happens."""
        if append:
            return os.pwritev(self._descriptor, [data], offset, os.RWF_APPEND)
        return os.pwrite(self._descriptor, data, offset)

    def seek(self, offset: int, whence: int) -> int:
        """As lseek(2)."""
        return os.lseek(self._descriptor, offset, whence)

    def allocate(self, mode: int, offset: int, size: int) -> None:
        """As fallocate(2)."""
        allocate(self._descriptor, mode, offset, size)

    def copy_from(self, source: File, source_offset: int, offset: int, size: int) -> int:
        """As copy_file_range(2), of any two files."""
        return copy_range(source, source_offset, self._descriptor, offset, size)

    def fsync(self, *, data_only: bool = False) -> None:
        """As fsync(2) and fdatasync(2)."""
        (os.fdatasync if data_only else os.fsync)(self._descriptor)

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self._descriptor)


def allocate(descriptor: int, mode: int, offset: int, size: int) -> None:
    """fallocate(2), which Python has only for mode 0."""
    while _libc.fallocate(descriptor, mode, offset, size):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, f"fallocate: {os.strerror(number)}")


def copy_range(source: File, source_offset: int, target: int, offset: int, size: int) -> int:
    """Copies up to ``size`` bytes to the descriptor ``target``, in the kernel where it can.

    Returns how many: fewer at the end of the source, or when something failed half-way. An error
    (or Pending) is raised only if nothing was copied.
    """
    copied = 0
    while copied < size:
        try:
            count = _copy_once(
                source, source_offset + copied, target, offset + copied, size - copied
            )
        except (OSError, Pending):
            if copied:
                break
            raise
        if not count:
            break
        copied += count
    return copied


def _copy_once(source: File, source_offset: int, target: int, offset: int, size: int) -> int:
    descriptor = source.fileno()
    if descriptor is not None:
        try:
            return os.copy_file_range(descriptor, target, size, source_offset, offset)
        except OSError as error:
            if error.errno not in _NOT_COPIED_IN_THE_KERNEL:
                raise
    data = source.read(min(size, _BUFFER_SIZE), source_offset)
    return os.pwrite(target, data, offset) if data else 0
