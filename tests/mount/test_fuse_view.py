"""The fuse view, by the product: the same trees as the kernel view's, kept over deaths."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.compare_trees import compare_scans, scan_tree
from tests.support.counting_proxy import CountingProxy
from tests.support.debian_image import LocalImage
from tests.support.five_layers import LARGE_BYTES, noise
from tests.support.mounts import mounts_below
from tests.support.product import CacheServer, NewProduct, Product, await_true

pytestmark = [pytest.mark.mount, pytest.mark.real, pytest.mark.timeout(240)]
MIB = 1 << 20
FUSE = ("--view", "fuse")


@pytest.fixture
def proxy(tmp_path: Path, cache_server: CacheServer) -> Iterator[CountingProxy]:
    with CountingProxy(tmp_path / "proxy.sock", cache_server.socket) as started:
        yield started


@pytest.fixture
def product(cache_server: CacheServer, new_product: NewProduct) -> Product:
    return new_product({"large_file_bytes": MIB}, server=cache_server.socket)


def view_process(product: Product, mount_id: str) -> int:
    """The pid of the process behind a mount."""
    record = json.loads((product.root / "mounts" / mount_id / "mount.json").read_bytes())
    return int(record["server_pid"])


def mount_id(product: Product, target: Path) -> str:
    [record] = [each for each in product.ask("ps") if each["target"] == str(target)]
    return str(record["id"])


@pytest.mark.parametrize("options", [(), ("--read-only",)], ids=["writable", "read-only"])
def test_shows_what_the_kernel_view_shows(
    five: LocalImage,
    proxy: CountingProxy,
    new_product: NewProduct,
    options: tuple[str, ...],
) -> None:
    product = new_product({"large_file_bytes": MIB}, server=proxy.path)
    fuse = product.mount(five.reference, "fuse", *FUSE, *options)
    shown = scan_tree(fuse)
    before = proxy.requests
    kernel = product.mount(five.reference, "kernel", "--view", "kernel", *options)
    assert compare_scans(scan_tree(kernel), shown) == []
    assert compare_scans(shown, scan_tree(fuse)) == []
    assert proxy.requests == before
    assert [mount.fs_type for mount in mounts_below(fuse)] == ["fuse.snapshotter"]
    product.do("umount", fuse)
    product.do("umount", kernel)
    assert product.ask("ps") == []


def test_an_upper_is_the_same_under_either_view(five: LocalImage, product: Product) -> None:
    upper = product.base / "changes"
    view = product.mount(five.reference, "fuse", *FUSE, "--upper", upper)
    (view / "new").mkdir()
    (view / "new/file").write_bytes(b"made")
    with (view / "keep/middle").open("r+b") as file:
        file.write(b"changed")
    shutil.move(view / "keep", view / "moved")
    (view / "moved/large").unlink()
    shown = scan_tree(view)
    product.do("umount", view)
    kernel = product.mount(five.reference, "kernel", "--view", "kernel", "--upper", upper)
    assert compare_scans(shown, scan_tree(kernel)) == []
    (kernel / "new/more").write_bytes(b"by the kernel")
    shown = scan_tree(kernel)
    product.do("umount", kernel)
    again = product.mount(five.reference, "again", *FUSE, "--upper", upper)
    assert compare_scans(shown, scan_tree(again)) == []
    product.do("umount", again)
    product.mount(five.reference, "kernel", "--view", "kernel", "--upper", upper)
    (kernel / "moved/chunk-and-one").chmod(0o600)
    shown = scan_tree(kernel)
    product.do("umount", kernel)
    metacopy = upper / "upper/moved/chunk-and-one"
    assert os.getxattr(metacopy, "trusted.overlay.metacopy") == b""
    product.mount(five.reference, "again", *FUSE, "--upper", upper)
    assert compare_scans(shown, scan_tree(again)) == []
    with (again / "moved/chunk-and-one").open("r+b") as file:
        file.write(b"changed")
    shown = scan_tree(again)
    product.do("umount", again)
    assert "trusted.overlay.metacopy" not in os.listxattr(metacopy)
    product.mount(five.reference, "kernel", "--view", "kernel", "--upper", upper)
    assert compare_scans(shown, scan_tree(kernel)) == []


def test_a_volatile_upper_is_marked_until_it_is_safe(five: LocalImage, product: Product) -> None:
    upper = product.base / "changes"
    view = product.mount(five.reference, "fuse", *FUSE, "--upper", upper, "--volatile")
    (view / "file").write_bytes(b"made")
    mark = upper / "work/work/incompat/volatile/dirty"
    assert mark.exists()
    product.do("umount", view)
    assert not mark.exists()
    product.mount(five.reference, "fuse", *FUSE, "--upper", upper)
    assert (view / "file").read_bytes() == b"made"
    assert not mark.exists()


def test_readers_wait_for_the_stores_successor(
    five: LocalImage, proxy: CountingProxy, new_product: NewProduct
) -> None:
    product = new_product({"large_file_bytes": MIB}, server=proxy.path)
    view = product.mount(five.reference, "view", *FUSE)
    proxy.hold_answers()
    before = proxy.content_requests
    with ThreadPoolExecutor(2) as readers:
        reads = {
            name: readers.submit((view / name).read_bytes) for name in ("keep/large", "keep/middle")
        }
        proxy.await_content_request(before)
        former = product.kill("store")
        product.await_successor("store", former)
        proxy.release_answers()
        assert reads["keep/large"].result(60) == noise(LARGE_BYTES, 4)
        assert len(reads["keep/middle"].result(60)) == os.stat(view / "keep/middle").st_size


def test_a_view_outlives_daemon_and_store_and_is_found_again(
    five: LocalImage, product: Product
) -> None:
    view = product.mount(five.reference, "view", *FUSE)
    (view / "written").write_bytes(b"before")
    identity = mount_id(product, view)
    served_by = view_process(product, identity)
    product.kill("store")
    product.kill("daemon")
    (view / "written").write_bytes(b"while nobody was there")
    [record] = product.ask("ps")  # starts a daemon
    assert (record["id"], record["view"], record["degraded"]) == (identity, "fuse", "")
    assert view_process(product, identity) == served_by
    assert (view / "written").read_bytes() == b"while nobody was there"
    assert (view / "keep/large").read_bytes() == noise(LARGE_BYTES, 4)
    upper = Path(record["upper"])
    product.do("umount", view)
    await_true(lambda: not upper.exists(), "the private upper's end")
    await_true(lambda: not Path(f"/proc/{served_by}").exists(), "the process's end")


def test_a_view_whose_process_died_says_so_and_goes(five: LocalImage, product: Product) -> None:
    view = product.mount(five.reference, "view", *FUSE)
    process = view_process(product, mount_id(product, view))
    os.kill(process, signal.SIGKILL)
    await_true(lambda: bool(product.ask("ps")[0]["degraded"]), "notice of its end")
    with pytest.raises(OSError, match="not connected"):
        (view / "keep").stat()
    product.do("umount", view)
    assert product.ask("ps") == []


def test_runs_a_command(debian: LocalImage, product: Product) -> None:
    script = "echo hello > /tmp/file && cat /tmp/file && stat -f -c %T / && rm -r /usr/share/doc"
    done = product.cli("run", *FUSE, debian.reference, "--", "sh", "-ec", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "hello"
    assert "fuse" in done.stdout
    await_true(lambda: product.ask("ps") == [], "the mount's end")


def test_cold_content_that_cannot_be_had_is_an_error_and_then_works(
    five: LocalImage, proxy: CountingProxy, new_product: NewProduct
) -> None:
    product = new_product({"lookup_deadline_s": 1}, server=proxy.path)
    view = product.mount(five.reference, "view", *FUSE)
    proxy.hold_answers()
    with pytest.raises(OSError, match="Input/output"):
        (view / "keep/middle").read_bytes()
    proxy.release_answers()
    await_true(lambda: _reads(view / "keep/middle"), "the content")


def _reads(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def test_a_warm_read_only_view_is_asked_nothing_a_second_time(
    five: LocalImage, product: Product
) -> None:
    view = product.mount(five.reference, "view", *FUSE, "--read-only")
    scan_tree(view)
    process = view_process(product, mount_id(product, view))

    def woken() -> int:
        switches = 0
        for status in Path(f"/proc/{process}/task").glob("*/status"):
            for line in status.read_text().splitlines():
                if line.startswith("voluntary_ctxt_switches"):
                    switches += int(line.split()[1])
        return switches

    def look() -> None:
        for _ in range(3):
            for path in view.rglob("*"):
                path.lstat()
        subprocess.run(["cat", view / "keep/middle"], check=True, stdout=subprocess.DEVNULL)

    look()
    before = woken()
    look()
    assert woken() == before
