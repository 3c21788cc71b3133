"""What keeps a host healthy, by command: du, verify, purge, images rm, with mounts standing."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotter.digest import sha256
from snapshotter.names import ContentName
from tests.support.gate_mount import name_of
from tests.support.images import Image, Layer, directory, file, write_layout
from tests.support.product import CacheServer, NewProduct, Product

pytestmark = [pytest.mark.mount, pytest.mark.timeout(180)]

MIB = 1 << 20
SHARED, OURS, THEIRS = b"in both images\n" * 300, b"only in a\n" * 300, b"only in b\n" * 300
LARGE = bytes(range(256)) * (3 * MIB // 256) + b"end"
SETTINGS = {"large_file_bytes": 2 * MIB, "companions_bytes": 0, "settle_s": 0.0}

Start = Callable[[], Product]


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shared = Layer([directory("d"), file("d/shared", SHARED)])
    tagged = {
        "a": Image([shared, Layer([file("d/own", OURS), file("d/large", LARGE)])]),
        "b": Image([shared, Layer([file("d/own", THEIRS)])]),
    }
    return write_layout(tmp_path_factory.mktemp("layout"), tagged)


@pytest.fixture
def start(new_product: NewProduct, cache_server: CacheServer) -> Start:
    return lambda: new_product(SETTINGS, server=cache_server.socket)


def read_all(view: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((view / "d").iterdir())}


def object_of(product: Product, body: bytes) -> Path:
    return product.root / "objects" / ContentName(sha256(body), len(body)).path


def fetched(product: Product) -> int:
    return product.counters().get("fetched_chunks", 0)


def test_purge_by_image_takes_what_it_alone_uses(start: Start, layout: Path) -> None:
    product = start()
    a = product.mount(f"oci:{layout}:a", "a")
    b = product.mount(f"oci:{layout}:b", "b")
    was = read_all(a)
    assert was == {"shared": SHARED, "own": OURS, "large": LARGE}
    assert read_all(b) == {"shared": SHARED, "own": THEIRS}
    used = product.ask("cache", "du")
    assert [use["here"]["contents"] for use in used["images"]] == [3, 2]
    assert [use["own"]["contents"] for use in used["images"]] == [2, 1]
    assert used["objects"]["contents"] == 4 + 2  # and two metadata images
    assert used["unused"]["contents"] == 0

    planned = product.ask("cache", "purge", "--image", f"oci:{layout}:a", "--dry-run")
    assert (planned["removed"], planned["dry_run"]) == (2, True)
    assert product.ask("cache", "du")["objects"]["contents"] == 6
    before = fetched(product)
    with (a / "d/own").open("rb") as held:
        done = product.ask("cache", "purge", "--image", f"oci:{layout}:a")
        assert (done["removed"], done["kept"]) == (2, 0)
        assert done["freed_bytes"] >= len(LARGE)
        assert held.read() == OURS
    assert not object_of(product, OURS).exists()
    assert object_of(product, SHARED).exists()
    product.do("cache", "purge")  # what no image uses: nothing
    assert fetched(product) == before
    assert read_all(b) == {"shared": SHARED, "own": THEIRS}
    assert fetched(product) == before
    # "own" was held open through the refresh; the next one lets it go.
    product.do("cache", "purge")
    assert read_all(a) == was
    # "own" comes again; of "large" the gate's pages may still be in memory.
    assert before + 1 <= fetched(product) <= before + 1 + 4


def test_purge_by_age_and_of_everything(start: Start, layout: Path) -> None:
    product = start()
    view = product.mount(f"oci:{layout}:b", "b")
    was = read_all(view)
    os.utime(object_of(product, SHARED), (0, 0))
    assert product.ask("cache", "purge", "--older-than", "1h")["removed"] == 1
    assert not object_of(product, SHARED).exists()
    assert object_of(product, THEIRS).exists()
    assert product.ask("cache", "purge", "--all")["removed"] == 1
    assert product.ask("cache", "du")["objects"]["contents"] == 1  # the metadata image
    assert read_all(view) == was
    product.do("umount", view)
    assert read_all(product.mount(f"oci:{layout}:b", "again")) == was
    bad = product.cli("cache", "purge", "--older-than", "soon")
    assert (bad.returncode, "7d" in bad.stderr) == (2, True)


def test_readers_notice_nothing_of_purges(
    new_product: NewProduct, cache_server: CacheServer, layout: Path
) -> None:
    settings = {**SETTINGS, "settle_s": 0.5}
    product = new_product(settings, server=cache_server.socket)
    views = [product.mount(f"oci:{layout}:{tag}", tag) for tag in "ab"]
    wanted = [read_all(view) for view in views]
    has_ended = threading.Event()

    def read(view: Path, was: dict[str, bytes]) -> int:
        rounds = 0
        while not has_ended.is_set():
            assert read_all(view) == was
            rounds += 1
        return rounds

    with ThreadPoolExecutor(4) as readers:
        reading = [readers.submit(read, *each) for each in zip(views * 2, wanted * 2, strict=True)]
        try:
            removed = sum(product.ask("cache", "purge", "--all")["removed"] for _ in range(6))
        finally:
            has_ended.set()
        assert all(each.result() > 1 for each in reading)
    assert removed > 0


def test_corrupt_content_is_found_removed_and_fetched_again(start: Start, layout: Path) -> None:
    product = start()
    view = product.mount(f"oci:{layout}:a", "a")
    was = read_all(view)
    assert product.ask("cache", "verify")["corrupt"] == []
    spoiled = object_of(product, OURS)
    spoiled.chmod(0o600)
    spoiled.write_bytes(OURS.upper())
    assert (view / "d/own").read_bytes() == OURS.upper()  # nothing on this way checks
    looked = product.cli("cache", "verify", "--dry-run")
    assert looked.returncode == 7
    assert spoiled.exists()
    found = product.cli("cache", "verify")
    assert found.returncode == 7, found.stderr
    assert spoiled.parent.name + "/" + spoiled.name in found.stdout
    assert "corrupt content removed" in product.log("store")
    assert read_all(view) == was
    assert product.ask("cache", "verify")["corrupt"] == []


def test_pages_of_a_large_file_that_were_corrupt_are_read_anew(
    new_product: NewProduct, cache_server: CacheServer, layout: Path
) -> None:
    settings = {**SETTINGS, "read_ahead_kb": 128, "fetch_ahead_bytes": 0}
    product = new_product(settings, server=cache_server.socket)
    view = product.mount(f"oci:{layout}:a", "a")
    with (view / "d/large").open("rb", buffering=0) as opened:
        assert os.pread(opened.fileno(), 9, 0) == LARGE[:9]
        partial = product.root / "partial" / name_of(LARGE).path
        with partial.open("r+b") as spoiled:
            os.pwrite(spoiled.fileno(), b"spoiled", MIB // 2)
        assert os.pread(opened.fileno(), 7, MIB // 2) == b"spoiled"  # nothing checks it again
        assert product.cli("cache", "verify").returncode == 7
        assert os.pread(opened.fileno(), 7, MIB // 2) == LARGE[MIB // 2 :][:7]
    assert (view / "d/large").read_bytes() == LARGE


def test_images_rm_refuses_what_is_mounted(start: Start, layout: Path) -> None:
    product = start()
    reference = f"oci:{layout}:b"
    view = product.mount(reference, "b")
    (mount,) = product.ask("ps")
    refused = product.cli("images", "rm", reference)
    assert refused.returncode == 6
    assert mount["id"] in refused.stderr
    assert str(view) in refused.stderr
    was = read_all(view)
    product.do("umount", view)
    assert product.ask("images", "rm", reference, "--dry-run")["whole"]
    assert len(product.ask("images")) == 1
    product.do("images", "rm", reference)
    assert product.ask("images") == []
    assert product.cli("images", "rm", reference).returncode == 3
    assert product.ask("cache", "du")["unused"]["contents"] == 3
    assert product.ask("cache", "purge")["removed"] == 3
    product.do("daemon", "stop")
    assert read_all(product.mount(reference, "again")) == was
    assert [image["number"] for image in product.ask("images")] == [2]


def test_a_name_of_several_goes_alone(start: Start, layout: Path, tmp_path: Path) -> None:
    product = start()
    twin = tmp_path / "twin"
    twin.symlink_to(layout)
    product.do("pull", f"oci:{layout}:b")
    product.mount(f"oci:{twin}:b", "b")
    (image,) = product.ask("images")
    assert len(image["references"]) == 2
    gone = product.ask("images", "rm", f"oci:{twin}:b")
    assert not gone["whole"]
    (image,) = product.ask("images")
    assert image["references"] == [f"oci:{layout}:b"]


def test_a_mount_can_be_without_devices_and_set_uid_bits(start: Start, layout: Path) -> None:
    view = start().mount(f"oci:{layout}:b", "b", "--nosuid", "--nodev")
    flags = os.statvfs(view).f_flag
    assert (bool(flags & os.ST_NOSUID), bool(flags & os.ST_NODEV)) == (True, True)
    assert (view / "d/own").read_bytes() == THEIRS


def test_a_metadata_image_that_was_lost_is_fetched_by_the_next_mount(
    start: Start, layout: Path
) -> None:
    product = start()
    product.do("pull", f"oci:{layout}:b")
    (image,) = product.ask("images")
    made = image["prepared"]["metadata_image"]
    digest = made["content"].removeprefix("sha256:")
    path = product.root / "objects" / digest[:2] / f"{digest[2:]}.{made['size']}"
    path.chmod(0o600)
    path.write_bytes(b"?")
    assert product.cli("cache", "verify").returncode == 7
    assert not path.exists()
    assert (product.mount(f"oci:{layout}:b", "b") / "d/own").read_bytes() == THEIRS
