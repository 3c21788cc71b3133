"""What the kernel shows of our metadata images and objects, against what containerd unpacks."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server.library import Library
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.projection.merge import merge_layers
from snapshotter.projection.tree import Inode, walk
from tests.support.compare_trees import compare_scans, scan_tree
from tests.support.containerd import Containerd, ContainerdError, running_containerd
from tests.support.debian_image import LocalImage
from tests.support.image_mounts import Mounts
from tests.support.images import (
    Entry,
    Image,
    Layer,
    directory,
    file,
    hard_link,
    symlink,
    write_layout,
)
from tests.support.odd_image import UNTOLD_TIMES, odd_image
from tests.unit.cache_server.formats.tar_blocks import header
from tests.unit.cache_server.layers import content_of, ingest

pytestmark = [pytest.mark.mount, pytest.mark.real]


@pytest.fixture(scope="module")
def containerd() -> Iterator[Containerd]:
    # A short name: a socket is in it. On a disk: overlayfs takes no upper on overlayfs.
    directory = Path(tempfile.mkdtemp(prefix="lazy-ctd-", dir="/tmp"))
    try:
        with running_containerd(directory) as running:
            yield running
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    made = Mounts(tmp_path)
    yield made
    made.close()


def tree_of(library: Library, image: Image) -> Inode:
    records = [ingest(library, layer.tar, layer.blob) for layer in image.layers]
    return merge_layers(library.layer_entries(record.diff_id) for record in records)


def write_objects(library: Library, tree: Inode, objects: Path) -> None:
    for _, inode in walk(tree):
        if inode.content_name is not None:
            target = objects / inode.content_name.path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content_of(library, inode))


def test_an_odd_image_is_what_containerd_makes_of_it(
    containerd: Containerd, mounts: Mounts, tmp_path: Path
) -> None:
    local, image = odd_image(tmp_path / "layout")
    expected = scan_tree(containerd.unpack(local))
    with Library(tmp_path / "library") as library:
        tree = tree_of(library, image)
        write_objects(library, tree, tmp_path / "objects")
    shown = scan_tree(mounts.overlay(mounts.erofs(tree), tmp_path / "objects"))
    assert compare_scans(expected, shown, ignore_mtime_of=UNTOLD_TIMES) == []
    assert len(shown) > 80


REFUSED = {
    "h": [hard_link("h", "missing")],
    "h2": [directory("d"), hard_link("h2", "d")],
    "self": [file("self"), hard_link("self", "self")],
    "file/below": [file("file"), file("file/below")],
    "loop/x": [symlink("loop", "loop"), file("loop/x")],
    "acl": [file("acl", xattrs={"system.posix_acl_access": b"no"})],
    "capable": [file("capable", xattrs={"security.capability": b"none"})],
    "n" * 256: [file("n" * 256)],
    "empty-link": header(b"empty-link", kind=b"2"),
    "unknown": header(b"unknown", kind=b"V"),
    "contiguous": header(b"contiguous", kind=b"7"),
    "mode": header(b"mode", mode=b"none"),
    "device": header(b"device", major=b"none"),
    "a/.wh..": header(b"a/.wh.."),
    "cut": header(b"cut", size=2000) + bytes(600),
}


@pytest.mark.parametrize(("name", "layer"), REFUSED.items(), ids=[name[:20] for name in REFUSED])
def test_what_containerd_refuses_is_refused_and_named(
    containerd: Containerd, tmp_path: Path, name: str, layer: list[Entry] | bytes
) -> None:
    image = Image([Layer(layer)])
    write_layout(tmp_path / "layout", {"bad": image})
    with pytest.raises(ContainerdError):
        containerd.unpack(LocalImage(tmp_path / "layout", "bad"))
    with (
        Library(tmp_path / "library") as library,
        pytest.raises((InvalidInputError, CorruptError), match=re.escape(name[:40])),
    ):
        tree_of(library, image)
