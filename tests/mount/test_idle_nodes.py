"""What the gate has answered with FUSE files is let go of once no view needs it."""

import os
from pathlib import Path

import pytest

from tests.support.images import Image, Layer, file, write_layout
from tests.support.product import NewProduct, Product, await_true

pytestmark = [pytest.mark.mount]

MIB = 1 << 20
FILES = 60
LARGE = os.urandom(3 * MIB)
SETTINGS = {"large_file_bytes": 2 * MIB, "companions_bytes": 0}


def await_forgotten(product: Product, count: int) -> None:
    def has_forgotten() -> bool:
        return product.counters().get("nodes_forgotten", 0) >= count

    await_true(has_forgotten, f"{count} forgotten nodes", log=product.logs)


def test_nodes_go_with_their_views_and_once_their_content_is_here(
    tmp_path: Path, new_product: NewProduct
) -> None:
    files = [file(f"d/{number}", b"%d" % number) for number in range(FILES)]
    layout = write_layout(tmp_path / "oci", {"v1": Image([Layer([*files, file("large", LARGE)])])})
    product = new_product(SETTINGS)
    reference = f"oci:{layout}:v1"
    stays, goes = product.mount(reference, "stays"), product.mount(reference, "goes")
    assert (stays / "large").read_bytes() == LARGE
    await_forgotten(product, 1)
    assert (stays / "large").read_bytes() == LARGE
    for number in range(FILES):
        (goes / f"d/{number}").chmod(0o600)
    assert product.counters()["metadata_only_lookups"] == FILES
    product.do("umount", goes)
    await_forgotten(product, FILES + 1)
    assert product.counters().get("failures", 0) == 0

    former = product.kill("store")
    product.await_successor("store", former)
    assert [(stays / f"d/{number}").read_bytes() for number in range(FILES)] == [
        b"%d" % number for number in range(FILES)
    ]
    (stays / "d/0").chmod(0o640)
    assert (product.mount(reference, "later") / "large").read_bytes() == LARGE


def test_nodes_that_a_dead_store_answered_are_served_and_let_go_of(
    tmp_path: Path, new_product: NewProduct
) -> None:
    layout = write_layout(tmp_path / "oci", {"v1": Image([Layer([file("large", LARGE)])])})
    product = new_product(SETTINGS)
    view = product.mount(f"oci:{layout}:v1", "view")
    with (view / "large").open("rb", buffering=0) as opened:
        assert opened.read(10) == LARGE[:10]
        former = product.kill("store")
        product.await_successor("store", former)
        assert os.pread(opened.fileno(), len(LARGE), 0) == LARGE
    assert (view / "large").read_bytes() == LARGE
    await_forgotten(product, 1)
    assert (view / "large").read_bytes() == LARGE
