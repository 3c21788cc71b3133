"""Processes are killed under a running container: no mount dies, and no read gets wrong bytes.

A round kills one process, or several together, while a reader opens files that are not here yet,
a loop starts processes in the container and another lists its directories. A read may fail with
EIO while what it needs is down; it must succeed in the end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.containerd.conftest import NewNode, Push
from tests.support.box_image import GREETING, shell_layer, top_layer
from tests.support.containerd import ContainerdError
from tests.support.images import Image, Layer, directory, file
from tests.support.mounts import mounts_below
from tests.support.node import Node
from tests.support.product import CacheServer, await_true

pytestmark = [pytest.mark.mount, pytest.mark.real, pytest.mark.timeout(900)]
_ROUNDS = 50 if os.environ.get("SNAPSHOTTER_LONG") else 5
_FILES_PER_ROUND = 12
_FILE_BYTES = 70 << 10
"""Larger than a companion: each file is asked for when it is opened, and not before."""
_EXEC = f'[ "$(cat /etc/greeting)" = "{GREETING.decode().strip()}" ]'
_VICTIMS = (
    ("service",),
    ("store",),
    ("cache-server",),
    ("daemon",),
    ("service", "store", "cache-server", "daemon"),
    ("containerd",),
    ("service", "store"),
    ("containerd", "service", "daemon"),
)


def contents(round_number: int) -> dict[str, bytes]:
    noise = random.Random(round_number)
    return {
        f"cold/{round_number}/{n}": noise.randbytes(_FILE_BYTES) for n in range(_FILES_PER_ROUND)
    }


@pytest.fixture
def own_server() -> Iterator[CacheServer]:
    server = CacheServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


class Work:
    """What goes on in a container, round after round, until ``end``; failures end up in it."""

    def __init__(self, node: Node, container: str) -> None:
        self._node = node
        self._container = container
        self._root = Path(f"/proc/{node.containerd.pid_of(container)}/root")
        self._ending = threading.Event()
        self._pool = ThreadPoolExecutor(2)
        self._futures: list[Future[None]] = []
        self._is_containerd_down = False
        self._outages = 0
        self.execs = self.walks = 0

    def start(self) -> None:
        """Begins to start processes in the container and to list its directories."""
        self._futures = [self._pool.submit(self._exec), self._pool.submit(self._walk)]

    @contextlib.contextmanager
    def without_containerd(self) -> Iterator[None]:
        """Meanwhile processes that cannot be started in the container are no failures."""
        self._outages += 1
        self._is_containerd_down = True
        try:
            yield
        finally:
            self._is_containerd_down = False

    def check(self) -> None:
        """Raises what went wrong so far."""
        for future in self._futures:
            if future.done():
                future.result()

    def end(self) -> None:
        """Ends it; raises what went wrong."""
        self._ending.set()
        self._pool.shutdown()
        for future in self._futures:
            future.result()

    def read(self, files: dict[str, bytes], is_recovering: Callable[[], bool]) -> None:
        """Reads files again and again until each was right once; EIO only while recovering."""
        for path, content in files.items():
            while True:
                was_recovering = is_recovering()
                try:
                    found = (self._root / path).read_bytes()
                except OSError as error:
                    if error.errno != errno.EIO or not was_recovering:
                        raise
                    continue
                assert found == content, f"{path}: wrong bytes"
                break

    def _exec(self) -> None:
        while not self._ending.is_set():
            was_down, outages = self._is_containerd_down, self._outages
            try:
                self._node.containerd.check(self._container, "sh", "-c", _EXEC)
            except ContainerdError:
                if not was_down and outages == self._outages:
                    raise
            else:
                self.execs += 1

    def _walk(self) -> None:
        wanted = {f"cold/{r}/{n}" for r in range(_ROUNDS) for n in range(_FILES_PER_ROUND)}
        while not self._ending.is_set():
            found = {
                os.path.relpath(os.path.join(place, name), self._root)
                for place, _, names in os.walk(self._root / "cold", onerror=_raise)
                for name in names
            }
            assert found == wanted
            self.walks += 1


def test_no_death_harms_a_container(new_node: NewNode, own_server: CacheServer, push: Push) -> None:
    directories = [directory("cold"), *(directory(f"cold/{n}") for n in range(_ROUNDS))]
    files = [file(path, data) for n in range(_ROUNDS) for path, data in contents(n).items()]
    image = Image([shell_layer(), Layer([*directories, *files]), top_layer()], env=["PATH=/bin"])
    pushed = push(image)
    node = new_node(server=own_server.socket)
    node.rpull(pushed.reference)
    container = node.containerd.start_container(pushed.reference, "sleep", "100000")
    work = Work(node, container)
    work.start()
    try:
        for number in range(_ROUNDS):
            kill_and_recover(node, own_server, work, _VICTIMS[number % len(_VICTIMS)], number)
            assert_nothing_dead_is_mounted(node)
            work.check()
        done = work.execs, work.walks

        def is_more_done() -> bool:
            work.check()
            return work.execs > done[0] and work.walks > done[1]

        await_true(is_more_done, "one more of each")
    finally:
        work.end()
    node.await_called()
    assert node.containerd.run(pushed.reference, "cat", "/etc/greeting") == GREETING.decode()
    node.containerd.end_container(container)


def kill_and_recover(
    node: Node, server: CacheServer, work: Work, victims: tuple[str, ...], number: int
) -> None:
    """Kills while files of this round are read; they are all read in the end."""
    is_recovering = threading.Event()
    is_recovering.set()
    has_no_containerd = "containerd" in victims
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(work.read, contents(number), is_recovering.is_set)
        try:
            with work.without_containerd() if has_no_containerd else contextlib.nullcontext():
                for victim in victims:
                    kill(node, server, victim)
                for victim in reversed(victims):
                    recover(node, server, victim)
                node.await_up()
        finally:
            is_recovering.clear()
        reading.result(timeout=60)


def kill(node: Node, server: CacheServer, victim: str) -> None:
    if victim == "cache-server":
        server.kill()
    elif victim == "containerd":
        node.containerd.kill()
    elif victim == "service":
        node.kill_service()
    else:
        with contextlib.suppress(Exception):  # the daemon, of whom its pid is asked, may be dead
            node.product.kill(victim)


def recover(node: Node, server: CacheServer, victim: str) -> None:
    if victim == "cache-server":
        server.start()
    elif victim == "containerd":
        node.containerd.start()
    elif victim == "service":
        node.start_service()
    elif victim == "daemon":
        node.product.do("daemon", "start")


def assert_nothing_dead_is_mounted(node: Node) -> None:
    for mount in mounts_below(node.product.base):
        os.statvfs(mount.target)  # ENOTCONN if its server is gone


def _raise(error: OSError) -> None:
    raise error
