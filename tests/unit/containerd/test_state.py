"""A state directory after crashes and accidents: it opens, and loses only what was lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotter.containerd.metastore import Metastore
from snapshotter.containerd.state import State
from snapshotter.errors import BusyError, UnsupportedError
from tests.support.snapshots import SnapshotsWorld


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A state directory with one committed and one active snapshot, closed."""
    world = SnapshotsWorld(tmp_path)
    world.committed("base")
    world.snapshots.prepare("k", "base", {"a": "b"})
    (world.upper("k") / "file").write_text("mine")
    world.close()
    return world.path


def test_records_survive_a_restart(left: Path) -> None:
    state = State(left)
    found = state.records.get("k")
    assert (found.parent, found.labels) == ("base", {"a": "b"})
    state.close()


def test_records_survive_a_process_that_never_closed_them(tmp_path: Path) -> None:
    world = SnapshotsWorld(tmp_path)
    world.committed("base")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in world.path.glob("snapshots.db*"):  # as the disk is at a power cut
        (copy / file.name).write_bytes(file.read_bytes())
    assert Metastore(copy / "snapshots.db").get("base").name == "base"
    world.close()


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 5000])
def test_truncated_records_are_set_aside_with_what_they_described(
    left: Path, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = left / "snapshots.db"
    path.write_bytes(path.read_bytes()[:size])
    state = State(left)
    assert state.records.all() == []
    assert state.directories.all() == set()
    state.close()
    (aside,) = left.glob("lost-*")
    assert [file.read_text() for file in aside.glob("snapshots/*/upper/file")] == ["mine"]
    assert "all snapshots are forgotten" in capsys.readouterr().out


def test_missing_records_are_said_to_be_missing(
    left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (left / "snapshots.db").unlink()
    state = State(left)
    assert state.records.all() == []
    state.close()
    assert "the records are gone" in capsys.readouterr().out


def test_missing_directories_leave_the_records(left: Path) -> None:
    import shutil

    shutil.rmtree(left / "snapshots")
    state = State(left)
    assert {each.name for each in state.records.all()} == {"base", "k"}
    state.close()


@pytest.mark.parametrize("name", ["lock", "snapshots.db-wal", "snapshots.db-shm"])
@pytest.mark.parametrize("size", [None, 0, 7])
def test_side_files_may_be_gone_or_garbage(left: Path, name: str, size: int | None) -> None:
    (left / name).unlink(missing_ok=True)
    if size is not None:
        (left / name).write_bytes(b"\xff" * size)
    state = State(left)
    assert {each.name for each in state.records.all()} == {"base", "k"}
    state.close()


def test_second_service_is_refused_and_told_why(left: Path) -> None:
    state = State(left)
    with pytest.raises(BusyError, match="each containerd needs a service of its own"):
        State(left)
    state.close()
    State(left).close()


def test_records_of_a_newer_version_are_left_alone(left: Path) -> None:
    import sqlite3

    database = sqlite3.connect(left / "snapshots.db")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(UnsupportedError, match="version 99"):
        State(left)
    assert list(left.glob("lost-*")) == []
