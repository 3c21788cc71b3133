"""Makes a view the root of this process, with what programs expect around it.

Everything here runs in the sandbox's own mount namespace, whose propagation is private: it ends
with the sandbox. Paths of the image are only walked after the root was changed, so that a
symlink in the image cannot lead out of it.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from snapshotter.errors import SnapshotterError, UnsupportedError
from snapshotter.kernel_view import syscalls
from snapshotter.service.sandbox_spec import Surroundings, Volume

_QUIET = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
_DEVICES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}
"""Devices of every sandbox (Documentation/admin-guide/devices.txt)."""

_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}

_READ_ONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_HIDDEN_PATHS = (
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
"""What the OCI runtime's defaults take away too: root in a sandbox is root, and these are not
guarded by a capability it lacks."""

_HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost\n"


@dataclass(frozen=True, slots=True)
class _Clone:
    """A detached clone of a part of the host's tree, to be placed at ``target``."""

    descriptor: int
    target: str
    is_directory: bool


def enter_root(view: int, surroundings: Surroundings, *, staging: Path) -> None:
    """Changes the root of this process to the detached mount ``view`` and fits it out.

    ``staging`` is any directory of the host, covered while the root changes. In a read-only view
    what it lacks is left out, except volumes. /proc is left to ``show_processes``. Raises OSError
    and SnapshotterError; the process is then of no use.
    """
    read_only = surroundings.read_only
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    with ExitStack() as stack:
        volumes = [_clone(volume.source, volume, stack) for volume in surroundings.volumes]
        cgroup = _clone_cgroup(stack)
        terminal = _clone_terminal(stack) if surroundings.has_terminal else None
        etc = _etc_files(surroundings.hostname)
        _change_root(view, staging)
        _mount_sys(cgroup, read_only=read_only)
        _make_devices(terminal, read_only=read_only)
        _place_etc(etc, read_only=read_only)
        _make_directory("/proc", read_only=read_only)
        for clone, volume in zip(volumes, surroundings.volumes, strict=True):
            _place_volume(clone, volume)
        _guard("/sys/")
    socket.sethostname(surroundings.hostname)


def show_processes() -> None:
    """Mounts /proc of this process's pid namespace, where the view has a place for it.

    To be called in a mount namespace of the pid namespace's own, below a root that was entered.
    Raises OSError.
    """
    if os.path.isdir("/proc"):
        syscalls.mount("proc", "/proc", "proc", _QUIET)
        _guard("/proc/")


def _clone(source: str, volume: Volume, stack: ExitStack) -> _Clone:
    flags = syscalls.OPEN_TREE_CLONE | syscalls.AT_RECURSIVE
    descriptor = syscalls.open_tree(source, flags)
    stack.callback(os.close, descriptor)
    if volume.read_only:
        syscalls.mount_setattr(
            descriptor, set_attributes=syscalls.MOUNT_ATTR_RDONLY, recursive=True
        )
    return _Clone(descriptor, volume.target, os.path.isdir(source))


def _clone_cgroup(stack: ExitStack) -> _Clone | None:
    path = "/sys/fs/cgroup"
    return _clone(path, Volume(path, path, True), stack) if os.path.isdir(path) else None


def _clone_terminal(stack: ExitStack) -> _Clone:
    return _clone(os.ttyname(0), Volume("", "/dev/console"), stack)


def _etc_files(hostname: str) -> dict[str, str]:
    """The files that tie a sandbox to this host's network, and their text."""
    hosts = _text("/etc/hosts") or _HOSTS
    if hostname not in hosts.split():
        hosts = f"{hosts.rstrip()}\n127.0.1.1\t{hostname}\n"
    return {
        "/etc/resolv.conf": _text("/etc/resolv.conf"),
        "/etc/hosts": hosts,
        "/etc/hostname": f"{hostname}\n",
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="surrogateescape")
    except OSError:
        return ""


def _change_root(view: int, staging: Path) -> None:
    """Places the view and makes it the root; the old root is gone afterwards.

    Without a device cgroup, a device node of the image would reach the host's disks: nodev.
    """
    syscalls.mount_setattr(view, set_attributes=syscalls.MOUNT_ATTR_NODEV)
    syscalls.move_mount(view, staging)
    os.chdir(staging)
    syscalls.pivot_root(".", ".")
    syscalls.umount(".", syscalls.MNT_DETACH)
    os.chdir("/")


