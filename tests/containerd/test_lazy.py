"""Every way to pull lazily: no layer reaches containerd, and containers are right all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.containerd.conftest import NewNode, Push
from tests.support.box_image import GREETING, Pushed, box_image, data_files, shell_layer
from tests.support.cri import NAMESPACE, Cri
from tests.support.images import Image, sha256_of
from tests.support.mounts import mounts_below
from tests.support.node import Node, ctr_remote_pull
from tests.support.product import CacheServer
from tests.support.registry import Registry

pytestmark = [pytest.mark.mount, pytest.mark.real]
Pull = Callable[[Node, str], None]


def by_rpull(node: Node, reference: str) -> None:
    node.rpull(reference)


@pytest.fixture(params=[by_rpull, ctr_remote_pull])
def pull(request: pytest.FixtureRequest) -> Pull:
    way: Pull = request.param
    return way


@pytest.fixture
def cri(node: Node) -> Iterator[Cri]:
    with Cri(node.containerd.address, node.product.base) as started:
        yield started


def assert_no_layer_in(node: Node, image: Image) -> None:
    content = set(node.containerd.names("content", "ls"))
    assert sha256_of(image.config) in content
    assert not content & {layer.descriptor["digest"] for layer in image.layers}


def test_container_starts_without_a_layer(
    node: Node, box: Pushed, registry: Registry, pull: Pull
) -> None:
    pull(node, box.reference)
    asked = box.layer_requests(registry)
    assert asked <= len(box.image.layers), "the cache server asks for each layer once"
    assert_no_layer_in(node, box.image)
    printed = node.containerd.run(box.reference, "sh", "-c", "cat /etc/greeting; ls /etc")
    assert printed == GREETING.decode() + "greeting\npasswd\n"
    assert box.layer_requests(registry) == asked


def test_prepared_image_costs_other_nodes_no_layer(
    node: Node, new_node: NewNode, cache_server: CacheServer, box: Pushed, registry: Registry,
    pull: Pull,
) -> None:  # fmt: skip
    node.rpull(box.reference)
    asked = box.layer_requests(registry)
    other = new_node(server=cache_server.socket)
    pull(other, box.reference)
    assert other.containerd.run(box.reference, "cat", "/etc/greeting") == GREETING.decode()
    assert box.layer_requests(registry) == asked


def test_pod_starts_without_a_layer(node: Node, box: Pushed, registry: Registry, cri: Cri) -> None:
    cri.pull(box.reference)
    asked = box.layer_requests(registry)
    assert asked <= len(box.image.layers)
    container = cri.start(box.reference, "sleep", "1000")
    assert cri.exec(container, "cat", "/etc/greeting") == GREETING.decode()
    assert box.layer_requests(registry) == asked
    assert NAMESPACE in node.containerd.names("namespaces", "ls")


def test_pod_of_cri_as_it_is_by_default_is_lazy_once_the_image_is_prepared(
    new_node: NewNode, cache_server: CacheServer, node: Node, box: Pushed, registry: Registry
) -> None:
    """Then nothing names the image: its layers are known by their chain ids."""
    node.product.do("pull", f"docker://{box.reference}")
    asked = box.layer_requests(registry)
    plain = new_node(
        server=cache_server.socket,
        cri=True,
        registry=registry.address,
        sandbox_image=box.reference,
        names_images=False,
    )
    with Cri(plain.containerd.address, plain.product.base) as cri:
        cri.pull(box.reference)
    assert box.layer_requests(registry) == asked


def test_every_file_is_right(node: Node, box: Pushed, push: Push) -> None:
    files = data_files(seed=77)
    pushed = push(box_image(seed=77))
    node.rpull(pushed.reference)
    printed = node.containerd.run(
        pushed.reference, "sh", "-c", "find /data -type f -exec sha256sum {} +"
    )
    found = {line.split()[1]: f"sha256:{line.split()[0]}" for line in printed.splitlines()}
    assert found == {f"/{path}": sha256_of(data) for path, data in files.items()}


def test_root_has_the_owner_and_mode_of_the_image(node: Node, box: Pushed) -> None:
    node.rpull(box.reference)
    assert node.containerd.run(box.reference, "stat", "-c", "%a %u %g", "/") == "750 7 8\n"


def test_writes_stay_in_their_container(node: Node, box: Pushed) -> None:
    node.rpull(box.reference)
    change = "echo mine > /etc/greeting && rm /data/0/000 && mkdir /new && cat /etc/greeting"
    first = node.containerd.start_container(box.reference, "sleep", "1000")
    try:
        assert node.containerd.exec(first, "sh", "-c", change) == "mine\n"
        look = "cat /etc/greeting; ls /data/0/000; ls -d /new || true"
        printed = node.containerd.run(box.reference, "sh", "-c", f"({look}) 2>/dev/null")
        assert printed == GREETING.decode() + "/data/0/000\n"
        assert node.containerd.exec(first, "sh", "-c", "ls -d /new; cat /etc/greeting") == (
            "/new\nmine\n"
        )
    finally:
        node.containerd.end_container(first)


def test_containers_of_an_image_share_its_mount(node: Node, box: Pushed) -> None:
    node.rpull(box.reference)

    def images_mounted() -> set[str]:
        return {m.device for m in mounts_below(node.product.base) if m.fs_type == "erofs"}

    containers = [node.containerd.start_container(box.reference, "sleep", "1000")]
    try:
        first = images_mounted()
        containers.append(node.containerd.start_container(box.reference, "sleep", "1000"))
        assert images_mounted() == first
    finally:
        for container in containers:
            node.containerd.end_container(container)


def test_second_pull_changes_nothing(node: Node, box: Pushed, pull: Pull) -> None:
    for _ in range(2):
        pull(node, box.reference)
        assert node.containerd.run(box.reference, "cat", "/etc/greeting") == GREETING.decode()


def test_image_of_one_layer(node: Node, push: Push, pull: Pull) -> None:
    pushed = push(Image([shell_layer()], env=["PATH=/bin"]))
    pull(node, pushed.reference)
    assert node.containerd.run(pushed.reference, "cat", "/etc/old") == "old\n"
