"""Metacopies: files whose attributes are in one layer and whose content is in a layer below.

Kernel overlayfs writes them with ``metacopy=on``, as in the kernel view, when only attributes were
changed. We never write one: here content comes along with a copy-up. A metacopy is looked for only
when content is wanted, so that names and attributes cost nothing more.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from snapshotter.vfs import File

if TYPE_CHECKING:
    from snapshotter.overlay.node import Node
    from snapshotter.overlay.tree import Tree


class ContentBelow(OSError):  # noqa: N818 - it says where to look
    """The content is not in this layer. ``redirect`` says under what path; b"" for the same."""

    def __init__(self, name: bytes, redirect: bytes) -> None:
        super().__init__(errno.EIO, "open: its content is in a layer below (metacopy)", name)
        self.redirect = redirect


def open_below(tree: Tree, node: Node) -> File:
    """Opens the content that the lowers have of a regular file.

    EIO if there is none where it must be; Pending if it is not here.
    """
    if node.content is not None:
        layer, lower = node.content
        return tree.lowers[layer].open(lower, os.O_RDONLY)
    parent, path = node.names[0] if node.names else node.last_name
    after = 0
    if node.has_upper:
        assert tree.upper is not None
        path = _follow(path, tree.upper.redirect(node))
    else:
        after, lower = node.lowers[0]
        try:
            return tree.lowers[after].open(lower, os.O_RDONLY)
        except ContentBelow as error:
            path = _follow(path, error.redirect)
    while True:
        found = tree.lowers.find(parent.lowers, path, after=after)
        if not found or not stat.S_ISREG(found[0].attr.mode):
            raise OSError(errno.EIO, "open: no lower has the content of this metacopy", path)
        after, lower, _ = found[0]
        try:
            file = tree.lowers[after].open(lower, os.O_RDONLY)
        except ContentBelow as error:
            path = _follow(path, error.redirect)
        else:
            node.content = after, lower
            return file


def _follow(path: bytes, redirect: bytes) -> bytes:
    """Where a redirect leads from ``path``: a name stays in its directory."""
    if not redirect:
        return path
    return (
        redirect if redirect.startswith(b"/") else b"".join((*path.rpartition(b"/")[:2], redirect))
    )