def _mount_sys(cgroup: _Clone | None, *, read_only: bool) -> None:
    if _make_directory("/sys", read_only=read_only):
        syscalls.mount("sysfs", "/sys", "sysfs", _QUIET | syscalls.MS_RDONLY)
        if cgroup is not None and os.path.isdir(cgroup.target):
            syscalls.move_mount(cgroup.descriptor, cgroup.target)


def _make_devices(terminal: _Clone | None, *, read_only: bool) -> None:
    if not _make_directory("/dev", read_only=read_only):
        raise UnsupportedError("run: the image has no /dev; run it without --read-only")
    syscalls.mount("tmpfs", "/dev", "tmpfs", syscalls.MS_NOSUID, "mode=755,size=65536k")
    old_mask = os.umask(0)
    try:
        for name, (major, minor) in _DEVICES.items():
            os.mknod(f"/dev/{name}", 0o020666, os.makedev(major, minor))
        for name, target in _LINKS.items():
            os.symlink(target, f"/dev/{name}")
        for name in ("pts", "shm", "mqueue"):
            os.mkdir(f"/dev/{name}", 0o755)
    finally:
        os.umask(old_mask)
    options = "newinstance,ptmxmode=0666,mode=0620,gid=5"
    syscalls.mount("devpts", "/dev/pts", "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, options)
    syscalls.mount("shm", "/dev/shm", "tmpfs", _QUIET, "mode=1777")  # noqa: S108 - the sandbox's own
    try:
        syscalls.mount("mqueue", "/dev/mqueue", "mqueue", _QUIET)
    except OSError as error:
        if error.errno != errno.ENODEV:  # a kernel without POSIX queues
            raise
    if terminal is not None:
        _make_file(terminal.target)
        syscalls.move_mount(terminal.descriptor, terminal.target)


def _place_etc(files: dict[str, str], *, read_only: bool) -> None:
    """Covers each file with one of a tmpfs, so that the image's own and the upper stay as is.

    The tmpfs is that of /dev; its names go away once the files are placed.
    """
    for path, text in files.items():
        target = os.path.realpath(path)
        if not os.path.isfile(target):
            if read_only:
                continue
            _make_file(target)
        source = f"/dev/.{os.path.basename(path)}"
        Path(source).write_text(text, errors="surrogateescape")
        clone = syscalls.open_tree(source)
        try:
            syscalls.move_mount(clone, target)
        finally:
            os.close(clone)
            os.unlink(source)


def _place_volume(clone: _Clone, volume: Volume) -> None:
    target = os.path.realpath(volume.target)
    try:
        if clone.is_directory:
            os.makedirs(target, exist_ok=True)
        elif not os.path.exists(target):
            _make_file(target)
        syscalls.move_mount(clone.descriptor, target)
    except OSError as error:
        raise SnapshotterError(
            f"volume {volume.source}: place it on {volume.target}: {error.strerror}"
        ) from error


def _guard(tree: str) -> None:
    """Takes away what is not for a sandbox below ``tree`` (with its last slash)."""
    for path in _READ_ONLY_PATHS:
        if path.startswith(tree) and os.path.exists(path):
            _cover(path, path, read_only=True)
    for path in _HIDDEN_PATHS:
        if not path.startswith(tree):
            continue
        if os.path.isdir(path):
            syscalls.mount("tmpfs", path, "tmpfs", _QUIET | syscalls.MS_RDONLY, "size=0")
        elif os.path.exists(path):
            _cover("/dev/null", path, read_only=False)


def _cover(source: str, target: str, *, read_only: bool) -> None:
    clone = syscalls.open_tree(source)
    try:
        if read_only:
            syscalls.mount_setattr(clone, set_attributes=syscalls.MOUNT_ATTR_RDONLY)
        syscalls.move_mount(clone, target)
    finally:
        os.close(clone)


def _make_directory(path: str, *, read_only: bool) -> bool:
    """Whether the directory is there, made if need be and possible."""
    if not os.path.isdir(path) and not read_only:
        os.makedirs(path, exist_ok=True)
    return os.path.isdir(path)


def _make_file(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
