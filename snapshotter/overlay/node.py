"""A file of the merged tree, as long as somebody holds it."""

from __future__ import annotations

import os
import stat
import weakref
from collections.abc import MutableMapping
from typing import Any, NamedTuple

from snapshotter.vfs import Attr

LowerRef = tuple[int, Any]
"""A layer's number (the upper is 0, lowers count from 1) and the node in it."""


class Inherited(NamedTuple):
    """What a directory gives to the files that are made in it."""

    gid: int | None
    """Its group, if it has the set-gid bit."""
    default_acl: bytes | None


class Node:
    """One file, directory, link or device. Who holds it keeps it; its parents only know of it.

    All fields belong to whoever holds the lock of the tree.
    """

    __slots__ = (
        "__weakref__",
        "alias",
        "attr",
        "children",
        "content",
        "copying",
        "has_content",
        "has_upper",
        "held",
        "inherited",
        "ino",
        "last_name",
        "lost_names",
        "lowers",
        "names",
        "redirect",
        "type_bits",
    )

    def __init__(
        self,
        type_bits: int,
        ino: int,
        *,
        has_upper: bool,
        lowers: tuple[LowerRef, ...] = (),
        redirect: bytes = b"",
        attr: Attr | None = None,
    ) -> None:
        self.type_bits = type_bits
        self.ino = ino
        self.has_upper = has_upper
        self.lowers = lowers
        """All of a directory; of another file the one that its content came from."""
        self.redirect = redirect
        """What the upper says of where the lowers have this directory."""
        self.attr = attr
        """As the lower has them, if that never changes."""
        self.names: list[tuple[Node, bytes]] = []
        """The names that are known: one of a directory, several of a file with hard links."""
        self.children = weakref.WeakValueDictionary() if type_bits == stat.S_IFDIR else _NO_CHILDREN
        self.inherited: Inherited | None = None
        """Of a directory what its new files inherit, once that was read from the upper."""
        self.held: int | None = None
        """A descriptor (O_PATH) of the file in the upper, when it may be without a known name."""
        self.last_name: tuple[Node, bytes]
        """Where a file was that has lost its last known name; set with that."""
        self.has_content = False
        """Whether it is known that the upper has its content too, and no lower (a metacopy)."""
        self.content: LowerRef | None = None
        """Where a lower has its content, if not where its attributes are and once that is known."""
        self.copying = False
        """Whether its content is being copied up."""
        self.alias: tuple[int, bytes] | None = None
        """Of a copied-up file with aliases: how many are in no upper yet; its alias name."""
        self.lost_names = 0
        """How many of its lower's names are gone."""

    @property
    def is_directory(self) -> bool:
        """Whether this is a directory."""
        return self.type_bits == stat.S_IFDIR

    def hold(self, descriptor: int) -> None:
        """Keeps ``descriptor`` until the node itself goes."""
        if self.held is not None:
            os.close(descriptor)
            return
        self.held = descriptor

    def let_go(self) -> None:
        """Closes the held descriptor; the node has its name still."""
        if self.held is not None:
            os.close(self.held)
            self.held = None

    def __del__(self) -> None:
        """Closes the held descriptor."""
        if self.held is not None:
            os.close(self.held)


_NO_CHILDREN: MutableMapping[bytes, Node] = {}
"""Shared by all that is no directory: one with weak values costs more than the rest of a node."""
