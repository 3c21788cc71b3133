"""Copies between a directory that plays the host and one that plays a sandbox's root."""

import contextlib
import os
import socket
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapshotter.api import copying
from snapshotter.api.cancelling import Cancellation
from snapshotter.api.paths_within import Owner
from snapshotter.errors import (
    InvalidInputError,
    NotFoundError,
    SnapshotterError,
    UnavailableError,
)
from snapshotter.overlay import syscalls

ROOT = Owner(0, 0)
TIME_NS = 1_234_567_890_123_456_789


@dataclass(frozen=True, slots=True)
class Place:
    host: Path
    box: Path
    root: int

    def copy_in(self, source: Path, target: str, owner: Owner = ROOT) -> None:
        names = (str(source), target)
        copying.copy_in(self.root, *names, owner=owner, cancellation=Cancellation())

    def copy_out(self, source: str, target: Path) -> None:
        copying.copy_out(self.root, source, str(target), cancellation=Cancellation())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    host, box = tmp_path / "host", tmp_path / "box"
    host.mkdir()
    box.mkdir()
    descriptors = set(os.listdir("/proc/self/fd"))
    root = os.open(box, os.O_PATH | os.O_DIRECTORY)
    yield Place(host, box, root)
    os.close(root)
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)  # nothing was left open


def test_a_file_goes_in_with_the_directories_to_it(place: Place) -> None:
    source = place.host / "f"
    source.write_bytes(b"some content")
    source.chmod(0o751)
    os.utime(source, ns=(5, TIME_NS))
    place.copy_in(source, "/new/deep/name", Owner(7, 8))
    copy = place.box / "new/deep/name"
    assert copy.read_bytes() == b"some content"
    found = copy.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o751, TIME_NS)
    assert (found.st_uid, found.st_gid) == (7, 8)
    parent = copy.parent.stat()
    assert (stat.S_IMODE(parent.st_mode), parent.st_uid) == (0o755, 7)


def make_tree(top: Path) -> None:
    (top / "sub/empty").mkdir(parents=True)
    (top / "sub/file").write_text("x" * 5000)
    (top / "link").symlink_to("/etc/passwd")
    (top / "nowhere").symlink_to("missing/../away")
    os.link(top / "sub/file", top / "again")
    os.mkfifo(top / "fifo", 0o640)
    os.setxattr(top / "sub/file", "user.note", b"kept\0")
    os.setxattr(top / "sub", "user.dir", b"too")
    (top / "sub").chmod(0o1750)
    for name in ("sub/empty", "sub", "link", "fifo"):
        os.utime(top / name, ns=(TIME_NS, TIME_NS), follow_symlinks=False)


def check_tree(top: Path) -> None:
    assert sorted(os.listdir(top)) == ["again", "fifo", "link", "nowhere", "sub"]
    assert (top / "sub/file").read_text() == "x" * 5000
    assert (top / "sub/empty").is_dir()
    assert os.readlink(top / "link") == "/etc/passwd"
    assert os.readlink(top / "nowhere") == "missing/../away"
    assert (top / "again").samefile(top / "sub/file")
    fifo = (top / "fifo").stat()
    assert (stat.S_ISFIFO(fifo.st_mode), stat.S_IMODE(fifo.st_mode)) == (True, 0o640)
    assert os.getxattr(top / "sub/file", "user.note") == b"kept\0"
    assert os.getxattr(top / "sub", "user.dir") == b"too"
    assert stat.S_IMODE((top / "sub").stat().st_mode) == 0o1750
    for name in ("sub/empty", "sub", "link", "fifo"):
        assert (top / name).lstat().st_mtime_ns == TIME_NS, name


def test_a_tree_goes_in_and_out_as_it_is(place: Place) -> None:
    make_tree(place.host / "tree")
    place.copy_in(place.host / "tree", "/copy")
    check_tree(place.box / "copy")
    place.copy_out("copy", place.host / "back")
    check_tree(place.host / "back")


