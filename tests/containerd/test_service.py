"""The service for containerd as a process, called and killed as on a node, with real mounts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotter.errors import ExistsError, InvalidInputError, NotFoundError
from snapshotter.kernel_view import syscalls
from tests.support.box_image import GREETING, box_image, data_files
from tests.support.images import Image, Layer, directory, file, whiteout, write_layout
from tests.support.mounts import mounts_below
from tests.support.product import CacheServer, Product
from tests.support.snapshots_service import SnapshotsService, chain_ids

pytestmark = [pytest.mark.mount]


@pytest.fixture
def service(cache_server: CacheServer) -> Iterator[SnapshotsService]:
    """A service over a product of its own that is up."""
    product = Product(server=cache_server.socket)
    made = SnapshotsService(product)
    try:
        made.start()
        yield made
    finally:
        made.close()
        product.close()


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layout of a box image."""
    return write_layout(tmp_path_factory.mktemp("box") / "oci", {"v1": box_image(seed=4711)})


def check_data(root: Path) -> None:
    """Every file of the box image below ``root`` is what it was."""
    for path, data in data_files(seed=4711).items():
        assert (root / path).read_bytes() == data, path


def test_container_of_a_remote_image_reads_and_writes(service: SnapshotsService, box: Path) -> None:
    top = service.pull(box)
    with service.container(top) as root:
        check_data(root)
        assert (root / "etc/greeting").read_bytes() == GREETING
        assert not (root / "etc/old").exists()
        status = root.stat()
        assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o750, 7, 8)
        (root / "data/0/000").write_bytes(b"mine")
        (root / "etc/greeting").chmod(0o600)
        assert os.statvfs(root).f_blocks > 0
        (other,) = [m for m in mounts_below(service.state) if m.fs_type == "erofs"]
        with service.container(top, "second") as second:
            check_data(second)
            assert [m for m in mounts_below(service.state) if m.fs_type == "erofs"] == [other]
    service.call("Cleanup")
    assert service.directories() == set()
    assert mounts_below(service.state) == []


def test_view_of_a_remote_image_is_read_only(service: SnapshotsService, box: Path) -> None:
    mounts = service.call("View", key=service.key("v"), parent=service.pull(box)).mounts
    root = service.mount(mounts, "view")
    check_data(root)
    assert os.statvfs(root).f_blocks > 0
    with pytest.raises(OSError, match="Read-only file system"):
        (root / "new").touch()


def test_commit_on_a_remote_image_holds_what_was_changed_and_no_headers(
    service: SnapshotsService, box: Path
) -> None:
    key = service.key("build")
    root = service.mount(service.call("Prepare", key=key, parent=service.pull(box)).mounts, "build")
    (root / "etc/passwd").unlink()
    (root / "data/1/001").chmod(0o711)
    (root / "etc/new").write_bytes(b"new")
    syscalls.umount(root)
    service.call("Commit", name="default/9/image", key=key)
    usage = service.call("Usage", key="default/9/image")
    assert usage.inodes >= 5
    assert usage.size >= len(data_files(4711)["data/1/001"])
    for path in (service.state / "snapshots").rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert "trusted.overlay.metacopy" not in os.listxattr(path)
    with service.container("default/9/image") as above:
        assert sorted(os.listdir(above / "etc")) == ["greeting", "new"]
        assert (above / "data/1/001").stat().st_mode & 0o777 == 0o711
        assert (above / "data/1/001").read_bytes() == data_files(4711)["data/1/001"]


