import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest

from snapshotter.errors import BusyError, NotFoundError
from snapshotter.service.control import MountRecord
from snapshotter.service.mounts import UNPLACED_GRACE_S, MountTable, start_ticks


def record(mount_id: str, **changes: object) -> MountRecord:
    plain = MountRecord(
        id=mount_id,
        image="a",
        image_number=1,
        view="kernel",
        upper=None,
        private_upper=False,
        read_only=True,
        created_at_s=0.0,
        device=1,
    )
    return msgspec.structs.replace(plain, **changes)


def add(table: MountTable, mount: MountRecord) -> None:
    table.add(mount, gate_device=7, volatile=False)


def test_records_are_found_again(tmp_path: Path) -> None:
    table = MountTable(tmp_path)
    add(table, record("m1", owner_pid=os.getpid()))
    table.place("m1", "/mnt", 42)
    later = MountTable(tmp_path)
    assert later.load() == []
    stored = later.get("m1")
    assert (stored.mount.target, stored.mount.pid, stored.gate_device) == ("/mnt", 42, 7)
    assert stored.owner_started == start_ticks(os.getpid())


def test_records_of_an_earlier_boot_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(MountTable(tmp_path), record("m1"))
    monkeypatch.setattr("snapshotter.service.mounts.boot_id", lambda: "another")
    assert MountTable(tmp_path).load() == ["m1"]


@pytest.mark.parametrize("raw", [b'{"mount":', b'{"x":' + b"[" * 9999, b'{"boot":"\xff"}'])
def test_damaged_record_is_removed_and_the_others_stay(tmp_path: Path, raw: bytes) -> None:
    table = MountTable(tmp_path)
    add(table, record("m1"))
    add(table, record("m2"))
    (tmp_path / "m1" / "mount.json").write_bytes(raw)
    later = MountTable(tmp_path)
    later.load()
    assert [stored.mount.id for stored in later.all()] == ["m2"]
    assert not (tmp_path / "m1").exists()


def test_dropped_mount_is_forgotten_before_its_directory_is_gone(tmp_path: Path) -> None:
    table = MountTable(tmp_path)
    add(table, record("m1"))
    gone = table.drop("m1")
    assert (gone / "mount.json").exists()
    with pytest.raises(NotFoundError, match="snapshotter ps"):
        table.get("m1")
    assert MountTable(tmp_path).load() == []
    assert not gone.exists()


def test_upper_is_for_one_mount_at_a_time(tmp_path: Path) -> None:
    table = MountTable(tmp_path / "mounts")
    (tmp_path / "mounts").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "upper")
    add(table, record("m1", upper=str(tmp_path / "upper"), target="/mnt"))
    for name in ("upper", "link", "mounts/../upper"):
        with pytest.raises(BusyError, match="m1 at /mnt"), table.claim_upper(f"{tmp_path}/{name}"):
            pass
    table.drop("m1")
    with (
        table.claim_upper(str(tmp_path / "upper")),
        pytest.raises(BusyError),
        table.claim_upper(str(tmp_path / "link")),
    ):
        pass
    with table.claim_upper(str(tmp_path / "upper")):
        pass


def test_vanished_are_those_nowhere_to_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    table = MountTable(tmp_path)
    add(table, record("there", target="/a"))
    add(table, record("gone", target="/b"))
    add(table, record("handed out", created_at_s=1000.0 - UNPLACED_GRACE_S + 1))
    add(table, record("lent", created_at_s=0.0, lent=True))
    add(table, record("never placed", created_at_s=1000.0 - UNPLACED_GRACE_S - 1))
    assert sorted(table.find_vanished(lambda: {"there"})) == ["gone", "never placed"]


def test_mount_that_is_placed_during_the_look_has_not_vanished(tmp_path: Path) -> None:
    table = MountTable(tmp_path)
    add(table, record("m1", created_at_s=time.time()))

    def look() -> set[str]:
        table.place("m1", "/a", 1)
        return set()

    assert table.find_vanished(look) == []
    assert table.find_vanished(set) == ["m1"]


def test_mount_whose_directory_was_removed_by_hand_can_be_dropped(tmp_path: Path) -> None:
    table = MountTable(tmp_path)
    add(table, record("m1"))
    shutil.rmtree(tmp_path / "m1")
    table.drop("m1")
    assert table.all() == []


def test_start_of_a_process_that_ended_is_unknown() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert start_ticks(child) is None  # a zombie owns nothing
    os.waitpid(child, 0)
    assert start_ticks(child) is None
