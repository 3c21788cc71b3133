"""Puts a view where a user wants it, takes it away again, and says who is in the way."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import msgspec

from snapshotter.errors import (
    AccessDeniedError,
    BusyError,
    InvalidInputError,
    NotFoundError,
    SnapshotterError,
)
from snapshotter.kernel_view import syscalls
from snapshotter.service import control
from snapshotter.service.control_client import ControlClient

_MAX_USERS_NAMED = 5


def check_target(directory: str) -> str:
    """The real absolute path of an existing directory that may be mounted on.

    Raises NotFoundError when there is none and InvalidInputError when it is no directory or is /.
    """
    target = os.path.realpath(directory)
    if not os.path.exists(target):
        raise NotFoundError(f"mount on {directory}: it does not exist; make it with mkdir")
    if not os.path.isdir(target):
        raise InvalidInputError(f"mount on {directory}: it is not a directory")
    if target == "/":
        raise InvalidInputError("mount on /: it would cover the whole system")
    return target


def place(view: int, target: str) -> None:
    """Places a detached mount on ``target``; AccessDeniedError or SnapshotterError if it cannot."""
    try:
        syscalls.move_mount(view, target)
    except PermissionError as error:
        raise AccessDeniedError(f"mount on {target}: {error.strerror}; it needs root") from error
    except OSError as error:
        raise SnapshotterError(f"mount on {target}: {error.strerror}") from error


def restrict(view: int, *, nosuid: bool, nodev: bool) -> None:
    """Takes set-uid bits and file capabilities, or device nodes, out of force in a detached view.

    For the mount alone: other views of the image are as they were. SnapshotterError if the kernel
    refuses it.
    """
    attributes = (syscalls.MOUNT_ATTR_NOSUID if nosuid else 0) | (
        syscalls.MOUNT_ATTR_NODEV if nodev else 0
    )
    if not attributes:
        return
    try:
        syscalls.mount_setattr(view, set_attributes=attributes)
    except OSError as error:
        raise SnapshotterError(f"restrict the mount: {error.strerror}") from error


def place_and_tell(
    client: ControlClient,
    mount: control.MountRecord,
    view: int,
    target: str,
    *,
    nosuid: bool = False,
    nodev: bool = False,
) -> control.MountRecord:
    """Places a view that was just made, and closes ``view``; its record with the place.

    When the view cannot be placed or the daemon not be told, the mount is taken back. Raises what
    ``place`` and ``client.ask`` raise.
    """
    placed = msgspec.structs.replace(mount, target=target, pid=os.getpid())
    try:
        restrict(view, nosuid=nosuid, nodev=nodev)
        place(view, target)
        client.ask(control.Placed(id=mount.id, target=target, pid=os.getpid()), control.Done)
    except BaseException:
        remove(placed, lazy=True)
        client.ask(control.Unmounted(id=mount.id), control.Done)
        raise
    finally:
        os.close(view)
    return placed


def remove_and_tell(
    client: ControlClient, mount: control.MountRecord, *, lazy: bool = False
) -> None:
    """Removes a mount, and has the daemon drop its record and private upper.

    Raises what ``remove`` and ``client.ask`` raise.
    """
    remove(mount, lazy=lazy)
    client.ask(control.Unmounted(id=mount.id), control.Done)


def find_mount(mounts: Sequence[control.MountRecord], name: str) -> control.MountRecord:
    """The mount of that id, or the newest that stands at that path.

    Raises NotFoundError when there is none.
    """
    target = os.path.realpath(name)
    for mount in sorted(mounts, key=lambda mount: mount.created_at_s, reverse=True):
        if mount.id == name or (mount.target == target and mount.owner_pid is None):
            return mount
    raise NotFoundError(f"unmount {name}: no mount of ours; `snapshotter ps` lists them")


def remove(mount: control.MountRecord, *, lazy: bool = False) -> None:
    """Unmounts ``mount`` in this mount namespace; one that is no longer there counts as removed.

    ``lazy`` detaches it at once and lets its users finish. Raises BusyError, naming the users that
    /proc shows, and InvalidInputError for the mount of a sandbox, which ends with its command.
    """
    if mount.owner_pid is not None:
        raise InvalidInputError(
            f"unmount {mount.id}: it belongs to the sandbox of process {mount.owner_pid} and ends "
            "with it"
        )
    target = mount.target
    if target is None or not _stands(mount, target):
        return
    try:
        flags = syscalls.UMOUNT_NOFOLLOW | (syscalls.MNT_DETACH if lazy else 0)
        syscalls.umount(target, flags)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise BusyError(f"unmount {target}: in use{_users_text(target)}") from error
        if error.errno == errno.EPERM:
            raise AccessDeniedError(f"unmount {target}: it needs root") from error
        raise SnapshotterError(f"unmount {target}: {error.strerror}") from error


def _stands(mount: control.MountRecord, target: str) -> bool:
    """Whether what is at ``target`` is that mount, and not the bare directory or another's."""
    try:
        return os.stat(target).st_dev == mount.device
    except FileNotFoundError:
        return False
    except OSError:
        return True  # a view whose file system is in trouble: unmounting is the way out


def users_of(target: str) -> list[tuple[int, str, str]]:
    """Processes of this mount namespace that hold ``target``: pid, command, and what they hold."""
    namespace = os.readlink("/proc/self/ns/mnt")
    users: list[tuple[int, str, str]] = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/ns/mnt") != namespace:
                continue
            held = _held_below(pid, target)
            if held is not None:
                with open(f"/proc/{pid}/comm") as file:
                    users.append((int(pid), file.read().strip(), held))
        except OSError:
            continue  # it ended meanwhile, or is not ours to see
    return users


def _held_below(pid: str, target: str) -> str | None:
    for link in ("cwd", "root", "exe"):
        if _is_below(os.readlink(f"/proc/{pid}/{link}"), target):
            return link if link != "cwd" else "working directory"
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = os.readlink(f"/proc/{pid}/fd/{number}")
        if _is_below(path, target):
            return path
    with open(f"/proc/{pid}/maps", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path and _is_below(f"/{path}", target):
                return f"/{path}"
    return None


def _is_below(path: str, target: str) -> bool:
    return path == target or path.startswith(f"{target}/")


def _users_text(target: str) -> str:
    users = users_of(target)
    if not users:
        return "; --lazy detaches it now and lets its users finish"
    named = [f"{command} (pid {pid}: {held})" for pid, command, held in users[:_MAX_USERS_NAMED]]
    more = f" and {len(users) - len(named)} more" if len(users) > len(named) else ""
    return f" by {', '.join(named)}{more}; end them, or detach it with --lazy"
