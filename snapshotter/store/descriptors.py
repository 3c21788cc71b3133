"""A bounded set of open file descriptors, shared by threads."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable


class OpenFile:
    """A descriptor that closes when nobody uses it any more.

    Reference counting does the closing, so that a file may leave the set while another thread is
    reading from it.
    """

    __slots__ = ("descriptor",)

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def close(self) -> None:
        """Closes it now, where it is certain that nobody uses it; harmless when it is closed."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class Descriptors:
    """The most recently used open files by key; at most ``limit`` of them."""

    def __init__(self, limit: int = 128) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._files: OrderedDict[Hashable, OpenFile] = OrderedDict()

    def get(self, key: Hashable, open_file: Callable[[], int]) -> OpenFile:
        """The open file of ``key``, from ``open_file`` if need be, whose OSError passes through."""
        with self._lock:
            file = self._files.get(key)
            if file is not None:
                self._files.move_to_end(key)
                return file
        file = OpenFile(open_file())
        with self._lock:
            kept = self._files.setdefault(key, file)
            evicted = self._files.popitem(last=False) if len(self._files) > self._limit else None
        del evicted  # closes outside the lock
        return kept

    def drop(self, key: Hashable) -> None:
        """Closes the file of ``key``, if there is one, as soon as nobody reads from it."""
        with self._lock:
            file = self._files.pop(key, None)
        del file

    def close(self) -> None:
        """Closes everything, at once: nobody may be reading any more."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def __len__(self) -> int:
        return len(self._files)
