from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard

from cache_server.ingest import ingest_layer
from cache_server.library import BlobDescriptor, Library
from cache_server.limits import IngestLimits
from snapshotter.errors import CorruptError, InvalidInputError, NotFoundError
from snapshotter.projection.tree import EntryKind
from tests.unit.cache_server.formats.tar_blocks import header, member, pax
from tests.unit.cache_server.layers import (
    FILES,
    MIB,
    content_of,
    describe,
    digest_of,
    files_of,
    ingest,
    make_tar,
    noise,
    pack_bytes,
    pieces,
)

TAR = make_tar(FILES)
GZIP = gzip.compress(TAR, 1)
ZSTD = zstandard.ZstdCompressor().compress(TAR)
DIFF_ID = digest_of(TAR)
BLOBS = {
    "tar": TAR,
    "gzip": GZIP,
    "gzip members": b"".join(gzip.compress(piece, 1) for piece in pieces(TAR, 100_000)),
    "zstd": ZSTD,
    "zstd frames": b"".join(zstandard.compress(piece) for piece in pieces(TAR, 100_000)),
}


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(tmp_path) as library:
        yield library


@pytest.mark.parametrize("blob", BLOBS.values(), ids=BLOBS.keys())
def test_a_layer_is_the_same_whatever_its_compression(library: Library, blob: bytes) -> None:
    record = ingest(library, TAR, blob)
    assert (record.diff_id, record.blob) == (DIFF_ID, describe(blob))
    assert (record.entries, record.files) == (len(FILES), len(FILES))
    assert record.content_bytes == sum(map(len, FILES.values()))
    assert library.layer(DIFF_ID) == record
    assert library.diff_id_of_blob(describe(blob).digest) == DIFF_ID
    assert files_of(library, DIFF_ID) == FILES


def test_a_layer_outlives_its_library(tmp_path: Path) -> None:
    with Library(tmp_path) as library:
        record = ingest(library, TAR)
    with Library(tmp_path) as library:
        assert library.layer(DIFF_ID) == record
        assert files_of(library, DIFF_ID) == FILES


def test_an_empty_layer(library: Library) -> None:
    record = ingest(library, bytes(1024))
    assert (record.entries, record.files, record.content_bytes) == (0, 0, 0)
    assert library.layer_entries(record.diff_id) == []


def test_a_known_layer_is_not_read(library: Library) -> None:
    record = ingest(library, TAR)

    def unread() -> Iterator[bytes]:
        pytest.fail("the blob was read")
        yield b""

    again = ingest_layer(library, unread(), descriptor=describe(ZSTD), diff_id=DIFF_ID)
    assert again == record
    assert library.diff_id_of_blob(describe(ZSTD).digest) is None


def test_a_chunk_is_stored_once(library: Library, tmp_path: Path) -> None:
    shared = noise(MIB, 1)
    ingest(library, make_tar({"a": shared, "b": shared, "c": shared + b"tail"}))
    once = pack_bytes(tmp_path)
    assert MIB < once < MIB + 100
    ingest(library, make_tar({"elsewhere": shared, "other": b"tail"}))
    assert pack_bytes(tmp_path) == once


def test_progress_counts_the_blob(library: Library) -> None:
    seen: list[int] = []
    ingest_layer(
        library,
        pieces(GZIP, 500_000),
        descriptor=describe(GZIP),
        diff_id=DIFF_ID,
        on_progress=seen.append,
    )
    assert seen == [min(at + 500_000, len(GZIP)) for at in range(0, len(GZIP), 500_000)]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


