import errno
import os
from pathlib import Path

import pytest

from snapshotter.errors import SnapshotterError
from snapshotter.kernel_view.node_journal import CONTENT_NODE, NodeJournal
from snapshotter.names import ContentName

GATE = bytes(range(32))
NAMES = [ContentName(bytes([number]) * 32, number + 1) for number in range(5)]


def test_a_successor_finds_the_names_of_the_nodes(tmp_path: Path) -> None:
    first = NodeJournal(tmp_path / "nodes", GATE)
    nodeids = [first.add(name) for name in NAMES]
    assert [first.add(name) for name in NAMES] == nodeids
    assert all(nodeid & CONTENT_NODE for nodeid in nodeids)
    second = NodeJournal(tmp_path / "nodes", GATE)  # the first was killed: nothing was closed
    assert [second.name(nodeid) for nodeid in nodeids] == NAMES
    assert second.add(NAMES[0]) == nodeids[0]
    first.close()
    second.close()


def test_another_gate_starts_without_nodes_and_with_other_numbers(tmp_path: Path) -> None:
    first = NodeJournal(tmp_path / "nodes", GATE)
    nodeid = first.add(NAMES[0])
    first.close()
    second = NodeJournal(tmp_path / "nodes", bytes(32))
    assert not second.has(NAMES[0])
    assert second.name(nodeid) is None
    assert second.add(NAMES[0]) != nodeid
    second.close()


@pytest.mark.parametrize("torn", range(1, 40))
def test_a_torn_record_is_dropped_and_later_ones_are_in_place(tmp_path: Path, torn: int) -> None:
    first = NodeJournal(tmp_path / "nodes", GATE)
    for name in NAMES[:2]:
        first.add(name)
    first.close()
    with (tmp_path / "nodes").open("ab") as file:
        file.write(bytes(torn))
    second = NodeJournal(tmp_path / "nodes", GATE)
    second.add(NAMES[2])
    second.close()
    third = NodeJournal(tmp_path / "nodes", GATE)
    assert [third.has(name) for name in NAMES] == [True, True, True, False, False]
    third.close()


def test_two_contents_with_one_nodeid_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeJournal, "nodeid", lambda _self, _name: CONTENT_NODE | 1)
    journal = NodeJournal(tmp_path / "nodes", GATE)
    journal.add(NAMES[0])
    with pytest.raises(SnapshotterError, match="one nodeid"):
        journal.add(NAMES[1])
    assert journal.name(CONTENT_NODE | 1) == NAMES[0]
    assert not journal.has(NAMES[1])
    journal.close()


def test_a_record_that_does_not_fit_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = NodeJournal(tmp_path / "nodes", GATE)
    journal.add(NAMES[0])
    with monkeypatch.context() as patch:
        write = os.pwrite
        patch.setattr("os.pwrite", lambda file, data, at: write(file, data[:7], at))
        with pytest.raises(OSError, match="7 of 40 bytes"):
            journal.add(NAMES[1])
    assert not journal.has(NAMES[1])
    journal.add(NAMES[2])
    journal.close()
    again = NodeJournal(tmp_path / "nodes", GATE)
    assert [again.has(name) for name in NAMES[:3]] == [True, False, True]
    again.close()


def test_what_the_kernel_forgets_is_gone_here_and_for_a_successor(tmp_path: Path) -> None:
    journal = NodeJournal(tmp_path / "nodes", GATE)
    first, second = (journal.add(name) for name in NAMES[:2])
    journal.add(NAMES[0])
    assert journal.forget([(first, 1), (second, 1), (CONTENT_NODE | 5, 1)]) == 1
    assert [journal.has(name) for name in NAMES[:2]] == [True, False]
    assert journal.name(second) is None
    assert journal.forget([(first, 1)]) == 1
    assert journal.add(NAMES[1]) == second
    successor = NodeJournal(tmp_path / "nodes", GATE)
    assert [successor.has(name) for name in NAMES[:2]] == [False, True]
    journal.close()
    successor.close()


@pytest.mark.parametrize(
    ("answered", "forgets", "is_gone"),
    [
        (0, [3], True),  # an eviction: nothing was answered here that could be on its way
        (1, [3], False),  # the predecessor's alone, or ours too?
        (1, [1], False),
        (1, [1, 2], True),
        (2, [1, 1], False),
    ],
)
def test_lookups_that_a_predecessor_answered_are_not_known(
    tmp_path: Path, answered: int, forgets: list[int], is_gone: bool
) -> None:
    first = NodeJournal(tmp_path / "nodes", GATE)
    nodeid = first.add(NAMES[0])
    first.close()
    second = NodeJournal(tmp_path / "nodes", GATE)
    for _ in range(answered):
        second.add(NAMES[0])
    for lookups in forgets:
        second.forget([(nodeid, lookups)])
    assert second.has(NAMES[0]) is not is_gone
    second.close()


def test_the_file_stays_small_whatever_comes_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    journal = NodeJournal(path, GATE)
    kept = journal.add(NAMES[0])
    empty_bytes = path.stat().st_size
    for number in range(10_000):
        nodeid = journal.add(ContentName(number.to_bytes(32, "big"), 9))
        journal.forget([(nodeid, 1)])
    assert path.stat().st_size <= empty_bytes + (512 << 10)
    journal.close()
    again = NodeJournal(path, GATE)
    assert (len(again), again.name(kept)) == (1, NAMES[0])
    again.close()
    assert os.listdir(tmp_path) == ["nodes"]


def test_a_full_disk_leaves_room_for_thousands_of_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "nodes"
    journal = NodeJournal(path, GATE)
    room = path.stat().st_blocks * 512

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    for number in range(6000):
        journal.add(ContentName(number.to_bytes(32, "big"), 9))
    assert path.stat().st_blocks * 512 == room
    journal.close()
    again = NodeJournal(path, GATE)
    assert len(again) == 6000
    again.close()
