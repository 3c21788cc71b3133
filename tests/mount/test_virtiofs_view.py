"""An image as a virtio-fs view: what a guest sees of it, and what of the host it cannot reach."""

import os
import stat
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from snapshotter.fuse.wire import Opcode
from snapshotter.vfs import AttrChange, Caller
from tests.support.compare_trees import compare_scans, scan_tree
from tests.support.fuse_client import FuseClient
from tests.support.images import Image, Layer, directory, file, hard_link, symlink, write_layout
from tests.support.product import NewProduct, Product, await_true
from tests.support.vfs_paths import VfsPaths, find, scan_file_system
from tests.support.virtiofs_guest import asker
from tests.support.virtiofs_process import VirtiofsProcess, virtiofs_process

pytestmark = [pytest.mark.mount]
LARGE = bytes(range(256)) * 50_000
IMAGE = Image(
    [
        Layer(
            [
                directory("etc", mode=0o750),
                file("etc/motd", b"hello\n", xattrs={"user.note": b"n"}),
                hard_link("etc/again", "etc/motd"),
                symlink("link", "etc/motd"),
                file("large", LARGE, mode=0o4755, uid=3, gid=4),
                *(file(f"many/{number:03}", b"%d" % number) for number in range(200)),
            ]
        )
    ]
)


@pytest.fixture
def product(new_product: NewProduct) -> Product:
    return new_product({"large_file_bytes": 1 << 20})


@pytest.fixture
def image(product: Product) -> str:
    write_layout(product.base / "layout", {"v1": IMAGE})
    return f"oci:{product.base / 'layout'}:v1"


def seen(view: VirtiofsProcess) -> FuseClient:
    return FuseClient(asker(view.guest))


def stateless_read(view: VirtiofsProcess, fs: Any, path: bytes, size: int) -> bytes:
    """Content of a view whose files are read without being opened."""
    node, data = find(fs, path), b""
    while len(data) < size:
        body = struct.pack("=QQIIQI4x", 0, len(data), 1 << 20, 0, 0, 0)
        more = fs.ask(Opcode.READ, node.nodeid, body)
        if not more:
            break
        data += more
    return data


def test_a_read_only_view_shows_the_image_and_opens_nothing(product: Product, image: str) -> None:
    with virtiofs_process(product, image, "--read-only") as view:
        fs = seen(view)
        assert stateless_read(view, fs, b"etc/motd", 100) == b"hello\n"
        assert stateless_read(view, fs, b"large", len(LARGE)) == LARGE
        assert fs.readlink(find(fs, b"link")) == b"etc/motd"
        with pytest.raises(OSError, match="Function not implemented"):
            fs.open(find(fs, b"large"), os.O_RDONLY)
        with pytest.raises(OSError, match="Function not implemented"):
            fs.mkdir(fs.root, b"new", 0o755, Caller())


def test_a_writable_view_equals_a_mount_and_its_upper_mounts_to_the_same(
    product: Product, image: str
) -> None:
    expected = scan_tree(product.mount(image, "expected"))
    upper = product.base / "upper"
    with virtiofs_process(product, image, "--upper", upper) as view:
        fs = seen(view)
        assert compare_scans(expected, scan_file_system(fs)) == []
        paths = VfsPaths(fs)
        paths.mkdir(b"new", 0o700)
        paths.create(b"new/file", 0o640, b"text" * 50_000)
        paths.rename(b"etc", b"new/etc", 0)
        paths.write(b"many/008", b"more", 0, os.O_APPEND)
        paths.unlink(b"many/007")
        paths.chmod(b"large", 0o711)
        fs.setattr(find(fs, b"many"), AttrChange(uid=7, gid=8))
        after = scan_file_system(fs)
    mounted = product.mount(image, "mounted", "--upper", upper)
    assert compare_scans(after, scan_tree(mounted)) == []
    product.do("umount", mounted)
    with virtiofs_process(product, image, "--upper", upper) as view:
        assert compare_scans(after, scan_file_system(seen(view))) == []


