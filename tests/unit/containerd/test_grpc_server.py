"""The service over its socket, by a gRPC client: messages, codes, the socket itself."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.containerd.client import ContainerdClient
from snapshotter.containerd.grpc_server import start_server
from snapshotter.containerd.labels import REF
from snapshotter.containerd.messages import SNAPSHOTS, Message, new
from snapshotter.errors import (
    BusyError,
    ExistsError,
    InvalidInputError,
    NotFoundError,
    SnapshotterError,
    UnavailableError,
)
from tests.support.snapshots import SnapshotsWorld, chain_id


@pytest.fixture
def world(tmp_path: Path) -> Iterator[SnapshotsWorld]:
    made = SnapshotsWorld(tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(world: SnapshotsWorld, tmp_path: Path) -> Iterator[ContainerdClient]:
    server = start_server(world.snapshots, tmp_path / "s")
    with ContainerdClient(tmp_path / "s", "default") as connected:
        yield connected
    server.stop(None).wait()


def call(client: ContainerdClient, method: str, **fields: object) -> Message:
    return client.call(SNAPSHOTS, method, snapshotter="x", **fields)


def names(client: ContainerdClient, *filters: str) -> list[str]:
    pieces = client.stream(SNAPSHOTS, "List", snapshotter="x", filters=filters)
    return [info.name for piece in pieces for info in piece.info]


def test_life_of_a_snapshot(client: ContainerdClient, world: SnapshotsWorld) -> None:
    (mount,) = call(client, "Prepare", key="k", labels={"a": "1"}).mounts
    assert (mount.type, list(mount.options)) == ("bind", ["rbind", "rw"])
    assert call(client, "Mounts", key="k").mounts == [mount]
    call(client, "Commit", key="k", name="c", labels={"a": "2"})
    (viewed,) = call(client, "View", key="v", parent="c").mounts
    assert list(viewed.options) == ["rbind", "ro"]
    info = call(client, "Stat", key="v").info
    assert (info.name, info.parent, info.kind) == ("v", "c", 1)
    stored = world.state.records.get("v")
    assert info.created_at.seconds * 10**9 + info.created_at.nanos == stored.created_ns
    mask = new("FieldMask", paths=["labels.b"])
    changed = call(
        client, "Update", info=new("SnapshotInfo", name="c", labels={"b": "3"}), update_mask=mask
    )
    assert dict(changed.info.labels) == {"a": "2", "b": "3"}
    assert call(client, "Usage", key="c").inodes == 1
    for key in ("v", "c"):
        call(client, "Remove", key=key)
    call(client, "Cleanup")
    assert world.state.directories.all() == set()


def test_list_comes_in_pieces(client: ContainerdClient, world: SnapshotsWorld) -> None:
    for number in range(250):
        world.snapshots.view(f"v{number:03}", "", {})
    assert sorted(names(client)) == [f"v{number:03}" for number in range(250)]


def test_remote_layer_exists_already_and_is_listed(
    client: ContainerdClient, world: SnapshotsWorld
) -> None:
    chain = chain_id("a")
    world.layers.known.add(chain)
    with pytest.raises(ExistsError):
        call(client, "Prepare", key="extract", labels={REF: chain})
    (name,) = names(client, f'labels."{REF}"=={chain},parent==""')
    info = call(client, "Stat", key=name).info
    assert (info.kind, info.labels[REF]) == (3, chain)


def test_errors_have_their_codes(client: ContainerdClient, world: SnapshotsWorld) -> None:
    world.committed("base")
    call(client, "Prepare", key="k", parent="base")
    for kind, method, fields in [
        (ExistsError, "Prepare", {"key": "k"}),
        (NotFoundError, "Stat", {"key": "nowhere"}),
        (InvalidInputError, "Prepare", {"key": "x", "parent": "k"}),
        (BusyError, "Remove", {"key": "base"}),
    ]:
        with pytest.raises(kind):
            call(client, method, **fields)


def test_failure_that_nobody_foresaw_is_told_and_the_service_goes_on(
    client: ContainerdClient, world: SnapshotsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(world.snapshots, "reclaim", fail)
    with pytest.raises(SnapshotterError, match="oh"):
        call(client, "Cleanup")
    assert names(client) == []


def test_daemon_that_is_away_is_unavailable(
    client: ContainerdClient, world: SnapshotsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UnavailableError("nobody is there")

    chain = chain_id("a")
    world.layers.known.add(chain)
    with pytest.raises(ExistsError):
        call(client, "Prepare", key="extract", labels={REF: chain})
    (name,) = names(client)
    monkeypatch.setattr(world.layers, "lend", fail)
    with pytest.raises(UnavailableError, match="nobody is there"):
        call(client, "Prepare", key="k", parent=name)


def test_socket_is_for_its_user_alone_and_replaces_a_stale_one(
    world: SnapshotsWorld, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    server = start_server(world.snapshots, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(BusyError, match="each containerd needs a service of its own"):
        start_server(world.snapshots, path)
    server.stop(None).wait()


def test_socket_that_cannot_be_made_is_told(world: SnapshotsWorld, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="name another --socket"):
        start_server(world.snapshots, tmp_path / "no" / "s")
