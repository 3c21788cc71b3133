"""The calls that rpull makes, against a containerd of dictionaries."""

from typing import Any, cast

import pytest

from snapshotter.containerd.client import ContainerdClient
from snapshotter.containerd.image_documents import ImageDocuments, image_documents
from snapshotter.containerd.messages import CONTENT, LEASES
from snapshotter.containerd.rpull import Outcome, rpull
from snapshotter.errors import (
    BusyError,
    ExistsError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from tests.unit.containerd.test_image_documents import IMAGE, NAME, index_of, prepared

CHAINS = [layer.chain_id for layer in prepared().layers]


class FakeContainerd:
    """Leases, content, images and snapshots; ``lost`` are chains that only containerd knows."""

    def __init__(self) -> None:
        self.lease: str | None = None
        self.leases: set[str] = set()
        self.content: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.images: dict[str, str] = {}
        self.chains: dict[str, str] = {}
        self.lost: set[str] = set()
        self.is_lazy = True
        self.active: set[str] = set()
        self.blocked: set[str] = set()
        self.fail: tuple[str, Exception] | None = None
        self.without_lease: list[str] = []

    def call(self, service: str, method: str, **fields: Any) -> None:
        if self.fail and self.fail[0] == method:
            raise self.fail[1]
        if service != LEASES and self.lease not in self.leases:
            self.without_lease.append(f"{service}.{method}")
        getattr(self, f"_{service.rpartition('.')[2]}_{method}".lower())(**fields)

    def exchange(self, service: str, method: str, requests: list[dict[str, Any]]) -> None:
        assert (service, method) == (CONTENT, "Write")
        (request,) = requests
        if request["expected"] in self.content:
            raise ExistsError("content")
        assert request["total"] == len(request["data"])
        self.content[request["expected"]] = (request["data"], dict(request["labels"]))

    def _leases_create(self, id: str, labels: dict[str, str]) -> None:  # noqa: A002
        assert "containerd.io/gc.expire" in labels
        self.leases.add(id)

    def _leases_delete(self, id: str) -> None:  # noqa: A002
        self.leases.remove(id)

    def _content_update(self, info: Any, update_mask: Any) -> None:
        labels = self.content[info.digest][1]
        for path in update_mask.paths:
            name = path.removeprefix("labels.")
            labels[name] = info.labels[name]

    def _snapshots_prepare(
        self, snapshotter: str, key: str, parent: str, labels: dict[str, str]
    ) -> None:
        assert snapshotter == "ours"
        chain = labels["containerd.io/snapshot.ref"]
        assert key.endswith(f" {chain}")
        if chain in self.chains:
            raise ExistsError(chain)
        if parent in self.lost:
            raise NotFoundError(parent)
        assert parent == "" or parent in self.chains
        if not self.is_lazy:
            self.active.add(key)
            return
        self.chains[chain] = parent
        raise ExistsError(chain)

    def _snapshots_stat(self, snapshotter: str, key: str) -> None:
        if key not in self.chains or key in self.lost:
            raise NotFoundError(key)

    def _snapshots_remove(self, snapshotter: str, key: str) -> None:
        if key in self.active:
            self.active.remove(key)
            return
        if key not in self.chains:
            raise NotFoundError(key)
        if key in self.chains.values() or key in self.blocked:
            raise BusyError("cannot remove snapshot with child")
        del self.chains[key]
        self.lost.discard(key)

    def _images_create(self, image: Any) -> None:
        if image.name in self.images:
            raise ExistsError(image.name)
        self.images[image.name] = image.target.digest

    def _images_update(self, image: Any, update_mask: Any) -> None:
        assert list(update_mask.paths) == ["target"]
        self.images[image.name] = image.target.digest


def documents(*above: str) -> ImageDocuments:
    return image_documents(NAME, prepared(), [*above, IMAGE.manifest.decode()])


def pull(containerd: FakeContainerd, *above: str) -> Outcome:
    return rpull(cast("ContainerdClient", containerd), "ours", documents(*above))


def test_everything_is_there_and_kept_when_the_lease_is_gone() -> None:
    containerd = FakeContainerd()
    index = index_of(IMAGE.manifest)
    assert pull(containerd, index) == Outcome(created=True, healed=0)
    image = documents(index)
    assert containerd.images == {NAME: image.target.digest}
    assert list(containerd.chains) == CHAINS
    assert {digest: data for digest, (data, _) in containerd.content.items()} == {
        blob.digest: blob.data for blob in (*image.blobs, image.config)
    }
    assert containerd.content[image.config.digest][1].items() >= {
        ("containerd.io/gc.ref.snapshot.ours", CHAINS[-1])
    }
    assert (containerd.leases, containerd.lease, containerd.without_lease) == (set(), None, [])


def test_second_pull_changes_nothing_but_adds_labels_of_another_snapshotter() -> None:
    containerd = FakeContainerd()
    pull(containerd)
    labels = containerd.content[documents().config.digest][1]
    labels["containerd.io/gc.ref.snapshot.other"] = "theirs"
    assert pull(containerd) == Outcome(created=False, healed=0)
    assert labels["containerd.io/gc.ref.snapshot.other"] == "theirs"
    assert labels["containerd.io/gc.ref.snapshot.ours"] == CHAINS[-1]


@pytest.mark.parametrize("lost", [{CHAINS[0]}, {CHAINS[2]}, set(CHAINS)])
def test_snapshots_that_were_lost_are_made_anew(lost: set[str]) -> None:
    containerd = FakeContainerd()
    pull(containerd)
    containerd.lost = set(lost)
    assert pull(containerd) == Outcome(created=False, healed=3)
    assert list(containerd.chains) == CHAINS
    assert not containerd.lost


def test_parent_that_was_lost_is_noticed_by_its_child() -> None:
    containerd = FakeContainerd()
    containerd.chains = {CHAINS[0]: ""}
    pull(containerd)
    del containerd.chains[CHAINS[2]]
    containerd.lost = {CHAINS[1]}
    assert pull(containerd).healed == 2
    assert list(containerd.chains) == CHAINS


def test_lost_snapshot_with_others_on_it_is_told() -> None:
    containerd = FakeContainerd()
    pull(containerd)
    containerd.lost, containerd.blocked = {CHAINS[2]}, {CHAINS[2]}
    with pytest.raises(BusyError, match="remove the containers and images that use it"):
        pull(containerd)
    assert not containerd.leases


def test_snapshotter_that_does_not_take_a_layer_lazily_leaves_nothing_active() -> None:
    containerd = FakeContainerd()
    containerd.is_lazy = False
    with pytest.raises(UnsupportedError, match="ctr images pull --snapshotter ours"):
        pull(containerd)
    assert (containerd.active, containerd.images, containerd.leases) == (set(), {}, set())


@pytest.mark.parametrize(
    ("method", "error"),
    [("Create", UnavailableError("x")), ("Prepare", UnavailableError("x")), ("Stat", OSError(5))],
)
def test_failure_leaves_no_lease_and_no_image(method: str, error: Exception) -> None:
    containerd = FakeContainerd()
    containerd.fail = (method, error)
    with pytest.raises(type(error)):
        pull(containerd)
    assert (containerd.images, containerd.leases, containerd.lease) == ({}, set(), None)


def test_lease_that_cannot_be_deleted_hides_no_result() -> None:
    containerd = FakeContainerd()
    containerd.fail = ("Delete", UnavailableError("gone"))
    assert pull(containerd).created
