"""A crash before every change to a file: what is found afterwards is whole, and work goes on.

Each scenario is one thing that a process does to its directory. It is killed before its first
change, before its second, and so on (writes also half done), and the directory opened again as the
next process would: after the process alone died and, where that differs, after the machine went
down and took what was not synced.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cache_server.library import Library
from snapshotter.digest import sha256
from snapshotter.kernel_view import node_journal
from snapshotter.kernel_view.node_journal import NodeJournal
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.paths import Paths
from snapshotter.service import uppers
from snapshotter.service.leftovers import clear_leftovers
from snapshotter.service.mounts import MountTable
from snapshotter.service.uppers import UpperRecord
from snapshotter.store import arrivals, chunk_table, images, inventory, objects
from snapshotter.store.arrivals import Arrivals
from snapshotter.store.descriptors import Descriptors
from snapshotter.store.inventory import find_object_fault, find_partial_fault, list_files
from snapshotter.store.objects import Objects
from snapshotter.store.partial import Partials
from snapshotter.telemetry import Counters
from tests.support.crash_points import crashes
from tests.support.fake_daemon import make_image, make_record
from tests.unit.cache_server.layers import FILES, digest_of, files_of, ingest, make_tar

BODIES = [b"one", b"two" * 1000, b"3" * 70_000]
LARGE = b"a" * CHUNK_SIZE + b"b" * CHUNK_SIZE + b"c"
PIECES = [LARGE[at : at + CHUNK_SIZE] for at in range(0, len(LARGE), CHUNK_SIZE)]
TABLE = chunk_table.encode([sha256(piece) for piece in PIECES], len(LARGE))
LARGE_NAME = ContentName(sha256(TABLE), len(LARGE))
NAMES = [ContentName(sha256(body), len(body)) for body in BODIES]
GATE_ID = b"g" * 32
UPPER = UpperRecord(metadata_image="sha256:1", image="demo")
TAR = make_tar(FILES)


class OpenStore:
    """The store's files, as a start of it opens them."""

    def __init__(self, root: Path) -> None:
        self.paths = Paths(root, root / "run")
        self.arrivals = Arrivals(counters=Counters())
        self.objects = Objects(self.paths, on_arrival=self.arrivals.note)
        self.partials = Partials(self.paths, descriptors=Descriptors())
        if self.arrivals.recover(self.paths, self.objects):
            self.partials.drop_all()
            self.arrivals.note_boot(self.paths)
        self.partials.drop_unfinished()

    def publish(self) -> None:
        for name, body in zip(NAMES, BODIES, strict=True):
            self.objects.publish(name, body)

    def fill(self) -> None:
        file = self.partials.load(LARGE_NAME) or self.partials.create(LARGE_NAME, TABLE)
        for index, piece in enumerate(PIECES):
            file.write_chunk(index, piece)
        file.promote(self.objects)


def check_store(root: Path, point: str) -> None:
    """Nothing torn under any name, nothing left over; and publishing again completes it."""
    store = OpenStore(root)
    paths = store.paths
    for directory in (paths.objects, paths.arrivals):
        faults = [find_object_fault(directory, file.name) for file in list_files(directory)]
        assert not any(faults), point
    assert [find_partial_fault(paths.partial, f.name) for f in list_files(paths.partial)] in (
        [],
        [None],
    ), point
    assert list((paths.arrivals / "tmp").iterdir()) == [], point
    store.publish()
    store.fill()
    store.arrivals.settle_all(store.objects)
    for name, body in zip([*NAMES, LARGE_NAME], [*BODIES, LARGE], strict=True):
        assert (paths.objects / name.path).read_bytes() == body, point
    assert list(list_files(paths.arrivals)) == [], point


def lose_power(root: Path) -> None:
    """What the disk may have of files that were not synced: nothing but their names and sizes."""
    paths = Paths(root, root / "run")
    arrived = [file.name for file in list_files(paths.arrivals)]
    unsynced = [
        directory / name.path for name in arrived for directory in (paths.arrivals, paths.objects)
    ]
    unsynced += [paths.partial / file.name.path for file in list_files(paths.partial)]
    for path in filter(Path.exists, unsynced):
        path.chmod(0o600)
        path.write_bytes(bytes(path.stat().st_size))
    (root / "store.boot").write_text("the boot before")


