"""Any one process dies in the middle of a read: readers get right data or EIO, never anything else.

Answers of the cache server are held back while a process is killed, so that every reader is known
to be waiting at that moment.
"""

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.counting_proxy import CountingProxy
from tests.support.debian_image import LocalImage
from tests.support.five_layers import LARGE_BYTES, MIDDLE_BYTES, noise
from tests.support.mounts import mounts_below
from tests.support.product import CacheServer, NewProduct, Product, await_true

pytestmark = [pytest.mark.mount, pytest.mark.real]
MIB = 1 << 20
CONTENT = {
    "keep/chunk-and-one": noise(MIB + 1, 2),
    "keep/middle": noise(MIDDLE_BYTES, 3),
    "keep/large": noise(LARGE_BYTES, 4),
}


@pytest.fixture
def own_server() -> Iterator[CacheServer]:
    """A cache server that a test may kill or damage."""
    server = CacheServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def proxy(tmp_path: Path, own_server: CacheServer) -> Iterator[CountingProxy]:
    with CountingProxy(tmp_path / "proxy.sock", own_server.socket) as started:
        yield started


@pytest.fixture
def readers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(len(CONTENT)) as pool:
        yield pool


def start_readers(
    readers: ThreadPoolExecutor, view: Path, proxy: CountingProxy
) -> dict[str, Future[bytes]]:
    """Begins to read every file; returns when the first of them wait for the server."""
    proxy.hold_answers()
    before = proxy.content_requests
    started = {path: readers.submit((view / path).read_bytes) for path in CONTENT}
    proxy.await_content_request(before)
    return started


def assert_right(results: dict[str, Future[bytes]]) -> None:
    for path, future in results.items():
        found = future.result(timeout=60)
        assert hashlib.sha256(found).digest() == hashlib.sha256(CONTENT[path]).digest(), path


def assert_nothing_dead_is_mounted(product: Product) -> None:
    for mount in mounts_below(product.base):
        os.statvfs(mount.target)  # ENOTCONN if its server is gone


def test_readers_outlive_the_store(
    five: LocalImage, proxy: CountingProxy, readers: ThreadPoolExecutor, new_product: NewProduct
) -> None:
    product = new_product(server=proxy.path)
    view = product.mount(five.reference, "view")
    results = start_readers(readers, view, proxy)
    former = product.kill("store")
    proxy.release_answers()
    assert_right(results)
    product.await_successor("store", former)
    assert_nothing_dead_is_mounted(product)


def test_readers_outlive_the_daemon(
    five: LocalImage, proxy: CountingProxy, readers: ThreadPoolExecutor, new_product: NewProduct
) -> None:
    product = new_product(server=proxy.path)
    view = product.mount(five.reference, "view")
    store = product.pid("store")
    results = start_readers(readers, view, proxy)
    product.kill("daemon")
    proxy.release_answers()
    assert_right(results)
    product.do("daemon", "start")
    assert product.pid("store") == store, "a new daemon takes over the store that lives"
    assert [mount["target"] for mount in product.ask("ps")] == [str(view)]
    product.do("umount", view)
    assert_nothing_dead_is_mounted(product)


def test_store_and_daemon_die_together(
    five: LocalImage, proxy: CountingProxy, readers: ThreadPoolExecutor, new_product: NewProduct
) -> None:
    product = new_product(server=proxy.path)
    view = product.mount(five.reference, "view")
    results = start_readers(readers, view, proxy)
    processes = product.status()["processes"]
    for name in ("daemon", "store"):
        os.kill(processes[name], 9)
    proxy.release_answers()
    product.do("daemon", "start")  # which starts a new store
    assert_right(results)
    assert_nothing_dead_is_mounted(product)


