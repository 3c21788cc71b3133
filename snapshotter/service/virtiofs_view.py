"""What a virtio-fs view is made of, and how a command becomes the process that serves it."""

from __future__ import annotations

import mmap
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec

import snapshotter
from snapshotter.config import Config
from snapshotter.errors import CorruptError, SnapshotterError, UnavailableError
from snapshotter.names import ContentName
from snapshotter.paths import Paths
from snapshotter.projection.image_reader import ImageReader
from snapshotter.service import uppers
from snapshotter.service.images import metadata_name
from snapshotter.service.uppers import UpperRecord
from snapshotter.service.virtiofs_process import VirtiofsOptions
from snapshotter.store.images import ImageRecord

_MODULE = "snapshotter.service.virtiofs_process"


def make_options(
    paths: Paths,
    config: Config,
    image: ImageRecord,
    *,
    socket: Path,
    upper: Path | None,
    contents_only: bool = False,
) -> VirtiofsOptions:
    """What the process is told; ``upper`` is made, or used again.

    Raises UnavailableError when the metadata image is not here, and what ``uppers.prepare`` does.
    """
    metadata = metadata_name(image.prepared)
    if not (paths.objects / metadata.path).exists():
        raise UnavailableError(f"metadata image {metadata}: it is not here; pull the image again")
    if upper is not None:
        assert image.prepared.metadata_image is not None
        record = UpperRecord(
            metadata_image=image.prepared.metadata_image.content,
            image=image.references[-1] if image.references else image.handle,
        )
        with _image_root(paths, metadata) as image_root:
            uppers.prepare(upper, record, image_root)
    return VirtiofsOptions(
        root=str(paths.root),
        run=str(paths.run),
        socket=str(socket),
        metadata_image=metadata.path,
        image_number=image.number,
        upper=None if upper is None else str(upper),
        contents_only=contents_only,
        large_file_bytes=config.large_file_bytes,
        fetch_deadline_s=config.lookup_deadline_s,
    )


def become(options: VirtiofsOptions) -> NoReturn:
    """This process goes on as that of the view, with its pid, stdin, stdout and stderr alone."""
    source = str(Path(snapshotter.__file__).parents[1])
    search = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    words = [sys.executable, "-P", "-m", _MODULE, msgspec.json.encode(options).decode()]
    sys.stdout.flush()
    os.execve(sys.executable, words, {**os.environ, "PYTHONPATH": search})  # noqa: S606


@contextmanager
def _image_root(paths: Paths, metadata: ContentName) -> Iterator[str]:
    """A directory with the attributes of the image's root, which an upper's root must have."""
    with tempfile.TemporaryDirectory(prefix=".root-", dir=paths.run) as made:
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