def publish(root: Path) -> None:
    OpenStore(root).publish()


def settle(root: Path) -> None:
    store = OpenStore(root)
    store.arrivals.settle_all(store.objects)


def fill(root: Path) -> None:
    OpenStore(root).fill()


def evict(root: Path) -> None:
    store = OpenStore(root)
    store.arrivals.settle_all(store.objects)
    for name in NAMES:
        store.objects.evict(name)
    store.partials.forget(LARGE_NAME)
    store.objects.evict(LARGE_NAME)


def prepare_store(root: Path) -> None:
    OpenStore(root)


def prepare_full_store(root: Path) -> None:
    store = OpenStore(root)
    store.publish()
    store.fill()


def reopen_after_power_cut(root: Path) -> None:
    OpenStore(root)


def prepare_power_cut(root: Path) -> None:
    prepare_full_store(root)
    lose_power(root)


def save_records(root: Path) -> None:
    for number in (1, 2):
        images.save(root, replace_number(number))
    images.remove(root, 2)


def replace_number(number: int) -> images.ImageRecord:
    image = make_image()
    return images.ImageRecord(
        number=number, references=["demo"], pulled_at_s=1.0, prepared=image.prepared
    )


def check_records(root: Path, point: str) -> None:
    """Each record is whole or not there; a number that was seen is never given again."""
    seen = {record.number for record in images.load_all(root)}
    assert all(images.load(root, number) == replace_number(number) for number in seen), point
    assert images.last_number(root) >= max(seen, default=0), point
    assert images.last_number(root) == 2 or not (root / "last-number").exists(), point
    save_records(root)
    assert [record.number for record in images.load_all(root)] == [1], point
    assert images.last_number(root) == 2, point


def keep_mounts(root: Path) -> None:
    table = MountTable(root)
    table.load()
    for mount_id in ("aaaaaaaaaaaa", "bbbbbbbbbbbb"):
        record = make_record(id=mount_id, private_upper=False)
        table.add(record, gate_device=1, volatile=False)
        table.place(mount_id, f"/mnt/{mount_id}", 1)
    uppers.remove(table.drop("aaaaaaaaaaaa"))


def check_mounts(root: Path, point: str) -> None:
    """Mounts that were recorded are found with a place or none; all else is cleared up."""
    table = MountTable(root)
    table.load()
    for stored in table.all():
        assert stored.mount.target in (None, f"/mnt/{stored.mount.id}"), point
    names = {path.name for path in root.iterdir()}
    assert names == {stored.mount.id for stored in table.all()}, point
    for stored in table.all():
        uppers.remove(table.drop(stored.mount.id))
    assert list(root.iterdir()) == [], point


def make_upper(root: Path) -> None:
    uppers.prepare(root / "upper", UPPER, str(root))


def check_upper(root: Path, point: str) -> None:
    """The upper is made by the next mount, wherever the first one stopped."""
    upper = uppers.prepare(root / "upper", UPPER, str(root))
    assert upper.upper.is_dir(), point
    assert upper.work.is_dir(), point


def start_over(root: Path) -> None:
    clear_leftovers(Paths(root, root / "run"))


def prepare_leftovers(root: Path) -> None:
    for name in (".probe-a/upper/work", "images", "run/.view-b"):
        (root / name).mkdir(parents=True)
    (root / "images/.1.json.new").write_bytes(b"{")


def check_leftovers(root: Path, point: str) -> None:
    """A start that was cut short is no worse than none."""
    clear_leftovers(Paths(root, root / "run"))
    left = sorted(path.name for path in root.rglob("*"))
    assert left == ["images", "run"], point


def prepare_nodes(root: Path) -> None:
    journal = NodeJournal(root / "nodes", GATE_ID)
    for name in NAMES[:2]:
        journal.add(name)
    journal.close()


