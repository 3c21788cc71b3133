"""Only what is touched is fetched, and each of it once."""

import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.counting_proxy import CountingProxy
from tests.support.debian_image import LocalImage
from tests.support.five_layers import LARGE_BYTES, noise
from tests.support.product import CacheServer, NewProduct

pytestmark = [pytest.mark.mount, pytest.mark.real]
MIB = 1 << 20
READERS = 64


@pytest.fixture
def proxy(tmp_path: Path, cache_server: CacheServer) -> Iterator[CountingProxy]:
    with CountingProxy(tmp_path / "proxy.sock", cache_server.socket) as started:
        yield started


def read_at_once(path: Path, readers: int) -> set[str]:
    """The digests that so many readers see who all open the file at the same moment."""
    barrier = threading.Barrier(readers)

    def read() -> str:
        barrier.wait()
        return hashlib.sha256(path.read_bytes()).hexdigest()

    with ThreadPoolExecutor(readers) as pool:
        return {future.result() for future in [pool.submit(read) for _ in range(readers)]}


def test_importing_json_brings_less_than_15_percent_of_debian(
    debian: LocalImage, proxy: CountingProxy, new_product: NewProduct
) -> None:
    product = new_product(server=proxy.path)
    pulled = product.ask("pull", debian.reference)
    content_bytes = pulled["prepared"]["totals"]["bytes"]
    command = ["python3", "-c", "import json; print(json.dumps([1]))"]
    assert product.do("run", debian.reference, "--", *command) == "[1]\n"
    assert content_bytes > 100 * MIB
    # everything the server sent, the metadata image and protocol included
    assert proxy.received_bytes < 0.15 * content_bytes


def test_second_run_asks_the_server_for_nothing(
    debian: LocalImage, proxy: CountingProxy, new_product: NewProduct
) -> None:
    product = new_product(server=proxy.path)
    command = ["run", debian.reference, "--", "python3", "-c", "import json"]
    product.do(*command)
    before = proxy.requests
    product.do(*command)
    assert proxy.requests == before


@pytest.mark.parametrize("path", ["keep/exact-chunk", "keep/small"])
def test_64_readers_of_a_cold_small_file_cause_one_fetch(
    five: LocalImage, proxy: CountingProxy, new_product: NewProduct, path: str
) -> None:
    product = new_product(server=proxy.path)
    view = product.mount(five.reference, "view")
    before, chunks_before = proxy.content_requests, proxy.fetched_chunks
    assert len(read_at_once(view / path, READERS)) == 1
    assert proxy.content_requests == before + 1
    assert proxy.fetched_chunks == chunks_before + 1


@pytest.mark.parametrize("large_file_bytes", [8 * MIB, 64 * MIB])
def test_64_readers_of_a_cold_large_file_fetch_each_chunk_once(
    five: LocalImage, proxy: CountingProxy, new_product: NewProduct, large_file_bytes: int
) -> None:
    product = new_product({"large_file_bytes": large_file_bytes}, server=proxy.path)
    view = product.mount(five.reference, "view")
    chunks_before, tables_before = proxy.fetched_chunks, proxy.requests["chunk_table"]
    expected = hashlib.sha256(noise(LARGE_BYTES, 4)).hexdigest()
    assert read_at_once(view / "keep/large", READERS) == {expected}
    assert proxy.fetched_chunks - chunks_before == -(-LARGE_BYTES // MIB)
    assert proxy.requests["chunk_table"] == tables_before + 1


def test_part_of_a_large_file_fetches_only_that_part(
    five: LocalImage, proxy: CountingProxy, new_product: NewProduct
) -> None:
    product = new_product(server=proxy.path)
    view = product.mount(five.reference, "view")
    chunks_before = proxy.fetched_chunks
    with (view / "keep/large").open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(file.fileno(), 100, 10 * MIB) == noise(LARGE_BYTES, 4)[10 * MIB :][:100]
    assert proxy.fetched_chunks - chunks_before < LARGE_BYTES // MIB // 2


def test_looking_at_everything_fetches_nothing(
    debian: LocalImage, proxy: CountingProxy, new_product: NewProduct
) -> None:
    product = new_product(server=proxy.path)
    view = product.mount(debian.reference, "view")
    before = proxy.content_requests
    listing = subprocess.run(["ls", "-lanR", view], check=True, capture_output=True)
    assert listing.stdout.count(b"\n") > 8000
    assert proxy.content_requests == before


def test_changing_owners_of_a_cold_tree_fetches_nothing(
    debian: LocalImage, proxy: CountingProxy, new_product: NewProduct
) -> None:
    product = new_product(server=proxy.path)
    view = product.mount(debian.reference, "view")
    before = proxy.content_requests
    subprocess.run(["chown", "-R", "--no-dereference", "1234:1234", view], check=True)
    assert proxy.content_requests == before
    release = view / "usr/lib/os-release"
    assert release.stat().st_uid == 1234
    assert b"bookworm" in release.read_bytes()
    assert proxy.content_requests == before + 1
