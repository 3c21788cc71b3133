"""The real store behind the real gate; only the cache server is to order."""

import hashlib
import os
from collections.abc import Iterator

import pytest

from tests.support.gate_mount import GateMount, wait_until
from tests.support.server_thread import ServerThread

pytestmark = pytest.mark.mount

LARGE = os.urandom(12 << 20) + b"the end"


@pytest.fixture
def gate() -> Iterator[GateMount]:
    mounted = GateMount(has_real_store=True)
    yield mounted
    mounted.close()


@pytest.fixture
def server(gate: GateMount) -> Iterator[ServerThread]:
    thread = ServerThread(gate.root / "run/cache.sock")
    yield thread
    thread.close()


def add(gate: GateMount, server: ServerThread, path: str, content: bytes) -> str:
    name = gate.add_file(path, content)
    assert server.server.add(content) == name
    return name.path


def test_small_middle_and_large_files(gate: GateMount, server: ServerThread) -> None:
    contents = {"small": b"content", "middle": LARGE[7 : 3 << 20], "large": LARGE}
    names = {path: add(gate, server, path, content) for path, content in contents.items()}
    view = gate.view()
    for path, content in contents.items():
        assert gate.read(view / path) == content
    assert all(count == 1 for count in server.server.fetched.values())
    for name in names.values():
        wait_until((gate.root / "objects" / name).exists)
    reads = gate.counter("reads")
    assert reads > 0
    for path, content in contents.items():
        assert gate.read(gate.view() / path) == content
    assert gate.counter("reads") == reads


def test_a_metadata_change_then_a_read(gate: GateMount, server: ServerThread) -> None:
    contents = {"small": b"content", "large": LARGE}
    for path, content in contents.items():
        add(gate, server, path, content)
    view = gate.view(is_writable=True)
    for path in contents:
        gate.run("/bin/chown", "5:6", view / path).communicate()
    assert not server.server.requests
    for path, content in contents.items():
        assert (view / path).stat().st_uid == 5
        assert gate.read(view / path) == content
    assert gate.counter("metadata_only_lookups") == 2


@pytest.mark.parametrize("path", ["small", "large"])
def test_a_successor_completes_what_a_killed_store_left(
    gate: GateMount, server: ServerThread, path: str
) -> None:
    content = b"content" if path == "small" else LARGE
    add(gate, server, path, content)
    view = gate.view()
    if path == "large":
        descriptor = os.open(view / path, os.O_RDONLY)
        assert os.pread(descriptor, 10, 0) == content[:10]
        os.close(descriptor)
    server.hold()
    before = len(server.server.requests)
    reader = gate.run("/usr/bin/sha256sum", view / path)
    wait_until(lambda: len(server.server.requests) > before)
    gate.store.kill()
    gate.store.wait()
    server.release()
    gate.start_store()
    assert reader.communicate()[0].split()[0].decode() == hashlib.sha256(content).hexdigest()


def test_a_server_that_is_away_and_comes_back(gate: GateMount) -> None:
    name = gate.add_file("file", b"content")
    view = gate.view()
    with pytest.raises(OSError, match="Input/output error"):
        gate.read(view / "file")
    assert str(name) in gate.log()
    server = ServerThread(gate.root / "run/cache.sock")
    try:
        server.server.add(b"content")
        assert gate.read(view / "file") == b"content"
    finally:
        server.close()


def test_the_process_ends_in_good_order_and_keeps_a_second_one_out(gate: GateMount) -> None:
    wait_until((gate.root / "run/store.sock").exists)
    first = gate.store
    second = gate.start_store()
    assert second.wait(20) == 6
    assert "cannot run" in gate.log()
    first.terminate()
    assert first.wait(20) == 0
    assert "Traceback" not in gate.log()
