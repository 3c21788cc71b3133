"""Which directories or which file of the lowers stand behind a name.

The rules are kernel overlayfs's (Documentation/filesystems/overlayfs.rst): the first layer that has
the name decides; directories are merged with those below until one is opaque, a whiteout or
another file is met; a redirect says under what path the layers below have the directory.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from typing import Any, NamedTuple

from snapshotter.overlay.node import LowerRef
from snapshotter.overlay.whiteouts import is_whiteout
from snapshotter.vfs import NO_MARKS, Attr, Entry, Lower


class Found(NamedTuple):
    """A file in a lower."""

    layer: int
    node: Any
    attr: Attr


class LowerStack:
    """Lowers in order, the topmost first; the layer numbers count from 1."""

    def __init__(self, lowers: Sequence[Lower[Any]]) -> None:
        self._lowers = tuple(lowers)
        self.is_immutable = all(lower.is_immutable for lower in lowers)
        """Whether no answer ever changes."""

    def __getitem__(self, layer: int) -> Lower[Any]:
        return self._lowers[layer - 1]

    @property
    def roots(self) -> tuple[LowerRef, ...]:
        """The root directories."""
        return tuple((layer, lower.root) for layer, lower in enumerate(self._lowers, 1))

    def has(self, parents: Sequence[LowerRef], name: bytes) -> bool:
        """Whether the lowers alone show ``name``, so that to hide it takes a whiteout."""
        for layer, parent in parents:
            entry = self._lookup(layer, parent, name)
            if entry is not None:
                return not is_whiteout(entry.attr.mode, entry.attr.rdev)
        return False

    def find(
        self,
        parents: Sequence[LowerRef],
        path: bytes,
        *,
        below_directory: bool = False,
        after: int = 0,
    ) -> list[Found]:
        """What is merged at ``path``: directories, or one other file, or nothing.

        ``path`` is a name in ``parents`` or, absolute, one in every layer. ``below_directory``
        says that there is a directory above already, so that only directories count; only layers
        below the layer ``after`` are looked at.
        """
        if len(parents) < 2 and b"/" not in path and not after:
            return self._find_in_one(parents, path, below_directory=below_directory)
        found: list[Found] = []
        candidates = list(parents) if not path.startswith(b"/") else self._all_layers(0)
        if after:
            candidates = [candidate for candidate in candidates if candidate[0] > after]
        position = 0
        while position < len(candidates):
            layer, parent = candidates[position]
            position += 1
            walk = _Walk(path, needs_marks=position < len(candidates))
            entry = self._walk(layer, parent, walk)
            if entry is not None:
                is_directory = stat.S_ISDIR(entry.attr.mode)
                if is_directory or not (found or below_directory):
                    found.append(Found(layer, entry.node, entry.attr))
                if not is_directory:
                    break
            if walk.stop:
                break
            if walk.path != path:
                path = walk.path
                if path.startswith(b"/"):
                    candidates, position = self._all_layers(layer), 0
        return found

    def _find_in_one(
        self, parents: Sequence[LowerRef], name: bytes, *, below_directory: bool
    ) -> list[Found]:
        """``find`` where at most one layer has the directory, as in most trees: no marks count."""
        for layer, parent in parents:
            entry = self._lookup(layer, parent, name)
            if entry is None or is_whiteout(entry.attr.mode, entry.attr.rdev):
                break
            if stat.S_ISDIR(entry.attr.mode) or not below_directory:
                return [Found(layer, entry.node, entry.attr)]
        return []

    def _all_layers(self, after: int) -> list[LowerRef]:
        return list(self.roots[after:])

    def _walk(self, layer: int, node: Any, walk: _Walk) -> Entry[Any] | None:
        """Follows a path in one layer; None if it has nothing there."""
        while True:
            entry = self._lookup(layer, node, walk.component)
            if entry is None:
                return None
            if is_whiteout(entry.attr.mode, entry.attr.rdev):
                walk.stop = True
                return None
            if not stat.S_ISDIR(entry.attr.mode):
                walk.stop = True
                return entry if walk.is_last else None
            if walk.needs_marks:
                walk.note(self[layer].marks(entry.node))
            if walk.is_last:
                return entry
            node = entry.node
            walk.position += 1

    def _lookup(self, layer: int, parent: Any, name: bytes) -> Entry[Any] | None:
        try:
            return self[layer].lookup(parent, name)
        except FileNotFoundError:
            return None


class _Walk:
    """Where a walk along a path stands, and what it has learnt for the layers below."""

    def __init__(self, path: bytes, *, needs_marks: bool) -> None:
        self.path = path
        self.needs_marks = needs_marks
        self.stop = False
        self.position = 0
        self._components = path.strip(b"/").split(b"/")

    @property
    def component(self) -> bytes:
        return self._components[self.position]

    @property
    def is_last(self) -> bool:
        return self.position + 1 == len(self._components)

    def note(self, marks: Any = NO_MARKS) -> None:
        """An opaque directory ends the search, a redirect changes the path from here on."""
        if marks.opaque:
            self.stop = True
        elif marks.redirect:
            rest = self._components[self.position + 1 :]
            if marks.redirect.startswith(b"/"):
                self.path = b"/".join([marks.redirect, *rest])
            else:
                before = self._components[: self.position]
                start = b"/" if self.path.startswith(b"/") else b""
                self.path = start + b"/".join([*before, marks.redirect, *rest])