OTHER = "sha256:" + "1" * 64
WRONG = {
    "blob digest": (GZIP, BlobDescriptor(OTHER, len(GZIP), ""), DIFF_ID),
    "diffID": (GZIP, describe(GZIP), OTHER),
    "longer than said": (GZIP, BlobDescriptor(describe(GZIP).digest, len(GZIP) - 1, ""), DIFF_ID),
    "shorter than said": (GZIP, BlobDescriptor(describe(GZIP).digest, len(GZIP) + 1, ""), DIFF_ID),
    "flipped in a plain tar": (flipped(TAR, 1024 + 600), describe(TAR), DIFF_ID),
    "flipped in gzip": (flipped(GZIP, len(GZIP) // 2), describe(GZIP), DIFF_ID),
    "flipped in zstd": (flipped(ZSTD, len(ZSTD) // 2), describe(ZSTD), DIFF_ID),
    "gzip cut": (GZIP[:-9], describe(GZIP[:-9]), DIFF_ID),
    "zstd cut": (ZSTD[:-9], describe(ZSTD[:-9]), DIFF_ID),
    "zstd cut to its header": (ZSTD[:9], describe(ZSTD[:9]), DIFF_ID),
    "tar cut": (TAR[:4000], describe(TAR[:4000]), digest_of(TAR[:4000])),
    "gzip and more": (GZIP + b"more", describe(GZIP + b"more"), DIFF_ID),
}


@pytest.mark.parametrize(("blob", "descriptor", "diff_id"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_blob_leaves_nothing(
    library: Library, tmp_path: Path, blob: bytes, descriptor: BlobDescriptor, diff_id: str
) -> None:
    with pytest.raises(CorruptError, match=f"layer {diff_id}"):
        ingest_layer(library, pieces(blob), descriptor=descriptor, diff_id=diff_id)
    assert_nothing_stored(library, tmp_path)
    ingest(library, TAR)
    assert files_of(library, DIFF_ID) == FILES


def assert_nothing_stored(library: Library, root: Path) -> None:
    assert library.layer(DIFF_ID) is None
    assert library.layer(OTHER) is None
    assert library.diff_id_of_blob(describe(GZIP).digest) is None
    assert pack_bytes(root) == 0
    with pytest.raises(NotFoundError):
        library.layer_entries(DIFF_ID)


def test_a_bad_entry_leaves_nothing(library: Library, tmp_path: Path) -> None:
    tar = member(b"fine", noise(2 * MIB, 3)) + header(b"../outside") + bytes(1024)
    with pytest.raises(InvalidInputError, match=r"layer sha256:.*entry '\.\./outside'"):
        ingest(library, tar)
    assert library.layer(digest_of(tar)) is None
    assert pack_bytes(tmp_path) == 0


@pytest.mark.parametrize("bad", ["sha256:xyz", "md5:1", ""])
def test_names_that_are_no_digests_are_refused(library: Library, bad: str) -> None:
    with pytest.raises(InvalidInputError):
        ingest_layer(library, [GZIP], descriptor=describe(GZIP), diff_id=bad)
    with pytest.raises(InvalidInputError):
        ingest_layer(library, [GZIP], descriptor=BlobDescriptor(bad, 1, ""), diff_id=DIFF_ID)


class DownloadError(Exception):
    pass


@pytest.mark.parametrize("after_pieces", [0, 1, 5])
def test_an_error_of_the_download_comes_through(
    library: Library, tmp_path: Path, after_pieces: int
) -> None:
    def failing() -> Iterator[bytes]:
        for count, piece in enumerate(pieces(GZIP, 300_000)):
            if count == after_pieces:
                raise DownloadError
            yield piece

    threads = threading.active_count()
    with pytest.raises(DownloadError):
        ingest_layer(library, failing(), descriptor=describe(GZIP), diff_id=DIFF_ID)
    assert_nothing_stored(library, tmp_path)
    assert threading.active_count() == threads


def test_files_that_aufs_kept_apart_are_where_links_to_them_are(library: Library) -> None:
    tar = (
        member(b".wh..wh.aufs", b"")
        + member(b".wh..wh.plnk/1.2", b"content")
        + header(b"first", kind=b"1", link=b".wh..wh.plnk/1.2")
        + header(b"second", kind=b"1", link=b".wh..wh.plnk/1.2")
        + bytes(1024)
    )
    record = ingest(library, tar)
    first, second = library.layer_entries(record.diff_id)
    assert (first.path, content_of(library, first)) == (b"first", b"content")
    assert (second.kind, second.path, second.target) == (EntryKind.HARD_LINK, b"second", b"first")
    assert (record.entries, record.files, record.content_bytes) == (2, 1, 7)
    lost = header(b"first", kind=b"1", link=b".wh..wh.plnk/1.2") + bytes(1024)
    with pytest.raises(InvalidInputError, match="hard link 'first'"):
        ingest(library, lost)


ONE_FILE = make_tar({"f": bytes(MIB)})
EXCEEDED: dict[str, tuple[IngestLimits, bytes]] = {
    "entries": (IngestLimits(layer_entries=2), make_tar({"a": b"", "b": b"", "c": b""})),
    "decompressed bytes": (IngestLimits(layer_bytes=MIB), bytes(4 * MIB)),
    "ratio": (IngestLimits(expansion_floor_bytes=1, expansion_ratio=10), ONE_FILE),
    "names": (IngestLimits(names_bytes=100), make_tar({"a" * 60: b"", "b" * 60: b""})),
    "bytes of holes": (
        IngestLimits(layer_bytes=1 << 30),
        pax(
            {
                b"GNU.sparse.map": b"0,0",
                b"GNU.sparse.numblocks": b"1",
                b"GNU.sparse.size": b"1073741825",
            }
        )
        + header(b"f"),
    ),
    "pax header": (IngestLimits(extension_bytes=99), pax({b"comment": b"c" * 99}) + header()),
    "xattrs": (IngestLimits(xattr_bytes=9), pax({b"SCHILY.xattr.user.a": b"1234"}) + header()),
    "path": (IngestLimits(path_bytes=8), header(b"d/" * 5)),
    "depth": (IngestLimits(path_depth=3), header(b"d/" * 5)),
}


@pytest.mark.parametrize(("limits", "tar"), EXCEEDED.values(), ids=EXCEEDED.keys())
def test_what_exceeds_a_limit_is_refused(
    library: Library, tmp_path: Path, limits: IngestLimits, tar: bytes
) -> None:
    blob = gzip.compress(tar)
    with pytest.raises(InvalidInputError, match="limit"):
        ingest_layer(
            library, [blob], descriptor=describe(blob), diff_id=digest_of(tar), limits=limits
        )
    assert pack_bytes(tmp_path) == 0


def test_holes_are_stored_once_and_read_back(library: Library, tmp_path: Path) -> None:
    size = (200 << 20) + 5
    records = {
        b"GNU.sparse.map": b"%d,3" % (size - 3),
        b"GNU.sparse.size": b"%d" % size,
        b"GNU.sparse.numblocks": b"1",
    }
    record = ingest(library, pax(records) + member(b"holes", b"end") + bytes(1024))
    (entry,) = library.layer_entries(record.diff_id)
    assert entry.size == record.content_bytes == size
    assert content_of(library, entry) == bytes(size - 3) + b"end"
    assert pack_bytes(tmp_path) < 1000


def test_a_bad_entry_stops_the_download(library: Library) -> None:
    """An entry that is refused early must not cost the rest of a large blob."""
    tar = header(b"../outside") + bytes(64 * MIB)
    read = 0

    def counted() -> Iterator[bytes]:
        nonlocal read
        for piece in pieces(tar, MIB):
            read += len(piece)
            yield piece

    with pytest.raises(InvalidInputError):
        ingest_layer(library, counted(), descriptor=describe(tar), diff_id=digest_of(tar))
    assert read < len(tar)


def test_layers_are_ingested_in_parallel(library: Library) -> None:
    """Eight layers that share half of their files, each of them twice, at the same time."""
    shared = {f"shared-{n}": noise(20_000, n) for n in range(20)}
    layers = [
        shared | {f"own-{n}": noise(300_000, 100 + layer * 10 + n) for n in range(4)}
        for layer in range(8)
    ]
    tars = [make_tar(files) for files in layers]
    start = threading.Barrier(16)

    def run(tar: bytes) -> None:
        start.wait()
        ingest(library, tar, tar)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(run, tars * 2))
    for files, tar in zip(layers, tars, strict=True):
        assert files_of(library, digest_of(tar)) == files


def test_chunks_are_read_while_layers_are_ingested(library: Library) -> None:
    ingest(library, TAR)
    entries = library.layer_entries(DIFF_ID)
    tars = [make_tar({"f": noise(2 * MIB, 50 + n)}) for n in range(6)]
    with ThreadPoolExecutor(1) as pool:
        ingests = [pool.submit(ingest, library, tar, tar) for tar in tars]
        while not ingests[-1].done():
            for entry in entries:
                assert content_of(library, entry) == FILES[entry.path.decode()]
        for done in ingests:
            done.result()


@pytest.mark.parametrize("kind", ["noise", "bomb"])
def test_memory_does_not_grow_with_the_layer(tmp_path: Path, kind: str) -> None:
    """A file of 300 MB, made on the fly in a process of its own; its peak memory is measured."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.cache_server.large_layer", str(tmp_path), kind],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 60 * MIB
