"""A root on a disk that is smaller than the image: everything can be read, nothing is torn."""

import subprocess
from pathlib import Path

import pytest

from tests.support.images import Image, Layer, directory, file, write_layout
from tests.support.product import CacheServer, NewProduct, Product, await_true

pytestmark = [pytest.mark.mount, pytest.mark.timeout(240)]

MIB = 1 << 20
DISK = 40 * MIB


def noise(size: int, seed: int) -> bytes:
    """Bytes of which no two chunks are the same."""
    return b"".join((b"%d/%d " % (seed, at)).ljust(64, b"#") for at in range(0, size, 64))[:size]


FILES = {
    **{f"small{number:03d}": noise(20_000 + number, number) for number in range(200)},
    **{f"middle{number:02d}": noise(2 * MIB + number, 1000 + number) for number in range(12)},
    "large": noise(24 * MIB + 5, 2000),
}
assert sum(map(len, FILES.values())) > DISK


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    layer = Layer([directory("d"), *(file(f"d/{name}", body) for name, body in FILES.items())])
    layout = write_layout(tmp_path_factory.mktemp("layout"), {"full": Image([layer])})
    return f"oci:{layout}:full"


def on_small_disk(product: Product) -> Product:
    """Puts the product's root on an ext4 of its own; closing the product unmounts it."""
    disk = product.base / "disk"
    with disk.open("wb") as made:
        made.truncate(DISK)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", disk], check=True)
    product.root.mkdir()
    subprocess.run(["mount", "-o", "loop", disk, product.root], check=True)
    return product


def free_bytes(product: Product) -> int:
    found = subprocess.run(
        ["stat", "--file-system", "--format=%a %S", product.root],
        check=True,
        capture_output=True,
        text=True,
    )
    blocks, size = map(int, found.stdout.split())
    return blocks * size


def read_all(view: Path) -> None:
    """Every file must be what the image says, whatever becomes of it afterwards."""
    for name, body in FILES.items():
        assert (view / "d" / name).read_bytes() == body, name


@pytest.mark.parametrize("floor", [None, 0])
def test_an_image_larger_than_the_disk_can_be_read_whole(
    new_product: NewProduct, cache_server: CacheServer, reference: str, floor: int | None
) -> None:
    settings: dict[str, object] = {"companions_bytes": 0}
    if floor is not None:
        settings["min_free_bytes"] = floor
    product = on_small_disk(new_product(settings, server=cache_server.socket))
    view = product.mount(reference, "view", "--read-only")
    read_all(view)
    read_all(view)
    assert product.counters()["unkept_reads"] > 0
    assert "disk is full: content is served without being kept" in product.log("store")
    assert product.ask("cache", "verify")["corrupt"] == []
    product.do("umount", view)
    product.do("daemon", "stop")
    read_all(product.mount(reference, "again", "--read-only"))


def test_a_purge_makes_room_and_content_is_kept_again(
    new_product: NewProduct, cache_server: CacheServer, reference: str
) -> None:
    settings = {"companions_bytes": 0, "min_free_bytes": 0, "settle_s": 0.0}
    product = on_small_disk(new_product(settings, server=cache_server.socket))
    view = product.mount(reference, "view", "--read-only")
    read_all(view)
    before = free_bytes(product)
    purged = product.ask("cache", "purge", "--all")
    assert purged["removed"] > 0
    # Views hold on to what they resolved; the purge has refreshed them.
    await_true(
        lambda: free_bytes(product) - before >= purged["freed_bytes"] * 0.95,
        f"space for {purged}",
        log=lambda: f"{free_bytes(product)}\n{product.do('cache', 'du')}{product.logs()}",
    )
    assert (view / "d/small000").read_bytes() == FILES["small000"]
    assert product.ask("cache", "du")["objects"]["contents"] >= 2
