"""Applies layers to a tree, as containerd does on overlayfs. No I/O.

Each layer is unpacked by itself and then laid over what is below: its symbolic links lead its own
entries, and a link or file of a layer below never does. Where an entry asks for a directory in the
place of one, there is a new directory. Whiteouts and opaque markers hide what the layers below
hold and nothing of their own layer, wherever they stand in it (OCI image specification, layer.md).
Everything else follows in order and the last one wins. docs/decisions says where this is not what
containerd does, and why.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass

from snapshotter.errors import InvalidInputError
from snapshotter.projection.posix_acl import access_acl_after_chmod
from snapshotter.projection.tree import EntryKind, Inode, LayerEntry

MAX_LINK_HOPS = 255
"""Symbolic links followed for one path before it counts as a loop (containerd's limit)."""
MAX_LINK_PARTS = 50_000_000
"""Names in targets of links followed in a whole image: some 20 s of work."""

_NODE = int(EntryKind.NODE)
_HARD_LINK = int(EntryKind.HARD_LINK)
_WHITEOUT = int(EntryKind.WHITEOUT)
_OPAQUE = int(EntryKind.OPAQUE)
_CAPABILITY = b"security.capability"
_ACCESS_ACL = b"system.posix_acl_access"
_TYPES = frozenset(
    (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO,
     stat.S_IFSOCK)
)  # fmt: skip


@dataclass(slots=True)
class MergeBudget:
    """What merging may still do; a hostile image runs out of it and is refused."""

    max_depth: int = 2_048
    """Directories above an entry, links resolved."""
    names: int = 8_000_000
    """Entries, and directories made for them."""
    link_parts: int = MAX_LINK_PARTS


def merge_layers(
    layers: Iterable[Iterable[LayerEntry]], budget: MergeBudget | None = None
) -> Inode:
    """The tree of these layers, lowest first; InvalidInputError as apply_layer."""
    root = _new_directory()
    budget = budget or MergeBudget()
    for entries in layers:
        apply_layer(root, entries, budget)
    return root


def apply_layer(
    root: Inode, entries: Iterable[LayerEntry], budget: MergeBudget | None = None
) -> None:
    """Changes the tree under ``root`` into what it is with this layer on top.

    Directories, and files that get one more hard link, are changed in place, so ``root`` must
    share none with a tree that is still wanted. Raises InvalidInputError, naming the entry, for a
    parent that is no directory or cannot be resolved, for a hard link without a target, to itself
    or to a directory, for an entry of unknown kind or type, and when the budget is used up; the
    tree is then half changed and of no use.
    """
    listed = list(entries)
    budget = budget or MergeBudget()
    own: set[int] | None = set() if root.children else None
    _hide_lower(root, listed)
    _Unpacker(root, own, budget).unpack(listed)


def _new_directory() -> Inode:
    return Inode(stat.S_IFDIR | 0o755)


def _children(directory: Inode) -> dict[bytes, Inode]:
    assert directory.children is not None
    return directory.children


# Whiteouts and opaque markers -------------------------------------------------------------------


def _hide_lower(root: Inode, entries: list[LayerEntry]) -> None:
    # All are found before any acts, so that their order cannot matter.
    emptied: list[dict[bytes, Inode]] = []
    removed: list[tuple[dict[bytes, Inode], bytes]] = []
    for entry in entries:
        if entry.kind == _OPAQUE:
            directory = _find_directory(root, entry.path)
            if directory is not None:
                emptied.append(_children(directory))
        elif entry.kind == _WHITEOUT:
            parent_path, _, name = entry.path.rpartition(b"/")
            if not name:
                raise InvalidInputError("whiteout of the root of an image")
            directory = _find_directory(root, parent_path)
            if directory is not None:
                removed.append((_children(directory), name))
    for children in emptied:
        children.clear()
    for siblings, name in removed:
        siblings.pop(name, None)


def _find_directory(root: Inode, path: bytes) -> Inode | None:
    """The directory at exactly this path, or None; no link is followed."""
    directory = root
    for part in path.split(b"/") if path else ():
        found = _children(directory).get(part)
        if found is None or found.children is None:
            return None
        directory = found
    return directory


# The other entries ------------------------------------------------------------------------------


class _Walk:
    """One path being resolved within the root: ``..`` stays below it, links are followed.

    ``own`` has the ids of what the layer itself has put in place, None for everything. What is
    neither own nor a directory is not there: a directory will take its place.
    """

    __slots__ = ("_budget", "_entry", "_missing", "_own", "_root", "chain", "is_lasting")

    def __init__(
        self, root: Inode, entry: LayerEntry, own: set[int] | None, budget: MergeBudget
    ) -> None:
        self._root = root
        self._entry = entry
        self._own = own
        self._budget = budget
        self._missing: list[bytes] = []
        self.chain = [root]
        """The directories from the root to the place reached."""
        self.is_lasting = True
        """Whether only what replaces a directory or a link can lead the path elsewhere."""

    def directory(self, parts: list[bytes]) -> Inode:
        """The directory at ``parts``; what is missing on the way is made (0755, root, time 0).

        All on the way are then the layer's own.
        """
        self._follow(parts)
        if len(self.chain) + len(self._missing) - 1 > self._budget.max_depth:
            raise self._invalid(f"lies deeper than limit path_depth: {self._budget.max_depth}")
        self._budget.names -= len(self._missing)
        for name in self._missing:
            made = _children(self.chain[-1])[name] = _new_directory()
            self.chain.append(made)
        if self._own is not None:
            self._own.update(map(id, self.chain))
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
            elif self._own is not None and id(found) not in self._own:
                self._missing.append(part)
            elif stat.S_ISLNK(found.mode):
                hops += 1
                if hops > MAX_LINK_HOPS:
                    raise self._invalid("too many symbolic links on its way")
                self._follow_link(found.target, todo)
            else:
                raise self._invalid(f"its parent {part!r} is not a directory")

    def _follow_link(self, target: bytes, todo: list[bytes]) -> None:
        if target.startswith(b"/"):
            del self.chain[1:]
        parts = target.split(b"/")
        self._budget.link_parts -= len(parts)
        if self._budget.link_parts < 0:
            raise self._invalid("the image leads through too many symbolic links")
        todo.extend(parts[::-1])

    def _ascend(self) -> None:
        if self._missing:
            self._missing.pop()
            self.is_lasting = False  # what is put there later may be a link
        elif len(self.chain) > 1:
            self.chain.pop()

    def _invalid(self, problem: str) -> InvalidInputError:
        entry = self._entry
        to = f" to {entry.target!r}" if entry.kind == _HARD_LINK else ""
        return InvalidInputError(f"layer entry {entry.path!r}{to}: {problem}")


class _Unpacker:
    """Puts one layer's entries in place, remembering which directories their parents are."""

    __slots__ = ("_budget", "_hidden", "_own", "_parents", "_root")

    def __init__(self, root: Inode, own: set[int] | None, budget: MergeBudget) -> None:
        self._root = root
        self._own = own
        self._budget = budget
        self._parents: dict[bytes, dict[bytes, Inode]] = {}
        self._hidden: set[bytes] = set()

    def unpack(self, entries: list[LayerEntry]) -> None:
        budget = self._budget
        self._hidden = {entry.path for entry in entries if entry.kind == _WHITEOUT}
        for entry in entries:
            budget.names -= 1
            if budget.names < 0:
                raise InvalidInputError(
                    f"layer entry {entry.path!r}: the image has more than limit image_entries"
                )
            if entry.kind == _NODE:
                self._put_node(entry)
            elif entry.kind == _HARD_LINK:
                self._put_hard_link(entry)
            elif entry.kind in (_WHITEOUT, _OPAQUE):
                self._put_marker(entry)
            else:
                raise InvalidInputError(f"layer entry {entry.path!r}: unknown kind {entry.kind}")

    def _put_node(self, entry: LayerEntry) -> None:
        kind = stat.S_IFMT(entry.mode)
        if kind not in _TYPES:
            raise InvalidInputError(f"layer entry {entry.path!r}: unknown type {entry.mode:o}")
        if not entry.path:
            if kind != stat.S_IFDIR:
                raise InvalidInputError("layer entry for the root is not a directory")
            _update_directory(self._root, entry, {})
            return
        siblings, name = self._place(entry)
        if kind == stat.S_IFDIR:
            existing = siblings.get(name)
            if existing is not None and existing.children is not None:
                is_own = self._is_own(existing)
                _update_directory(existing, entry, existing.xattrs if is_own else {})
                if not is_own:
                    self._put(siblings, name, existing)
                return
        self._put(siblings, name, _new_inode(entry, kind))

    def _put_marker(self, entry: LayerEntry) -> None:
        """What a marker still does after ``_hide_lower``, as any entry: its parents are there.

        If links of this layer lead it elsewhere, it hides what is there. In what the layer hides
        as a whole there is no more to hide, and nothing to make.
        """
        parts = entry.path.split(b"/")
        ends = range(1, len(parts) + (entry.kind == _OPAQUE))
        if any(b"/".join(parts[:end]) in self._hidden for end in ends):
            return
        if entry.kind == _OPAQUE:
            children = self._children_at(entry, entry.path)
            for name in [name for name, child in children.items() if not self._is_own(child)]:
                del children[name]
        else:
            siblings, name = self._place(entry)
            hidden = siblings.get(name)
            if hidden is not None and not self._is_own(hidden):
                del siblings[name]

    def _put_hard_link(self, entry: LayerEntry) -> None:
        walk = _Walk(self._root, entry, None, self._budget)
        parent_path, _, target_name = entry.target.rpartition(b"/")
        parent = walk.existing_directory(parent_path.split(b"/"))
        target = None if parent is None else _children(parent).get(target_name)
        if parent is None or target is None or target.children is not None:
            problem = "is missing" if target is None else "is a directory"
            raise _bad_link(entry, problem)
        if not entry.path:
            raise InvalidInputError("hard link in the place of the root")
        siblings, name = self._place(entry)
        if siblings is _children(parent) and name == target_name:
            raise _bad_link(entry, "is itself")
        if _children(parent)[target_name] is not target:  # a link of a layer below: see _Walk
            raise _bad_link(entry, "gave way to a directory above it")
        existing = siblings.get(name)
        if existing is not None and any(existing is directory for directory in walk.chain):
            raise _bad_link(entry, "lies in the directory that it replaces")
        _update_file(target, entry)
        self._put(siblings, name, target)

    def _place(self, entry: LayerEntry) -> tuple[dict[bytes, Inode], bytes]:
        """The children among which the entry belongs, and its name there."""
        parent_path, _, name = entry.path.rpartition(b"/")
        return self._children_at(entry, parent_path), name

    def _children_at(self, entry: LayerEntry, path: bytes) -> dict[bytes, Inode]:
        children = self._parents.get(path)
        if children is None:
            walk = _Walk(self._root, entry, self._own, self._budget)
            children = _children(walk.directory(path.split(b"/")))
            if walk.is_lasting:
                self._parents[path] = children
        return children

    def _put(self, siblings: dict[bytes, Inode], name: bytes, inode: Inode) -> None:
        existing = siblings.get(name)
        # Only a directory or a link can lie on the way to a remembered parent.
        if (
            existing is not None
            and existing is not inode
            and (existing.children is not None or stat.S_ISLNK(existing.mode))
        ):
            self._parents.clear()
        siblings[name] = inode
        if self._own is not None:
            self._own.add(id(inode))

    def _is_own(self, inode: Inode) -> bool:
        return self._own is None or id(inode) in self._own


def _bad_link(entry: LayerEntry, problem: str) -> InvalidInputError:
    return InvalidInputError(f"hard link {entry.path!r}: its target {entry.target!r} {problem}")


def _update_directory(directory: Inode, entry: LayerEntry, kept_xattrs: dict[bytes, bytes]) -> None:
    directory.mode = entry.mode
    directory.uid = entry.uid
    directory.gid = entry.gid
    directory.mtime_ns = entry.mtime_ns
    directory.xattrs = {**kept_xattrs, **entry.xattrs} if kept_xattrs else entry.xattrs


def _update_file(inode: Inode, link: LayerEntry) -> None:
    """What a hard link's own header does to the file: chown, which ends capabilities, and more."""
    if stat.S_ISLNK(inode.mode):
        unfit: tuple[bytes, ...] = (b"user.", b"system.")
    else:
        inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(link.mode)
        unfit = () if stat.S_ISREG(inode.mode) else (b"user.",)
    inode.uid = link.uid
    inode.gid = link.gid
    inode.mtime_ns = link.mtime_ns
    if link.xattrs or not inode.xattrs.keys().isdisjoint((_CAPABILITY, _ACCESS_ACL)):
        xattrs = {n: value for n, value in inode.xattrs.items() if n != _CAPABILITY}
        xattrs |= {n: value for n, value in link.xattrs.items() if not n.startswith(unfit)}
        if _ACCESS_ACL in xattrs:
            acl = access_acl_after_chmod(xattrs.pop(_ACCESS_ACL), inode.mode)
            xattrs |= {_ACCESS_ACL: acl} if acl is not None else {}
        inode.xattrs = xattrs


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
