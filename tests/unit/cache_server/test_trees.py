"""list, stat and read: pages that fit a frame, memory that stays bounded, damage that is told."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server import trees as trees_module
from cache_server.library import Library, StoredImage
from cache_server.trees import Trees
from snapshotter.cache_v1.protocol import (
    Entries,
    List,
    MetadataImage,
    Prepared,
    Read,
    Stat,
    encode_response,
)
from snapshotter.digest import format_digest, sha256
from snapshotter.errors import CorruptError, InvalidInputError, NotFoundError, SnapshotterError
from snapshotter.framing import MAX_FRAME_BYTES
from snapshotter.projection.image_writer import write_image
from snapshotter.projection.tree import Inode
from tests.support.trees import directory, regular

DIGEST = format_digest(bytes(32))
BIG = bytes(range(251)) * 9_000
LONG = [b"%03d" % number + b"\xff" * 252 for number in range(300)]


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(tmp_path / "root") as opened:
        yield opened


def add(library: Library, tree: Inode) -> MetadataImage:
    name = library.add_content(write_image(tree))
    return MetadataImage(format_digest(name.content_id), name.size)


def file(library: Library, data: bytes) -> Inode:
    return regular(len(data), content=library.add_content(data).content_id)


def list_all(trees: Trees, image: MetadataImage, path: bytes = b"") -> list[Entries]:
    pages, offset = [], 0
    while offset is not None:
        page = trees.list(image, List(digest=DIGEST, path=[*path], offset=offset))
        pages.append(page)
        offset = page.next_offset
    return pages


def names(pages: list[Entries]) -> list[bytes]:
    return [bytes(name) for page in pages for name in page.names]


def long_names() -> Inode:
    tree = directory()
    tree.children = {
        name: Inode(stat.S_IFLNK | 0o777, target=b"\xff" * 4095, mtime_ns=-1) for name in LONG
    }
    return tree


def test_pages_of_the_longest_names_and_targets_fit_a_frame(library: Library) -> None:
    pages = list_all(Trees(library), add(library, long_names()))
    assert names(pages) == LONG
    assert max(len(encode_response(page)) for page in pages) <= MAX_FRAME_BYTES
    assert len(pages) < 8  # they are filled


def test_pages_have_256_entries_at_most_and_go_on_where_they_ended(library: Library) -> None:
    tree = directory()
    tree.children = {b"%04d" % number: regular(0) for number in range(700)}
    pages = list_all(Trees(library), add(library, tree))
    assert [len(page.names) for page in pages] == [256, 256, 188]
    assert names(pages) == sorted(tree.children)


def test_a_forgotten_place_is_found_by_counting(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees_module, "_KEPT_PLACES", 0)
    tree = directory()
    # before and after "." and ".."
    tree.children = {b"%c%03d" % (first, n): regular(0) for first in b"!z" for n in range(300)}
    trees, image = Trees(library), add(library, tree)
    assert names(list_all(trees, image)) == sorted(tree.children)
    beyond = trees.list(image, List(digest=DIGEST, path=[], offset=5000))
    assert (beyond.names, beyond.next_offset) == ([], None)


def test_ranges_over_chunks_and_the_end(library: Library) -> None:
    trees, image = Trees(library), add(library, directory(big=file(library, BIG)))
    for offset, length in ((0, 1), (1 << 20, 1 << 20), ((1 << 20) - 3, 7), (len(BIG) - 5, 99)):
        request = Read(digest=DIGEST, path=[*b"big"], offset=offset, length=length)
        assert trees.read(image, request) == BIG[offset : offset + length]
    at_end = Read(digest=DIGEST, path=[*b"big"], offset=len(BIG), length=1)
    assert trees.read(image, at_end) == b""


def test_missing_content_is_no_missing_file(library: Library) -> None:
    trees = Trees(library)
    tree = directory(lost=regular(5), large=regular(3 << 20))
    image = add(library, tree)
    for name in (b"lost", b"large"):
        with pytest.raises(SnapshotterError) as caught:
            trees.read(image, Read(digest=DIGEST, path=[*name], offset=0, length=1))
        assert caught.value.code == "request_failed"
    gone = MetadataImage(format_digest(sha256(b"gone")), 8192)
    for unreadable, code in ((gone, "request_failed"), (not_an_image(library), "corrupt")):
        with pytest.raises(SnapshotterError) as caught:
            trees.stat(unreadable, Stat(digest=DIGEST, path=[]))
        assert caught.value.code == code


def not_an_image(library: Library) -> MetadataImage:
    name = library.add_content(b"x" * 8192)
    return MetadataImage(format_digest(name.content_id), name.size)


def test_content_of_another_size_than_the_tree_says_is_corrupt(library: Library) -> None:
    content = library.add_content(b"12345").content_id
    image = add(library, directory(f=regular(6, content=content)))
    with pytest.raises(CorruptError):
        Trees(library).read(image, Read(digest=DIGEST, path=[*b"f"], offset=0, length=6))


@pytest.mark.parametrize("path", [b"none", b"d/none", b"f/x", b"s/x", b"s/f"])
def test_absent_names_and_ways_through_what_is_no_directory(library: Library, path: bytes) -> None:
    link = Inode(stat.S_IFLNK | 0o777, target=b"d")
    image = add(library, directory(d=directory(f=regular(0)), f=regular(0), s=link))
    with pytest.raises(NotFoundError):
        Trees(library).stat(image, Stat(digest=DIGEST, path=[*path]))


def test_few_images_are_kept(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees_module, "_KEPT_IMAGES", 2)
    reads: list[str] = []
    read_content = library.read_content
    monkeypatch.setattr(
        library, "read_content", lambda name: [reads.append(name.path), read_content(name)][1]
    )
    trees = Trees(library)
    images = [add(library, directory(**{name: regular(0)})) for name in "abc"]
    for index in (0, 1, 0, 2, 0, 1):
        trees.stat(images[index], Stat(digest=DIGEST, path=[]))
    assert len(reads) == 4  # a, b, c, and b once more
    monkeypatch.setattr(trees_module, "_KEPT_BYTES", 1)
    for _ in range(2):
        trees.stat(images[2], Stat(digest=DIGEST, path=[]))
    assert len(reads) == 5  # one is kept, whatever its size
    assert len(trees._open_images._readers) == 1


def prepared(handle: str, digest: str | None) -> Prepared:
    return Prepared(
        image_handle=handle,
        metadata_generation="1",
        digest=digest,
        architecture="amd64",
        env={},
        entrypoint=[],
        cmd=[],
        config=None,
        totals=None,
        layers=[],
        metadata_image=None,
    )


def test_images_are_found_by_handle_and_by_manifest(library: Library) -> None:
    manifest = format_digest(sha256(b"manifest"))
    image = prepared(trees_module.image_handle(manifest, "amd64"), manifest)
    chain = prepared(format_digest(sha256(b"chain")), None)
    for each in (image, chain):
        library.save_image(StoredImage(prepared=each))
    trees = Trees(library)
    assert trees.find(image.image_handle) == image
    assert trees.find(chain.image_handle) == chain
    assert trees.find(manifest) == trees.find(manifest) == image
    with pytest.raises(InvalidInputError):
        trees.find("latest")
    with pytest.raises(SnapshotterError, match="prepare it first") as caught:
        trees.find(DIGEST)
    assert caught.value.code == "request_failed"
