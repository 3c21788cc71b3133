"""Picks paths of an image to test with; what an image lacks is not tested with it."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable
from typing import Any

import pytest

from snapshotter.projection.image_reader import ImageInode

Fields = dict[str, Any]
Tree = dict[bytes, ImageInode]
CHUNK = 1 << 20
SAMPLED = 400
"""How many names of a large image are looked at one by one."""


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


UNKNOWN = digest_of(b"nobody has this")


def sample(tree: Tree) -> list[bytes]:
    paths = sorted(tree)
    return paths[:: -(-len(paths) // SAMPLED)]


def some(tree: Tree, what: str, is_meant: Callable[[bytes, ImageInode], bool]) -> bytes:
    """The first path of that kind."""
    for path, inode in tree.items():
        if is_meant(path, inode):
            return path
    pytest.skip(f"the image has no {what}")


def regular(tree: Tree, least_bytes: int = 0) -> bytes:
    return some(
        tree,
        f"file of {least_bytes} bytes",
        lambda _, inode: stat.S_ISREG(inode.mode) and inode.size >= least_bytes,
    )


def link(tree: Tree) -> bytes:
    return some(tree, "symbolic link", lambda _, inode: stat.S_ISLNK(inode.mode))


def small(tree: Tree) -> bytes:
    return some(
        tree,
        "small file",
        lambda _, inode: stat.S_ISREG(inode.mode) and 0 < inode.size <= CHUNK,
    )
