"""The machine goes down with mounts standing, and comes up again: nothing torn, nothing left."""

import shutil
from pathlib import Path

import msgspec
import pytest

from snapshotter.service.mounts import StoredMount
from snapshotter.store.inventory import list_files
from tests.support.images import Image, Layer, file, write_layout
from tests.support.product import NewProduct, Product

pytestmark = [pytest.mark.mount]

MIB = 1 << 20
FILES = {"small": b"small\n" * 500, "middle": b"m" * MIB * 2, "large": bytes(range(256)) * 20_000}
SETTINGS = {"large_file_bytes": 3 * MIB, "companions_bytes": 0, "settle_s": 900.0}


def go_down(product: Product) -> None:
    """Ends everything at once and takes from the disk what was not synced."""
    product.cut_off()
    shutil.rmtree(product.run)
    for path in product.root.glob("mounts/*/mount.json"):
        stored = msgspec.json.decode(path.read_bytes(), type=StoredMount)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(stored, boot="before")))
    torn = 0
    for directory in (product.root / "arrivals", product.root / "partial"):
        for stored_file in list_files(directory):
            path = directory / stored_file.name.path
            path.chmod(0o600)
            path.write_bytes(bytes(stored_file.name.size))
            torn += 1
    assert torn >= len(FILES)
    (product.root / "store.boot").write_text("before")


def test_after_a_reboot_nothing_is_torn_and_nothing_is_left(
    tmp_path: Path, new_product: NewProduct
) -> None:
    image = Image([Layer([file(name, body) for name, body in FILES.items()])])
    reference = f"oci:{write_layout(tmp_path / 'oci', {'v1': image})}:v1"
    product = new_product(SETTINGS)
    view = product.mount(reference, "private")
    kept = product.base / "upper"
    named = product.mount(reference, "named", "--upper", kept)
    for name, body in FILES.items():
        assert (view / name).read_bytes()[: MIB // 2] == body[: MIB // 2]
    (view / "lost").write_bytes(b"x")
    (named / "kept").write_bytes(b"y")

    go_down(product)

    assert product.ask("ps") == []
    assert list((product.root / "mounts").iterdir()) == []
    assert len(product.ask("images")) == 1
    view = product.mount(reference, "again", "--upper", kept)
    assert (view / "kept").read_bytes() == b"y"
    for name, body in FILES.items():
        assert (view / name).read_bytes() == body
    assert product.ask("cache", "verify")["corrupt"] == []
