"""What the kernel has open: file handles and the open files and directories behind them."""

from __future__ import annotations

import errno
import itertools
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """An open file or directory."""

    def close(self) -> None:
        """Lets go of what it holds."""
        ...


T = TypeVar("T", bound=Closable)


class Opened(Generic[T]):
    """An open file or directory, closed as soon as nobody holds this any more.

    So one that is released while another thread still reads from it stays open until that is done,
    without a lock or a count for each request.
    """

    __slots__ = ("item", "nodeid")

    def __init__(self, item: T, nodeid: int) -> None:
        self.item = item
        self.nodeid = nodeid

    def __del__(self) -> None:
        self.item.close()


class Handles(Generic[T]):
    """Open files by handle, from any thread. ``limit`` bounds how many; more are ENFILE."""

    def __init__(self, *, limit: int | None = None) -> None:
        self._limit = limit
        self._numbers = itertools.count(1)
        self._opened: dict[int, Opened[T]] = {}

    def __len__(self) -> int:
        return len(self._opened)

    def add(self, item: T, nodeid: int) -> int:
        """The handle of a file that was opened; if it is refused the file is closed."""
        if self._limit is not None and len(self._opened) >= self._limit:
            item.close()
            raise OSError(errno.ENFILE, "too many open files")
        handle = next(self._numbers)
        self._opened[handle] = Opened(item, nodeid)
        return handle

    def get(self, handle: int) -> Opened[T]:
        """What is open as ``handle``; EBADF if nothing is."""
        try:
            return self._opened[handle]
        except KeyError:
            raise OSError(errno.EBADF, f"file handle {handle} is not open") from None

    def remove(self, handle: int) -> Opened[T]:
        """Forgets a handle; its file is closed when what is returned is dropped."""
        try:
            return self._opened.pop(handle)
        except KeyError:
            raise OSError(errno.EBADF, f"file handle {handle} is not open") from None

    def clear(self) -> None:
        """Closes everything."""
        self._opened.clear()
