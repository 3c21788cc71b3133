"""The gate's mount: made, given to the keeper, found again, and replaced when it is dead.

All of it blocks, and none of it touches the mounted file system: that would wait for the store.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import structlog

from snapshotter.config import Config
from snapshotter.errors import BusyError, SnapshotterError, UnavailableError
from snapshotter.kernel_view import keeper_client, mountinfo, syscalls
from snapshotter.paths import Paths

_log = structlog.get_logger()
_FLAGS = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV


@dataclass(frozen=True, slots=True)
class GateMount:
    """A living gate: its st_dev, and whether it was mounted just now."""

    device: int
    is_new: bool


def ensure_gate(paths: Paths, config: Config) -> GateMount:
    """A living gate at ``paths.gate``: the one that stands, else a new one.

    A dead one is detached first, so that nothing dead stays mounted; its views keep what they
    have opened and fail to open other cold files. Needs the keeper. Raises SnapshotterError
    when the kernel refuses the mount, UnavailableError when the keeper must be replaced first.
    """
    standing = mountinfo.mount_at(paths.gate)
    has_gate = keeper_client.status(paths.keeper_socket).has_gate
    if standing is not None and has_gate:
        return GateMount(standing.device, is_new=False)
    remove_gate(paths)
    if has_gate:
        keeper_client.stop(paths.keeper_socket)
        raise UnavailableError(
            f"gate at {paths.gate}: somebody unmounted it; keeper and gate are made anew"
        )
    device = _mount(paths)
    raise_read_ahead(device, config.read_ahead_kb)
    _log.info("gate mounted", target=str(paths.gate), device=device)
    return GateMount(device, is_new=True)


def let_go_of_idle_nodes(paths: Paths) -> None:
    """Makes the kernel forget what no view holds of the gate; OSError if there is none.

    It would keep that, and the store with it, until memory is short.
    """
    syscalls.reconfigure(paths.gate, ["ro"])


def remove_gate(paths: Paths) -> None:
    """Unmounts whatever stands at the gate's mount point."""
    while mountinfo.mount_at(paths.gate) is not None:
        syscalls.umount(paths.gate, syscalls.MNT_DETACH)


def _mount(paths: Paths) -> int:
    try:
        connection = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SnapshotterError(f"open /dev/fuse: {error.strerror}; modprobe fuse") from error
    try:
        data = f"fd={connection},rootmode=40555,user_id=0,group_id=0,allow_other"
        syscalls.mount("snapshotter-gate", paths.gate, "fuse.snapshotter", _FLAGS, data)
        keeper_client.register(paths.keeper_socket, connection)
    except OSError as error:
        raise SnapshotterError(f"mount the gate: {error}") from error
    except (UnavailableError, BusyError):
        remove_gate(paths)
        raise
    finally:
        os.close(connection)
    standing = mountinfo.mount_at(paths.gate)
    if standing is None:
        raise SnapshotterError(f"gate at {paths.gate}: it vanished while it was being made")
    return standing.device


def raise_read_ahead(device: int, kib: int) -> None:
    """Cold sequential reads of large files then ask for several chunks at a time.

    ``device`` is the st_dev of a FUSE file system of ours.
    """
    path = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        path.write_text(str(kib))
    except OSError as error:
        _log.warning("read-ahead not raised", path=str(path), error=str(error))
