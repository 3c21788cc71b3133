"""The core of the snapshots service: what containerd relies on, without gRPC and without mounts."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.containerd.labels import REF
from snapshotter.containerd.metastore import Kind
from snapshotter.containerd.snapshots import Mount, Snapshots
from snapshotter.errors import (
    BusyError,
    ExistsError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from tests.support.snapshots import SnapshotsWorld, chain_id

A, B = chain_id("a"), chain_id("b")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SnapshotsWorld]:
    made = SnapshotsWorld(tmp_path)
    yield made
    made.close()


@pytest.fixture
def snapshots(world: SnapshotsWorld) -> Snapshots:
    return world.snapshots


def option(mount: Mount, name: str) -> str:
    return next(each.partition("=")[2] for each in mount.options if each.startswith(f"{name}="))


def remote(world: SnapshotsWorld, chain: str, parent: str = "") -> str:
    """Has a chain recorded as containerd does; the name of its snapshot."""
    world.layers.known.add(chain)
    with pytest.raises(ExistsError):
        world.snapshots.prepare(f"extract {chain}", parent, {REF: chain})
    (found,) = world.snapshots.find([f'labels."{REF}"=={chain},parent=="{parent}"'])
    return found.name


def test_active_snapshot_on_nothing_is_a_bind_of_its_directory(world: SnapshotsWorld) -> None:
    (mount,) = world.snapshots.prepare("k", "", {})
    assert mount == Mount("bind", str(world.upper("k")), ("rbind", "rw"))
    assert stat.S_IMODE(world.upper("k").stat().st_mode) == 0o755
    assert world.snapshots.mounts("k") == [mount]


def test_active_snapshot_on_others_is_an_overlay_of_them_topmost_first(
    world: SnapshotsWorld,
) -> None:
    base = world.committed("base")
    top = world.committed("top", base)
    (mount,) = world.snapshots.prepare("k", top, {})
    assert mount.type == "overlay"
    assert option(mount, "lowerdir") == f"{world.upper(top)}:{world.upper(base)}"
    assert option(mount, "upperdir") == str(world.upper("k"))
    assert "index=off" in mount.options


def test_views_are_read_only(world: SnapshotsWorld) -> None:
    base = world.committed("base")
    top = world.committed("top", base)
    (of_nothing,) = world.snapshots.view("v0", "", {})
    (of_one,) = world.snapshots.view("v1", base, {})
    (of_two,) = world.snapshots.view("v2", top, {})
    assert of_nothing.options == ("rbind", "ro")
    assert (of_one.source, of_one.options) == (str(world.upper(base)), ("rbind", "ro"))
    assert of_two.options[-1] == "ro"
    assert not any(each.startswith("upperdir") for each in of_two.options)


def test_upper_has_owner_and_mode_of_its_parents_root(world: SnapshotsWorld) -> None:
    base = world.committed("base")
    os.chown(world.upper(base), 12, 34)
    world.upper(base).chmod(0o711)
    world.snapshots.prepare("k", base, {})
    found = world.upper("k").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12, 34, 0o711)


def test_remote_layer_is_recorded_with_its_labels(world: SnapshotsWorld) -> None:
    name = remote(world, A)
    found = world.snapshots.stat(name)
    assert (found.kind, found.chain, found.parent) == (Kind.COMMITTED, A, "")
    assert found.labels[REF] == A
    assert not world.layers.held  # nothing is merged before something is mounted


def test_remote_layer_is_found_again_by_everybody(world: SnapshotsWorld) -> None:
    assert remote(world, A) == remote(world, A)
    assert len(world.snapshots.find()) == 1


def test_same_chain_on_another_parent_is_another_snapshot(world: SnapshotsWorld) -> None:
    base = world.committed("base")
    assert remote(world, B) != remote(world, B, base)


def test_layer_that_cannot_be_remote_becomes_an_ordinary_snapshot(world: SnapshotsWorld) -> None:
    (mount,) = world.snapshots.prepare("extract", "", {REF: A})
    assert mount.type == "bind"
    assert world.counters.snapshot() == {"remote_refused": 1}


def test_without_the_label_of_the_chain_nothing_is_remote(world: SnapshotsWorld) -> None:
    world.layers.known.add(A)
    world.snapshots.prepare("k", "", {})
    world.snapshots.prepare("l", "", {REF: "no digest"})
    assert world.layers.images == []


def test_active_snapshot_on_remote_ones_is_mounted_on_one_merged_image(
    world: SnapshotsWorld,
) -> None:
    top = remote(world, B, remote(world, A))
    (mount,) = world.snapshots.prepare("k", top, {})
    assert world.layers.held == {B}
    assert option(mount, "lowerdir") == (
        f"{world.layers.metadata(B)}::/objects::/gate/g7::/arrivals::/gate/v"
    )
    assert {"metacopy=off", "redirect_dir=off", "index=off"} < set(mount.options)
    assert stat.S_IMODE(world.upper("k").stat().st_mode) == 0o751


def test_view_of_remote_snapshots_has_no_upper(world: SnapshotsWorld) -> None:
    (mount,) = world.snapshots.view("v", remote(world, A), {})
    assert mount.options[-1] == "ro"
    assert "metacopy=on" in mount.options
    assert not any(each.startswith("upperdir") for each in mount.options)


def test_directories_above_a_remote_snapshot_are_above_its_merged_image(
    world: SnapshotsWorld,
) -> None:
    middle = world.committed("middle", remote(world, A))
    (mount,) = world.snapshots.prepare("k", middle, {})
    lowers = option(mount, "lowerdir").split("::")[0]
    assert lowers == f"{world.upper(middle)}:{world.layers.metadata(A)}"


def test_remote_snapshot_stands_for_what_is_below_it(world: SnapshotsWorld) -> None:
    top = remote(world, B, world.committed("base"))
    (mount,) = world.snapshots.prepare("k", top, {})
    assert option(mount, "lowerdir").startswith(f"{world.layers.metadata(B)}::")


def test_snapshot_whose_image_cannot_be_had_leaves_nothing(world: SnapshotsWorld) -> None:
    name = remote(world, A)
    world.layers.known.clear()
    with pytest.raises(NotFoundError):
        world.snapshots.prepare("k", name, {})
    assert world.state.directories.all() == set()
    world.layers.known.add(A)
    world.snapshots.prepare("k", name, {})


def test_commit_keeps_the_content_under_the_new_name(world: SnapshotsWorld) -> None:
    world.snapshots.prepare("k", "", {})
    (world.upper("k") / "file").write_bytes(b"x" * 10_000)
    world.snapshots.commit("c", "k", {"containerd.io/snapshot/x": "1"})
    assert (world.upper("c") / "file").read_bytes() == b"x" * 10_000
    found = world.snapshots.stat("c")
    assert (found.kind, found.labels) == (Kind.COMMITTED, {"containerd.io/snapshot/x": "1"})
    with pytest.raises(NotFoundError):
        world.snapshots.stat("k")


def test_usage_counts_bytes_of_disk_once_for_each_inode(world: SnapshotsWorld) -> None:
    world.snapshots.prepare("k", "", {})
    empty = world.snapshots.usage("k")
    (world.upper("k") / "file").write_bytes(b"x" * 8192)
    os.link(world.upper("k") / "file", world.upper("k") / "again")
    (world.upper("k") / "directory").mkdir()
    used = world.snapshots.usage("k")
    assert empty.inodes == 1
    assert used.inodes == 3
    assert used.size_bytes - empty.size_bytes >= 8192
    world.snapshots.commit("c", "k", {})
    assert world.snapshots.usage("c") == used


def test_remote_snapshot_takes_nothing_for_itself(world: SnapshotsWorld) -> None:
    usage = world.snapshots.usage(remote(world, A))
    assert (usage.size_bytes, usage.inodes) == (0, 0)


def test_bad_requests_change_nothing(world: SnapshotsWorld, snapshots: Snapshots) -> None:
    base = world.committed("base")
    snapshots.prepare("k", base, {})
    before = snapshots.find()
    for kind, call in [
        (ExistsError, lambda: snapshots.prepare("k", "", {})),
        (NotFoundError, lambda: snapshots.prepare("x", "nowhere", {})),
        (InvalidInputError, lambda: snapshots.prepare("x", "k", {})),
        (InvalidInputError, lambda: snapshots.prepare("", "", {})),
        (ExistsError, lambda: snapshots.commit(base, "k", {})),
        (NotFoundError, lambda: snapshots.commit("c", "nowhere", {})),
        (InvalidInputError, lambda: snapshots.commit("c", base, {})),
        (InvalidInputError, lambda: snapshots.mounts(base)),
        (NotFoundError, lambda: snapshots.mounts("nowhere")),
        (BusyError, lambda: snapshots.remove(base)),
        (NotFoundError, lambda: snapshots.remove("nowhere")),
        (InvalidInputError, lambda: snapshots.update("k", {}, ["parent"])),
        (NotFoundError, lambda: snapshots.update("nowhere", {}, [])),
    ]:
        with pytest.raises(kind):
            call()
    assert snapshots.find() == before
    snapshots.reclaim()
    assert len(world.state.directories.all()) == 2


def test_labels_are_changed_one_by_one_or_all(snapshots: Snapshots) -> None:
    snapshots.prepare("k", "", {"a": "1", "b": "2"})
    assert snapshots.update("k", {"a": "3"}, ["labels.a"]).labels == {"a": "3", "b": "2"}
    assert snapshots.update("k", {}, ["labels.b"]).labels == {"a": "3"}
    assert snapshots.update("k", {"c": "4"}, []).labels == {"c": "4"}
    assert snapshots.update("k", {"d": "5"}, ["labels"]).labels == {"d": "5"}


def test_removal_only_marks_and_reclaim_deletes(world: SnapshotsWorld) -> None:
    world.snapshots.prepare("k", "", {})
    upper = world.upper("k")
    world.snapshots.remove("k")
    assert upper.exists()
    world.snapshots.reclaim()
    assert not upper.exists()
    assert world.state.records.removed() == []


def test_removed_name_is_free_at_once(world: SnapshotsWorld) -> None:
    world.snapshots.prepare("k", "", {})
    world.snapshots.remove("k")
    world.snapshots.prepare("k", "", {})
    world.snapshots.reclaim()
    assert world.upper("k").exists()


def test_what_is_mounted_and_what_it_stands_on_is_left(
    world: SnapshotsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = world.committed("base")
    world.snapshots.prepare("k", base, {})
    lower, upper, key_id = world.upper(base), world.upper("k"), world.snapshots.stat("k").id
    world.snapshots.remove("k")
    world.snapshots.remove(base)
    with monkeypatch.context() as patch:
        patch.setattr(world.state.directories, "mounted", lambda: {key_id})
        world.snapshots.reclaim()
        assert lower.exists()
        assert upper.exists()
    world.snapshots.reclaim()
    assert world.state.directories.all() == set()


def test_merged_image_goes_with_the_last_snapshot_that_is_mounted_on_it(
    world: SnapshotsWorld,
) -> None:
    name = remote(world, A)
    world.snapshots.prepare("k", name, {})
    world.snapshots.view("v", name, {})
    world.snapshots.remove("k")
    world.snapshots.reclaim()
    assert world.layers.held == {A}
    world.snapshots.remove("v")
    world.snapshots.reclaim()
    assert not world.layers.held
    assert not world.layers.holders
    assert world.layers.forgotten == []  # the layer is still known
    world.snapshots.prepare("k", name, {})
    world.snapshots.remove("k")
    world.snapshots.remove(name)
    world.snapshots.reclaim()
    assert world.layers.forgotten == [A]


def test_directory_of_a_crash_is_reclaimed(world: SnapshotsWorld) -> None:
    world.state.directories.make("0123456789ab", like=None)
    world.snapshots.reclaim()
    assert world.state.directories.all() == set()


def test_filter_that_is_not_known_lists_everything(world: SnapshotsWorld) -> None:
    remote(world, A)
    world.committed("base")
    assert len(world.snapshots.find(["kind==committed"])) == 2
    assert world.snapshots.find([f'labels."{REF}"=={B},parent==""']) == []


def test_failure_of_the_daemon_makes_an_ordinary_snapshot(
    world: SnapshotsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(chain: str, image: str | None) -> None:
        raise UnavailableError("nobody is there")

    monkeypatch.setattr(world.layers, "check", fail)
    (mount,) = world.snapshots.prepare("k", "", {REF: A})
    assert mount.type == "bind"
