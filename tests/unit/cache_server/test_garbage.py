"""What is removed from a library, what stays readable, and what a crash in between leaves."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from cache_server import garbage
from cache_server.answers import Answers
from cache_server.companions import Companions, Trail
from cache_server.library import Library
from cache_server.records import StoredImage
from snapshotter.cache_v1.protocol import Collected, Fetch, MetadataImage, Prepared
from snapshotter.cache_v1.protocol import Layer as PreparedLayer
from snapshotter.digest import format_digest, sha256
from snapshotter.errors import NotFoundError, SnapshotterError
from snapshotter.telemetry import Counters
from tests.support.crash_points import crashes
from tests.unit.cache_server.layers import (
    MIB,
    digest_of,
    files_of,
    ingest,
    make_tar,
    noise,
    pack_bytes,
)

SHARED = {"shared": noise(30_000, 1), "large": noise(2 * MIB + 5, 2)}
ONE = {"one": noise(2 * MIB + 100_000, 3), "same": SHARED["shared"]}
TWO = {"two": noise(50_000, 4)}


def save(library: Library, reference: str, *tars: bytes) -> StoredImage:
    """An image of these layers, with a metadata image of its own."""
    metadata = library.add_content(b"metadata of " + reference.encode())
    layers = [
        PreparedLayer(
            digest=digest_of(tar),
            diff_id=digest_of(tar),
            chain_id=digest_of(tar),
            size=len(tar),
            media_type="",
        )
        for tar in tars
    ]
    prepared = Prepared(
        image_handle=f"handle of {reference}",
        metadata_generation="1",
        digest=digest_of(reference.encode()),
        architecture="amd64",
        env={},
        entrypoint=None,
        cmd=None,
        config=None,
        totals=None,
        layers=layers,
        metadata_image=MetadataImage(format_digest(metadata.content_id), metadata.size),
    )
    image = StoredImage(prepared=prepared, references=[reference], saved_at_s=1.0)
    library.save_image(image)
    return image


def fill(library: Library) -> tuple[StoredImage, StoredImage]:
    tars = [make_tar(files) for files in (SHARED, ONE, TWO)]
    for tar in tars:
        ingest(library, tar)
    return save(library, "a", tars[0], tars[1]), save(library, "b", tars[0], tars[2])


def contents(library: Library, image: StoredImage) -> list[dict[str, bytes]]:
    return [files_of(library, layer.diff_id) for layer in image.prepared.layers]


def test_nothing_is_collected_while_every_image_is_there(tmp_path: Path) -> None:
    with Library(tmp_path) as library:
        fill(library)
        before = pack_bytes(tmp_path)
        assert library.collect_garbage() == Collected()
        assert pack_bytes(tmp_path) == before


def test_what_an_image_alone_needed_goes_and_everything_else_stays(tmp_path: Path) -> None:
    with Library(tmp_path) as library:
        one, two = fill(library)
        assert contents(library, two) == [SHARED, TWO]  # packs are open for reading
        before = pack_bytes(tmp_path)
        assert library.remove_image(one, "a")
        planned = library.collect_garbage(dry_run=True)
        assert pack_bytes(tmp_path) == before
        assert contents(library, one) == [SHARED, ONE]
        collected = library.collect_garbage()
        assert collected == planned
        assert (collected.layers, collected.chunk_tables, collected.chunks) == (1, 1, 4)
        assert collected.packs_rewritten == 1
        assert before - pack_bytes(tmp_path) == collected.freed_bytes > 2 * MIB
        assert contents(library, two) == [SHARED, TWO]
        with pytest.raises(NotFoundError):
            library.read_chunk(sha256(ONE["one"][:MIB]))
        assert library.collect_garbage() == Collected()
        assert contents(library, two) == [SHARED, TWO]
    with Library(tmp_path) as library:
        assert contents(library, two) == [SHARED, TWO]
        ingest(library, make_tar(ONE))  # its blob is forgotten, too: it can come again
        assert files_of(library, digest_of(make_tar(ONE))) == ONE


def test_everything_goes_with_the_last_image(tmp_path: Path) -> None:
    with Library(tmp_path) as library:
        for image in fill(library):
            library.remove_image(image, image.references[0])
        collected = library.collect_garbage()
        assert (collected.layers, collected.packs_rewritten) == (3, 0)
        assert list((tmp_path / "packs").iterdir()) == []
        image, _ = fill(library)
        assert contents(library, image) == [SHARED, ONE]
    with Library(tmp_path) as library:
        assert contents(library, image) == [SHARED, ONE]


@pytest.mark.parametrize("name", ["two", "raw"])
def test_chunks_that_move_after_they_were_located_are_sent_from_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    files = TWO | {"raw": noise(500_000, 5)}
    with Library(tmp_path) as library:
        one, two = (save(library, reference, make_tar(ONE)) for reference in "ab")
        ingest(library, make_tar(ONE))
        kept = make_tar(files)
        ingest(library, kept)
        save(library, "c", kept)
        digest = sha256(files[name])
        located = library.locate_all([digest])
        for image in (one, two):
            library.remove_image(image, image.references[0])
        assert library.collect_garbage().packs_rewritten == 1
        assert library.locate(digest) != located[digest]
        monkeypatch.setattr(library, "locate_all", lambda _: monkeypatch.undo() or located)
        answers = Answers(library, Companions(library), Counters())
        sent = answers.fetch(Fetch(chunks=[format_digest(digest)]), Trail())
        body = [part for part in sent if part == library.locate(digest) or files[name] in part]
        assert len(body) == 1
        answers.companions.close()


def test_a_name_of_several_goes_alone(tmp_path: Path) -> None:
    with Library(tmp_path) as library:
        one, _ = fill(library)
        library.save_image(StoredImage(prepared=one.prepared, references=["c"], saved_at_s=2.0))
        (image,) = (image for image in library.images() if image.handle == one.handle)
        assert image.references == ["a", "c"]
        assert not library.remove_image(image, "a")
        assert library.find_reference("a", "amd64") is None
        assert library.find_reference("c", "amd64") is not None
        assert library.collect_garbage() == Collected()


def test_after_a_crash_at_any_step_all_that_is_needed_is_there(tmp_path: Path) -> None:
    with Library(tmp_path / "base") as library:
        one, two = fill(library)
        library.remove_image(one, "a")
        at_most = pack_bytes(tmp_path / "base")

    def collect(root: Path) -> None:
        with Library(root) as library:
            library.collect_garbage()

    points = []
    for point in crashes(tmp_path / "base", tmp_path / "crashed", collect):
        points.append(point)
        with Library(tmp_path / "crashed") as library:
            assert contents(library, two) == [SHARED, TWO], point
            assert pack_bytes(tmp_path / "crashed") <= at_most, point
            library.collect_garbage()
            assert contents(library, two) == [SHARED, TWO], point
            assert pack_bytes(tmp_path / "crashed") < MIB * 2.5, point
    assert len(points) >= 5


@pytest.mark.parametrize("step", ["marks", "rewrites"])
def test_a_failing_step_leaves_everything_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with Library(tmp_path) as library:
        one, two = fill(library)
        library.remove_image(one, "a")
        with monkeypatch.context() as patched:
            patched.setattr(garbage, "_count" if step == "marks" else "_forget_source", fail)
            with pytest.raises(SnapshotterError, match="disk is full"):
                library.collect_garbage()
        assert contents(library, two) == [SHARED, TWO]
        library.collect_garbage()
        assert contents(library, two) == [SHARED, TWO]
    with Library(tmp_path) as library:
        assert contents(library, two) == [SHARED, TWO]
        assert pack_bytes(tmp_path) < MIB * 2.5
