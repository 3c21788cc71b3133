"""Odd layers from their blobs to what a reader of the metadata image finds."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server.library import Library
from cache_server.limits import IngestLimits
from cache_server.merge import merge_image
from snapshotter.errors import InvalidInputError
from snapshotter.names import ContentName
from snapshotter.projection.image_reader import ImageReader
from snapshotter.projection.tree import Inode, walk
from snapshotter.store import chunk_table
from tests.support.images import Layer, directory, file, hard_link, opaque, symlink, whiteout
from tests.support.odd_image import odd_image
from tests.unit.cache_server.formats.tar_blocks import header
from tests.unit.cache_server.layers import content_of, ingest


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(tmp_path / "library") as library:
        yield library


def ingested(library: Library, *layers: Layer) -> list[str]:
    return [ingest(library, layer.tar, layer.blob).diff_id for layer in layers]


def content(library: Library, name: ContentName) -> bytes:
    if not name.is_chunked:
        return library.read_chunk(name.content_id)
    digests = chunk_table.decode(library.chunk_table(name), name)
    return b"".join(library.read_chunk(digest) for digest in digests)


def shown(library: Library, *layers: Layer) -> dict[bytes, Inode]:
    """Every path of the metadata image that these layers give."""
    name, _ = merge_image(library, ingested(library, *layers))
    return dict(walk(ImageReader(content(library, name)).to_tree()))


def test_the_odd_image(library: Library, tmp_path: Path) -> None:
    _, image = odd_image(tmp_path / "layout")
    found = shown(library, *image.layers)

    def text(path: bytes) -> bytes:
        inode = found[path]
        name = inode.content_name
        return content(library, name) if name is not None else b""

    assert text(b"raw-sparse") == b"\0" * 4096 + b"first" + b"\0" * 1_995_899 + b"end" + bytes(
        999_997
    )
    assert text(b"names/" + b"n" * 255) == b"longest"
    assert len(found[b"names/longest-target"].target) == 4095
    assert found[b"kinds"].uid == 4_294_967_294
    assert found[b"kinds/big"].rdev == 0xFFF << 8 | 0xFF | 0xFFF00 << 12
    assert found[b"links/third"] is found[b"links/file"] is found[b"links/second"]
    assert found[b"over-link"].children is not None
    assert text(b"target/kept") == b"1"
    assert set(found[b"opaque"].children or ()) == {b"before", b"after"}
    assert found[b"gone"].children == {}
    assert found[b"raw-binary"].mtime_ns == (1 << 24) * 10**9


def test_120_layers(library: Library) -> None:
    layers = [Layer([directory("d"), file("d/first"), file("d/top", b"0")])]
    layers += [
        Layer([file(f"d/of-{n}", b"%d" % n), file("d/top", b"%d" % n), whiteout(f"d/of-{n - 2}")])
        for n in range(1, 120)
    ]
    found = shown(library, *layers)
    assert set(found[b"d"].children or ()) == {b"first", b"top", b"of-118", b"of-119"}
    assert content_of(library, found[b"d/top"]) == b"119"  # type: ignore[arg-type]


def test_a_directory_of_100_000_entries(library: Library) -> None:
    headers = (header(b"d/%d" % number) for number in range(100_000))
    first = Layer(header(b"d", kind=b"5") + b"".join(headers) + bytes(1024), compression="zstd")
    second = Layer([whiteout("d/0"), whiteout("d/99999"), file("d/new", b"1")])
    found = shown(library, first, second)
    assert len(found[b"d"].children or ()) == 99_999
    assert len(shown(library, first, Layer([opaque("d")]))) == 2


def test_layers_of_nothing(library: Library) -> None:
    for tar in (b"", bytes(512), bytes(1024), bytes(10_240)):
        assert set(shown(library, Layer(tar, compression="none"), Layer(tar))) == {b""}


def test_an_image_beyond_its_limits_is_refused(library: Library) -> None:
    diff_ids = ingested(library, *(Layer([file(f"{n}/a"), file(f"{n}/b")]) for n in range(3)))
    merge_image(library, diff_ids, IngestLimits(image_entries=9))
    with pytest.raises(InvalidInputError, match="layer entry b'2/b'"):
        merge_image(library, diff_ids, IngestLimits(image_entries=8))


def test_links_that_multiply_directories_are_refused(library: Library) -> None:
    """A short target makes its whole length in directories, in every directory that it is in."""
    deep = "x/" * 300
    layer = Layer(
        [entry for n in range(40) for entry in (symlink(f"{n}", f"d{n}/{deep}"), file(f"{n}/f"))]
    )
    with pytest.raises(InvalidInputError, match="layer entry"):
        merge_image(library, ingested(library, layer), IngestLimits(image_entries=5000))


def test_links_of_later_layers_keep_the_file(library: Library) -> None:
    layers = [[file("a", b"1")], [hard_link("b", "a", uid=7)], [file("a", b"2")]]
    found = shown(library, *map(Layer, layers))
    assert (found[b"b"].uid, found[b"a"].uid) == (7, 0)
    assert stat.S_ISREG(found[b"b"].mode)
    assert content_of(library, found[b"b"]) == b"1"  # type: ignore[arg-type]
