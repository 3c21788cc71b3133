"""Archives of images: tars of OCI layouts, and what versions of ``docker save`` write."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.images import Image, sha256_of


def pack_layout(layout: Path, archive: Path, *, prefix: str = "") -> Path:
    """A tar of an OCI layout; ``prefix`` (such as ``./``) is put before each name."""
    with tarfile.open(archive, "w") as tar:
        for path in sorted(layout.rglob("*")):
            tar.add(path, prefix + str(path.relative_to(layout)), recursive=False)
    return archive


def save(archive: Path, images: Mapping[str, Image], *, compressed: bool = False) -> Path:
    """A docker archive as ``docker save`` 1.10 to 24 writes it: each layer once, later images'
    directories of the same layer holding a symbolic link to it. ``compressed`` keeps blobs as they
    are, as a Docker engine with containerd's store does.
    """
    entries = []
    homes: dict[str, str] = {}
    with tarfile.open(archive, "w") as tar:
        for number, (tag, image) in enumerate(images.items()):
            config = image.config
            name = sha256_of(config).removeprefix("sha256:") + ".json"
            paths = []
            for at, layer in enumerate(image.layers):
                path = f"{number}{at}" + "c" * 30 + "/layer.tar"
                if layer.diff_id in homes:
                    _link(tar, path, f"../{homes[layer.diff_id]}")
                else:
                    _file(tar, path, layer.blob if compressed else layer.tar)
                homes.setdefault(layer.diff_id, path)
                paths.append(path)
            _file(tar, name, config)
            tags: Sequence[str] | None = [tag] if tag else None
            entries.append({"Config": name, "RepoTags": tags, "Layers": paths})
        _file(tar, "manifest.json", json.dumps(entries).encode())
    return archive


def _file(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)