def test_the_process_is_confined(product: Product, image: str) -> None:
    with virtiofs_process(product, image, "--upper", product.base / "upper") as view:
        place = Path(f"/proc/{view.process.pid}")
        status = dict(
            line.split(":", 1)
            for line in (place / "status").read_text().splitlines()
            if ":" in line
        )
        assert status["NoNewPrivs"].strip() == "1"
        kept = sum(1 << number for number in (0, 1, 2, 3, 4, 21, 27, 31))
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == kept
        options = [line.split()[5] for line in (place / "mountinfo").read_text().splitlines()]
        assert options
        assert all("ro" in each.split(",") for each in options)
        assert (place / "ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink()
        open_files = {os.readlink(each) for each in (place / "fd").iterdir()}
        assert not any(str(product.root / "server") in path for path in open_files)
        assert not view.socket.exists()


def test_names_that_lead_out_and_devices_lead_nowhere(product: Product, image: str) -> None:
    with virtiofs_process(product, image, "--upper", product.base / "upper") as view:
        fs = seen(view)
        for name in (b"..", b".", b"../../etc/passwd", b"/etc/passwd", b"a/b"):
            with pytest.raises(OSError, match="Invalid argument"):
                fs.lookup(fs.root, name)
        link = fs.symlink(fs.root, b"out", b"/etc/passwd", Caller()).node
        with pytest.raises(OSError, match=r"Invalid argument|Too many levels"):
            fs.open(link, os.O_RDONLY)
        node = fs.mknod(fs.root, b"null", stat.S_IFCHR | 0o666, os.makedev(1, 3), Caller()).node
        with pytest.raises(OSError, match="Invalid argument"):
            fs.open(node, os.O_RDONLY)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "one of --upper DIR, --read-only and --contents"),
        (["--read-only", "--upper", "u"], "one of --upper DIR"),
        (["--contents", "--read-only"], "one of --upper DIR"),
    ],
)
def test_bad_usage_is_refused(product: Product, image: str, options: list[str], words: str) -> None:
    done = product.cli("virtiofs", image, "--socket", product.base / "s", *options)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_path_that_is_something_else_is_refused(product: Product, image: str) -> None:
    path = product.base / "file"
    path.write_text("precious")
    done = product.cli("virtiofs", image, "--socket", path, "--read-only")
    assert done.returncode == 2
    assert "something else is there" in done.stderr
    assert path.read_text() == "precious"


def test_an_upper_that_is_in_use_is_refused(product: Product, image: str) -> None:
    upper = product.base / "upper"
    with virtiofs_process(product, image, "--upper", upper):
        done = subprocess.run(
            product.command("virtiofs", image, "--socket", product.base / "b", "--upper", upper),
            capture_output=True,
            text=True,
            env=product.environment,
            timeout=60,
        )
        assert done.returncode == 6


def test_the_daemon_knows_of_it_until_it_ends(product: Product, image: str) -> None:
    upper = product.base / "upper"
    with virtiofs_process(product, image, "--upper", upper) as view:
        (record,) = product.ask("ps")
        assert (record["view"], record["owner_pid"]) == ("virtiofs", view.process.pid)
        assert product.cli("images", "rm", image).returncode == 6
        target = product.base / "mnt"
        target.mkdir()
        refused = product.cli("mount", image, target, "--upper", upper)
        assert refused.returncode == 6
        assert "in use" in refused.stderr
    await_true(lambda: not product.ask("ps"), "the record to be dropped")
    product.mount(image, "mnt", "--upper", upper)


@pytest.mark.parametrize("command", [["mount"], ["run"]])
def test_it_is_no_mount_of_this_host(product: Product, image: str, command: list[str]) -> None:
    done = product.cli(*command, "--view", "virtiofs", image, product.base)
    assert done.returncode in (2, 125)
    assert "snapshotter virtiofs IMAGE" in done.stderr
