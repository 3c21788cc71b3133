"""The Python surface with the whole product and a real image: what its parts do to each other."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from snapshotter import api
from snapshotter.api import aio
from snapshotter.errors import BusyError, InvalidInputError, NotFoundError
from tests.support.debian_image import LocalImage
from tests.support.http_faults import Reply, Seen, scripted
from tests.support.images import Image, Layer, file, tar_bytes, write_layout
from tests.support.product import CacheServer, NewProduct, Product, await_true

pytestmark = [pytest.mark.mount, pytest.mark.real]


@pytest.fixture
def product(new_product: NewProduct, cache_server: CacheServer) -> Product:
    made = new_product(server=cache_server.socket)
    made.do("daemon", "start")
    return made


@pytest.fixture
def client(product: Product) -> Iterator[api.Client]:
    with api.connect(root=product.root, run=product.run, config=product.config) as connected:
        yield connected


def test_a_kept_upper_is_opened_again_and_by_nobody_else_meanwhile(
    client: api.Client, product: Product, debian: LocalImage
) -> None:
    image = client.pull(debian.reference)
    upper = product.base / "kept"
    with client.sandbox(image, upper=upper) as box:
        box.run(["sh", "-c", "echo kept > /etc/motd && rm /etc/passwd"], check=True)
        with pytest.raises(BusyError, match="in use"):
            client.sandbox(image, upper=upper)
    with client.mount(image, upper=upper) as tree:
        assert Path(tree.path, "etc/motd").read_text() == "kept\n"
        assert not Path(tree.path, "etc/passwd").exists()
        assert [record.image for record in client.mounts()] == [debian.reference]
    with client.sandbox(image) as box:
        assert box.run(["test", "-e", "/etc/passwd"]).exit_status == 0
    assert client.mounts() == []


def test_a_mount_in_use_is_told_or_detached(client: api.Client, debian: LocalImage) -> None:
    tree = client.mount(debian.reference)
    with Path(tree.path, "etc/passwd").open() as held:
        with pytest.raises(BusyError, match=str(os.getpid())):
            tree.unmount()
        tree.unmount(lazy=True)
        assert held.readline().startswith("root:")
    tree.unmount()  # again
    assert not os.path.exists(tree)
    with pytest.raises(NotFoundError, match="does not exist"):
        client.mount(debian.reference, "/nonexistent")


def test_sandboxes_outlive_the_daemon(
    client: api.Client, product: Product, debian: LocalImage
) -> None:
    with client.sandbox(debian.reference) as box:
        product.kill("daemon")
        assert box.run(["cat", "/etc/hostname"]).exit_status == 0
    assert [image.references for image in client.images()] == [[debian.reference]]
    await_true(lambda: client.mounts() == [], "the mount goes", log=product.logs)


PROGRAM = """
import sys, time
from snapshotter import api
root, run, image = sys.argv[1:]
client = api.connect(root=root, run=run)
box = client.sandbox(image)
process = box.start(["sh", "-c", "trap '' TERM; (setsid sleep 1000 &); echo up; sleep 1000"])
print(process.stdout.readline().decode(), end="", flush=True)
time.sleep(1000)
"""


def test_a_killed_program_leaves_nothing(product: Product, debian: LocalImage) -> None:
    before = set(product.processes())
    command = [sys.executable, "-c", PROGRAM, product.root, product.run, debian.reference]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=product.environment) as program:
        assert program.stdout is not None
        try:
            assert program.stdout.readline() == b"up\n"
            assert len(product.ask("ps")) == 1
        finally:
            program.send_signal(signal.SIGKILL)
    await_true(lambda: product.ask("ps") == [], "the mount goes", log=product.logs)
    known = before | set(product.status()["processes"].values())
    await_true(lambda: set(product.processes()) <= known, "processes end", log=product.logs)
    assert list((product.root / "mounts").iterdir()) == []


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_pull_that_waits_tells_progress_and_can_be_cancelled(product: Product, loop: str) -> None:
    released = threading.Event()
    said: list[str] = []

    def answer(_: Seen) -> Reply:
        released.wait(60)
        return Reply(404)

    async def main(image: str) -> None:
        async with aio.connect(root=product.root, run=product.run) as client:
            with anyio.CancelScope() as scope:

                def cancel(progress: api.Progress) -> None:
                    said.append(progress.phase)
                    scope.cancel()

                await client.pull(image, on_progress=cancel)
            assert scope.cancelled_caught
            assert not released.is_set()
            released.set()
            with pytest.raises(NotFoundError):
                await client.pull(image)

    with scripted(answer) as registry:
        anyio.run(main, f"docker://{registry.address}/x:1", backend=loop)
    assert said


def test_an_upper_of_another_image_is_refused(
    client: api.Client, product: Product, debian: LocalImage
) -> None:
    write_layout(product.base / "other", {"v1": Image([Layer(tar_bytes([file("f")]))])})
    upper = product.base / "kept"
    with client.mount(debian.reference, upper=upper):
        pass
    with pytest.raises(InvalidInputError, match="upper"):
        client.mount(f"oci:{product.base}/other:v1", upper=upper)
