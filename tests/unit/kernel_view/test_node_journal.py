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
    assert (tmp_path / "nodes").stat().st_size == 40 * 6
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
        write = __import__("os").write
        patch.setattr("os.write", lambda file, data: write(file, data[:7]))
        with pytest.raises(OSError, match="7 of 40 bytes"):
            journal.add(NAMES[1])
    assert not journal.has(NAMES[1])
    journal.add(NAMES[2])
    journal.close()
    again = NodeJournal(tmp_path / "nodes", GATE)
    assert [again.has(name) for name in NAMES[:3]] == [True, False, True]
    again.close()
