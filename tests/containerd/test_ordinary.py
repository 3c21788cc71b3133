"""What is not lazy, in whole or in part, runs as with any snapshotter."""

from __future__ import annotations

import subprocess

import pytest

from tests.containerd.conftest import NewNode, Push
from tests.support.box_image import GREETING, Pushed, shell_layer, top_layer
from tests.support.containerd import SNAPSHOTTER
from tests.support.images import Image, Layer, file
from tests.support.node import Node, ctr_remote_pull
from tests.support.product import CacheServer
from tests.support.registry import Registry

pytestmark = [pytest.mark.mount, pytest.mark.real]


def plain_pull(node: Node, reference: str) -> None:
    """As plain ctr of 1.6 does it: all layers first, Prepares without labels."""
    options = ["--plain-http", "--snapshotter", SNAPSHOTTER]
    node.containerd.do("images", "pull", *options, reference)


def test_plain_pull_makes_ordinary_snapshots(node: Node, box: Pushed, registry: Registry) -> None:
    plain_pull(node, box.reference)
    assert box.layer_requests(registry) == len(box.image.layers)
    printed = node.containerd.run(box.reference, "sh", "-c", "cat /etc/greeting; ls /etc")
    assert printed == GREETING.decode() + "greeting\npasswd\n"


def test_ordinary_layer_above_lazy_ones(node: Node, box: Pushed, push: Push) -> None:
    node.rpull(box.reference)
    above = Layer([file("etc/greeting", b"changed\n"), file("added", b"new\n")])
    mixed = push(Image([*box.image.layers, above], env=["PATH=/bin"]))
    plain_pull(node, mixed.reference)
    printed = node.containerd.run(
        mixed.reference, "sh", "-c", "cat /etc/greeting /added; ls /etc /data | sort"
    )
    assert printed.startswith("changed\nnew\n")
    assert "passwd" in printed
    assert "old" not in printed


def test_lazy_layers_above_an_ordinary_one(node: Node, push: Push) -> None:
    first = shell_layer()
    marked = Layer([file("marked", b"of this test alone\n")])
    below = push(Image([first, marked], env=["PATH=/bin"]))
    plain_pull(node, below.reference)
    whole = push(Image([first, marked, top_layer()], env=["PATH=/bin"]))
    node.rpull(whole.reference)
    printed = node.containerd.run(whole.reference, "sh", "-c", "cat /etc/greeting /marked; ls /etc")
    assert printed == GREETING.decode() + "of this test alone\ngreeting\npasswd\n"


def image_that_cannot_be_lazy(seed: int) -> Image:
    """One layer expands further than the cache server allows; containerd knows no such limit."""
    zeros = Layer([file("zeros", bytes(80 << 20)), file("seed", b"%d" % seed)], compression="zstd")
    return Image([shell_layer(), zeros, top_layer()], env=["PATH=/bin"])


def test_image_that_cannot_be_lazy_is_refused_by_rpull_and_runs_ordinarily(
    node: Node, push: Push
) -> None:
    pushed = push(image_that_cannot_be_lazy(1))
    done = node.product.cli("rpull", pushed.reference, *node.where)
    assert done.returncode == 2
    assert "expansion_ratio" in done.stderr
    assert pushed.reference not in node.containerd.names("images", "ls")
    plain_pull(node, pushed.reference)
    assert node.containerd.run(pushed.reference, "cat", "/etc/greeting") == GREETING.decode()


def test_pull_that_wants_layers_lazily_gets_what_cannot_be_so_ordinarily(
    node: Node, push: Push, registry: Registry
) -> None:
    pushed = push(image_that_cannot_be_lazy(2))
    ctr_remote_pull(node, pushed.reference)
    assert pushed.layer_requests(registry) >= len(pushed.image.layers)
    assert node.containerd.run(pushed.reference, "cat", "/etc/greeting") == GREETING.decode()


def test_changes_of_a_container_make_an_image_that_is_equal_elsewhere(
    node: Node, new_node: NewNode, cache_server: CacheServer, box: Pushed, push: Push
) -> None:
    node.rpull(box.reference)
    container = node.containerd.start_container(box.reference, "sleep", "1000")
    change = (
        "echo more >> /etc/greeting; rm -r /data/1; mkdir -p /data/1/fresh; mv /data/2 /moved;"
        " echo x > /data/1/fresh/file"
    )
    look = "find / -xdev \\( -path /proc -o -path /dev -o -path /sys -o -path /run \\) -prune"
    look += " -o -type f -exec sha256sum {} + ; find /data /moved | sort"
    try:
        node.containerd.exec(container, "sh", "-c", change)
        seen = node.containerd.exec(container, "sh", "-c", look)
        layer = diff_of(node, container)
    finally:
        node.containerd.end_container(container)
    committed = push(Image([*box.image.layers, Layer(layer)], env=["PATH=/bin"]))
    other = new_node(server=cache_server.socket)
    other.rpull(committed.reference)
    assert sorted(other.containerd.run(committed.reference, "sh", "-c", look).splitlines()) == (
        sorted(seen.splitlines())
    )


def diff_of(node: Node, container: str) -> bytes:
    """The layer of what a container changed, as containerd's own diff service makes it."""
    command = ["ctr", "--address", str(node.containerd.address)]
    command += ["--namespace", node.containerd.namespace]
    command += ["snapshots", "--snapshotter", SNAPSHOTTER, "diff"]
    media_type = "application/vnd.oci.image.layer.v1.tar"
    done = subprocess.run([*command, "--media-type", media_type, container], capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_committed_snapshot_on_lazy_ones_is_a_parent(node: Node, box: Pushed) -> None:
    """As docker's snapshot between image and container, and as an image's build."""
    node.rpull(box.reference)
    containerd = node.containerd
    first = containerd.start_container(box.reference, "sleep", "1000")
    containerd.exec(first, "sh", "-c", "echo built > /built; rm /etc/passwd")
    containerd.do("tasks", "rm", "--force", first)
    made = containerd.new_id()
    containerd.do("snapshots", "--snapshotter", SNAPSHOTTER, "commit", made, first)
    containerd.do("containers", "rm", first)
    key = containerd.new_id()
    mounts = containerd.do(
        "snapshots", "--snapshotter", SNAPSHOTTER, "prepare", "--target", "/nowhere", key, made
    )
    try:
        assert "overlay" in mounts
        assert containerd.snapshots()[key] == (made, "Active")
    finally:
        for name in (key, made):
            containerd.do("snapshots", "--snapshotter", SNAPSHOTTER, "rm", name)