def test_cache_server_away_is_eio_and_right_at_the_next_open(
    five: LocalImage,
    own_server: CacheServer,
    proxy: CountingProxy,
    readers: ThreadPoolExecutor,
    new_product: NewProduct,
) -> None:
    product = new_product(server=proxy.path)
    view = product.mount(five.reference, "view")
    results = start_readers(readers, view, proxy)
    own_server.kill()
    proxy.release_answers()
    for path, future in results.items():
        failure = future.exception(timeout=60)
        if failure is None:  # its answer was on the way already
            assert future.result() == CONTENT[path]
        else:
            assert isinstance(failure, OSError)
            assert failure.errno == errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        (view / "keep/exact-chunk").read_bytes()
    own_server.start()
    assert_right({path: readers.submit((view / path).read_bytes) for path in CONTENT})
    assert (view / "keep/exact-chunk").read_bytes() == noise(MIB, 1)


def test_cache_server_of_the_daemon_is_started_again(
    five: LocalImage, readers: ThreadPoolExecutor, new_product: NewProduct
) -> None:
    product = new_product()
    view = product.mount(five.reference, "view")
    former = product.kill("cache-server")
    product.await_successor("cache-server", former)

    def is_readable() -> bool:
        try:
            return (view / "keep/exact-chunk").read_bytes() == noise(MIB, 1)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return False

    await_true(is_readable, "content from the new cache server", log=product.logs)
    assert_right({path: readers.submit((view / path).read_bytes) for path in CONTENT})


def test_warm_content_needs_no_process_at_all(
    five: LocalImage, own_server: CacheServer, new_product: NewProduct
) -> None:
    product = new_product({"large_file_bytes": 64 * MIB}, server=own_server.socket)
    view = product.mount(five.reference, "view")
    for path, content in CONTENT.items():
        assert (view / path).read_bytes() == content
    processes = [pid for pid in product.status()["processes"].values() if pid]
    for pid in processes:
        os.kill(pid, 9)
    for path, content in CONTENT.items():
        assert (view / path).read_bytes() == content
        (view / path).write_bytes(b"changed")


def test_dead_gate_is_replaced(
    five: LocalImage, own_server: CacheServer, new_product: NewProduct
) -> None:
    product = new_product(server=own_server.socket)
    view = product.mount(five.reference, "view")
    former = product.kill("keeper")  # the daemon ends the store that serves the lost gate
    product.await_successor("keeper", former)
    fresh = product.mount(five.reference, "fresh")
    assert (fresh / "keep/middle").read_bytes() == CONTENT["keep/middle"]
    product.do("umount", view)
    product.do("umount", fresh)
    assert_nothing_dead_is_mounted(product)


def test_corrupt_chunk_is_eio_and_a_log_line_and_heals(
    five: LocalImage, own_server: CacheServer, new_product: NewProduct
) -> None:
    product = new_product(server=own_server.socket)
    view = product.mount(five.reference, "view")
    pack, offset = find_in_packs(own_server, noise(MIB, 1)[1000:1064])
    flip_byte(pack, offset)
    with pytest.raises(OSError, match="Input/output error") as failure:
        (view / "keep/exact-chunk").read_bytes()
    assert failure.value.errno == errno.EIO
    digest = hashlib.sha256(noise(MIB, 1)).hexdigest()
    logged = [json.loads(line) for line in product.log("store").splitlines()]
    told = [line for line in logged if line["level"] == "error"]
    assert [line["object"] for line in told] == [f"{digest[:2]}/{digest[2:]}.{MIB}"]
    assert "its bytes have another digest" in told[0]["cause"]
    assert (view / "keep/middle").read_bytes() == CONTENT["keep/middle"]
    flip_byte(pack, offset)
    assert (view / "keep/exact-chunk").read_bytes() == noise(MIB, 1)


def find_in_packs(server: CacheServer, wanted: bytes) -> tuple[Path, int]:
    for pack in server.packs():
        offset = pack.read_bytes().find(wanted)
        if offset >= 0:
            return pack, offset
    raise AssertionError(f"no pack of {server.packs()} holds it")


def flip_byte(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 0xFF]))
