"""Large files through a view while they fill: every way to read them, and everything that fails."""

import hashlib
import importlib.machinery
import importlib.util
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.digest import format_digest
from snapshotter.names import CHUNK_SIZE, ContentName
from tests.support.gate_mount import GateMount, wait_until
from tests.support.large_readers import WAYS
from tests.support.server_thread import ServerThread

pytestmark = pytest.mark.mount

_SIZE_BYTES = 30 * CHUNK_SIZE + 4321
_REPOSITORY = Path(__file__).resolve().parents[2]


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


def content_of(seed: int) -> bytes:
    return random.Random(seed).randbytes(_SIZE_BYTES)


def add(
    gate: GateMount, server: ServerThread, path: str, content: bytes, mode: int = 0o644
) -> ContentName:
    name = gate.add_file(path, content, mode)
    assert server.server.add(content) == name
    return name


def chunk_digests(content: bytes) -> list[bytes]:
    return [
        hashlib.sha256(content[at : at + CHUNK_SIZE]).digest()
        for at in range(0, len(content), CHUNK_SIZE)
    ]


def read_in(gate: GateMount, way: str, path: Path, name: ContentName) -> str:
    """What the way of reading says of the file, compared with the original of that name."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.support.large_readers",
            way,
            str(path),
            str(gate.originals / name.path),
        ],
        cwd=_REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    return process.communicate(timeout=60)[0].strip()


def files_below(directory: Path) -> list[str]:
    return [file for _, _, files in os.walk(directory) for file in files]


def padded(path: str) -> bytes:
    """An ELF file of 30 MiB: what comes after its last section is of no concern to a loader."""
    return Path(path).read_bytes() + content_of(5)


def test_every_way_to_read_a_cold_file(gate: GateMount, server: ServerThread) -> None:
    names = {way: add(gate, server, way, content_of(seed)) for seed, way in enumerate(WAYS)}
    view = gate.view()
    assert {way: read_in(gate, way, view / way, name) for way, name in names.items()} == (
        dict.fromkeys(WAYS, "same")
    )
    assert max(server.server.fetched.values()) == 1


def test_a_cold_program_and_a_cold_library_run(gate: GateMount, server: ServerThread) -> None:
    backend = importlib.util.find_spec("zstandard.backend_c")
    assert backend is not None
    assert backend.origin is not None
    add(gate, server, "python", padded(os.path.realpath(sys.executable)), 0o755)
    add(gate, server, "backend_c.so", padded(backend.origin))
    view = gate.view()
    program = gate.run(view / "python", "-I", "-S", "-c", "print(sum(range(100)))")
    assert program.communicate()[0] == b"4950\n"
    code = (
        "import sys, importlib.machinery as machinery, importlib.util as util\n"
        "loader = machinery.ExtensionFileLoader('zstandard.backend_c', sys.argv[1])\n"
        "spec = util.spec_from_file_location('zstandard.backend_c', loader=loader)\n"
        "module = util.module_from_spec(spec)\n"
        "loader.exec_module(module)\n"
        "packed = module.ZstdCompressor().compress(b'x' * 100_000)\n"
        "print(len(module.ZstdDecompressor().decompress(packed)))\n"
    )
    library = gate.run(sys.executable, "-c", code, view / "backend_c.so")
    assert library.communicate()[0] == b"100000\n"


def test_a_killed_store_keeps_its_chunks_and_an_open_file_goes_on(
    gate: GateMount, server: ServerThread
) -> None:
    content = content_of(1)
    name = add(gate, server, "file", content)
    view = gate.view()
    code = (
        "import os, sys\n"
        "file = os.open(sys.argv[1], os.O_RDONLY)\n"
        "for chunk in (20, 3, 11, 7):\n"
        "    os.pread(file, 1 << 20, chunk << 20)\n"
        "print('read', flush=True)\n"
        "sys.stdin.read(1)\n"
        "os.lseek(file, 0, 0)\n"
        "sys.stdout.buffer.write(os.fdopen(file, 'rb').read())\n"
    )
    reader = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code, view / "file"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"read\n"
    gate.store.send_signal(signal.SIGKILL)
    gate.store.wait()
    gate.start_store()
    assert reader.communicate(b"x", timeout=60)[0] == content
    digests = chunk_digests(content)
    assert [server.server.fetched[format_digest(digests[chunk])] for chunk in (20, 3, 11, 7)] == [
        1
    ] * 4
    assert set(server.server.fetched) == {format_digest(digest) for digest in digests}
    wait_until((gate.root / "objects" / name.path).exists)


def test_a_store_that_is_killed_again_and_again(gate: GateMount, server: ServerThread) -> None:
    contents = [content_of(seed) for seed in range(3)]
    names = [add(gate, server, f"file{at}", content) for at, content in enumerate(contents)]
    view = gate.view()
    readers = [gate.run("/usr/bin/sha256sum", view / f"file{at}") for at in range(len(contents))]
    for chunks in (8, 24, 40, 56):
        wait_until(lambda chunks=chunks: server.server.fetched.total() >= chunks)
        gate.store.kill()
        gate.store.wait()
        gate.start_store()
    digests = [reader.communicate()[0].split()[0].decode() for reader in readers]
    assert digests == [hashlib.sha256(content).hexdigest() for content in contents]
    for name in names:
        wait_until((gate.root / "objects" / name.path).exists)


def test_a_complete_file_is_an_object_alone(gate: GateMount, server: ServerThread) -> None:
    content = content_of(2)
    name = add(gate, server, "file", content)
    view, second = gate.view(), gate.view()
    assert gate.read(view / "file") == content
    wait_until((gate.root / "objects" / name.path).exists)
    wait_until(lambda: not files_below(gate.root / "partial"))
    reads = gate.counter("reads")
    assert gate.read(gate.view() / "file") == content
    assert gate.read(second / "file") == content
    assert gate.counter("reads") == reads
    # The first view's file is the gate's for good: it reads the object, and fetches it once more
    # when that was evicted.
    forget = (
        "import os, sys\n"
        "file = os.open(sys.argv[1], os.O_RDONLY)\n"
        "os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)\n"
    )
    for directory in ("", "objects arrivals"):
        for part in directory.split():
            (gate.root / part / name.path).unlink(missing_ok=True)
        gate.python(forget, view / "file").communicate()
        assert gate.read(view / "file") == content
    assert gate.counter("reads") > reads


def test_a_chunk_that_fails_fails_alone_and_not_for_ever(
    gate: GateMount, server: ServerThread
) -> None:
    content = content_of(3)
    add(gate, server, "file", content)
    bad = chunk_digests(content)[17]
    server.server.corrupt(bad)
    view = gate.view()
    pread = (
        "import os, sys\n"
        "file = os.open(sys.argv[1], os.O_RDONLY)\n"
        "sys.stdout.buffer.write(os.pread(file, 5000, int(sys.argv[2]) << 20))\n"
    )
    fault = (
        "import mmap, os, sys\n"
        "file = os.open(sys.argv[1], os.O_RDONLY)\n"
        "view = mmap.mmap(file, 0, prot=mmap.PROT_READ)\n"
        "start = int(sys.argv[2]) << 20\n"
        "sys.stdout.buffer.write(view[start : start + 5000])\n"
    )
    before, bad_read, bad_fault = (
        gate.python(code, view / "file", chunk)
        for code, chunk in ((pread, "16"), (pread, "17"), (fault, "17"))
    )
    assert before.communicate()[0] == content[16 << 20 : (16 << 20) + 5000]
    assert b"Errno 5" in bad_read.communicate()[1]
    assert bad_fault.communicate() == (b"", b"")
    assert bad_fault.returncode == -signal.SIGBUS
    assert format_digest(bad) in gate.log()
    server.server.corrupt(bad)  # the same bit again: right now
    for code in (pread, fault):
        output, _ = gate.python(code, view / "file", "17").communicate()
        assert output == content[17 << 20 : (17 << 20) + 5000]
    assert gate.read(view / "file") == content
