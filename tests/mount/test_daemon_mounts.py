"""The daemon with its real processes, asked on its control socket."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotter.config import Config
from snapshotter.errors import (
    BusyError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from snapshotter.kernel_view import syscalls
from snapshotter.paths import Paths
from snapshotter.service import control
from snapshotter.service.control_client import ControlClient
from snapshotter.service.uppers import Upper
from tests.support import images
from tests.support.mounts import mounts_below
from tests.support.product import CacheServer, Product, await_true

pytestmark = [pytest.mark.mount, pytest.mark.timeout(180)]

MIB = 1 << 20
LARGE = bytes(range(256)) * (3 * MIB // 256) + b"end"


class Daemon(Product):
    """A daemon below a directory of its own, and its control socket."""

    def __init__(self, server: CacheServer) -> None:
        super().__init__({"large_file_bytes": MIB}, server=server.socket)
        self.paths = Paths(self.root, self.run)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.begin()
        await_true(self.is_up, "daemon", log=self.said)

    def begin(self) -> None:
        arguments = ["--root", self.root, "--run", self.run, "--config", self.config]
        with (self.base / "daemon.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "snapshotter.service.daemon", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
            )

    def is_up(self) -> bool:
        with contextlib.suppress(Exception), ControlClient(self.paths.control_socket) as client:
            running = client.ask(control.Status(), control.Running)
            return all(running.processes.values())
        return False

    def said(self) -> str:
        return (self.base / "daemon.log").read_text()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        assert self._process is not None
        self.tell(control.Stop())
        assert self._process.wait(60) == 0

    def close(self) -> None:
        super().close()
        if self._process is not None:
            self._process.wait()

    def tell(self, request: control.Request) -> None:
        with ControlClient(self.paths.control_socket) as client:
            client.ask(request, control.Done)

    def running(self) -> control.Running:
        with ControlClient(self.paths.control_socket) as client:
            return client.ask(control.Status(), control.Running)

    def pid_of(self, name: str) -> int:
        pid = self.running().processes[name]
        assert pid is not None
        return pid

    def mounts(self) -> dict[str, control.MountRecord]:
        with ControlClient(self.paths.control_socket) as client:
            listed = client.ask(control.ListMounts(), control.Mounts).mounts
        return {mount.id: mount for mount in listed}

    def place(self, name: str, image: str, **options: object) -> tuple[Path, control.MountRecord]:
        """Mounts an image at a new directory."""
        request = control.Mount(image=image, **options)  # type: ignore[arg-type]
        target = self.base / name
        target.mkdir(exist_ok=True)
        with ControlClient(self.paths.control_socket) as client:
            mounted, descriptor = client.mount(request)
            syscalls.move_mount(descriptor, target)
            os.close(descriptor)
            placed = control.Placed(id=mounted.mount.id, target=str(target), pid=os.getpid())
            client.ask(placed, control.Done)
        return target, mounted.mount

    def take(self, target: Path, mount: control.MountRecord) -> None:
        """Unmounts it and says so."""
        syscalls.umount(target)
        self.tell(control.Unmounted(id=mount.id))


@pytest.fixture(scope="module")
def server() -> Iterator[CacheServer]:
    server = CacheServer()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The reference of a small image, and beside it ``…:other``."""
    entries = [
        images.directory("etc", mode=0o750),
        images.file("etc/motd", b"hello\n", uid=5),
        *(images.file(f"etc/{number}", b"%d" % number) for number in range(20)),
        images.file("large", LARGE),
    ]
    path = tmp_path_factory.mktemp("oci") / "layout"
    other = images.Image([images.Layer([images.file("one", b"1")])])
    images.write_layout(path, {"v1": images.Image([images.Layer(entries)]), "other": other})
    return f"oci:{path}:v1"


@pytest.fixture(scope="module")
def module_daemon(server: CacheServer) -> Iterator[Daemon]:
    daemon = Daemon(server)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


@pytest.fixture
def shared(module_daemon: Daemon) -> Iterator[Daemon]:
    """One daemon for all tests that do it no harm; their views are unmounted."""
    yield module_daemon
    for mount in mounts_below(module_daemon.base):
        if mount.fs_type == "overlay":
            syscalls.umount(mount.target, syscalls.MNT_DETACH)
    assert module_daemon.mounts() == {}


@pytest.fixture
def own(server: CacheServer) -> Iterator[Daemon]:
    """A daemon of the test's own."""
    daemon = Daemon(server)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


def test_private_upper_lives_as_long_as_its_mount(shared: Daemon, image: str) -> None:
    target, mount = shared.place("private", image)
    assert (target / "etc" / "motd").read_bytes() == b"hello\n"
    assert (target / "etc").stat().st_mode & 0o7777 == 0o750
    (target / "new").write_text("written")
    upper = Upper(shared.paths.mounts / mount.id)
    assert (upper.upper / "new").read_text() == "written"
    assert shared.mounts()[mount.id].target == str(target)
    shared.take(target, mount)
    assert shared.mounts() == {}
    await_true(lambda: not any(shared.paths.mounts.iterdir()), "the private upper's removal")
    with pytest.raises(NotFoundError):
        shared.tell(control.Unmounted(id=mount.id))


