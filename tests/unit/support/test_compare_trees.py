"""The comparer must see every kind of difference, or the end-to-end tests prove nothing."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.compare_trees import compare_trees


def build(root: Path) -> None:
    """A small tree with one of everything."""
    (root / "d/sub").mkdir(parents=True)
    (root / "d/file").write_bytes(b"content")
    (root / "d/other").write_bytes(b"other")
    (root / "link").symlink_to("d/file")
    os.link(root / "d/file", root / "d/sub/hard")
    os.mkfifo(root / "fifo")
    os.mknod(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    os.setxattr(root / "d/other", "user.note", b"one")
    for path in (*root.rglob("*"), root):
        os.utime(path, ns=(0, 1_600_000_000_123_456_789), follow_symlinks=False)


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    expected, actual = tmp_path / "expected", tmp_path / "actual"
    for root in (expected, actual):
        root.mkdir()
        build(root)
    return expected, actual


def keep_times(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """The change alone, without the mtimes that it touches."""

    def changed(root: Path) -> None:
        change(root)
        for path in (*root.rglob("*"), root):
            os.utime(path, ns=(0, 1_600_000_000_123_456_789), follow_symlinks=False)

    return changed


def replace_node(path: Path, mode: int, device: int = 0) -> None:
    path.unlink()
    os.mknod(path, mode, device)


def relink(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def split(path: Path) -> None:
    shutil.copy2(path, path.with_name("copy"))
    path.with_name("copy").replace(path)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda root: (root / "d/other").unlink(), "d/other: missing"),
    "added": (lambda root: (root / "new").touch(), "new: not expected"),
    "added in an empty directory": (
        lambda root: (root / "d/sub/new").mkdir(),
        "d/sub/new: not expected",
    ),
    "content of the same size": (
        lambda root: (root / "d/other").write_bytes(b"OTHER"),
        "d/other: sha256",
    ),
    "size": (lambda root: (root / "d/other").write_bytes(b"others"), "d/other: size"),
    "mode": (lambda root: (root / "d/other").chmod(0o600), "d/other: mode"),
    "setuid": (lambda root: (root / "d/other").chmod(0o4644), "d/other: mode"),
    "directory's mode": (lambda root: (root / "d").chmod(0o1777), "d: mode"),
    "root's mode": (lambda root: root.chmod(0o700), ".: mode"),
    "owner": (lambda root: os.chown(root / "d/other", 5, 0), "d/other: uid"),
    "group": (lambda root: os.chown(root / "link", 0, 6, follow_symlinks=False), "link: gid"),
    "type": (lambda root: replace_node(root / "fifo", 0o644 | stat.S_IFREG), "fifo: mode"),
    "device number": (
        lambda root: replace_node(root / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 5)),
        "null: rdev",
    ),
    "link target": (lambda root: relink(root / "link", "d/evil"), "link: target"),
    "xattr's value": (
        lambda root: os.setxattr(root / "d/other", "user.note", b"two"),
        "d/other: xattrs",
    ),
    "xattr too many": (
        lambda root: os.setxattr(root / "d/sub", "user.more", b""),
        "d/sub: xattrs",
    ),
    "xattr missing": (
        lambda root: os.removexattr(root / "d/other", "user.note"),
        "d/other: xattrs",
    ),
    "hard link split": (lambda root: split(root / "d/sub/hard"), "d/sub/hard: links"),
    "hard link outside the tree": (
        lambda root: os.link(root / "d/other", root.parent / "outside"),
        "d/other: nlink",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_is_named(trees: tuple[Path, Path], name: str) -> None:
    expected, actual = trees
    change, line = CHANGES[name]
    keep_times(change)(actual)
    assert any(found.startswith(line) for found in compare_trees(expected, actual))


def test_one_nanosecond_is_a_difference(trees: tuple[Path, Path]) -> None:
    expected, actual = trees
    os.utime(actual / "link", ns=(0, 1_600_000_000_123_456_788), follow_symlinks=False)
    assert [line.split(" is ")[0] for line in compare_trees(expected, actual)] == ["link: mtime_ns"]


def test_time_that_no_entry_tells_can_be_left_out(trees: tuple[Path, Path]) -> None:
    expected, actual = trees
    os.utime(actual, ns=(0, 1))
    assert compare_trees(expected, actual, ignore_mtime_of=frozenset({b"."})) == []


def test_equal_trees_have_no_differences(trees: tuple[Path, Path]) -> None:
    assert compare_trees(*trees) == []
