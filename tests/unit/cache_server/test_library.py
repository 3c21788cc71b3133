from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cache_server.catalog import Catalog
from cache_server.library import Library
from cache_server.records import Addition, Codec
from snapshotter.digest import sha256
from snapshotter.errors import (
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    SnapshotterError,
    UnsupportedError,
)
from snapshotter.names import ContentName
from snapshotter.projection.tree import EntryKind, LayerEntry
from snapshotter.store import chunk_table
from tests.unit.cache_server.layers import (
    FILES,
    MIB,
    digest_of,
    files_of,
    ingest,
    make_tar,
    noise,
    pack_bytes,
)

TAR = make_tar(FILES)
DIFF_ID = digest_of(TAR)


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(tmp_path / "library") as library:
        yield library


def the_pack(root: Path) -> Path:
    (path,) = (root / "packs").iterdir()
    return path


# content


@pytest.mark.parametrize("size", [1, MIB - 1, MIB, MIB + 1, 3 * MIB, 3 * MIB + 1])
def test_content_is_named_and_given_back(library: Library, size: int) -> None:
    data = noise(size, size)
    name = library.add_content(memoryview(data))
    assert name == chunk_table.content_name(
        [sha256(data[at : at + MIB]) for at in range(0, size, MIB)], size
    )
    if size <= MIB:
        assert library.read_chunk(name.content_id) == data
    else:
        digests = chunk_table.decode(library.chunk_table(name), name)
        assert b"".join(library.read_chunk(digest) for digest in digests) == data
    assert library.add_content(bytearray(data)) == name


def test_no_content_has_no_name(library: Library) -> None:
    with pytest.raises(InvalidInputError):
        library.add_content(b"")


def test_what_compresses_is_compressed(library: Library) -> None:
    text = library.locate(library.add_content(b"text " * 1000).content_id)
    assert text.codec == Codec.ZSTD
    assert text.length < 200
    raw = library.locate(library.add_content(noise(5000, 1)).content_id)
    assert (raw.codec, raw.length, raw.source) == (Codec.RAW, 5000, text.source)
    assert raw.offset == text.offset + text.length


def test_many_chunks_are_located_at_once_and_missing_ones_left_out(library: Library) -> None:
    digests = [library.add_content(b"%d" % number).content_id for number in range(3)]
    asked = [*digests, bytes(32)] * 200
    located = library.locate_all(asked)
    assert located == {digest: library.locate(digest) for digest in digests}


def test_what_is_not_there_is_not_found(library: Library) -> None:
    name = library.add_content(noise(MIB + 1, 1))
    with pytest.raises(NotFoundError):
        library.locate(bytes(32))
    with pytest.raises(NotFoundError):
        library.read_chunk(name.content_id)
    with pytest.raises(NotFoundError):
        library.chunk_table(ContentName(bytes(32), MIB + 1))
    with pytest.raises(NotFoundError):
        library.chunk_table(ContentName(name.content_id, name.size + 1))
    with pytest.raises(NotFoundError):
        library.layer_entries("sha256:" + "0" * 64)
    assert library.layer("sha256:" + "0" * 64) is None
    assert library.diff_id_of_blob("sha256:" + "0" * 64) is None