def test_mounts_of_one_image_share_its_metadata_and_not_their_writes(
    shared: Daemon, image: str
) -> None:
    one, first = shared.place("one", image)
    two, second = shared.place("two", image)
    (one / "etc" / "motd").write_text("changed\n")
    assert (two / "etc" / "motd").read_text() == "hello\n"
    assert (one / "large").stat().st_ino == (two / "large").stat().st_ino
    shared.take(one, first)
    shared.take(two, second)


def test_read_only_view_refuses_writes_and_has_no_upper(shared: Daemon, image: str) -> None:
    target, mount = shared.place("read-only", image, read_only=True)
    assert mount.upper is None
    with pytest.raises(OSError, match="Read-only"):
        (target / "new").touch()
    assert (target / "etc" / "1").read_text() == "1"
    shared.take(target, mount)


def test_upper_of_the_user_is_kept_for_its_image_alone(
    shared: Daemon, image: str, tmp_path: Path
) -> None:
    upper = str(tmp_path / "upper")
    target, mount = shared.place("user", image, upper=upper)
    (target / "new").write_text("kept")
    (target / "etc" / "motd").chmod(0o600)
    with pytest.raises(BusyError, match=f"in use by mount {mount.id}"):
        shared.place("second", image, upper=upper)
    shared.take(target, mount)
    target, mount = shared.place("user", image, upper=upper)
    assert (target / "new").read_text() == "kept"
    assert (target / "etc" / "motd").stat().st_mode & 0o7777 == 0o600
    assert (target / "etc" / "motd").read_text() == "hello\n"
    shared.take(target, mount)
    with pytest.raises(InvalidInputError, match="made over"):
        shared.place("user", image.replace(":v1", ":other"), upper=upper)


