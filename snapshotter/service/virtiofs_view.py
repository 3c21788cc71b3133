"""What a virtio-fs view is made of, and how a command becomes the process that serves it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

import snapshotter
from snapshotter.config import Config
from snapshotter.errors import UnavailableError
from snapshotter.paths import Paths
from snapshotter.service.images import metadata_name
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
    """What the process is told; UnavailableError when the metadata image is not here."""
    metadata = metadata_name(image.prepared)
    if not (paths.objects / metadata.path).exists():
        raise UnavailableError(f"metadata image {metadata}: it is not here; pull the image again")
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