def forget_nodes(root: Path) -> None:
    """The journal is written anew in between: see ``few_directories``."""
    journal = NodeJournal(root / "nodes", GATE_ID)
    journal.forget([(journal.nodeid(NAMES[1]), 1)])
    journal.add(NAMES[2])
    for _ in range(3):
        journal.forget([(journal.add(LARGE_NAME), 1)])
    journal.close()


def check_nodes(root: Path, point: str) -> None:
    """A node that the kernel has is known, whenever its store died."""
    journal = NodeJournal(root / "nodes", GATE_ID)
    assert journal.has(NAMES[0]), point
    assert journal.name(journal.nodeid(NAMES[0])) == NAMES[0], point
    assert len(journal) <= 4, point
    journal.close()
    forget_nodes(root)
    journal = NodeJournal(root / "nodes", GATE_ID)
    assert [journal.has(name) for name in NAMES] == [True, False, True], point
    assert (root / "nodes").stat().st_size < 600_000, point
    journal.close()


def ingest_layer(root: Path) -> None:
    with Library(root) as library:
        ingest(library, TAR)


def check_library(root: Path, point: str) -> None:
    """The layer is known whole, with every byte, or not at all; and it can come again."""
    with Library(root) as library:
        if library.layer(digest_of(TAR)) is not None:
            assert files_of(library, digest_of(TAR)) == FILES, point
        ingest(library, TAR)
        assert files_of(library, digest_of(TAR)) == FILES, point
    with Library(root) as library:
        assert files_of(library, digest_of(TAR)) == FILES, point


@dataclass(frozen=True)
class Scenario:
    prepare: Callable[[Path], None]
    act: Callable[[Path], None]
    check: Callable[[Path, str], None]
    at_least: int
    """So many crash points, or something is not seen any more."""
    has_power_cut: bool = False


SCENARIOS = {
    "store: publish": Scenario(prepare_store, publish, check_store, 9, has_power_cut=True),
    "store: settle": Scenario(prepare_full_store, settle, check_store, 4, has_power_cut=True),
    "store: fill a large file": Scenario(prepare_store, fill, check_store, 9, has_power_cut=True),
    "store: evict": Scenario(prepare_full_store, evict, check_store, 8, has_power_cut=True),
    "store: undo after a power cut": Scenario(
        prepare_power_cut, reopen_after_power_cut, check_store, 8
    ),
    "store: forget nodes": Scenario(prepare_nodes, forget_nodes, check_nodes, 10),
    "daemon: image records": Scenario(lambda _: None, save_records, check_records, 8),
    "daemon: mount records": Scenario(lambda _: None, keep_mounts, check_mounts, 8),
    "daemon: make an upper": Scenario(lambda _: None, make_upper, check_upper, 5),
    "daemon: clear leftovers": Scenario(prepare_leftovers, start_over, check_leftovers, 4),
    "cache server: ingest a layer": Scenario(
        lambda root: Library(root).close(), ingest_layer, check_library, 3
    ),
}


@pytest.fixture(autouse=True)
def few_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the contents here need; copying 512 for each crash point takes minutes."""
    needed = tuple(sorted({name.directory for name in (*NAMES, LARGE_NAME)}))
    for module in (arrivals, inventory, objects):
        monkeypatch.setattr(module, "FAN_OUT", needed)
    monkeypatch.setattr(node_journal, "_SLACK_RECORDS", 0)


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_a_crash_leaves_is_whole(tmp_path: Path, name: str) -> None:
    scenario = SCENARIOS[name]
    base, place = tmp_path / "base", tmp_path / "crashed"
    base.mkdir()
    scenario.prepare(base)
    points = []
    for point in crashes(base, place, scenario.act):
        points.append(point)
        if scenario.has_power_cut:
            dark = tmp_path / "dark"
            shutil.rmtree(dark, ignore_errors=True)
            shutil.copytree(place, dark)
            lose_power(dark)
            scenario.check(dark, f"{name}, {point}, power cut")
        scenario.check(place, f"{name}, {point}")
    assert len(points) >= scenario.at_least, points