@pytest.mark.parametrize("data", [noise(5000, 1), b"text " * 1000], ids=["raw", "zstd"])
def test_every_damaged_byte_is_noticed(library: Library, tmp_path: Path, data: bytes) -> None:
    digest = library.add_content(data).content_id
    pack = the_pack(tmp_path / "library")
    stored = pack.read_bytes()
    for at in range(0, len(stored), max(1, len(stored) // 50)):
        pack.write_bytes(stored[:at] + bytes([stored[at] ^ 0x55]) + stored[at + 1 :])
        with pytest.raises(CorruptError, match=f"chunk sha256:{digest.hex()} in pack 000001"):
            library.read_chunk(digest)
    pack.write_bytes(stored)
    assert library.read_chunk(digest) == data


def test_a_frame_that_claims_too_much_is_refused(library: Library, tmp_path: Path) -> None:
    digest = library.add_content(b"text " * 1000).content_id
    pack = the_pack(tmp_path / "library")
    huge = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little")
    pack.write_bytes(huge.ljust(pack.stat().st_size, b"\0"))
    with pytest.raises(CorruptError):
        library.read_chunk(digest)


def test_a_pack_cut_under_an_open_library_is_noticed(library: Library, tmp_path: Path) -> None:
    digest = library.add_content(noise(5000, 1)).content_id
    os.truncate(the_pack(tmp_path / "library"), 4000)
    with pytest.raises(CorruptError, match="pack 000001"):
        library.read_chunk(digest)
    the_pack(tmp_path / "library").unlink()
    with pytest.raises(CorruptError, match="pack 000001"):
        library.read_chunk(digest)


# layers


def test_entries_come_back_as_they_were(library: Library) -> None:
    entries = [
        LayerEntry(EntryKind.OPAQUE, b"d"),
        LayerEntry(EntryKind.WHITEOUT, b"d/\xff\xfe"),
        LayerEntry(
            EntryKind.NODE,
            b"f",
            mode=0o100644,
            uid=(1 << 32) - 2,
            gid=3,
            mtime_ns=-(1 << 63),
            size=(1 << 63) - 1,
            rdev=(1 << 32) - 1,
            target=b"t\xff",
            content=bytes(range(32)),
            xattrs={b"user.\xff": b"\0", b"user.e": b""},
        ),
        *(LayerEntry(EntryKind.NODE, b"many/%d" % number) for number in range(20_000)),
    ]
    record = ingest(library, TAR)
    with library.batch() as batch:
        for entry in entries:
            batch.add_entry(entry)
        other = "sha256:" + "2" * 64
        batch.commit(type(record)(other, record.blob, len(entries), 0, 0))
    assert library.layer_entries(other) == entries


def test_a_damaged_listing_is_noticed(library: Library, tmp_path: Path) -> None:
    ingest(library, TAR)
    with sqlite3.connect(tmp_path / "library" / "catalog.db") as connection:
        connection.execute("UPDATE layers SET listing = substr(listing, 1, 20)")
    connection.close()
    with pytest.raises(CorruptError, match=DIFF_ID):
        library.layer_entries(DIFF_ID)


def test_leaving_a_batch_undoes_it(library: Library, tmp_path: Path) -> None:
    with library.batch() as batch:
        digest = batch.add_chunk(noise(2 * MIB, 1)[:MIB])
        batch.add_chunk(noise(2 * MIB, 2)[:MIB])
    with pytest.raises(NotFoundError):
        library.locate(digest)
    assert pack_bytes(tmp_path / "library") == 0


def test_a_large_batch_is_saved_on_the_way(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks of a layer that then fails stay, correct; of the layer nothing is known."""
    monkeypatch.setattr("cache_server.library._MAX_UNSAVED_CHUNKS", 2)
    with library.batch() as batch:
        digests = [batch.add_chunk(noise(1000, seed)) for seed in range(5)]
        batch.add_entry(LayerEntry(EntryKind.NODE, b"f"))
    assert [library.read_chunk(digest) for digest in digests[:4]] == [
        noise(1000, seed) for seed in range(4)
    ]
    with pytest.raises(NotFoundError):
        library.locate(digests[4])
    assert pack_bytes(tmp_path / "library") == 4000
    ingest(library, TAR)
    assert files_of(library, DIFF_ID) == FILES


def test_packs_roll_over(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache_server.library.PACK_SIZE", MIB)
    monkeypatch.setattr("cache_server.packs.PACK_SIZE", MIB)
    chunks = [noise(400_000, seed) for seed in range(12)]
    files = {f"f{number}": chunk for number, chunk in enumerate(chunks)}
    tar = make_tar(files)
    ingest(library, tar, tar)
    sizes = [path.stat().st_size for path in (tmp_path / "library" / "packs").iterdir()]
    assert sizes == [1_200_000] * 4
    assert files_of(library, digest_of(tar)) == files


def test_more_packs_than_are_kept_open(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("library.PACK_SIZE", 1), ("packs.PACK_SIZE", 1), ("packs._MAX_OPEN", 2)):
        monkeypatch.setattr(f"cache_server.{name}", value)
    descriptors = len(os.listdir("/proc/self/fd"))
    names = [library.add_content(noise(10, seed)) for seed in range(6)]
    for seed, name in enumerate(names):
        assert library.read_chunk(name.content_id) == noise(10, seed)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 3


# opening


def test_one_process_at_a_time(library: Library, tmp_path: Path) -> None:
    with pytest.raises(BusyError, match="in use"):
        Library(tmp_path / "library")
    library.close()
    Library(tmp_path / "library").close()
    library.__init__(tmp_path / "library")  # type: ignore[misc] # for the fixture to close


def test_a_newer_layout_is_refused_and_left_alone(tmp_path: Path) -> None:
    Library(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "catalog.db")
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    (tmp_path / "packs" / "000009.pack").write_bytes(b"of a newer version")
    with pytest.raises(UnsupportedError, match="newer"):
        Library(tmp_path)
    assert (tmp_path / "packs" / "000009.pack").exists()


def test_a_catalog_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "catalog.db").write_bytes(b"not a database, but long enough to look at " * 100)
    with pytest.raises(CorruptError, match=r"catalog\.db"):
        Library(tmp_path)


def test_leftovers_are_removed(tmp_path: Path) -> None:
    with Library(tmp_path) as library:
        digest = library.add_content(noise(5000, 1)).content_id
    with the_pack(tmp_path).open("ab") as pack:
        pack.write(b"a tail that was never committed")
    (tmp_path / "packs" / "000007.pack").write_bytes(b"never committed")
    with Library(tmp_path) as library:
        assert pack_bytes(tmp_path) == 5000
        assert library.read_chunk(digest) == noise(5000, 1)
        other = library.add_content(noise(6000, 2)).content_id
        assert library.read_chunk(other) == noise(6000, 2)
        assert pack_bytes(tmp_path) == 11_000


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, 4999), Path.unlink])
def test_packs_that_lack_committed_bytes_are_refused(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    with Library(tmp_path) as library:
        library.add_content(noise(5000, 1))
    damage(the_pack(tmp_path))
    (tmp_path / "packs" / "000002.pack").write_bytes(b"never committed")
    with pytest.raises(CorruptError, match="import again"):
        Library(tmp_path)
    assert (tmp_path / "packs" / "000002.pack").exists(), "nothing was changed"


# crashes

CRASH_FILES = {
    "small": b"some text\n" * 20,
    "chunked": noise(MIB + 17, 2),
    "last": noise(60_000, 3),
}
CRASH_TAR = make_tar(CRASH_FILES)
CRASH_DIFF_ID = digest_of(CRASH_TAR)


def shrink(patches: pytest.MonkeyPatch, max_unsaved: int) -> None:
    """Small packs, buffers and batches: many steps that write, with little data."""
    patches.setattr("cache_server.library.PACK_SIZE", 50_000)
    patches.setattr("cache_server.packs._BUFFER_BYTES", 20_000)
    patches.setattr("cache_server.library._MAX_UNSAVED_CHUNKS", max_unsaved)


class PowerCuts:
    """Copies the library's root before and after every step that writes, as a power cut would
    leave it at worst: of packs only what was synced, by name only what a synced directory lists.
    """

    def __init__(self, root: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._copies = copies
        self._synced = {path.name: path.stat().st_size for path in (root / "packs").iterdir()}
        self._durable_names = set(self._synced)
        self.count = 0
        for name in ("pwrite", "fdatasync", "fsync"):
            monkeypatch.setattr(f"cache_server.packs.os.{name}", self._step(getattr(os, name)))
        monkeypatch.setattr(Catalog, "add", self._step(Catalog.add))

    def _step(self, step: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            self._cut()
            result = step(*arguments)
            if step is REAL_FDATASYNC and isinstance(arguments[0], int):
                path = Path(os.readlink(f"/proc/self/fd/{arguments[0]}"))
                self._synced[path.name] = path.stat().st_size
            elif step is REAL_FSYNC:
                self._durable_names |= {path.name for path in (self._root / "packs").iterdir()}
            self._cut()
            return result

        return run

    def _cut(self) -> None:
        copy = self._copies / str(self.count)
        shutil.copytree(self._root, copy)
        for path in (copy / "packs").iterdir():
            if path.name in self._durable_names:
                os.truncate(path, min(path.stat().st_size, self._synced.get(path.name, 0)))
            else:
                path.unlink()
        self.count += 1


REAL_FDATASYNC = os.fdatasync
REAL_FSYNC = os.fsync


@pytest.mark.parametrize("max_unsaved", [1, 1000])
def test_the_catalog_never_refers_to_bytes_that_a_power_cut_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_unsaved: int
) -> None:
    root = tmp_path / "library"
    before = make_tar({"before": noise(300_000, 9)})
    with Library(root) as library:
        ingest(library, before)
        with monkeypatch.context() as patches:
            shrink(patches, max_unsaved)
            cuts = PowerCuts(root, tmp_path, patches)
            ingest(library, CRASH_TAR)
    assert cuts.count >= 12
    seen = []
    for number in range(cuts.count):
        with Library(tmp_path / str(number)) as library:
            assert files_of(library, digest_of(before)) == {"before": noise(300_000, 9)}
            seen.append(library.layer(CRASH_DIFF_ID) is not None)
            ingest(library, CRASH_TAR)
            assert files_of(library, CRASH_DIFF_ID) == CRASH_FILES
    assert seen == sorted(seen), "once there, a layer stays"
    assert not seen[0]
    assert seen[-1]


class Failures:
    """Lets the n-th step that writes fail, before or after it took effect."""

    def __init__(self, fail_at: int, *, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._fail_at = fail_at
        self._after = after
        for name in ("pwrite", "fdatasync", "fsync"):
            monkeypatch.setattr(f"cache_server.packs.os.{name}", self._step(getattr(os, name)))
        monkeypatch.setattr(Catalog, "add", self._step(Catalog.add))

    def _step(self, step: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            number, self.count = self.count, self.count + 1
            if number == self._fail_at and not self._after:
                raise OSError(28, "No space left on device")
            result = step(*arguments)
            if number == self._fail_at:
                raise OSError(5, "Input/output error")
            return result

        return run


@pytest.mark.parametrize("max_unsaved", [2, 1000])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_any_write_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_unsaved: int, *, after: bool
) -> None:
    fail_at, has_failed = 0, True
    while has_failed:
        root = tmp_path / str(fail_at)
        with Library(root) as library:
            kept = library.add_content(noise(3000, 4)).content_id
            with monkeypatch.context() as patches:
                shrink(patches, max_unsaved)
                failures = Failures(fail_at, after=after, monkeypatch=patches)
                try:
                    ingest(library, CRASH_TAR)
                    has_failed = False
                except (SnapshotterError, OSError):
                    pass
            if library.layer(CRASH_DIFF_ID) is not None:
                assert files_of(library, CRASH_DIFF_ID) == CRASH_FILES
            ingest(library, CRASH_TAR)
            assert files_of(library, CRASH_DIFF_ID) == CRASH_FILES
        with Library(root) as library:
            assert files_of(library, CRASH_DIFF_ID) == CRASH_FILES
            assert library.read_chunk(kept) == noise(3000, 4)
        fail_at += 1
    assert fail_at >= 7
    assert failures.count < fail_at


def test_a_killed_process_leaves_a_whole_library(tmp_path: Path) -> None:
    """SIGKILL in the midst of an ingest, once the first bytes are in the pack."""
    with Library(tmp_path) as library:
        kept = library.add_content(noise(3000, 4)).content_id
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from cache_server.library import Library\n"
        "batch = Library(Path(sys.argv[1])).batch()\n"
        "for _ in range(4): batch.add_chunk(os.urandom(1 << 20))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)])
    assert done.returncode == -9
    assert pack_bytes(tmp_path) > 3000
    with Library(tmp_path) as library:
        assert pack_bytes(tmp_path) == 3000
        assert library.read_chunk(kept) == noise(3000, 4)


def test_a_failed_commit_leaves_no_half(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the midst of the transaction: neither chunks nor layer are visible."""
    real = Catalog._add_pack
    monkeypatch.setattr(
        Catalog,
        "_add_pack",
        lambda *arguments: (real(*arguments), 1 / 0),  # type: ignore[func-returns-value]
    )
    with pytest.raises(ZeroDivisionError):
        ingest(library, TAR)
    monkeypatch.undo()
    assert library.layer(DIFF_ID) is None
    with pytest.raises(NotFoundError):
        library.locate(sha256(FILES["small"]))
    ingest(library, TAR)
    assert files_of(library, DIFF_ID) == FILES


def test_additions_of_others_do_not_wait_for_readers(library: Library) -> None:
    """A reader in the midst of its rows sees the state it began with, and blocks no writer."""
    catalog = library._catalog
    with catalog._reader() as connection:
        rows = connection.execute("SELECT path FROM sources")
        catalog.add(Addition([], {}))
        library.add_content(b"new")
        assert rows.fetchall() == []
