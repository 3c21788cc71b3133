"""Makes and refreshes kernel views. Everything here blocks: it is called in worker threads."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path

import structlog

from snapshotter.errors import SnapshotterError, UnavailableError
from snapshotter.kernel_view import loop_device, mountinfo, syscalls
from snapshotter.kernel_view.layers import (
    Options,
    ViewLayers,
    api_options,
    mount_data,
    overlay_options,
)
from snapshotter.kernel_view.probe import Abilities
from snapshotter.names import ContentName
from snapshotter.paths import Paths
from snapshotter.service.control import MountRecord
from snapshotter.service.leftovers import VIEW
from snapshotter.service.uppers import Upper

_log = structlog.get_logger()
_MAX_SOURCE_BYTES = 255
"""What fsconfig(2) takes as a string."""


class MetadataMounts:
    """Metadata images as EROFS mounts: one for each, kept while the daemon lives, shared by views.

    An overlay clones its lowers, so that the views stay when these mounts go.
    """

    def __init__(self, paths: Paths, abilities: Abilities) -> None:
        self._paths = paths
        self._abilities = abilities
        self._lock = threading.Lock()
        self._mounts: dict[ContentName, str] = {}
        self._descriptors: dict[ContentName, int] = {}

    def mount(self, name: ContentName) -> str:
        """A path to the mounted metadata image; its object must be here.

        Raises UnavailableError when it is not, SnapshotterError when the kernel refuses it.
        """
        with self._lock:
            path = self._mounts.get(name)
            if path is None:
                path = self._mounts[name] = self._mount(name)
            return path

    def release(self, name: ContentName) -> None:
        """Ends the mount of a metadata image, if there is one; views that use it stay."""
        with self._lock:
            path = self._mounts.pop(name, None)
            descriptor = self._descriptors.pop(name, None)
            if descriptor is not None:
                os.close(descriptor)
            elif path is not None:
                syscalls.umount(path, syscalls.MNT_DETACH)

    def close(self) -> None:
        """Ends the mounts; views that use them stay."""
        with self._lock:
            for descriptor in self._descriptors.values():
                os.close(descriptor)
            self._descriptors.clear()
            self._mounts.clear()
            remove_placed(self._places)

    @property
    def _places(self) -> Path:
        return self._paths.run / "metadata"

    def _mount(self, name: ContentName) -> str:
        image = self._paths.objects / name.path
        if not image.exists():
            raise UnavailableError(f"metadata image {name}: it is not here; pull the image again")
        try:
            descriptor = mount_metadata(image, erofs_file=self._abilities.erofs_file)
        except OSError as error:
            raise SnapshotterError(f"mount metadata image {name}: {error.strerror}") from error
        if self._abilities.detached_layers:
            self._descriptors[name] = descriptor
            return f"/proc/self/fd/{descriptor}"
        place = self._places / name.content_id.hex()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        syscalls.move_mount(descriptor, place)
        os.close(descriptor)
        return str(place)


def mount_metadata(image: Path, *, erofs_file: bool) -> int:
    """The descriptor of a detached mount of a metadata image, by a loop device if need be.

    Raises OSError.
    """
    if erofs_file:
        if len(os.fsencode(image)) <= _MAX_SOURCE_BYTES:
            return syscalls.make_mount("erofs", [("source", str(image)), ("ro", None)])
        device = os.open(image, os.O_RDONLY | os.O_CLOEXEC)
        path = f"/proc/self/fd/{device}"
    else:
        device, path = loop_device.attach(str(image))
    try:
        return syscalls.make_mount("erofs", [("source", path), ("ro", None)])
    finally:
        os.close(device)


def remove_placed(directory: Path) -> None:
    """Unmounts what stands directly below ``directory`` (left by this or an earlier daemon)."""
    for line in mountinfo.mounts():
        if Path(line.target).parent == directory:
            syscalls.umount(line.target, syscalls.MNT_DETACH)


def make_view(
    paths: Paths,
    abilities: Abilities,
    *,
    mount_id: str,
    metadata: str,
    image_number: int,
    upper: Upper | None,
    volatile: bool,
    read_only: bool,
) -> int:
    """The descriptor of a detached mount of a new view.

    Waits for the store (overlayfs asks the gate about its directories). Raises SnapshotterError
    with the kernel's words when it is refused.
    """
    layers = ViewLayers(
        metadata=metadata,
        objects=str(paths.objects),
        arrivals=str(paths.arrivals),
        gate=str(paths.gate),
        image_number=image_number,
        upper=str(upper.upper) if upper else None,
        work=str(upper.work) if upper else None,
        volatile=volatile,
    )
    options = overlay_options(layers)
    source = source_of(mount_id)
    attributes = syscalls.MOUNT_ATTR_RDONLY if read_only else 0
    try:
        if abilities.mount_api:
            described = [("source", source), *api_options(options)]
            return syscalls.make_mount("overlay", described, attributes=attributes)
        return _make_with_string(paths, source, options, attributes)
    except OSError as error:
        where = f" over upper {upper.directory}" if upper else ""
        raise SnapshotterError(f"mount the view{where}: {error.strerror}") from error


def _make_with_string(paths: Paths, source: str, options: Options, attributes: int) -> int:
    """For kernels without ``lowerdir+``: mounted by mount(2), then taken from where it stands."""
    data = mount_data(options)
    with tempfile.TemporaryDirectory(prefix=VIEW, dir=paths.run) as place:
        flags = syscalls.MS_RDONLY if attributes else 0
        syscalls.mount(source, place, "overlay", flags, data)
        try:
            return syscalls.open_tree(place)
        finally:
            syscalls.umount(place, syscalls.MNT_DETACH)


def source_of(mount_id: str) -> str:
    """The source that a view's mount has in mountinfo: it tells whose mount it is, anywhere.

    (A device number does not: the kernel gives it to another mount later.)
    """
    return f"snapshotter:{mount_id}"


def mounts_everywhere() -> set[str]:
    """Ids of the views that stand in any mount namespace on this host."""
    prefix = source_of("")
    return {
        source.removeprefix(prefix)
        for source in mountinfo.sources_everywhere()
        if source.startswith(prefix)
    }


def refresh(records: Iterable[MountRecord]) -> None:
    """Lets idle files of these views resolve anew (a remount), wherever they stand.

    Views that are not to be found are passed over. A refusal is logged.
    """
    here: dict[str, list[mountinfo.MountLine]] = {}
    for line in mountinfo.mounts():
        here.setdefault(line.source, []).append(line)
    for record in records:
        source = source_of(record.id)
        try:
            for line in here.get(source, ()):
                _remount(line.target, line.device)
            if source not in here and record.pid is not None:
                _remount(_path_in_process(record.pid, source), record.device)
        except FileNotFoundError:
            continue  # unmounted, or its process ended
        except OSError as error:
            _log.warning("view not refreshed", id=record.id, error=str(error))


def _path_in_process(pid: int, source: str) -> str:
    for line in mountinfo.mounts(pid):
        if line.source == source:
            return f"/proc/{pid}/root{line.target}"
    raise FileNotFoundError(f"process {pid} has no mount {source}")


def _remount(path: str, device: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_dev == device:  # else something was mounted on top
            read_only = os.fstatvfs(descriptor).f_flag & os.ST_RDONLY
            syscalls.reconfigure("", ["ro"] if read_only else [], descriptor)
    finally:
        os.close(descriptor)
