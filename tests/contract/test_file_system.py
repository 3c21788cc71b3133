"""What every file system promises (snapshotter.vfs), run over all that there are.

The model is a directory of the host with the same tree: what system calls show there, the file
systems have to show.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotter.vfs import RENAME_EXCHANGE, RENAME_NOREPLACE, AttrChange, Caller
from tests.support.compare_trees import compare_scans, scan_tree
from tests.support.file_systems import READABLE, WRITABLE, file_system, make_sample
from tests.support.native_paths import NativePaths
from tests.support.overlay_trees import without_clock
from tests.support.scratch import scratch_directory
from tests.support.vfs_paths import VfsPaths, find, scan_file_system

CALLER = Caller(1, 2, 0o027)


@pytest.fixture(scope="module")
def sample() -> Iterator[Path]:
    with scratch_directory() as base:
        make_sample(base / "sample")
        yield base / "sample"


@pytest.fixture
def base() -> Iterator[Path]:
    with scratch_directory() as made:
        yield made


@pytest.fixture(params=[*READABLE, *WRITABLE])
def fs(request: pytest.FixtureRequest, sample: Path, base: Path) -> Iterator[Any]:
    with file_system(request.param, sample, base) as made:
        yield made


@pytest.fixture(params=WRITABLE)
def writable(request: pytest.FixtureRequest, sample: Path, base: Path) -> Iterator[Any]:
    with file_system(request.param, sample, base) as made:
        yield made


def refused(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(OSError) as caught:  # noqa: PT011 - its number is what is returned
        call(*arguments)
    return errno.errorcode[caught.value.errno or 0]


def content(fs: Any, node: Any) -> bytes:
    file = fs.open(node, os.O_RDONLY)
    try:
        return bytes(file.read(1 << 21, 0))
    finally:
        file.close()


# Reading ----------------------------------------------------------------------------------------


def test_shows_the_whole_tree(fs: Any, sample: Path) -> None:
    assert compare_scans(scan_tree(sample), scan_file_system(fs)) == []


def test_a_name_leads_to_the_same_node_each_time(fs: Any) -> None:
    first = fs.lookup(fs.root, b"file")
    assert fs.lookup(fs.root, b"file").node == first.node
    assert hash(fs.lookup(fs.root, b"file").node) == hash(first.node)
    assert fs.getattr(first.node) == first.attr


def test_refuses_what_is_not_there_or_is_something_else(fs: Any) -> None:
    file, link = find(fs, b"file"), fs.lookup(fs.root, b"link").node
    assert refused(fs.lookup, fs.root, b"missing") == "ENOENT"
    assert refused(fs.lookup, fs.root, b"n" * 256) == "ENAMETOOLONG"
    assert refused(fs.lookup, file, b"x") == "ENOTDIR"
    assert refused(fs.opendir, file) == "ENOTDIR"
    assert refused(fs.readlink, file) == "EINVAL"
    assert refused(fs.getxattr, file, b"user.none") == "ENODATA"
    assert refused(fs.open, find(fs, b"dir"), os.O_RDONLY) == "EISDIR"
    assert fs.readlink(link) == b"dir/sub"


def test_a_listing_goes_on_at_each_of_its_offsets(fs: Any) -> None:
    directory = fs.opendir(find(fs, b"many"))
    entries = list(directory.entries())
    assert sorted(entry.name for entry in entries) == [b"%03d" % n for n in range(300)]
    for position in (0, 1, 150, 298, 299):
        offset = entries[position].next_offset
        assert list(directory.entries(offset)) == entries[position + 1 :]
    assert list(directory.entries(0)) == entries
    directory.close()


def test_reads_any_range_and_stops_at_the_end(fs: Any) -> None:
    file = fs.open(find(fs, b"file"), os.O_RDONLY)
    assert file.read(4, 3) == b"3456"
    assert file.read(100, 8) == b"89"
    assert file.read(100, 10) == b""
    assert file.seek(2, os.SEEK_DATA) == 2
    assert file.seek(2, os.SEEK_HOLE) == 10
    file.close()
    assert content(fs, find(fs, b"empty")) == b""


def test_a_tree_without_upper_is_never_written_to(sample: Path, base: Path) -> None:
    with file_system("image alone merged", sample, base) as fs:
        file = find(fs, b"file")
        assert refused(fs.open, file, os.O_RDWR) == "EROFS"
        assert refused(fs.mkdir, fs.root, b"new", 0o755, CALLER) == "EROFS"
        assert refused(fs.unlink, fs.root, b"file") == "EROFS"
        assert refused(fs.setattr, file, AttrChange(mode=0)) == "EROFS"
        assert refused(fs.setxattr, file, b"user.a", b"", 0) == "EROFS"


# Writing ----------------------------------------------------------------------------------------

SCRIPT: list[tuple[Any, ...]] = [
    ("mkdir", b"new", 0o7777),
    ("create", b"new/file", 0o666, b"text"),
    ("rename", b"file", b"dir/file", 0),
    ("rename", b"empty", b"new/file", RENAME_NOREPLACE),
    ("rename", b"dir/sub/deep", b"link", RENAME_EXCHANGE),
    ("rename", b"dir", b"new/dir", 0),
    ("rename", b"new", b"new/dir/sub", 0),
    ("rename", b"new/dir/sub", b"new", 0),
    ("unlink", b"dir"),
    ("unlink", b"many"),
    ("rmdir", b"many"),
    ("unlink", b"many/007"),
    ("create", b"many/007", 0o600, b"again"),
    ("rmdir", b"fifo"),
    ("link", b"large", b"new/large"),
    ("link", b"many", b"new/many"),
    ("link", b"many", b"file"),
    ("truncate", b"large", 1000),
    ("write", b"new/large", b"end", 0, os.O_APPEND),
    ("chmod", b"large", 0o4711),
    ("chown", b"large", 5, 6),
    ("utime", b"device", 123_456_789),
    ("symlink", b"new/link", b"x" * 300),
    ("mknod", b"new/fifo", stat.S_IFIFO | 0o622, 0),
    ("setxattr", b"new/dir", b"user.a", b"b"),
    ("removexattr", b"empty", b"user.from"),
    ("removexattr", b"empty", b"user.from"),
    ("mkdir", b"n" * 256, 0o755),
    ("rmdir", b"new/dir/sub"),
    ("listdir", b"new"),
]


def test_does_what_a_directory_of_the_host_does(writable: Any, sample: Path, base: Path) -> None:
    copy = base / "model"
    shutil.copytree(sample, copy, symlinks=True, ignore=lambda *_: ["fifo", "device"])
    os.mkfifo(copy / "fifo", 0o640)
    os.mknod(copy / "device", stat.S_IFBLK | 0o600, os.makedev(7, 300))
    for path in [copy, *copy.rglob("*")]:
        original = (sample / path.relative_to(copy)).lstat()
        os.chown(path, original.st_uid, original.st_gid, follow_symlinks=False)
    for path in [*sorted(copy.rglob("*"), reverse=True), copy]:
        os.utime(path, ns=(10**18, 10**18), follow_symlinks=False)
    native, vfs = NativePaths(copy), VfsPaths(writable)
    for operation in SCRIPT:
        assert result(vfs, operation) == result(native, operation), operation
    assert (
        compare_scans(without_clock(scan_tree(copy)), without_clock(scan_file_system(writable)))
        == []
    )


def result(side: Any, operation: tuple[Any, ...]) -> Any:
    try:
        return getattr(side, operation[0])(*operation[1:])
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def test_a_file_opened_before_its_copy_up_shows_what_is_written_after(writable: Any) -> None:
    node = find(writable, b"file")
    early = writable.open(node, os.O_RDONLY)
    late = writable.open(node, os.O_RDWR)
    assert late.write(b"AB", 1) == 2
    assert early.read(100, 0) == b"0AB3456789"
    early.close()
    late.close()


def test_appends_at_the_end_of_that_moment(writable: Any) -> None:
    node = find(writable, b"file")
    one, two = writable.open(node, os.O_WRONLY), writable.open(node, os.O_WRONLY)
    one.write(b"a", 0, append=True)
    two.write(b"b", 0, append=True)
    one.write(b"c", 0, append=False)
    assert content(writable, node) == b"c123456789ab"
    one.fsync()
    two.fsync(data_only=True)
    one.close()
    two.close()


@pytest.mark.parametrize("written_first", [True, False])
def test_an_unlinked_file_lives_on_while_it_is_held(writable: Any, written_first: bool) -> None:
    node = find(writable, b"file")
    if written_first:
        writable.setattr(node, AttrChange(mode=0o640))
    writable.unlink(writable.root, b"file")
    assert refused(writable.lookup, writable.root, b"file") == "ENOENT"
    assert writable.getattr(node).nlink == 0
    file = writable.open(node, os.O_RDWR)
    file.write(b"XY", 9)
    file.close()
    writable.setattr(node, AttrChange(size=10, uid=7))
    writable.setxattr(node, b"user.late", b"1", 0)
    assert content(writable, node) == b"012345678X"
    assert writable.getattr(node).uid == 7
    assert b"user.late" in writable.listxattr(node)
    assert refused(writable.link, node, writable.root, b"file") == "ENOENT"
    made, again = writable.create(writable.root, b"file", 0o600, CALLER, 0)
    again.close()
    assert made.node != node
    assert content(writable, made.node) == b""


def test_nothing_is_made_in_a_removed_directory(writable: Any) -> None:
    node = writable.mkdir(writable.root, b"gone", 0o755, CALLER).node
    writable.rmdir(writable.root, b"gone")
    assert refused(writable.mkdir, node, b"x", 0o755, CALLER) == "ENOENT"
    assert refused(writable.rename, writable.root, b"file", node, b"x", 0) == "ENOENT"
    directory = writable.opendir(node)
    assert list(directory.entries()) == []
    directory.close()
    writable.fsyncdir(node)


def test_nodes_and_inode_numbers_survive_copy_up_and_renames(writable: Any) -> None:
    directory, file = find(writable, b"dir"), find(writable, b"dir/sub/deep")
    before = writable.getattr(directory).ino, writable.getattr(file).ino
    writable.rename(writable.root, b"dir", find(writable, b"many"), b"moved", 0)
    writable.setattr(file, AttrChange(mode=0o444))
    assert find(writable, b"many/moved/sub/deep") == file
    assert (writable.getattr(directory).ino, writable.getattr(file).ino) == before
    writable.fsyncdir(directory)


def test_makes_files_for_the_caller(writable: Any) -> None:
    made, file = writable.create(writable.root, b"made", 0o666, CALLER, 0)
    file.close()
    assert (made.attr.uid, made.attr.gid, stat.S_IMODE(made.attr.mode)) == (1, 2, 0o640)
    writable.setattr(find(writable, b"dir"), AttrChange(gid=9, mode=0o2775))
    below = writable.mkdir(find(writable, b"dir"), b"below", 0o777, CALLER).attr
    assert (below.gid, stat.S_IMODE(below.mode)) == (9, 0o2750)


def test_copies_ranges_and_says_how_much(writable: Any) -> None:
    source = writable.open(find(writable, b"large"), os.O_RDONLY)
    target = writable.open(find(writable, b"file"), os.O_RDWR)
    assert target.copy_from(source, 1000, 5, 1 << 22) == 256 * 5000 - 1000
    assert target.read(15, 0) == b"01234" + bytes(range(232, 242))
    assert target.copy_from(source, 1 << 22, 0, 10) == 0
    source.close()
    target.close()


def test_allocates_and_finds_holes(writable: Any) -> None:
    file = writable.open(find(writable, b"large"), os.O_RDWR)
    punch_hole_keep_size = 3
    file.allocate(punch_hole_keep_size, 4096, 8192)
    assert file.read(8192, 4096) == bytes(8192)
    assert file.seek(0, os.SEEK_HOLE) == 4096
    assert file.seek(4096, os.SEEK_DATA) == 12288
    file.close()
