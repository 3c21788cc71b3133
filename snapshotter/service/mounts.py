"""Records of mounts: ``mounts/<id>/mount.json``, with the private upper beside it.

A mount lives in somebody's mount namespace, out of the daemon's hands. Its record says what it
is made of, and is dropped when the mount is said, or found, to be gone.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import structlog

from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import BusyError, NotFoundError
from snapshotter.service import uppers
from snapshotter.service.control import MountRecord
from snapshotter.service.uppers import Upper

_log = structlog.get_logger()
_FILE = "mount.json"
_GONE = ".gone-"
UNPLACED_GRACE_S = 60.0
"""A mount that was handed out and is placed nowhere yet is left alone for this long."""


class StoredMount(msgspec.Struct, frozen=True, kw_only=True):
    """A record and what finds out, in another life of the daemon, whether the mount still is.

    ``boot`` is the kernel's boot id; ``gate_device`` the st_dev of the gate behind the view;
    ``owner_started`` the owner's start time in clock ticks, which tells it from a later process
    of the same number. ``server_pid`` and ``server_started`` are the process that serves a fuse
    view.
    """

    mount: MountRecord
    boot: str
    gate_device: int
    volatile: bool
    owner_started: int | None
    server_pid: int | None = None
    server_started: int | None = None

    @property
    def is_served(self) -> bool:
        """Whether the process behind a view that has one still lives."""
        if self.server_pid is None:
            return True
        return self.server_started is not None and (
            start_ticks(self.server_pid) == self.server_started
        )


def boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it is gone or a zombie."""
    try:
        raw = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = raw.rpartition(b")")[2].split()  # from field 3; a name may hold anything
    return None if fields[0] in b"ZX" else int(fields[19])


class MountTable:
    """All mounts of this root, in memory and on disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._boot = boot_id()
        self._mounts: dict[str, StoredMount] = {}
        self._claimed: set[str] = set()

    def new_id(self) -> str:
        """An id that no mount has."""
        return secrets.token_hex(6)

    def directory_of(self, mount_id: str) -> Path:
        """Where a mount's record and private upper are."""
        return self._directory / mount_id

    def load(self) -> list[str]:
        """Reads the records of earlier daemons; the ids of those from before a reboot are told.

        What was being removed, and what never became a record, is removed now.
        """
        stale = []
        for directory in sorted(self._directory.iterdir()):
            stored = None if directory.name.startswith(_GONE) else _read(directory / _FILE)
            if stored is None:
                if not uppers.is_in_use(Upper(directory)):
                    uppers.remove(directory)
                continue
            self._mounts[stored.mount.id] = stored
            if stored.boot != self._boot:
                stale.append(stored.mount.id)
        return stale

    def all(self) -> list[StoredMount]:
        """Every mount, oldest first."""
        return sorted(self._mounts.values(), key=lambda stored: stored.mount.created_at_s)

    def get(self, mount_id: str) -> StoredMount:
        """One mount; NotFoundError if there is none of that id."""
        stored = self._mounts.get(mount_id)
        if stored is None:
            raise NotFoundError(f"mount {mount_id}: there is none; snapshotter ps lists them")
        return stored

    def find(self, mount_id: str) -> StoredMount | None:
        """One mount, or None."""
        return self._mounts.get(mount_id)

    @contextmanager
    def claim_upper(self, directory: str) -> Iterator[None]:
        """Holds an upper while a mount over it is made; BusyError if another mount has it."""
        wanted = os.path.realpath(directory)
        for stored in self._mounts.values():
            used = stored.mount.upper
            if used is not None and os.path.realpath(used) == wanted:
                raise BusyError(
                    f"upper {directory} is in use by mount {stored.mount.id} at "
                    f"{stored.mount.target}: unmount that first"
                )
        if wanted in self._claimed:
            raise BusyError(f"upper {directory} is being mounted already; give another directory")
        self._claimed.add(wanted)
        try:
            yield
        finally:
            self._claimed.remove(wanted)

    def add(
        self,
        mount: MountRecord,
        *,
        gate_device: int,
        volatile: bool,
        server_pid: int | None = None,
    ) -> StoredMount:
        """Records a mount that was made, and the process that serves it if there is one."""
        owner = mount.owner_pid
        stored = StoredMount(
            mount=mount,
            boot=self._boot,
            gate_device=gate_device,
            volatile=volatile,
            owner_started=start_ticks(owner) if owner is not None else None,
            server_pid=server_pid,
            server_started=start_ticks(server_pid) if server_pid is not None else None,
        )
        self._save(stored)
        return stored

    def place(self, mount_id: str, target: str, pid: int) -> StoredMount:
        """Records where a mount stands."""
        stored = self.get(mount_id)
        mount = msgspec.structs.replace(stored.mount, target=target, pid=pid)
        placed = msgspec.structs.replace(stored, mount=mount)
        self._save(placed)
        return placed

    def drop(self, mount_id: str) -> Path:
        """Forgets a mount; the directory that is returned is left to be removed (uppers.remove)."""
        self.get(mount_id)
        gone = self._directory / f"{_GONE}{mount_id}"
        with suppress(FileNotFoundError):  # somebody cleared up by hand
            self.directory_of(mount_id).rename(gone)
        del self._mounts[mount_id]
        return gone

    def remove_dropped(self) -> None:
        """Removes the directories of dropped mounts. Blocks for as long as that takes."""
        for directory in self._directory.glob(f"{_GONE}*"):
            uppers.remove(directory)

    def find_vanished(self, look: Callable[[], Container[str]]) -> list[str]:
        """Ids of mounts that are not among those that ``look`` finds standing. Blocks.

        A mount that is placed while it looks is not taken for one that vanished, and overlayfs
        itself is asked about those with a private upper. Lent ones come and go, and what is served
        to a virtual machine is mounted nowhere: it ends with its owner.
        """
        newest = time.time() - UNPLACED_GRACE_S
        candidates = [
            stored.mount
            for stored in self.all()
            if not (stored.mount.lent or stored.mount.view == "virtiofs")
            and (stored.mount.target is not None or stored.mount.created_at_s < newest)
        ]
        standing = look()
        return [
            mount.id
            for mount in candidates
            if mount.id not in standing
            and not (mount.private_upper and uppers.is_in_use(Upper(self.directory_of(mount.id))))
        ]

    def _save(self, stored: StoredMount) -> None:
        """Not synced: the mount itself would not survive a reboot either."""
        directory = self.directory_of(stored.mount.id)
        directory.mkdir(mode=0o700, exist_ok=True)
        temporary = directory / f".{_FILE}.new"
        temporary.write_bytes(msgspec.json.encode(stored))
        temporary.replace(directory / _FILE)
        self._mounts[stored.mount.id] = stored


def _read(path: Path) -> StoredMount | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=StoredMount)
    except (OSError, *DECODE_ERRORS) as error:
        _log.warning("mount record unreadable; it is removed", path=str(path), error=str(error))
        return None
