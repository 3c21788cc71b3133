import os
import signal
import stat
from collections.abc import Iterator

import pytest

from tests.support.gate_mount import GateMount, wait_until

pytestmark = pytest.mark.mount

LARGE = os.urandom(1 << 20) * 12 + b"the end"


@pytest.fixture
def gate() -> Iterator[GateMount]:
    mounted = GateMount()
    yield mounted
    mounted.close()


def test_a_cold_file_is_fetched_once_and_then_needs_the_gate_no_more(gate: GateMount) -> None:
    name = gate.add_file("etc/motd", b"welcome\n")
    first, second = gate.view(), gate.view()
    assert (first / "etc/motd").stat().st_size == 8
    assert not gate.fetched()
    assert gate.read(first / "etc/motd") == b"welcome\n"
    assert gate.read(second / "etc/motd") == b"welcome\n"
    assert gate.fetched() == [f"object {name} 7"]
    gate.store.kill()
    gate.store.wait()
    assert gate.read(first / "etc/motd") == b"welcome\n"


def test_a_failed_fetch_is_an_io_error_and_the_next_open_succeeds(gate: GateMount) -> None:
    name = gate.add_file("file", b"content")
    view = gate.view()
    gate.order("fail")
    with pytest.raises(OSError, match="Input/output error"):
        gate.read(view / "file")
    assert (view / "file").stat().st_size == 7
    gate.release("fail")
    assert gate.read(view / "file") == b"content"
    assert gate.fetched() == [f"object {name} 7"] * 2
    assert f'"object": "{name}", "cause": "told to fail"' in gate.log()


def test_an_object_without_its_arrival_is_found_by_the_kernels_own_retry(gate: GateMount) -> None:
    """Another view's lookup was answered as the content came, but the arrival is gone by then."""
    name = gate.add_file("file", b"content")
    view = gate.view()
    gate.order("hold")
    reader = gate.run("/bin/cat", view / "file")
    wait_until(lambda: len(gate.fetched()) == 1)
    (gate.root / "objects" / name.path).write_bytes(b"content")
    gate.order("fail")
    gate.release("hold")
    assert reader.communicate() == (b"content", b"")


@pytest.mark.parametrize("how", ["read", "mmap"])
def test_a_large_file_is_served_by_chunk(gate: GateMount, how: str) -> None:
    name = gate.add_file("large", LARGE)
    view = gate.view()
    code = {
        "read": "import sys; sys.stdout.buffer.write(open(sys.argv[1], 'rb').read())",
        "mmap": "import mmap, sys; f = open(sys.argv[1], 'rb')\n"
        "sys.stdout.buffer.write(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)[:])",
    }[how]
    output, errors = gate.python(code, view / "large").communicate()
    assert not errors
    assert output == LARGE
    assert gate.fetched()[0] == f"table {name} 7"
    assert f"range {name} 0" in gate.fetched()
    assert not (gate.root / "objects" / name.path).exists()


def test_a_large_program_runs_from_the_gate(gate: GateMount) -> None:
    with open("/bin/true", "rb") as program:
        content = program.read()
    gate.add_file("true", content + bytes(9 << 20), mode=0o755)
    view = gate.view()
    process = gate.run(view / "true")
    process.communicate()
    assert process.returncode == 0


def test_a_failing_chunk_is_an_io_error_until_it_comes(gate: GateMount) -> None:
    gate.add_file("large", LARGE)
    view = gate.view()
    descriptor = os.open(view / "large", os.O_RDONLY)
    try:
        gate.order("fail")
        with pytest.raises(OSError, match="Input/output error"):
            os.pread(descriptor, 10, 5 << 20)
        gate.release("fail")
        assert os.pread(descriptor, 10, 5 << 20) == LARGE[5 << 20 : (5 << 20) + 10]
    finally:
        os.close(descriptor)


