"""Compares two directory trees completely and says, for people, where they differ.

Everything that a container can see is compared: which paths there are, type and permission bits,
owner, mtime in nanoseconds, size, device number, extended attributes, link target, which names
are hard links of one file, and the content. Not compared is what belongs to the file system
rather than to the tree: a directory's size and link count, inode numbers as such, atime, ctime.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Node:
    """What one path of a tree is. ``links`` are all names of a file with several, else empty."""

    mode: str
    uid: int
    gid: int
    mtime_ns: int
    size: int
    rdev: str
    xattrs: tuple[tuple[str, bytes], ...]
    target: bytes
    links: tuple[bytes, ...]
    nlink: int
    sha256: str


def compare_trees(
    expected: str | os.PathLike[str],
    actual: str | os.PathLike[str],
    *,
    ignore_mtime_of: frozenset[bytes] = frozenset(),
) -> list[str]:
    """One line for each difference, empty when the trees are the same.

    ``ignore_mtime_of`` names paths (relative, ``.`` is the root) whose time is not told by the
    input, because no entry of an image describes them.
    """
    return compare_scans(scan_tree(expected), scan_tree(actual), ignore_mtime_of=ignore_mtime_of)


def compare_scans(
    expected: dict[bytes, Node],
    actual: dict[bytes, Node],
    *,
    ignore_mtime_of: frozenset[bytes] = frozenset(),
) -> list[str]:
    """As ``compare_trees``, of trees that were scanned before."""
    lines = []
    for path in sorted(expected.keys() | actual.keys()):
        shown = os.fsdecode(path)
        if path not in actual:
            lines.append(f"{shown}: missing ({expected[path].mode})")
        elif path not in expected:
            lines.append(f"{shown}: not expected ({actual[path].mode})")
        else:
            lines += [
                f"{shown}: {name} is {found!r}, expected {wanted!r}"
                for name, wanted, found in _unequal(expected[path], actual[path])
                if not (name == "mtime_ns" and path in ignore_mtime_of)
            ]
    return lines


def scan_tree(root: str | os.PathLike[str]) -> dict[bytes, Node]:
    """Every path below ``root`` (relative, the root is ``.``) with what it is.

    Reads every file. An error while doing so is the caller's to see: it is no difference.
    """
    base = os.fsencode(root)
    stats = {path: os.lstat(os.path.join(base, path)) for path in _paths(base)}
    names: dict[tuple[int, int], list[bytes]] = {}
    for path, status in stats.items():
        if not stat.S_ISDIR(status.st_mode):
            names.setdefault((status.st_dev, status.st_ino), []).append(path)
    groups = {
        path: tuple(sorted(group)) for group in names.values() if len(group) > 1 for path in group
    }
    return {
        path: _describe(os.path.join(base, path), status, groups.get(path, ()))
        for path, status in stats.items()
    }


def _paths(base: bytes) -> Iterator[bytes]:
    yield b"."
    stack = [b""]
    while stack:
        directory = stack.pop()
        with os.scandir(os.path.join(base, directory)) as entries:
            for entry in entries:
                path = os.path.join(directory, entry.name)
                yield path
                if entry.is_dir(follow_symlinks=False):
                    stack.append(path)


def _describe(path: bytes, status: os.stat_result, links: tuple[bytes, ...]) -> Node:
    is_directory = stat.S_ISDIR(status.st_mode)
    is_device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
    return Node(
        mode=f"{stat.filemode(status.st_mode)} ({stat.S_IMODE(status.st_mode):04o})",
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
        size=0 if is_directory else status.st_size,
        rdev=f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}" if is_device else "",
        xattrs=tuple(
            (name, os.getxattr(path, name, follow_symlinks=False))
            for name in sorted(os.listxattr(path, follow_symlinks=False))
        ),
        target=os.readlink(path) if stat.S_ISLNK(status.st_mode) else b"",
        links=links,
        nlink=0 if is_directory else status.st_nlink,
        sha256=_file_digest(path) if stat.S_ISREG(status.st_mode) else "",
    )


def _file_digest(path: bytes) -> str:
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unequal(expected: Node, actual: Node) -> Iterator[tuple[str, object, object]]:
    for field in fields(Node):
        wanted, found = getattr(expected, field.name), getattr(actual, field.name)
        if wanted != found:
            yield field.name, wanted, found
