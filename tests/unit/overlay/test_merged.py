"""What the contract of all file systems does not say: aliases, waiting, marks, uppers."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from snapshotter.descriptor_file import DescriptorFile
from snapshotter.errors import BusyError, InvalidInputError
from snapshotter.overlay.directory_lower import DirectoryLower
from snapshotter.overlay.merged import Merged
from snapshotter.overlay.upper import Upper
from snapshotter.overlay.whiteouts import USER
from snapshotter.projection.image_lower import ImageLower, ObjectDirectory
from snapshotter.projection.image_reader import ImageReader
from snapshotter.projection.image_writer import write_image
from snapshotter.projection.tree import Inode
from snapshotter.vfs import AttrChange, Caller, Pending
from tests.support.file_systems import image_lower
from tests.support.overlay_trees import LONG_AGO_NS, fill, merged, new_upper
from tests.support.scratch import scratch_directory
from tests.support.vfs_paths import VfsPaths, find, scan_file_system


@pytest.fixture
def base():
    with scratch_directory() as made:
        (made / "lower").mkdir()
        fill(made / "lower", {"file": b"content", "dir": None, "dir/below": b"x", "other": b"o"})
        yield made


# Aliases ----------------------------------------------------------------------------------------


@pytest.fixture
def aliases(base: Path) -> Path:
    """A lower with one file under three names."""
    for name in ("dir/second", "third"):
        os.link(base / "lower" / "file", base / "lower" / name)
    for path in (base / "lower", base / "lower" / "dir"):
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    return base


@pytest.mark.parametrize("seen_before", [True, False])
@pytest.mark.parametrize("kind", ["directory", "image"])
def test_aliases_stay_one_file_after_copy_up(aliases: Path, kind: str, seen_before: bool) -> None:
    lower: Any = DirectoryLower(aliases / "lower", immutable=True)
    lower = lower if kind == "directory" else image_lower(aliases / "lower", aliases / "objects")
    top = Upper(*new_upper(aliases, "top"))
    fs = Merged([lower], top)
    seen = [find(fs, b"dir/second"), find(fs, b"third")] if seen_before else []
    node = find(fs, b"file")
    VfsPaths(fs).write(b"file", b"CHANGED", 0, 0)
    ino = fs.getattr(node).ino
    del node, seen  # what is forgotten is found again
    for path in (b"third", b"dir/second", b"file"):
        assert VfsPaths(fs).read(path) == b"CHANGED"
        assert (VfsPaths(fs).lstat(path).ino, VfsPaths(fs).lstat(path).nlink) == (ino, 3)
    VfsPaths(fs).unlink(b"file")
    VfsPaths(fs).write(b"third", b"AGAIN", 0, 0)
    assert VfsPaths(fs).read(b"dir/second") == b"AGAINED"
    assert VfsPaths(fs).lstat(b"dir/second").nlink == 2
    assert os.stat(aliases / "lower" / "dir").st_mtime_ns == LONG_AGO_NS
    assert VfsPaths(fs).lstat(b"dir").mtime_ns == LONG_AGO_NS
    top.close()


def test_aliases_stay_one_file_at_the_next_mount(aliases: Path) -> None:
    top = new_upper(aliases, "top")
    with merged([aliases / "lower"], *top) as fs:
        VfsPaths(fs).write(b"file", b"CHANGED", 0, 0)
        VfsPaths(fs).unlink(b"file")
    with merged([aliases / "lower"], *top) as fs:
        assert VfsPaths(fs).read(b"dir/second") == b"CHANGED"
        assert scan_file_system(fs)[b"third"].links == (b"dir/second", b"third")
        VfsPaths(fs).unlink(b"third")
        assert VfsPaths(fs).lstat(b"dir/second").nlink == 1
        VfsPaths(fs).unlink(b"dir/second")
    assert os.listdir(top[1] / "aliases") == []
    assert os.listdir(top[1] / "work") == []


def test_a_file_that_took_an_aliases_place_in_the_lower_is_not_taken_for_it(aliases: Path) -> None:
    top = new_upper(aliases, "top")
    with merged([aliases / "lower"], *top) as fs:
        VfsPaths(fs).write(b"file", b"CHANGED", 0, 0)
    (aliases / "lower" / "third").write_bytes(b"written to the lower since")
    with merged([aliases / "lower"], *top) as fs:
        assert VfsPaths(fs).read(b"third") == b"written to the lower since"


# Waiting ----------------------------------------------------------------------------------------


class _HeldFile(DescriptorFile):
    """Waits in reads until told to go on; it has no descriptor to copy from."""

    def __init__(self, descriptor: int, reading: threading.Event, go_on: threading.Event) -> None:
        super().__init__(descriptor)
        self._events = reading, go_on

    def fileno(self) -> Any:
        return None

    def read(self, size: int, offset: int) -> bytes:
        self._events[0].set()
        assert self._events[1].wait(30)
        return super().read(size, offset)


class _HeldLower(DirectoryLower):
    def __init__(self, path: Path) -> None:
        super().__init__(path, immutable=True)
        self.reading, self.go_on = threading.Event(), threading.Event()

    def open(self, node: bytes, flags: int) -> Any:
        file = super().open(node, flags)
        if node != b"file":
            return file
        descriptor = os.dup(file.fileno() or 0)
        file.close()
        return _HeldFile(descriptor, self.reading, self.go_on)


def _start(call: Callable[..., Any], *arguments: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call(*arguments)))
    thread.start()
    return thread, results


def test_content_is_copied_while_everybody_else_goes_on(base: Path) -> None:
    lower, top = _HeldLower(base / "lower"), Upper(*new_upper(base, "top"))
    fs = Merged([lower], top)
    node = find(fs, b"file")
    first, _ = _start(fs.setattr, node, AttrChange(mode=0o600))
    assert lower.reading.wait(30)
    second, results = _start(fs.setattr, node, AttrChange(uid=5))
    assert VfsPaths(fs).read(b"other") == b"o"
    VfsPaths(fs).write(b"other", b"O", 0, 0)
    VfsPaths(fs).rename(b"dir", b"moved", 0)
    assert fs.getattr(node).size == 7
    VfsPaths(fs).unlink(b"file")
    VfsPaths(fs).create(b"file", 0o644, b"another")
    lower.go_on.set()
    first.join(30)
    second.join(30)
    assert (results[0].uid, results[0].mode & 0o777, results[0].nlink) == (5, 0o600, 0)
    assert VfsPaths(fs).read(b"file") == b"another"
    file = fs.open(node, os.O_RDONLY)
    assert file.read(100, 0) == b"content"
    file.close()
    top.close()
    lower.close()


def test_missing_content_is_pending_and_nothing_has_changed(base: Path) -> None:
    image = image_lower(base / "lower", base / "objects")
    content = image.open(image.lookup(image.root, b"file").node, os.O_RDONLY)
    content.close()
    (object_path,) = [p for p in (base / "objects").rglob("*.7") if p.is_file()]
    object_path.rename(base / "away")
    upper, work = new_upper(base, "top")
    top = Upper(upper, work)
    fs = Merged([image], top)
    node = find(fs, b"file")
    for call in (
        lambda: fs.open(node, os.O_RDONLY),
        lambda: fs.open(node, os.O_RDWR),
        lambda: fs.setattr(node, AttrChange(mode=0)),
        lambda: fs.rename(fs.root, b"file", fs.root, b"new", 0),
    ):
        with pytest.raises(Pending) as caught:
            call()
        assert (caught.value.content.size, caught.value.offset, caught.value.size) == (7, 0, 7)
    assert os.listdir(upper) == os.listdir(work / "work") == []
    (base / "away").rename(object_path)
    fs.setattr(node, AttrChange(mode=0o600))
    assert VfsPaths(fs).read(b"file") == b"content"
    object_path.unlink()
    top.close()


def test_a_truncating_open_needs_no_content(base: Path) -> None:
    image = image_lower(base / "lower", base / "objects")
    for path in (base / "objects").rglob("*.*"):
        path.unlink()
    top = Upper(*new_upper(base, "top"))
    fs = Merged([image], top)
    VfsPaths(fs).write(b"file", b"new", 0, os.O_TRUNC)
    fs.setattr(find(fs, b"other"), AttrChange(size=0))
    assert (VfsPaths(fs).read(b"file"), VfsPaths(fs).read(b"other")) == (b"new", b"")
    top.close()


# Listings ---------------------------------------------------------------------------------------


def test_a_listing_of_100_000_names_keeps_its_offsets(base: Path) -> None:
    children = {b"%06d" % number: Inode(0o100644) for number in range(100_000)}
    tree = Inode(0o040755)
    tree.children = dict(children)
    image = ImageReader(bytes(write_image(tree)))
    top = Upper(*new_upper(base, "top"))
    fs = Merged([ImageLower(image, ObjectDirectory(base))], top)
    paths = VfsPaths(fs)
    for number in range(0, 1000, 2):
        paths.unlink(b"%06d" % number)
        paths.create(b"new%d" % number, 0o600, b"")
    directory = fs.opendir(fs.root)
    seen: list[bytes] = []
    offset = 0
    while part := list(itertools.islice(directory.entries(offset), 5000)):
        seen += [entry.name for entry in part]
        offset = part[-1].next_offset
        paths.unlink(seen[-1])  # one that was seen, and one that comes
        paths.create(b"later%d" % offset, 0o600, b"")
    directory.close()
    gone = {b"%06d" % number for number in range(0, 1000, 2)}
    made = {b"new%d" % number for number in range(0, 1000, 2)}
    assert len(seen) == len(set(seen))
    assert set(seen) == (children.keys() - gone) | made
    top.close()


# Lowers and uppers ------------------------------------------------------------------------------


def test_a_mutable_lower_shows_what_the_host_changes(base: Path) -> None:
    with merged([base / "lower"], immutable=False) as fs:
        before = find(fs, b"file")
        (base / "lower" / "file").unlink()
        with pytest.raises(FileNotFoundError):
            find(fs, b"file")
        (base / "lower" / "file").mkdir()
        assert find(fs, b"file") != before
        assert VfsPaths(fs).listdir(b"file") == []


def test_directories_of_a_lower_cannot_be_renamed_with_marks_of_users(base: Path) -> None:
    lower = DirectoryLower(base / "lower", immutable=True, xattrs=USER)
    top = Upper(*new_upper(base, "top"), xattrs=USER)
    fs = Merged([lower], top)
    with pytest.raises(OSError, match="rename") as caught:
        VfsPaths(fs).rename(b"dir", b"moved", 0)
    assert caught.value.errno == errno.EXDEV
    VfsPaths(fs).mkdir(b"new", 0o755)
    VfsPaths(fs).rename(b"new", b"newer", 0)
    VfsPaths(fs).unlink(b"file")
    VfsPaths(fs).mkdir(b"file", 0o755)
    assert os.getxattr(base / "top" / "upper" / "file", "user.overlay.opaque") == b"y"
    top.close()
    lower.close()


def test_a_metacopy_without_content_below_is_an_error_and_never_zeros(base: Path) -> None:
    upper, work = new_upper(base, "top")
    for name in ("made", "dir"):
        (upper / name).write_bytes(bytes(4))
        os.setxattr(upper / name, "trusted.overlay.metacopy", b"")
    with merged([base / "lower"], upper, work) as fs:
        for call in (
            lambda: fs.open(find(fs, b"made"), os.O_RDONLY),
            lambda: fs.open(find(fs, b"made"), os.O_RDWR),
            lambda: fs.open(find(fs, b"dir"), os.O_RDONLY),
            lambda: fs.setattr(find(fs, b"dir"), AttrChange(size=2)),
        ):
            with pytest.raises(OSError, match="metacopy") as caught:
                call()
            assert caught.value.errno == errno.EIO
        VfsPaths(fs).write(b"made", b"new", 0, os.O_TRUNC)
        assert VfsPaths(fs).read(b"made") == b"new"


def test_an_upper_is_for_one_mount_at_a_time(base: Path) -> None:
    upper, work = new_upper(base, "top")
    other, other_work = new_upper(base, "other")
    held = Upper(upper, work)
    with pytest.raises(BusyError, match="another mount"):
        Upper(upper, other_work)
    with pytest.raises(BusyError, match="another mount"):
        Upper(other, work)
    held.close()
    Upper(upper, other_work).close()


def test_leftovers_of_a_crash_are_removed(base: Path) -> None:
    upper, work = new_upper(base, "top")
    (work / "work" / "#0" / "deep" / "er").mkdir(parents=True)
    (work / "work" / "#1").write_bytes(b"half")
    Upper(upper, work).close()
    assert os.listdir(work / "work") == []


def test_upper_and_work_must_be_on_one_file_system(base: Path, tmp_path: Path) -> None:
    upper, _ = new_upper(base, "top")
    is_same = os.stat(base).st_dev == os.stat(tmp_path).st_dev
    other = Path("/dev") if is_same else tmp_path
    with pytest.raises(InvalidInputError, match="one file system"):
        Upper(upper, other)


def test_trees_deeper_than_the_descriptors_kept_open(base: Path) -> None:
    with merged([base / "lower"], *new_upper(base, "top")) as fs:
        caller, at = Caller(), fs.root
        chain = [at]
        for _ in range(400):
            at = fs.mkdir(at, b"d", 0o755, caller).node
            chain.append(at)
        fs.rename(fs.root, b"file", at, b"far away", 0)
        fs.link(fs.lookup(at, b"far away").node, chain[1], b"near")
        fs.rename(at, b"far away", fs.root, b"back", 0)
        assert VfsPaths(fs).read(b"d/near") == b"content"
        for parent in reversed(chain[:-1]):
            if parent is chain[1]:
                fs.unlink(parent, b"near")
            fs.rmdir(parent, b"d")
        assert VfsPaths(fs).read(b"back") == b"content"