def test_changing_metadata_of_cold_files_fetches_nothing(gate: GateMount) -> None:
    names = [gate.add_file(f"tree/{number}", b"%d" % number) for number in range(10)]
    name = gate.add_file("tree/large", LARGE)
    view = gate.view(is_writable=True)
    gate.order("fail")
    code = (
        "import os, sys\nos.chdir(sys.argv[1])\nfor name in os.listdir(): os.chown(name, 3, 4)\n"
        "os.chmod('1', 0o600); os.utime('2', (5, 6)); os.link('3', 'three')\n"
        "os.rename('4', 'four'); os.setxattr('5', 'trusted.a', b'b')"
    )
    _, errors = gate.python(code, view / "tree").communicate()
    assert not errors
    assert not gate.fetched()
    assert (view / "tree/0").stat().st_uid == 3
    assert stat.S_IMODE((view / "tree/1").stat().st_mode) == 0o600
    gate.release("fail")
    assert gate.read(view / "tree/three") == b"3"
    assert gate.read(view / "tree/four") == b"4"
    assert gate.read(view / "tree/large") == LARGE
    assert gate.fetched()[0] == f"range {names[3]} 0"
    assert f"range {name} 0" in gate.fetched()


def test_a_name_keeps_its_fuse_file_in_later_views(gate: GateMount) -> None:
    name = gate.add_file("file", b"content")
    first = gate.view(is_writable=True)
    gate.run("/bin/chmod", "600", first / "file").communicate()
    second = gate.view(image=8)
    assert gate.read(second / "file") == b"content"
    assert gate.fetched() == [f"range {name} 0"]
    assert gate.read(first / "file") == b"content"


def test_a_killed_reader_dies_at_once(gate: GateMount) -> None:
    gate.add_file("file", b"content")
    view = gate.view()
    gate.order("hold")
    reader = gate.run("/bin/cat", view / "file")
    wait_until(lambda: len(gate.fetched()) == 1)
    reader.kill()
    reader.wait(5)
    gate.release("hold")
    assert gate.read(view / "file") == b"content"
    assert len(gate.fetched()) == 1


HANDLES_USR1 = (
    "import os, signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'handled'))\n"
    "os.close(os.open(sys.argv[1], os.O_RDONLY))"
)


def test_a_signal_with_a_handler_does_not_disturb_an_open(gate: GateMount) -> None:
    gate.add_file("file", b"content")
    view = gate.view()
    gate.order("hold")
    reader = gate.python(HANDLES_USR1, view / "file")
    wait_until(lambda: len(gate.fetched()) == 1)
    reader.send_signal(signal.SIGUSR1)
    wait_until(lambda: gate.counter("interrupts") == 1)
    gate.release("hold")
    assert reader.communicate() == (b"handled", b"")


def test_a_kill_after_a_handled_signal_ends_the_wait_too(gate: GateMount) -> None:
    """The kernel tells of the first signal alone."""
    gate.add_file("file", b"content")
    view = gate.view()
    gate.order("hold")
    reader = gate.python(HANDLES_USR1, view / "file")
    wait_until(lambda: len(gate.fetched()) == 1)
    reader.send_signal(signal.SIGUSR1)
    wait_until(lambda: gate.counter("interrupts") == 1)
    assert reader.poll() is None
    reader.kill()
    reader.wait(5)


def test_many_readers_of_one_file_make_one_fetch(gate: GateMount) -> None:
    gate.add_file("file", b"content")
    views = [gate.view() for _ in range(4)]
    gate.order("hold")
    readers = [gate.run("/bin/cat", views[number % 4] / "file") for number in range(64)]
    wait_until(lambda: len(gate.fetched()) == 1)
    gate.release("hold")
    assert {reader.communicate() for reader in readers} == {(b"content", b"")}
    assert len(gate.fetched()) == 1


def test_cold_files_of_one_directory_are_fetched_side_by_side(gate: GateMount) -> None:
    """The fetches wait until all have begun, so this ends only if lookups overlap."""
    contents = [b"content %d" % number for number in range(40)]
    for number, content in enumerate(contents):
        gate.add_file(f"{number}", content)
    view = gate.view()
    gate.order("hold")
    readers = [gate.run("/bin/cat", view / str(number)) for number in range(40)]
    wait_until(lambda: len(gate.fetched()) == 40)
    gate.release("hold")
    assert [reader.communicate()[0] for reader in readers] == contents


