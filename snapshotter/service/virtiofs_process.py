"""The process of a virtio-fs view: ``python -m snapshotter.service.virtiofs_process OPTIONS``.

OPTIONS are ``VirtiofsOptions`` as JSON. It listens on a Unix socket for one VMM, serves it and ends
when that hangs up. It opens what it needs, and then confines itself: see ``confinement``.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import structlog

from snapshotter.errors import InvalidInputError, SnapshotterError
from snapshotter.fuse.cache_policy import FOREVER, FOREVER_NS, CachePolicy, KernelCache
from snapshotter.fuse.file_system_server import FileSystemServer
from snapshotter.fuse.virtiofs.device import Device
from snapshotter.fuse.virtiofs.listening import Listener
from snapshotter.fuse.virtiofs.requests import FuseRequests
from snapshotter.fuse.wire import Header
from snapshotter.overlay.merged import Merged
from snapshotter.overlay.upper import Upper
from snapshotter.paths import Paths, default_paths
from snapshotter.projection.content_tree import ContentTree
from snapshotter.projection.image_lower import ImageLower
from snapshotter.projection.image_reader import ImageReader
from snapshotter.service import confinement
from snapshotter.service.view_contents import ViewContents
from snapshotter.service.view_fetch import ViewFetch
from snapshotter.telemetry import configure_logging

OWNED = CachePolicy(
    entry_ttl_ns=FOREVER_NS,
    attr_ttl_ns=FOREVER_NS,
    absence_ttl_ns=FOREVER_NS,
    keeps_data=True,
    keeps_listings=True,
)
"""For an overlay that one guest alone changes. virtio-fs has no way to tell the guest's kernel of a
change, and here it needs none: the lower never changes, the upper is locked by this process, so
each change was asked for by that kernel, which then corrects what it keeps by itself."""

MAX_NODES = 500_000
"""Names that a guest's kernel may keep here; each costs about 0.5 KB. It gives back what it does
not need when its memory runs low."""

_MAX_DESCRIPTORS = 65_536
"""Of this process, so of open files too: beyond it an open fails with EMFILE."""

_MAX_DATA_BYTES = 2 << 30
"""Memory of this process without the guest's: what would need more fails with EIO."""

_SWITCH_INTERVAL_S = 0.0001
_log = structlog.get_logger()


class VirtiofsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a view is made of. ``upper`` is the directory that holds ``upper`` and ``work``."""

    root: str
    run: str
    socket: str
    metadata_image: str
    """The object's path below ``objects``."""
    image_number: int
    upper: str | None
    contents_only: bool
    """Whether contents are served by name (``projection.content_tree``), and not the image."""
    large_file_bytes: int
    fetch_deadline_s: float


def serve(options: VirtiofsOptions) -> None:
    """Listens, serves one VMM, and returns when it has hung up."""
    paths = default_paths(options.root, options.run)
    with contextlib.ExitStack() as closing:
        server = _make_server(paths, options, closing)
        listener = closing.enter_context(Listener(Path(options.socket)))
        confinement.confine(writes=options.upper is not None)
        gc.freeze()  # what is here now stays; collections look at the rest alone
        with listener.accept() as connection:
            _log.info("VMM connected")
            try:
                Device(connection, FuseRequests(server), _report_broken).serve()
            except InvalidInputError as error:
                _log.error("VMM hung up on", cause=str(error))
        server.connection.clear()


def _make_server(
    paths: Paths, options: VirtiofsOptions, closing: contextlib.ExitStack
) -> FileSystemServer:
    contents = ViewContents(paths, large_file_bytes=options.large_file_bytes)
    closing.callback(contents.close)
    fetch = ViewFetch(
        paths.store_socket, image=options.image_number, deadline_s=options.fetch_deadline_s
    )
    closing.callback(fetch.close)
    fs: Any
    if options.contents_only:
        fs = ContentTree(contents)
    else:
        fs = _make_tree(paths, options, contents, closing)
    is_writable = options.upper is not None
    return FileSystemServer(
        fs,
        KernelCache(OWNED if is_writable else FOREVER),
        writable=is_writable,
        report_fault=_report_fault,
        fetch=fetch,
        limit=MAX_NODES,
    )


def _make_tree(
    paths: Paths, options: VirtiofsOptions, contents: ViewContents, closing: contextlib.ExitStack
) -> Any:
    image = ImageLower(_open_image(paths.objects / options.metadata_image), contents)
    if options.upper is None:
        return image
    upper = Upper(Path(options.upper) / "upper", Path(options.upper) / "work")
    closing.callback(upper.close)
    return Merged([image], upper)


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


def _report_broken(what: str, error: Exception) -> None:
    is_unforeseen = not isinstance(error, SnapshotterError)
    _log.error(what, cause=str(error), exc_info=error if is_unforeseen else None)


def _limit(kind: int, wanted: int) -> None:
    _, hard = resource.getrlimit(kind)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(kind, (limit, limit))


def main() -> int:
    """Runs the process; 0 once the VMM has hung up."""
    configure_logging("virtiofs")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    options = msgspec.json.decode(sys.argv[1], type=VirtiofsOptions)
    os.chdir("/")  # no mount is kept busy by us
    os.umask(0)  # a guest's kernel has applied that of its process
    _limit(resource.RLIMIT_NOFILE, _MAX_DESCRIPTORS)
    _limit(resource.RLIMIT_DATA, _MAX_DATA_BYTES)
    try:
        serve(options)
    except (SnapshotterError, OSError) as error:
        _log.error("cannot serve the view", socket=options.socket, cause=str(error))
        return error.exit_code if isinstance(error, SnapshotterError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
