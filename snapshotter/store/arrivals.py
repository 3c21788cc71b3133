"""ARRIVALS as the undo list: what was published and is not yet known to be on disk.

A name stays in ARRIVALS until a syncfs(2) that began after its arrival has ended. When the machine
goes down before that, the file behind the name may be torn, so the next start removes it from both
directories. When only the process died, the page cache still has everything: nothing is undone.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from snapshotter.paths import Paths
from snapshotter.store.objects import FAN_OUT, Objects
from snapshotter.telemetry import Counters

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_libc = ctypes.CDLL(None, use_errno=True)


def sync_file_system(descriptor: int) -> None:
    """syncfs(2): waits until everything written so far to that file system is on disk."""
    if _libc.syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def read_boot_id() -> str:
    """What tells this boot of the kernel from every other."""
    with open(_BOOT_ID, encoding="ascii") as file:
        return file.read().strip()


class Arrivals:
    """Which names wait for a sync. ``note`` may be called from any thread.

    Arrivals are young until the next ``settle_ripe`` and ripe from then on; each call settles
    what was ripe. So with one call every ``settle_s`` nothing is dropped at a younger age.
    """

    def __init__(self, *, counters: Counters) -> None:
        self._young: deque[str] = deque()
        self._ripe: deque[str] = deque()
        self._counters = counters

    def note(self, path: str) -> None:
        """An object of that name (``ab/…``) was just put into ARRIVALS."""
        self._young.append(path)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits for a sync."""
        return not self._young and not self._ripe

    def settle_ripe(self, objects: Objects) -> None:
        """Settles what was young at the call before this one. Blocks; OSError changes nothing."""
        batch = list(_drain(self._ripe))
        self._ripe.extend(_drain(self._young))
        self._settle(batch, objects)

    def settle_all(self, objects: Objects) -> None:
        """Settles every arrival, however young. Blocks; OSError changes nothing.

        overlayfs may miss one of these in ARRIVALS if it is just between the two directories;
        the gate's verdict then has it look again, and it finds the name in OBJECTS.
        """
        self._settle([*_drain(self._ripe), *_drain(self._young)], objects)

    def _settle(self, batch: list[str], objects: Objects) -> None:
        if not batch:
            return
        try:
            sync_file_system(objects.arrivals_fd)
        except BaseException:
            self._ripe.extend(batch)
            raise
        for path in batch:
            _unlink(path, objects.arrivals_fd)
        self._counters.add("arrivals_settled", len(batch))

    def recover(self, paths: Paths, objects: Objects) -> bool:
        """Brings both directories in order after the last stop; True if the machine went down.

        Then ``note_boot`` is due, once everything else is in order too. Every start of a machine
        has another boot id, so the marker needs no fsync: one that did not reach the disk says
        the same as one of an earlier boot.
        """
        marker = _marker(paths)
        is_same_boot = marker.exists() and marker.read_text(encoding="ascii") == read_boot_id()
        for path in _names(objects.arrivals_fd):
            if is_same_boot:
                self._adopt(path, objects)
            else:
                # OBJECTS first: while the ARRIVALS name stands, a further stop repeats this.
                _unlink(path, objects.objects_fd)
                _unlink(path, objects.arrivals_fd)
                self._counters.add("arrivals_undone")
        return not is_same_boot

    def note_boot(self, paths: Paths) -> None:
        """From now on what is there is of this boot; called earlier, a stop would hide a reboot."""
        _marker(paths).write_text(read_boot_id(), encoding="ascii")

    def _adopt(self, path: str, objects: Objects) -> None:
        """Completes what a process that died between the two links left."""
        try:
            os.link(path, path, src_dir_fd=objects.arrivals_fd, dst_dir_fd=objects.objects_fd)
        except FileExistsError:
            pass
        self.note(path)


def _marker(paths: Paths) -> Path:
    return paths.root / "store.boot"


def _drain(names: deque[str]) -> Iterator[str]:
    while names:
        yield names.popleft()


def _names(directory_fd: int) -> Iterator[str]:
    for fan_out in FAN_OUT:
        descriptor = os.open(fan_out, os.O_RDONLY | os.O_DIRECTORY, dir_fd=directory_fd)
        try:
            files = os.listdir(descriptor)
        finally:
            os.close(descriptor)
        for file in files:
            yield f"{fan_out}/{file}"


def _unlink(path: str, directory_fd: int) -> None:
    try:
        os.unlink(path, dir_fd=directory_fd)
    except FileNotFoundError:
        pass