def test_directories_are_merged_and_files_replaced(place: Place) -> None:
    (place.host / "t/d").mkdir(parents=True)
    (place.host / "t/d/new").write_text("new")
    (place.host / "t/file").write_text("new")
    (place.host / "t").chmod(0o700)
    (place.box / "t/d").mkdir(parents=True)
    (place.box / "t/d/old").write_text("old")
    (place.box / "elsewhere").write_text("untouched")
    (place.box / "t/file").symlink_to("../elsewhere")
    (place.box / "t").chmod(0o755)
    place.copy_in(place.host / "t", "/t/")
    assert sorted(os.listdir(place.box / "t/d")) == ["new", "old"]
    assert not (place.box / "t/file").is_symlink()
    assert (place.box / "elsewhere").read_text() == "untouched"
    assert stat.S_IMODE((place.box / "t").stat().st_mode) == 0o755


def test_the_root_itself_can_be_the_target_and_the_source(place: Place) -> None:
    (place.host / "t").mkdir(0o700)
    (place.host / "t/f").write_text("f")
    mode = place.box.stat().st_mode
    place.copy_in(place.host / "t", "/")
    assert ((place.box / "f").read_text(), place.box.stat().st_mode) == ("f", mode)
    place.copy_out("/", place.host / "all")
    assert (place.host / "all/f").read_text() == "f"


@pytest.mark.parametrize("link", ["/", "../../../host", "/../host"])
def test_links_never_lead_out_of_the_root(place: Place, link: str) -> None:
    (place.host / "secret").write_text("secret")
    (place.host / "file").write_text("mine")
    (place.box / "way").symlink_to(link)
    for path in ("/way/host/secret", "way/secret", "../host/secret", str(place.host / "secret")):
        with pytest.raises(NotFoundError):
            copying.read_file(place.root, path)
        with pytest.raises(NotFoundError):
            place.copy_out(path, place.host / "out")
    place.copy_in(place.host / "file", "../host/secret")
    copying.write_file(place.root, "/../../host/x", b"x", mode=0o600, owner=ROOT)
    assert (place.host / "secret").read_text() == "secret"
    assert sorted(os.listdir(place.host)) == ["file", "secret"]
    assert sorted(os.listdir(place.box / "host")) == ["secret", "x"]


def test_links_of_the_sandbox_are_followed_within_it(place: Place) -> None:
    (place.box / "usr/bin").mkdir(parents=True)
    (place.box / "bin").symlink_to("/usr/bin")
    (place.host / "tool").write_text("t")
    place.copy_in(place.host / "tool", "/bin/tool")
    (place.host / "tools").mkdir()
    (place.host / "tools/more").write_text("m")
    place.copy_in(place.host / "tools", "/bin")
    assert sorted(os.listdir(place.box / "usr/bin")) == ["more", "tool"]
    assert (place.box / "bin").is_symlink()
    assert copying.read_file(place.root, "bin/tool") == b"t"


def test_a_directory_never_goes_through_a_link_below_the_target(place: Place) -> None:
    (place.host / "t/d").mkdir(parents=True)
    (place.host / "t/d/f").write_text("f")
    (place.box / "away").mkdir()
    (place.box / "t").mkdir()
    (place.box / "t/d").symlink_to("../away")
    with pytest.raises(InvalidInputError, match=r"copy d of .*/t: (Not a dir|Too many)"):
        place.copy_in(place.host / "t", "t")
    assert os.listdir(place.box / "away") == []


def test_magic_links_are_not_followed(place: Place) -> None:
    proc = os.open("/proc/self", os.O_PATH)
    try:
        with pytest.raises(InvalidInputError):
            copying.read_file(proc, "/root/etc/passwd")
    finally:
        os.close(proc)


def test_privileges_stay_behind(place: Place) -> None:
    source = place.host / "f"
    source.write_text("f")
    os.chown(source, 5, 6)
    source.chmod(0o6755)
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    os.setxattr(source, "security.capability", capability)
    os.setxattr(source, "trusted.overlay.opaque", b"y")
    place.copy_in(source, "/f")
    os.chown(place.box / "f", 5, 6)
    (place.box / "f").chmod(0o6755)
    place.copy_out("/f", place.host / "back")
    for copy, mode in ((place.box / "f", 0o6755), (place.host / "back", 0o755)):
        assert stat.S_IMODE(copy.stat().st_mode) == mode
        assert os.listxattr(copy) == []
    assert (place.host / "back").stat().st_uid == os.geteuid()


def test_holes_stay_holes(place: Place) -> None:
    with (place.host / "f").open("wb") as file:
        file.seek(8 << 20)
        file.write(b"middle")
        file.truncate(64 << 20)
    place.copy_in(place.host / "f", "/f")
    copy = place.box / "f"
    assert copy.stat().st_size == 64 << 20
    assert copy.stat().st_blocks * 512 < 1 << 20
    with copy.open("rb") as file:
        file.seek((8 << 20) - 1)
        assert file.read(8) == b"\0middle\0"


