import os
from pathlib import Path

import pytest

from snapshotter.errors import InvalidInputError, NotFoundError
from snapshotter.service import placement
from tests.support.fake_daemon import make_record


def test_a_target_is_an_existing_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(".")
    assert placement.check_target(str(tmp_path / "link")) == str(tmp_path)
    with pytest.raises(NotFoundError, match="mkdir"):
        placement.check_target(str(tmp_path / "gone"))
    with pytest.raises(InvalidInputError, match="not a directory"):
        placement.check_target(str(tmp_path / "file"))
    with pytest.raises(InvalidInputError, match="whole system"):
        placement.check_target("/..")


def test_a_mount_is_found_by_id_and_the_newest_by_path(tmp_path: Path) -> None:
    old = make_record(id="old", target=str(tmp_path), created_at_s=1.0)
    new = make_record(id="new", target=str(tmp_path), created_at_s=2.0)
    sandbox = make_record(id="box", target="/", owner_pid=7)
    mounts = [new, old, sandbox]
    assert placement.find_mount(mounts, "old") is old
    assert placement.find_mount(mounts, f"{tmp_path}/.") is new
    assert placement.find_mount(mounts, "box") is sandbox
    for name in ("/", "nothing"):
        with pytest.raises(NotFoundError, match="snapshotter ps"):
            placement.find_mount(mounts, name)


def test_a_sandbox_is_not_unmounted() -> None:
    with pytest.raises(InvalidInputError, match="process 7"):
        placement.remove(make_record(target="/", owner_pid=7))


def test_what_is_no_longer_mounted_counts_as_removed(tmp_path: Path) -> None:
    other_device = tmp_path.stat().st_dev + 1
    placement.remove(make_record(target=None))
    placement.remove(make_record(target=str(tmp_path), device=other_device))
    placement.remove(make_record(target=str(tmp_path / "gone")))


def test_users_are_found_by_what_they_hold_open(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w"):
        users = placement.users_of(str(tmp_path))
    assert [(pid, held) for pid, _, held in users] == [(os.getpid(), str(tmp_path / "log"))]
    assert placement.users_of(str(tmp_path / "lo")) == []
