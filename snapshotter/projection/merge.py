"""Applies layers to a tree, as containerd's unpacker would to a directory. No I/O.

Whiteouts and opaque markers hide what the layers below hold and nothing of their own layer,
wherever they stand in it (OCI image specification, layer.md). Everything else follows in order
and the last one wins.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable

from snapshotter.errors import InvalidInputError
from snapshotter.projection.tree import EntryKind, Inode, LayerEntry

MAX_LINK_HOPS = 255
"""Symbolic links followed for one path before it counts as a loop (containerd's limit)."""

_NODE = int(EntryKind.NODE)
_HARD_LINK = int(EntryKind.HARD_LINK)
_WHITEOUT = int(EntryKind.WHITEOUT)
_OPAQUE = int(EntryKind.OPAQUE)
_TYPES = frozenset(
    (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO,
     stat.S_IFSOCK)
)  # fmt: skip


def merge_layers(layers: Iterable[Iterable[LayerEntry]]) -> Inode:
    """The tree of these layers, lowest first; InvalidInputError as apply_layer."""
    root = _new_directory()
    for entries in layers:
        apply_layer(root, entries)
    return root


def apply_layer(root: Inode, entries: Iterable[LayerEntry]) -> None:
    """Changes the tree under ``root`` into what it is with this layer on top.

    Directories are changed in place, so ``root`` must share none with a tree that is still wanted;
    files are never changed, only replaced. Raises InvalidInputError, naming the entry, for a
    parent that is no directory or cannot be resolved, for a hard link without a target or to a
    directory, and for an entry of unknown kind or type; the tree is then half changed and of no
    use.
    """
    listed = list(entries)
    _hide_lower(root, listed)
    _Unpacker(root).unpack(listed)


def _new_directory() -> Inode:
    return Inode(stat.S_IFDIR | 0o755)


def _children(directory: Inode) -> dict[bytes, Inode]:
    assert directory.children is not None
    return directory.children


# Whiteouts and opaque markers -------------------------------------------------------------------


def _hide_lower(root: Inode, entries: list[LayerEntry]) -> None:
    markers = [entry for entry in entries if entry.kind in (_WHITEOUT, _OPAQUE)]
    if not markers:
        return
    own = {entry.path for entry in entries if entry.kind != _OPAQUE}
    # All are found before any acts, so that their order cannot matter.
    emptied: list[dict[bytes, Inode]] = []
    removed: list[tuple[dict[bytes, Inode], bytes]] = []
    for entry in markers:
        parent_path, _, name = entry.path.rpartition(b"/")
        if entry.kind == _OPAQUE:
            directory = _find_lower(root, entry, entry.path, own)
            if directory is not None:
                emptied.append(_children(directory))
        elif not name:
            raise InvalidInputError("whiteout of the root of an image")
        else:
            directory = _find_lower(root, entry, parent_path, own)
            if directory is not None:
                removed.append((_children(directory), name))
    for children in emptied:
        children.clear()
    for siblings, name in removed:
        siblings.pop(name, None)


def _find_lower(root: Inode, entry: LayerEntry, path: bytes, own: set[bytes]) -> Inode | None:
    """The directory ``path`` of the layers below, or None if they have none there.

    A link in the way is followed unless the layer replaces or hides it: then the marker is about
    what the layer has in that place, and nothing of the link's target is meant.
    """
    directory = root
    parts = path.split(b"/") if path else []
    for depth, part in enumerate(parts, 1):
        found = _children(directory).get(part)
        if found is None:
            return None
        if found.children is None:
            here = parts[:depth]
            if not stat.S_ISLNK(found.mode) or b"/".join(here) in own:
                return None
            found = _Walk(root, entry).existing_directory(here)
            if found is None:
                return None
        directory = found
    return directory


# The other entries ------------------------------------------------------------------------------


class _Walk:
    """One path being resolved within the root: ``..`` stays below it, links are followed."""

    __slots__ = ("_entry", "_missing", "_root", "chain")

    def __init__(self, root: Inode, entry: LayerEntry) -> None:
        self._root = root
        self._entry = entry
        self._missing: list[bytes] = []
        self.chain = [root]
        """The directories from the root to the place reached."""

    def directory(self, parts: list[bytes]) -> Inode:
        """The directory at ``parts``; what is missing on the way is made (0755, root, time 0)."""
        self._follow(parts)
        for name in self._missing:
            made = _children(self.chain[-1])[name] = _new_directory()
            self.chain.append(made)
        return self.chain[-1]

    def existing_directory(self, parts: list[bytes]) -> Inode | None:
        """The directory at ``parts``, or None if there is none."""
        try:
            self._follow(parts)
        except InvalidInputError:
            return None
        return None if self._missing else self.chain[-1]

    def _follow(self, parts: list[bytes]) -> None:
        todo = parts[::-1]
        hops = 0
        while todo:
            part = todo.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                self._ascend()
                continue
            # What follows a missing directory is missing too, until ".." leads back.
            found = None if self._missing else _children(self.chain[-1]).get(part)
            if found is None:
                self._missing.append(part)
            elif found.children is not None:
                self.chain.append(found)
            elif stat.S_ISLNK(found.mode):
                hops += 1
                if hops > MAX_LINK_HOPS:
                    raise self._invalid("too many symbolic links on its way")
                if found.target.startswith(b"/"):
                    del self.chain[1:]
                todo.extend(found.target.split(b"/")[::-1])
            else:
                raise self._invalid(f"its parent {part!r} is not a directory")

    def _ascend(self) -> None:
        if self._missing:
            self._missing.pop()
        elif len(self.chain) > 1:
            self.chain.pop()

    def _invalid(self, problem: str) -> InvalidInputError:
        entry = self._entry
        to = f" to {entry.target!r}" if entry.kind == _HARD_LINK else ""
        return InvalidInputError(f"layer entry {entry.path!r}{to}: {problem}")


class _Unpacker:
    """Puts one layer's entries in place, remembering which directories their parents are."""

    __slots__ = ("_parents", "_root")

    def __init__(self, root: Inode) -> None:
        self._root = root
        self._parents: dict[bytes, dict[bytes, Inode]] = {}

    def unpack(self, entries: list[LayerEntry]) -> None:
        for entry in entries:
            if entry.kind == _NODE:
                self._put_node(entry)
            elif entry.kind == _HARD_LINK:
                self._put_hard_link(entry)
            elif entry.kind not in (_WHITEOUT, _OPAQUE):
                raise InvalidInputError(f"layer entry {entry.path!r}: unknown kind {entry.kind}")

    def _put_node(self, entry: LayerEntry) -> None:
        kind = stat.S_IFMT(entry.mode)
        if kind not in _TYPES:
            raise InvalidInputError(f"layer entry {entry.path!r}: unknown type {entry.mode:o}")
        if not entry.path:
            if kind != stat.S_IFDIR:
                raise InvalidInputError("layer entry for the root is not a directory")
            _update_directory(self._root, entry)
            return
        siblings, name = self._place(entry)
        if kind == stat.S_IFDIR:
            existing = siblings.get(name)
            if existing is not None and existing.children is not None:
                _update_directory(existing, entry)
                return
        self._put(siblings, name, _new_inode(entry, kind))

    def _put_hard_link(self, entry: LayerEntry) -> None:
        walk = _Walk(self._root, entry)
        parent_path, _, target_name = entry.target.rpartition(b"/")
        parent = walk.existing_directory(parent_path.split(b"/"))
        target = None if parent is None else _children(parent).get(target_name)
        if target is None or target.children is not None:
            problem = "is missing" if target is None else "is a directory"
            raise InvalidInputError(
                f"hard link {entry.path!r}: its target {entry.target!r} {problem}"
            )
        if not entry.path:
            raise InvalidInputError("hard link in the place of the root")
        siblings, name = self._place(entry)
        existing = siblings.get(name)
        if existing is not None and any(existing is directory for directory in walk.chain):
            raise InvalidInputError(
                f"hard link {entry.path!r}: its target {entry.target!r} lies in the directory that"
                " it replaces"
            )
        self._put(siblings, name, target)

    def _place(self, entry: LayerEntry) -> tuple[dict[bytes, Inode], bytes]:
        """The children among which the entry belongs, and its name there."""
        parent_path, _, name = entry.path.rpartition(b"/")
        siblings = self._parents.get(parent_path)
        if siblings is None:
            directory = _Walk(self._root, entry).directory(parent_path.split(b"/"))
            siblings = self._parents[parent_path] = _children(directory)
        return siblings, name

    def _put(self, siblings: dict[bytes, Inode], name: bytes, inode: Inode) -> None:
        existing = siblings.get(name)
        # Only a directory or a link can lie on the way to a remembered parent.
        if existing is not None and (existing.children is not None or stat.S_ISLNK(existing.mode)):
            self._parents.clear()
        siblings[name] = inode


def _update_directory(directory: Inode, entry: LayerEntry) -> None:
    directory.mode = entry.mode
    directory.uid = entry.uid
    directory.gid = entry.gid
    directory.mtime_ns = entry.mtime_ns
    directory.xattrs = entry.xattrs


def _new_inode(entry: LayerEntry, kind: int) -> Inode:
    """What the entry describes, with only the fields that its type has."""
    regular = kind == stat.S_IFREG
    device = kind in (stat.S_IFCHR, stat.S_IFBLK)
    link = kind == stat.S_IFLNK
    return Inode(
        # Linux makes every symbolic link 0777, whatever a tar header says.
        entry.mode | 0o777 if link else entry.mode,
        uid=entry.uid,
        gid=entry.gid,
        mtime_ns=entry.mtime_ns,
        size=entry.size if regular else 0,
        rdev=entry.rdev if device else 0,
        target=entry.target if link else b"",
        content=entry.content if regular and entry.size else b"",
        xattrs=entry.xattrs,
    )