@pytest.mark.parametrize("kind", ["device", "socket"])
def test_devices_and_sockets_are_refused(place: Place, kind: str) -> None:
    (place.box / "d").mkdir()
    if kind == "device":
        os.mknod(place.box / "d/x", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(place.box / "d/x"))
    for path in ("/d", "/d/x"):
        with pytest.raises(InvalidInputError, match="no regular file"):
            place.copy_out(path, place.host / "out")
    with pytest.raises(InvalidInputError, match="no regular file"):
        copying.read_file(place.root, "/d/x")


def test_what_cannot_be_is_told_with_its_name(place: Place) -> None:
    (place.host / "f").write_text("f")
    (place.box / "d").mkdir()
    (place.box / "loop").symlink_to("loop")
    (place.box / "dangling").symlink_to("nowhere")
    with pytest.raises(NotFoundError, match=r"copy .*/none to /x in the sandbox: No such file"):
        place.copy_in(place.host / "none", "/x")
    with pytest.raises(NotFoundError, match="/none in the sandbox"):
        place.copy_out("/none", place.host / "x")
    with pytest.raises(NotFoundError):
        place.copy_out("/d", place.host / "no/parent")
    with pytest.raises(InvalidInputError):
        place.copy_in(place.host / "f", "/d")
    with pytest.raises(InvalidInputError, match="name the file itself"):
        place.copy_in(place.host / "f", "/d/")
    with pytest.raises(InvalidInputError, match="is a directory"):
        copying.read_file(place.root, "/d")
    for link in ("/loop/f", "/dangling/f"):
        with pytest.raises(SnapshotterError):
            place.copy_in(place.host / "f", link)
    assert sorted(os.listdir(place.box)) == ["d", "dangling", "loop"]


def test_a_tree_that_is_too_deep_is_refused(place: Place) -> None:
    deep = place.box
    for _ in range(140):
        deep = deep / "d"
        deep.mkdir()
    with pytest.raises(InvalidInputError, match="128 directories deep"):
        place.copy_out("/", place.host / "out")


def test_a_cancelled_copy_ends(place: Place) -> None:
    (place.box / "d").mkdir()
    (place.box / "d/f").write_text("f")
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(UnavailableError, match="cancelled"):
        copying.copy_out(place.root, "/d", str(place.host / "out"), cancellation=cancellation)


def test_a_written_file_replaces_what_has_its_name(place: Place) -> None:
    (place.box / "victim").write_text("untouched")
    (place.box / "name").symlink_to("victim")
    copying.write_file(place.root, "/name", b"data", mode=0o4640, owner=Owner(3, 4))
    copy = place.box / "name"
    found = copy.lstat()
    assert (copy.read_bytes(), (place.box / "victim").read_text()) == (b"data", "untouched")
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o640, 3, 4)


def test_nobody_gets_out_while_directories_turn_into_links(place: Place) -> None:
    """A path's directory changes places with a link to the host all the time."""
    (place.host / "secret").write_text("secret")
    (place.host / "mine/sub").mkdir(parents=True)
    (place.host / "mine/sub/f").write_text("mine")
    (place.box / "way/sub").mkdir(parents=True)
    (place.box / "link").symlink_to("../host")
    (place.box / "host").mkdir()
    before = sorted(str(path) for path in place.host.rglob("*"))
    stop = threading.Event()

    def swap() -> None:
        directory = os.open(place.box, os.O_PATH)
        while not stop.is_set():
            syscalls.rename(directory, b"way", directory, b"link", syscalls.RENAME_EXCHANGE)
        os.close(directory)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(300):
            for work in (
                lambda: place.copy_in(place.host / "mine", "/way"),
                lambda: place.copy_in(place.host / "mine/sub/f", "/way/sub/f"),
                lambda: copying.read_file(place.root, "/way/secret"),
            ):
                with contextlib.suppress(SnapshotterError):
                    assert work() is None, "it read what is outside"
    finally:
        stop.set()
        thread.join()
    assert sorted(str(path) for path in place.host.rglob("*")) == before
    assert (place.host / "mine/sub/f").read_text() == "mine"