def test_remote_layer_above_an_ordinary_one_and_below_another(
    service: SnapshotsService, tmp_path: Path
) -> None:
    layers = [
        Layer([directory("d"), file("d/base", b"base"), file("gone", b"x")]),
        Layer([file("d/middle", b"middle"), whiteout("gone")]),
    ]
    layout = write_layout(tmp_path / "oci", {"v1": Image(layers)})
    first, second = chain_ids(layout)
    key = service.key("extract")
    root = service.mount(service.call("Prepare", key=key, parent="").mounts, "extract")
    (root / "d").mkdir()
    (root / "d/base").write_bytes(b"base")  # as containerd unpacks it
    (root / "gone").write_bytes(b"x")
    syscalls.umount(root)
    service.call("Commit", name=f"default/1/{first}", key=key)
    remote = service.pull_chain(second, f"default/1/{first}", f"oci:{layout}:v1")
    key = service.key("top")
    root = service.mount(service.call("Prepare", key=key, parent=remote).mounts, "top")
    assert {path.name: path.read_bytes() for path in (root / "d").iterdir()} == {
        "base": b"base",
        "middle": b"middle",
    }
    (root / "d/base").unlink()
    (root / "d/top").write_bytes(b"top")
    syscalls.umount(root)
    service.call("Commit", name="default/2/top", key=key)
    with service.container("default/2/top") as above:
        assert sorted(os.listdir(above / "d")) == ["middle", "top"]
        assert sorted(os.listdir(above)) == ["d"]


def test_eight_threads_on_one_image_leave_nothing(service: SnapshotsService, box: Path) -> None:
    top = service.pull(box)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round_ in range(4):
                assert service.pull(box) == top
                with service.container(top, f"t{number}-{round_}") as root:
                    assert (root / "etc/greeting").read_bytes() == GREETING
                    (root / "tmp/x").write_bytes(b"x")
                service.call("Cleanup")
        except BaseException as error:
            failures.append(error)

    before = len(os.listdir(f"/proc/{service.pid}/fd"))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert failures == []
    service.call("Cleanup")
    assert service.directories() == set()
    assert mounts_below(service.state) == []
    assert len(os.listdir(f"/proc/{service.pid}/fd")) <= before + 8  # idle connections of gRPC


def test_image_of_128_layers_below_a_long_root(cache_server: CacheServer, tmp_path: Path) -> None:
    layers = [Layer([file(f"f{n:03}", b"%d" % n)]) for n in range(128)]
    layout = write_layout(tmp_path / "oci", {"v1": Image(layers)})
    product = Product(server=cache_server.socket)
    product.root = product.base / ("r" * 120) / ("s" * 100)
    product.root.mkdir(parents=True)
    service = SnapshotsService(product)
    try:
        service.start()
        with service.container(service.pull(layout)) as root:
            assert sorted(os.listdir(root)) == [f"f{n:03}" for n in range(128)]
            assert (root / "f127").read_bytes() == b"127"
    finally:
        service.close()
        product.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_end_of_the_service_disturbs_no_container(
    service: SnapshotsService, box: Path, number: signal.Signals
) -> None:
    top = service.pull(box)
    key = service.key("c")
    mounts = service.call("Prepare", key=key, parent=top).mounts
    root = service.mount(mounts, "c")
    assert service.end(number) in (0, -number)
    check_data(root)
    (root / "etc/greeting").write_bytes(b"changed")
    service.start()
    assert service.call("Mounts", key=key).mounts == mounts
    service.call("Cleanup")
    assert (root / "etc/greeting").read_bytes() == b"changed"
    syscalls.umount(root)


def test_stop_of_the_daemon_leaves_what_containers_need(
    service: SnapshotsService, box: Path
) -> None:
    with service.container(service.pull(box)) as root:
        service.product.do("daemon", "stop")
        check_data(root)  # the store serves on
        (listed,) = service.product.ask("ps")
        assert (listed["lent"], listed["degraded"]) == (True, "")


def test_container_is_mounted_again_after_a_reboot_without_a_cache_server(box: Path) -> None:
    server = CacheServer()
    product = Product(server=server.socket)
    service = SnapshotsService(product)
    try:
        server.start()
        service.start()
        key = service.key("c")
        top = service.pull(box)
        root = service.mount(service.call("Prepare", key=key, parent=top).mounts, "c")
        check_data(root)
        (root / "etc/greeting").write_bytes(b"changed")
        syscalls.umount(root)
        service.close()
        server.kill()
        product.end()  # every process and every mount, as a reboot does
        service.start()
        root = service.mount(service.call("Mounts", key=key).mounts, "c")
        check_data(root)
        assert (root / "etc/greeting").read_bytes() == b"changed"
        assert service.pull(box) == top
        syscalls.umount(root)
    finally:
        service.close()
        product.close()
        server.close()