def test_volatile_upper_can_be_used_again_after_a_clean_unmount(
    shared: Daemon, image: str, tmp_path: Path
) -> None:
    upper = Upper(tmp_path / "upper")
    target, mount = shared.place("volatile", image, upper=str(upper.directory), volatile=True)
    (target / "new").write_text("kept")
    assert upper.volatile_mark.exists()
    shared.take(target, mount)
    target, mount = shared.place("volatile", image, upper=str(upper.directory))
    assert (target / "new").read_text() == "kept"
    shared.take(target, mount)


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[bytes]]:
    """A process that may own mounts."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_end_of_the_owner_ends_the_mount(
    shared: Daemon, image: str, owner: subprocess.Popen[bytes]
) -> None:
    target, mount = shared.place("owned", image, owner_pid=owner.pid)
    (target / "new").touch()
    assert mount.id in shared.mounts()
    syscalls.umount(target, syscalls.MNT_DETACH)
    owner.kill()
    owner.wait()
    await_true(lambda: not any(shared.paths.mounts.iterdir()), "the private upper's removal")
    assert shared.mounts() == {}


@pytest.mark.parametrize("pid", [0, -1, 1 << 22, 1 << 40])
def test_owner_that_is_no_process_is_refused(shared: Daemon, image: str, pid: int) -> None:
    with pytest.raises(InvalidInputError, match="no such process"):
        shared.place("owned", image, owner_pid=pid)
    assert shared.mounts() == {}


def test_plain_umount_is_noticed(shared: Daemon, image: str) -> None:
    target, mount = shared.place("plain", image)
    syscalls.umount(target)
    assert mount.id not in shared.mounts()


def test_view_that_was_named_is_not_replaced(shared: Daemon, image: str) -> None:
    with pytest.raises(UnsupportedError, match="virtiofs: it is for virtual machines"):
        shared.place("virtiofs", image, view="virtiofs")
    with ControlClient(shared.paths.control_socket) as client:
        facts = client.ask(control.Facts(), control.HostFacts)
    assert {fact.name: fact.ok for fact in facts.views} == {
        "kernel": True,
        "fuse": True,
        "virtiofs": True,
    }


def test_large_file_is_served_by_the_kernel_once_it_is_complete(shared: Daemon, image: str) -> None:
    target, mount = shared.place("large", image)

    def reads_at_the_gate() -> int:
        before = shared.running().counters.get("reads", 0)
        with (target / "large").open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert file.read() == LARGE
        return shared.running().counters.get("reads", 0) - before

    reads_at_the_gate()
    await_true(lambda: reads_at_the_gate() == 0, "the view's refresh")
    shared.take(target, mount)


def test_gate_reads_ahead_as_the_settings_say(shared: Daemon) -> None:
    (gate,) = mounts_below(shared.paths.gate)
    setting = Path(f"/sys/class/bdi/{gate.device}/read_ahead_kb").read_text()
    assert int(setting) == Config().read_ahead_kb


def test_second_daemon_is_refused(shared: Daemon) -> None:
    arguments = ["--root", shared.root, "--run", shared.run]
    second = subprocess.run(
        [sys.executable, "-m", "snapshotter.service.daemon", *arguments],
        capture_output=True,
        text=True,
        env=shared.environment,
    )
    assert second.returncode == BusyError.exit_code
    assert "serves it already" in second.stderr


def test_killed_daemon_breaks_nothing_and_its_successor_takes_all_up(
    own: Daemon, image: str, owner: subprocess.Popen[bytes]
) -> None:
    target, mount = own.place("view", image)
    owned_at, owned = own.place("owned", image, owner_pid=owner.pid)
    before = own.running().processes
    own.kill()
    assert (target / "etc" / "2").read_text() == "2"
    syscalls.umount(owned_at)
    owner.kill()
    owner.wait()
    own.start()
    after = own.running().processes
    assert {**after, "daemon": 0} == {**before, "daemon": 0}
    assert list(own.mounts()) == [mount.id]
    assert (target / "etc" / "3").read_text() == "3"
    await_true(lambda: not (own.paths.mounts / owned.id).exists(), "the removal of its upper")


def test_dead_store_is_replaced(own: Daemon, image: str) -> None:
    target, _ = own.place("view", image)
    store = own.pid_of("store")
    os.kill(store, signal.SIGKILL)
    assert (target / "etc" / "4").read_text() == "4"  # waits for the successor
    await_true(own.is_up, "the store's successor")
    assert own.pid_of("store") != store


def test_dead_gate_is_replaced_and_its_views_are_told(own: Daemon, image: str) -> None:
    target, mount = own.place("view", image)
    assert (target / "etc" / "5").read_text() == "5"
    gate = mounts_below(own.paths.gate)
    os.kill(own.pid_of("keeper"), signal.SIGKILL)
    await_true(lambda: mounts_below(own.paths.gate) not in ([], gate), "a new gate", log=own.said)
    await_true(own.is_up, "all processes", log=own.said)
    assert len(mounts_below(own.paths.gate)) == 1
    assert (target / "etc" / "5").read_text() == "5"
    with pytest.raises(OSError, match="large") as caught:
        (target / "large").read_bytes()
    assert caught.value.errno == errno.ENOTCONN
    assert "mount it again" in own.mounts()[mount.id].degraded
    again, second = own.place("again", image)
    assert (again / "large").read_bytes() == LARGE
    assert own.mounts()[second.id].degraded == ""


def test_gate_that_somebody_unmounted_is_made_anew(own: Daemon, image: str) -> None:
    syscalls.umount(own.paths.gate, syscalls.MNT_DETACH)
    target, mount = own.place("view", image)
    assert (target / "etc" / "8").read_text() == "8"
    syscalls.umount(own.paths.gate, syscalls.MNT_DETACH)  # it lives on below the view
    with pytest.raises(UnavailableError, match="somebody unmounted it"):
        own.place("again", image)
    await_true(lambda: mounts_below(own.paths.gate) != [], "a new gate", log=own.said)
    await_true(own.is_up, "all processes", log=own.said)
    again, second = own.place("again", image)
    assert (again / "large").read_bytes() == LARGE
    degraded = {mount.id: mount.degraded != "" for mount in own.mounts().values()}
    assert degraded == {mount.id: True, second.id: False}


def test_many_mounts_at_once(own: Daemon, image: str) -> None:
    with ThreadPoolExecutor(16) as pool:
        placed = list(pool.map(lambda n: own.place(f"view{n}", image), range(64)))
        read = pool.map(lambda view: (view[0] / "etc" / "motd").read_text(), placed)
        assert set(read) == {"hello\n"}
        assert len(own.mounts()) == 64
        list(pool.map(lambda view: own.take(*view), placed))
    assert own.mounts() == {}
    await_true(lambda: not any(own.paths.mounts.iterdir()), "the removal of the uppers")


def test_stop_at_once_leaves_nothing(server: CacheServer) -> None:
    daemon = Daemon(server)
    try:
        daemon.begin()
        await_true(daemon.paths.control_socket.exists, "the control socket", log=daemon.said)
        daemon.stop()
        assert daemon.processes() == []
        assert mounts_below(daemon.base) == []
    finally:
        daemon.close()


def test_stop_leaves_what_mounts_need_and_otherwise_nothing(own: Daemon, image: str) -> None:
    target, mount = own.place("view", image)
    own.stop()
    assert (target / "etc" / "7").read_text() == "7"  # cold: keeper and store go on
    own.start()
    own.take(target, mount)
    own.stop()
    assert own.processes() == []
    assert mounts_below(own.base) == []
    assert list(own.paths.mounts.iterdir()) == []
