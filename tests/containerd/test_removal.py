"""Images that go: their mounts, records and disk go with them, and nothing of anybody else's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.containerd.conftest import NewNode, Push
from tests.support.box_image import GREETING, Pushed, box_image, pause_image
from tests.support.containerd import Containerd
from tests.support.cri import NAMESPACE, Cri
from tests.support.mounts import mounts_below
from tests.support.node import Node
from tests.support.product import CacheServer, await_true
from tests.support.registry import Registry

pytestmark = [pytest.mark.mount, pytest.mark.real]
_IS_LONG = bool(os.environ.get("SNAPSHOTTER_LONG"))
_CYCLES = 100 if _IS_LONG else 12
_WARM_UP = 4
_GROWTH_BYTES = 8 << 20
"""More than noise, and less than a leak of 100 kB a cycle over the long run."""


def views(node: Node) -> list[str]:
    """Where overlays and metadata images of ours are mounted."""
    return [
        mount.target
        for mount in mounts_below(node.product.root)
        if mount.fs_type in ("overlay", "erofs")
    ]


def remove(node: Node, *references: str) -> None:
    """Removes images and waits for the collection that takes their snapshots."""
    node.containerd.do("images", "rm", "--sync", *references)


def upper_directories(node: Node) -> list[Path]:
    return sorted(node.product.root.glob("**/snapshots/*"))


def test_removed_image_leaves_no_snapshot_mount_or_directory(
    new_node: NewNode, cache_server: CacheServer, box: Pushed
) -> None:
    node = new_node(server=cache_server.socket)
    before = views(node)
    node.rpull(box.reference)
    node.containerd.run(box.reference, "sh", "-c", "cat /etc/greeting > /new")
    remove(node, box.reference)
    assert node.containerd.snapshots() == {}
    await_true(lambda: views(node) == before, "unmounting", log=node.product.logs)
    await_true(lambda: upper_directories(node) == [], "deleting", log=node.product.logs)
    assert node.containerd.names("content", "ls") == []
    assert node.containerd.names("leases", "ls") == []


def test_image_that_cri_removes_leaves_no_mount(
    new_node: NewNode, cache_server: CacheServer, registry: Registry, push: Push
) -> None:
    pause, box = push(pause_image()), push(box_image(seed=31))
    node = new_node(
        server=cache_server.socket,
        cri=True,
        registry=registry.address,
        sandbox_image=pause.reference,
    )
    with Cri(node.containerd.address, node.product.base) as cri:
        cri.pull(box.reference)
        container = cri.start(box.reference, "sleep", "1000")
        assert cri.exec(container, "cat", "/etc/greeting") == GREETING.decode()
        assert views(node)
        cri.remove_pods()
        cri.remove_image(box.reference)
        cri.remove_image(pause.reference)
    kept = Containerd.beside(node.containerd, namespace=NAMESPACE)
    await_true(lambda: kept.snapshots() == {}, "collecting", log=kept.log)
    await_true(lambda: views(node) == [], "unmounting", log=node.service_log)
    await_true(lambda: upper_directories(node) == [], "deleting", log=node.service_log)


def test_disk_is_back_once_the_content_is_purged_too(
    new_node: NewNode, cache_server: CacheServer, box: Pushed
) -> None:
    node = new_node(server=cache_server.socket)
    node.rpull(box.reference)
    node.containerd.run(box.reference, "sh", "-c", "cat /data/*/* > /dev/null")
    remove(node, box.reference)
    await_true(lambda: views(node) == [], "unmounting", log=node.product.logs)
    node.product.do("images", "rm", f"docker://{box.reference}")

    def is_purged() -> bool:
        node.product.do("cache", "purge")  # which leaves what arrived in the last seconds
        return not any(path.is_file() for path in (node.product.root / "objects").rglob("*"))

    await_true(is_purged, "purging", log=node.product.logs)


def test_running_container_outlives_the_removal_of_its_image(node: Node, box: Pushed) -> None:
    node.rpull(box.reference)
    container = node.containerd.start_container(box.reference, "sleep", "1000")
    try:
        remove(node, box.reference)
        printed = node.containerd.exec(container, "sh", "-c", "cat /data/*/* | sha256sum")
        assert len(printed.split()[0]) == 64
        assert node.containerd.exec(container, "cat", "/etc/greeting") == GREETING.decode()
    finally:
        node.containerd.end_container(container)


def test_lost_records_are_healed_by_the_next_rpull(
    new_node: NewNode, cache_server: CacheServer, box: Pushed
) -> None:
    node = new_node(server=cache_server.socket)
    node.rpull(box.reference)
    node.stop_service()
    for state in node.product.root.glob("**/snapshots.db*"):
        state.unlink()
    node.start_service()
    answer = node.rpull(box.reference)
    assert (answer["created"], answer["healed"]) == (False, len(box.image.layers))
    assert node.containerd.run(box.reference, "cat", "/etc/greeting") == GREETING.decode()


def test_namespaces_do_not_see_one_another(node: Node, box: Pushed) -> None:
    ours = node.containerd
    theirs = Containerd.beside(ours, namespace=f"{ours.namespace}-b")
    node.rpull(box.reference)
    assert box.reference not in theirs.names("images", "ls")
    assert theirs.snapshots() == {}
    node.product.do("rpull", box.reference, *node.where, "--namespace", theirs.namespace)
    chains = set(theirs.snapshots())
    assert chains <= set(ours.snapshots())
    remove(node, box.reference)
    assert not chains & set(ours.snapshots())
    assert theirs.run(box.reference, "cat", "/etc/greeting") == GREETING.decode()
    theirs.do("images", "rm", "--sync", box.reference)
    assert theirs.snapshots() == {}


def test_cycles_of_pull_run_and_removal_leave_everything_flat(
    new_node: NewNode, cache_server: CacheServer, push: Push
) -> None:
    node = new_node(server=cache_server.socket)
    pushed = [push(box_image(seed=seed)) for seed in range(2)]
    first: tuple[dict[str, tuple[int, int]], int] | None = None
    for cycle in range(_CYCLES):
        image = pushed[cycle % 2]
        node.rpull(image.reference)
        assert node.containerd.run(image.reference, "cat", "/etc/greeting") == GREETING.decode()
        remove(node, image.reference)
        await_true(lambda: views(node) == [], "unmounting", log=node.product.logs)
        if cycle == _WARM_UP:
            first = resources(node), len(mounts_below(node.product.base))
    assert first is not None
    last = resources(node)
    assert len(mounts_below(node.product.base)) == first[1]
    for name, (descriptors, rss_bytes) in last.items():
        assert descriptors <= first[0][name][0] + 2, (name, first, last)
        assert rss_bytes <= first[0][name][1] + _GROWTH_BYTES, (name, first, last)


def resources(node: Node) -> dict[str, tuple[int, int]]:
    """Open descriptors and RssAnon in bytes of each process of ours."""
    found = {}
    for name, pid in node.pids().items():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        rss = next(line for line in lines if line.startswith("RssAnon:"))
        found[name] = (len(os.listdir(f"/proc/{pid}/fd")), int(rss.split()[1]) << 10)
    return found
