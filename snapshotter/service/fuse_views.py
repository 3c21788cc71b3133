"""Makes fuse views: a mount each, and a process of its own that serves it. Everything blocks."""

from __future__ import annotations

import mmap
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from snapshotter.config import Config
from snapshotter.errors import CorruptError, SnapshotterError, UnavailableError
from snapshotter.kernel_view import syscalls
from snapshotter.names import ContentName
from snapshotter.paths import Paths
from snapshotter.projection.image_reader import ImageReader
from snapshotter.service import uppers
from snapshotter.service.fuse_view_process import ViewOptions
from snapshotter.service.gate_mount import raise_read_ahead
from snapshotter.service.processes import Program, exit_status, log_tail, spawn
from snapshotter.service.uppers import UpperRecord
from snapshotter.service.views import source_of

DEVICE = "/dev/fuse"


@dataclass(frozen=True, slots=True)
class FuseView:
    """A view that was just made: the descriptor of its detached mount, and who serves it."""

    descriptor: int
    pid: int


def missing(device: str = DEVICE) -> str:
    """Why there can be no fuse view here; empty when there can."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"{device}: {error.strerror}; modprobe fuse, or give this container the device"
    return ""


def make_fuse_view(
    paths: Paths,
    config: Config,
    *,
    mount_id: str,
    metadata: ContentName,
    image_number: int,
    upper: Path | None,
    upper_record: UpperRecord,
    volatile: bool,
    read_only: bool,
) -> FuseView:
    """A new view with its process, serving. ``upper`` is the directory that holds upper and work.

    Raises UnavailableError when the metadata image is not here or the process does not serve,
    SnapshotterError when the kernel refuses the mount, and what ``uppers.prepare`` raises.
    """
    if not (paths.objects / metadata.path).exists():
        raise UnavailableError(f"metadata image {metadata}: it is not here; pull the image again")
    if upper is not None:
        prepare_upper(paths, metadata, upper, upper_record)
    options = ViewOptions(
        root=str(paths.root),
        run=str(paths.run),
        metadata_image=metadata.path,
        image_number=image_number,
        upper=None if upper is None else str(upper),
        volatile=volatile and not read_only,
        read_only=read_only,
        large_file_bytes=config.large_file_bytes,
        fetch_deadline_s=config.lookup_deadline_s,
    )
    log = paths.log("fuse-views")
    logged = log.stat().st_size if log.exists() else 0
    # Only the process keeps the device: when it has ended nobody serves, and who waits is told.
    device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        descriptor = _mount(device, mount_id, read_only=read_only or upper is None)
        pid = spawn(_program(options, log), stdin=device)
    finally:
        os.close(device)
    try:
        root = os.fstat(descriptor)  # answered by the process
    except OSError as error:
        os.close(descriptor)
        exit_status(pid)
        raise UnavailableError(
            f"the view's process (pid {pid}) does not serve: {log_tail(log, logged)}"
        ) from error
    raise_read_ahead(root.st_dev, config.read_ahead_kb)
    return FuseView(descriptor, pid)


def prepare_upper(paths: Paths, metadata: ContentName, upper: Path, record: UpperRecord) -> None:
    """Makes ``upper`` one that our own overlay can serve; raises what ``uppers.prepare`` raises."""
    with _image_root(paths, metadata) as image_root:
        uppers.prepare(upper, record, image_root)


def _program(options: ViewOptions, log: Path) -> Program:
    module = "snapshotter.service.fuse_view_process"
    arguments = (module, msgspec.json.encode(options).decode())
    return Program("fuse-view", arguments, log, lambda: None)


def _mount(device: int, mount_id: str, *, read_only: bool) -> int:
    options: list[tuple[str, str | None]] = [
        ("source", source_of(mount_id)),
        ("subtype", "snapshotter"),
        ("fd", str(device)),
        ("rootmode", f"{stat.S_IFDIR:o}"),
        ("user_id", "0"),
        ("group_id", "0"),
        ("allow_other", None),
        ("default_permissions", None),
    ]
    if read_only:
        options.append(("ro", None))
    attributes = syscalls.MOUNT_ATTR_RDONLY if read_only else 0
    try:
        return syscalls.make_mount("fuse", options, attributes=attributes)
    except OSError as error:
        raise SnapshotterError(f"mount the fuse view: {error.strerror}") from error


@contextmanager
def _image_root(paths: Paths, metadata: ContentName) -> Iterator[str]:
    """A directory with the attributes of the image's root, which an upper's root must have."""
    with tempfile.TemporaryDirectory(prefix=".root-", dir=paths.mounts) as made:
        try:
            with open(paths.objects / metadata.path, "rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            image = ImageReader(content)
            inode, xattrs = image.inode(image.root), image.xattrs(image.root)
        except CorruptError as error:
            raise SnapshotterError(f"metadata image {metadata}: {error}") from error
        for name, value in xattrs.items():
            os.setxattr(made, name, value)
        os.chown(made, inode.uid, inode.gid)
        os.chmod(made, stat.S_IMODE(inode.mode))
        os.utime(made, ns=(inode.mtime_ns, inode.mtime_ns))
        yield made
