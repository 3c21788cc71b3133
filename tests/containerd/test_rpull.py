"""rpull against a real containerd and a real registry."""

import pytest

from tests.support.node import Node

pytestmark = [pytest.mark.mount, pytest.mark.real]


def test_snapshotter_that_is_not_lazy_is_told_and_nothing_is_left(node: Node, box: str) -> None:
    done = node.product.cli("rpull", box, *node.where, "--snapshotter", "overlayfs")
    assert done.returncode == 8
    assert "ctr images pull --snapshotter overlayfs" in done.stderr
    assert box not in node.containerd.names("images", "ls")
    assert node.containerd.names("leases", "ls") == []
    snapshots = node.containerd.do("snapshots", "--snapshotter", "overlayfs", "ls")
    assert len(snapshots.splitlines()) == 1


def test_containerd_that_is_not_there_is_told(node: Node, box: str) -> None:
    done = node.product.cli("rpull", box, "--address", "/nowhere/at/all.sock")
    assert done.returncode == 5
    assert "containerd at /nowhere/at/all.sock" in done.stderr
