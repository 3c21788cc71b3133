"""The process of one fuse view: ``python -m snapshotter.service.fuse_view_process OPTIONS``.

Started by the daemon with /dev/fuse as its standard input; OPTIONS are ``ViewOptions`` as JSON. It
serves until the view is unmounted, whoever else ends, and opens nothing but what it needs: the
metadata image, the store's directories and socket, and the upper.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import structlog

from snapshotter.errors import SnapshotterError
from snapshotter.fuse.cache_policy import BRIEF, FOREVER, KernelCache
from snapshotter.fuse.device_threads import DeviceThreads
from snapshotter.fuse.file_system_server import FileSystemServer
from snapshotter.fuse.wire import Header
from snapshotter.kernel_view.asker import is_being_killed
from snapshotter.overlay.merged import Merged
from snapshotter.overlay.upper import Upper
from snapshotter.paths import default_paths
from snapshotter.projection.image_lower import ImageLower
from snapshotter.projection.image_reader import ImageReader
from snapshotter.service.view_contents import ViewContents
from snapshotter.service.view_fetch import ViewFetch
from snapshotter.telemetry import configure_logging
from snapshotter.vfs import Lower

_THREADS = 2
_SWITCH_INTERVAL_S = 0.0001
_DEVICE = 0

_log = structlog.get_logger()


class ViewOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a view is made of. ``upper`` is the directory that holds ``upper`` and ``work``."""

    root: str
    run: str
    metadata_image: str
    """The object's path below ``objects``."""
    image_number: int
    upper: str | None
    volatile: bool
    read_only: bool
    large_file_bytes: int
    fetch_deadline_s: float


def serve(options: ViewOptions, device: int) -> None:
    """Serves the view on ``device`` until it is unmounted."""
    paths = default_paths(options.root, options.run)
    contents = ViewContents(paths, large_file_bytes=options.large_file_bytes)
    fetch = ViewFetch(
        paths.store_socket, image=options.image_number, deadline_s=options.fetch_deadline_s
    )
    with contextlib.ExitStack() as closing:
        closing.callback(contents.close)
        closing.callback(fetch.close)
        image = ImageLower(_open_image(paths.objects / options.metadata_image), contents)
        upper = None
        if options.upper is not None:
            directory = Path(options.upper)
            upper = Upper(directory / "upper", directory / "work", volatile=options.volatile)
            closing.callback(upper.close)
        writable = upper is not None and not options.read_only
        fs: Lower[Any] = image if upper is None else Merged([image], upper)
        server = FileSystemServer(
            fs,
            KernelCache(FOREVER if upper is None else BRIEF),
            writable=writable,
            report_fault=_report_fault,
            fetch=fetch,
            is_being_killed=is_being_killed,
        )
        gc.freeze()  # what is here now stays; collections look at the rest alone
        DeviceThreads(device, server, threads=_THREADS).run()
        server.connection.clear()


def _open_image(path: Path) -> ImageReader:
    with open(path, "rb") as file:
        return ImageReader(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _report_fault(error: Exception, header: Header | None) -> None:
    is_unforeseen = not isinstance(error, SnapshotterError)
    _log.error(
        "FUSE request failed",
        operation=None if header is None else header.opcode,
        nodeid=None if header is None else header.nodeid,
        cause=str(error),
        exc_info=error if is_unforeseen else None,
    )


def main() -> int:
    """Runs the process; 0 once the view is unmounted."""
    configure_logging("fuse-view")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    os.chdir("/")  # no mount is kept busy by us
    options = msgspec.json.decode(sys.argv[1], type=ViewOptions)
    try:
        serve(options, _DEVICE)
    except (SnapshotterError, OSError) as error:
        _log.error("cannot serve the view", upper=options.upper, cause=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
