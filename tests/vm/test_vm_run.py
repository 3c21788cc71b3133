"""`snapshotter vm run` with real QEMU, Debian's kernel and Debian's image, plain and assisted."""

from __future__ import annotations

import hashlib
import os
import pty
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.compare_trees import scan_tree
from tests.support.debian_image import LocalImage
from tests.support.guests import GUEST_DEADLINE_S, Guests, kill
from tests.support.images import Entry, Image, Layer, directory, file, symlink, write_layout

pytestmark = [pytest.mark.real, pytest.mark.mount, pytest.mark.timeout(400)]

VIEWS = [pytest.param((), id="plain"), pytest.param(("--guest-assist",), id="assisted")]
FILES = 2000


@pytest.fixture(autouse=True)
def nothing_is_left(guests: Guests) -> Iterator[None]:
    yield
    guests.await_nothing_left()


def contents(number: int) -> bytes:
    return b"%d\n" % number * (number % 700)


@pytest.fixture(scope="module")
def tree(debian: LocalImage, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Debian below 2,000 files in 40 directories and one large file."""
    entries: list[Entry] = [directory("tree")]
    entries += [directory(f"tree/{number}") for number in range(40)]
    entries += [file(f"tree/{number % 40}/f{number}", contents(number)) for number in range(FILES)]
    entries += [file("tree/large", bytes(range(256)) * (12 << 12)), symlink("tree/link", "large")]
    base = read_layer(debian)
    image = Image([Layer(base), Layer(entries)], env=["PATH=/usr/bin:/bin"])
    return f"oci:{write_layout(tmp_path_factory.mktemp('tree'), {'v1': image})}:v1"


def read_layer(image: LocalImage) -> bytes:
    """The tar of the image's only layer."""
    import gzip
    import json

    blobs = image.layout / "blobs/sha256"
    index = json.loads((image.layout / "index.json").read_bytes())
    manifest = json.loads((blobs / index["manifests"][0]["digest"][7:]).read_bytes())
    raw = (blobs / manifest["layers"][0]["digest"][7:]).read_bytes()
    return gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw


@pytest.mark.parametrize("view", VIEWS)
def test_streams_are_passed_byte_for_byte_and_the_status_is_the_commands(
    guests: Guests, debian: LocalImage, view: tuple[str, ...]
) -> None:
    data = os.urandom(300_000)
    script = "cat; echo 'to stderr' >&2; exit 7"
    done = guests.run(debian.reference, *view, "/bin/sh", "-c", script, stdin=data)
    assert done.stderr == b"to stderr\n"
    assert done.stdout == data
    assert done.returncode == 7


@pytest.mark.parametrize("view", VIEWS)
def test_every_file_is_equal(guests: Guests, tree: str, view: tuple[str, ...]) -> None:
    script = "cd /tree; find . -type f | LC_ALL=C sort | xargs sha256sum; readlink link"
    lines = guests.shell(tree, *view, script=script).splitlines()
    expected = {f"./{n % 40}/f{n}": contents(n) for n in range(FILES)}
    expected["./large"] = bytes(range(256)) * (12 << 12)
    assert lines == [
        *(f"{hashlib.sha256(expected[name]).hexdigest()}  {name}" for name in sorted(expected)),
        "large",
    ]


def test_what_a_guest_writes_is_in_the_upper_and_nowhere_else(
    guests: Guests, debian: LocalImage
) -> None:
    product = guests.product
    product.do("pull", debian.reference)
    before = scan_tree(product.root / "objects")
    upper = product.base / "kept"
    script = """
        cd /root; echo new >new; ln new linked; ln -s new soft; mkdir -p a/b; mv a c
        chmod 600 /etc/hostname 2>/dev/null || touch /etc/hostname; chown 5:6 /etc/issue
        echo more >>/etc/issue; rm /etc/debian_version; mv /etc/skel /etc/moved
        python3 - <<'END'
import mmap, os
os.setxattr("/root/new", "user.key", b"value")
with open("/root/mapped", "w+b") as file:
    file.truncate(10000)
    with mmap.mmap(file.fileno(), 10000) as mapped:
        mapped[5000:5003] = b"abc"
        mapped.flush()
    os.fsync(file.fileno())
END
        sync"""
    guests.shell(debian.reference, f"--upper={upper}", script=script)
    changed = scan_tree(product.root / "objects")
    assert all(changed[path] == node for path, node in before.items() if path.count(b"/") > 1)
    target = product.mount(debian.reference, "again", "--upper", upper)
    assert (target / "root/linked").read_text() == "new\n"
    assert (target / "root/new").stat().st_nlink == 2
    assert os.getxattr(target / "root/new", "user.key") == b"value"
    assert os.readlink(target / "root/soft") == "new"
    assert (target / "root/mapped").read_bytes()[4999:5004] == b"\0abc\0"
    assert (target / "root/c/b").is_dir()
    assert not (target / "etc/debian_version").exists()
    assert (target / "etc/moved/.bashrc").exists()
    assert not (target / "etc/skel").exists()
    issue = target / "etc/issue"
    assert issue.read_text().endswith("more\n")
    assert (issue.stat().st_uid, issue.stat().st_gid) == (5, 6)
    product.do("umount", target)
    seen = guests.shell(debian.reference, f"--upper={upper}", script="cat /root/new; ls /etc/moved")
    assert seen == "new\n"


def test_an_upper_disk_keeps_what_an_assisted_guest_wrote(
    guests: Guests, debian: LocalImage
) -> None:
    disk = guests.product.base / "disk, of one.img"
    options = ("--guest-assist", f"--upper-disk={disk}")
    guests.shell(debian.reference, *options, script="echo kept >/root/file; rm /etc/issue")
    script = "cat /root/file; test ! -e /etc/issue"
    assert guests.shell(debian.reference, *options, script=script) == "kept\n"
    assert disk.stat().st_blocks * 512 < disk.stat().st_size


@pytest.mark.parametrize("view", VIEWS)
def test_a_dead_back_end_ends_the_guest_with_a_reason(
    guests: Guests, debian: LocalImage, view: tuple[str, ...]
) -> None:
    guest = guests.begin(debian.reference, *view, "/bin/sh", "-c", "echo up; exec sleep 1000")
    (back_end,) = guests.back_ends()
    kill(back_end)
    _, stderr = guest.communicate(timeout=GUEST_DEADLINE_S)
    assert guest.returncode == 125
    assert b"the virtio-fs back end ended before the command did" in stderr


def test_guests_of_one_image_do_not_know_one_another(guests: Guests, debian: LocalImage) -> None:
    script = "echo mine >/root/$0; echo up; read line; ls /root; cat /usr/bin/python3 | sha256sum"
    first = guests.begin(debian.reference, "/bin/sh", "-c", script, "first")
    second = guests.begin(debian.reference, "/bin/sh", "-c", script, "second")
    first.kill()
    first.communicate()
    output, errors = second.communicate(b"go\n", timeout=GUEST_DEADLINE_S)
    assert (second.returncode, errors) == (0, b"")
    assert output.splitlines()[0] == b"second"
    assert len(output.splitlines()) == 2


def test_signals_reach_the_command(guests: Guests, debian: LocalImage) -> None:
    script = "trap 'echo got it; exit 3' TERM; echo up; while :; do sleep 0.1; done"
    guest = guests.begin(debian.reference, "/bin/sh", "-c", script)
    guest.send_signal(signal.SIGTERM)
    output, errors = guest.communicate(timeout=GUEST_DEADLINE_S)
    assert (output, errors, guest.returncode) == (b"got it\n", b"", 3)


def test_a_terminal_is_the_guests(guests: Guests, debian: LocalImage) -> None:
    import subprocess

    leader, follower = pty.openpty()
    words = guests.words(debian.reference, "/bin/sh", "-c", "stty size; test -t 1 && echo tty")
    size = subprocess.run(["stty", "rows", "33", "cols", "99"], stdin=follower)
    assert size.returncode == 0
    done = subprocess.run(
        words,
        stdin=follower,
        stdout=follower,
        stderr=subprocess.PIPE,
        timeout=GUEST_DEADLINE_S,
        env=guests.product.environment,
    )
    assert (done.stderr, done.returncode) == (b"", 0)
    assert os.read(leader, 1000).split() == [b"33", b"99", b"tty"]
    os.close(leader)
    os.close(follower)


def test_a_read_only_guest_writes_nothing(guests: Guests, debian: LocalImage) -> None:
    done = guests.run(debian.reference, "--read-only", "/bin/sh", "-c", "echo x >/root/x")
    assert done.returncode != 0
    assert b"Read-only file system" in done.stderr


def test_users_and_commands_are_the_images(guests: Guests, debian: LocalImage) -> None:
    user = guests.run(debian.reference, "--user=nobody", "/usr/bin/id", "-un")
    assert (user.stdout, user.returncode) == (b"nobody\n", 0)
    missing = guests.run(debian.reference, "no-such-program")
    assert missing.returncode == 127
    assert b"no-such-program is not in the image" in missing.stderr


@pytest.mark.parametrize("machine", ["microvm", "q35"])
def test_both_machines_start(guests: Guests, debian: LocalImage, machine: str) -> None:
    log = guests.product.base / f"{machine}.log"
    words = (f"--machine={machine}", f"--console-log={log}", "--guest-assist")
    done = guests.run(debian.reference, *words, "/bin/sh", "-c", "cut -c1-5 /proc/version")
    assert (done.stdout, done.stderr, done.returncode) == (b"Linux\n", b"", 0)
    assert log.exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--guest-assist", "--upper=/tmp/x"), "--upper-disk"),
        (("--upper-disk=/tmp/x",), "--guest-assist"),
        (("--machine=pdp11",), "choose one of auto, microvm, q35"),
        (("--kernel=/no/such/kernel",), "kernel /no/such/kernel does not exist"),
        (("--memory=5",), "128 MiB"),
    ],
)
def test_bad_input_is_refused(
    guests: Guests, debian: LocalImage, options: tuple[str, ...], text: str
) -> None:
    done = guests.run(debian.reference, *options, "true")
    assert done.returncode == 125
    assert text in done.stderr.decode()
    assert not Path("/tmp/x").exists()