def test_layer_is_ordinary_while_the_cache_server_is_away(tmp_path: Path, box: Path) -> None:
    product = Product(server=tmp_path / "nobody.sock")
    service = SnapshotsService(product)
    try:
        service.start()
        with pytest.raises(AssertionError, match="is not remote"):
            service.pull(box)
        assert "layer cannot be remote; containerd fetches it" in product.log("containerd")
        assert product.counters()["chains_refused"] == 1
    finally:
        service.close()
        product.close()


def test_damaged_records_cost_the_snapshots_and_no_container(
    service: SnapshotsService, box: Path
) -> None:
    key = service.key("c")
    root = service.mount(service.call("Prepare", key=key, parent=service.pull(box)).mounts, "c")
    service.end(signal.SIGKILL)
    records = service.state / "snapshots.db"
    records.write_bytes(records.read_bytes()[:5000])
    for side in ("-wal", "-shm"):
        (service.state / f"snapshots.db{side}").unlink(missing_ok=True)
    service.start()
    assert service.names() == []
    assert "all snapshots are forgotten" in service.product.log("containerd")
    service.call("Cleanup")
    check_data(root)
    (root / "etc/greeting").write_bytes(b"changed")
    service.pull(box)
    syscalls.umount(root)


def test_mounted_snapshot_that_was_removed_stays_until_it_is_unmounted(
    service: SnapshotsService, box: Path
) -> None:
    key = service.key("c")
    top = service.pull(box)
    root = service.mount(service.call("Prepare", key=key, parent=top).mounts, "c")
    plain = service.key("plain")
    bound = service.mount(service.call("Prepare", key=plain, parent="").mounts, "plain")
    (bound / "file").touch()
    for each in (key, plain):
        service.call("Remove", key=each)
    service.call("Cleanup")
    check_data(root)
    (root / "etc/greeting").write_bytes(b"changed")
    assert (bound / "file").exists()
    syscalls.umount(root)
    syscalls.umount(bound)
    service.call("Cleanup")
    assert service.directories() == set()


def test_second_service_for_the_same_state_is_refused(service: SnapshotsService) -> None:
    done = service.product.cli("containerd", "serve", "--socket", service.product.base / "2.sock")
    assert done.returncode == 6
    assert "each containerd needs a service of its own" in done.stderr
    done = service.product.cli("containerd", "serve", "--state", service.product.base / "state2")
    assert done.returncode == 6
    assert "each containerd needs a service of its own" in done.stderr


def test_calls_fail_with_their_own_codes(service: SnapshotsService) -> None:
    service.call("Prepare", key="k", parent="")
    with pytest.raises(ExistsError):
        service.call("Prepare", key="k", parent="")
    with pytest.raises(NotFoundError):
        service.call("Stat", key="nowhere")
    with pytest.raises(InvalidInputError):
        service.call("Prepare", key="l", parent="k")


def test_readers_notice_nothing_of_deaths(service: SnapshotsService, box: Path) -> None:
    """Service, store and daemon are killed in turn, while one reads, walks and opens cold files."""
    top = service.pull(box)
    ended = threading.Event()
    failures: list[BaseException] = []

    def read(root: Path) -> None:
        try:
            while not ended.is_set():
                check_data(root)
                list(root.rglob("*"))
        except BaseException as error:
            failures.append(error)

    with service.container(top) as root, ThreadPoolExecutor(1) as pool:
        pool.submit(read, root)
        try:
            for round_ in range(int(os.environ.get("SNAPSHOTTER_LONG", "0")) * 45 + 5):
                if round_ % 3 == 0:
                    service.restart()
                elif round_ % 3 == 1:
                    former = service.product.kill("store")
                    service.product.await_successor("store", former)
                else:
                    service.product.kill("daemon")
                with service.container(top, f"round-{round_}") as another:
                    check_data(another)
        finally:
            ended.set()
    assert failures == []
    service.call("Cleanup")
    assert service.directories() == set()