@pytest.mark.parametrize("what", ["small", "large", "read"])
def test_a_successor_completes_what_a_killed_store_left(gate: GateMount, what: str) -> None:
    path = "small" if what == "small" else "large"
    content = b"content" if what == "small" else LARGE
    gate.add_file(path, content)
    view = gate.view()
    if what == "read":  # the node is known, only its chunks are missing
        os.close(os.open(view / path, os.O_RDONLY))
    before = len(gate.fetched())
    gate.order("hold")
    reader = gate.run("/bin/cat", view / path)
    wait_until(lambda: len(gate.fetched()) > before)
    gate.store.kill()
    gate.store.wait()
    gate.release("hold")
    gate.start_store()
    assert reader.communicate() == (content, b"")


def test_a_store_that_is_told_to_end_leaves_requests_to_its_successor(gate: GateMount) -> None:
    gate.add_file("file", b"content")
    view = gate.view()
    gate.order("hold")
    reader = gate.run("/bin/cat", view / "file")
    wait_until(lambda: len(gate.fetched()) == 1)
    gate.store.terminate()
    assert gate.store.wait(5) == 0
    assert reader.poll() is None
    gate.release("hold")
    gate.start_store()
    assert reader.communicate() == (b"content", b"")


def test_an_asker_killed_while_there_is_no_store_dies_with_the_next(gate: GateMount) -> None:
    gate.add_file("file", b"content")
    view = gate.view()
    gate.order("hold")
    reader = gate.run("/bin/cat", view / "file")
    wait_until(lambda: len(gate.fetched()) == 1)
    gate.store.kill()
    gate.store.wait()
    reader.kill()
    gate.start_store()
    reader.wait(10)


def test_names_that_are_no_objects_do_not_exist(gate: GateMount) -> None:
    root = gate.root / "gate"
    for name in ("x", "g", "g01", "g-1", "v1", "g1/xx", "g1/AB", "g1/ab/file", "g1/ab/00.1"):
        with pytest.raises(FileNotFoundError):
            (root / name).stat()
    assert (root / "g0/ab").is_dir()
    assert (root / "v/00").is_dir()
    assert os.listdir(root) == []


class TestDeadline:
    @pytest.fixture
    def gate(self) -> Iterator[GateMount]:
        mounted = GateMount(deadline_s=0.2)
        yield mounted
        mounted.close()

    def test_an_open_fails_at_the_deadline_and_its_fetch_goes_on(self, gate: GateMount) -> None:
        gate.add_file("file", b"content")
        view = gate.view()
        gate.order("hold")
        with pytest.raises(OSError, match="Input/output error"):
            gate.read(view / "file")
        gate.release("hold")
        wait_until(lambda: any((gate.root / "objects").glob("??/*")))
        assert gate.read(view / "file") == b"content"
        assert len(gate.fetched()) == 1


class TestPatience:
    @pytest.fixture
    def gate(self) -> Iterator[GateMount]:
        mounted = GateMount(patience_s=3.0)  # a store has to start within it
        yield mounted
        mounted.close()

    def test_without_a_store_the_gate_ends_and_a_new_one_serves_new_views(
        self, gate: GateMount
    ) -> None:
        gate.add_file("warm", b"warm")
        gate.add_file("cold", b"cold")
        view = gate.view()
        assert gate.read(view / "warm") == b"warm"
        gate.order("hold")
        reader = gate.run("/bin/cat", view / "cold")
        wait_until(lambda: len(gate.fetched()) == 2)
        gate.store.kill()
        gate.store.wait()
        assert b"Transport endpoint is not connected" in reader.communicate()[1]
        assert gate.read(view / "warm") == b"warm"
        gate.run("/bin/umount", "-l", gate.root / "gate").communicate()
        gate.release("hold")
        gate.mount_gate()
        gate.start_store()
        assert gate.read(gate.view() / "cold") == b"cold"
