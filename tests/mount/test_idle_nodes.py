"""What the gate has answered with FUSE files is let go of once no view needs it."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotter.kernel_view import syscalls
from tests.support.gate_mount import GateMount
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


@pytest.fixture
def gate() -> Iterator[GateMount]:
    mounted = GateMount()
    yield mounted
    mounted.close()


def test_nothing_is_stale_while_nodes_are_let_go_of_all_the_time(gate: GateMount) -> None:
    """Views come and go and ask for the same nodes, their store dies, the kernel forgets."""
    bodies = {f"f{number}": b"%d" % number * 100 for number in range(8)} | {"large": LARGE * 3}
    for name, body in bodies.items():
        gate.add_file(name, body)
    has_ended = threading.Event()

    def let_go() -> None:
        while not has_ended.wait(0.002):
            syscalls.reconfigure(gate.root / "gate", ["ro"])

    def use(worker: int) -> None:
        for turn in range(6):
            view = gate.view(is_writable=True, image=worker)
            chmod = gate.run("/bin/chmod", "600", *(view / name for name in bodies))
            assert chmod.communicate()[1] == b""
            if worker == 0 and turn == 2:
                gate.store.kill()
                gate.store.wait()
                gate.start_store()
            for name in ("large", f"f{turn}"):
                assert gate.read(view / name) == bodies[name]
            syscalls.umount(view)

    with ThreadPoolExecutor(4) as pool:
        letting_go = pool.submit(let_go)
        try:
            use(3)  # of nodes that two stores answered, one of them never hears the end
            await_true(lambda: gate.counter("nodes_forgotten") > 0, "a forgotten node")
            for worker in [pool.submit(use, number) for number in range(3)]:
                worker.result()
        finally:
            has_ended.set()
        letting_go.result()
    assert "unknown node" not in gate.log()
