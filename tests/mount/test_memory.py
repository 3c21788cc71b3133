"""Memory stays flat: the benchmark of memory in small, with bounds that a leak would break."""

from pathlib import Path

import pytest

from benchmarks import memory
from tests.support.product import NewProduct

pytestmark = [pytest.mark.mount, pytest.mark.timeout(240)]

MIB = memory.MIB
PROCESSES = {"daemon", "keeper", "store", "cache-server"}


def test_no_process_grows_with_mounts_and_faults(new_product: NewProduct, tmp_path: Path) -> None:
    product = new_product({"companions_bytes": 0})
    image = memory.write_small_files(tmp_path / "layout", "files", 6000)
    grown = memory.mounts(product, image, 100, warm_up=30)
    assert grown.keys() == PROCESSES
    assert max(grown.values()) < 2 * MIB, grown  # 20 KiB a mount
    grown = memory.faults(product, image, 5000, warm_up=1000)
    assert max(grown.values()) < 3 * MIB, grown  # 600 bytes a fault


def test_a_further_mounted_image_costs_the_daemon_little(
    new_product: NewProduct, tmp_path: Path
) -> None:
    grown = memory.images(new_product({"companions_bytes": 0}), tmp_path, 4)
    assert grown["daemon"] < 2 * MIB, grown
    assert grown["store"] < 2 * MIB, grown


def test_an_import_takes_memory_that_its_size_does_not_change(tmp_path: Path) -> None:
    small = memory.import_peak(tmp_path / "small", 16 * MIB)
    large = memory.import_peak(tmp_path / "large", 192 * MIB)
    assert large < 150 * MIB
    assert large - small < 48 * MIB
