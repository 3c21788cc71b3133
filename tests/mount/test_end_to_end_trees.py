"""Mounted images are exactly what an independent tool unpacks, cold and warm, small and large."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.compare_trees import Node, compare_scans, scan_tree
from tests.support.counting_proxy import CountingProxy
from tests.support.debian_image import LocalImage, unpack_with_umoci
from tests.support.images import push
from tests.support.product import CacheServer, NewProduct
from tests.support.registry import Registry

pytestmark = [pytest.mark.mount, pytest.mark.real]
MIB = 1 << 20
Scan = dict[bytes, Node]


def unpacked(image: LocalImage, directory: Path) -> Scan:
    try:
        return scan_tree(unpack_with_umoci(image, directory / "bundle"))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def debian_scan(debian: LocalImage, tmp_path_factory: pytest.TempPathFactory) -> Scan:
    return unpacked(debian, tmp_path_factory.mktemp("debian"))


@pytest.fixture(scope="module")
def five_scan(
    five_layers: tuple[LocalImage, LocalImage], tmp_path_factory: pytest.TempPathFactory
) -> Scan:
    return without_trusted(unpacked(five_layers[1], tmp_path_factory.mktemp("five-unpacked")))


def without_trusted(scan: Scan) -> Scan:
    """containerd, whose unpacking we follow, takes no ``trusted.*`` attribute from an image."""
    return {
        path: replace(
            node, xattrs=tuple(pair for pair in node.xattrs if not pair[0].startswith("trusted."))
        )
        for path, node in scan.items()
    }


@pytest.fixture
def proxy(tmp_path: Path, cache_server: CacheServer) -> Iterator[CountingProxy]:
    with CountingProxy(tmp_path / "proxy.sock", cache_server.socket) as started:
        yield started


@pytest.mark.timeout(240)
@pytest.mark.parametrize("large_file_bytes", [8 * MIB, 1 * MIB])
def test_debian_equals_its_unpacking_and_a_second_mount_asks_for_nothing(
    debian: LocalImage,
    debian_scan: Scan,
    proxy: CountingProxy,
    new_product: NewProduct,
    large_file_bytes: int,
) -> None:
    product = new_product({"large_file_bytes": large_file_bytes}, server=proxy.path)
    cold = product.mount(debian.reference, "cold")
    assert compare_scans(debian_scan, scan_tree(cold)) == []
    product.do("umount", cold)
    before = proxy.requests

    warm = product.mount(debian.reference, "warm")
    assert compare_scans(debian_scan, scan_tree(warm)) == []
    assert proxy.requests == before


@pytest.mark.parametrize("large_file_bytes", [8 * MIB, 1 * MIB])
def test_five_layers_from_a_registry_equal_their_unpacking(
    five: LocalImage,
    five_scan: Scan,
    registry: Registry,
    cache_server: CacheServer,
    new_product: NewProduct,
    large_file_bytes: int,
) -> None:
    push(five.layout, five.tag, registry.address, "end-to-end/five")
    product = new_product({"large_file_bytes": large_file_bytes}, server=cache_server.socket)
    view = product.mount(f"docker://{registry.address}/end-to-end/five:five", "view")
    assert compare_scans(five_scan, scan_tree(view)) == []


def test_read_only_mount_of_five_layers_equals_their_unpacking(
    five: LocalImage, five_scan: Scan, cache_server: CacheServer, new_product: NewProduct
) -> None:
    product = new_product(server=cache_server.socket)
    view = product.mount(five.reference, "view", "--read-only")
    assert compare_scans(five_scan, scan_tree(view)) == []
    with pytest.raises(OSError, match="Read-only"):
        (view / "new").touch()
