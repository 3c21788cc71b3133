"""The merged tree as it is: names to nodes, attributes, listings. It changes nothing on disk."""

from __future__ import annotations

import errno
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from snapshotter.overlay.node import Node
from snapshotter.overlay.stack import Found, LowerStack
from snapshotter.overlay.upper import Place, Upper
from snapshotter.overlay.whiteouts import is_whiteout
from snapshotter.vfs import TYPE_MASK, Attr, DirEntry, Entry, Lower

_NAME_MAX = 255
_LAYER_SHIFT = 48
"""st_ino is the layer's number above this bit and the file's own below: exact in a double up to
31 lowers, and one number for one file."""

_UPPER = 0
_SECTOR_SIZE = 512


class Resolved(NamedTuple):
    """What a name stands for at this moment."""

    upper: os.stat_result | None
    lowers: Sequence[Found]
    redirect: bytes

    @property
    def type_bits(self) -> int:
        """The type bits of the mode."""
        if self.upper is not None:
            return self.upper.st_mode & TYPE_MASK
        return self.lowers[0].attr.type_bits


class Tree:
    """Lowers, topmost first, below an upper, or without one.

    ``lock`` guards everything: all methods are called while holding it.
    """

    def __init__(self, lowers: Sequence[Lower[Any]], upper: Upper | None) -> None:
        self.lock = threading.Lock()
        self.copied = threading.Condition(self.lock)
        """Told whenever a file's content has been copied up, or could not be."""
        self.lowers = LowerStack(lowers)
        self.upper = upper
        self.join_alias: Callable[[Node, Node, bytes], None] = _no_aliases
        """Gives a copied-up file the name of one more of its aliases, in the upper."""
        self._linked: weakref.WeakValueDictionary[tuple[int, int], Node] = (
            weakref.WeakValueDictionary()
        )
        self._numbers: dict[int, int] = {} if upper is None else self._alias_numbers(upper)
        self.root = self._make_root()

    # Names --------------------------------------------------------------------------------------

    def child(self, parent: Node, name: bytes) -> Node:
        """The file ``name`` of a directory; FileNotFoundError if there is none."""
        node = self.find_child(parent, name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "lookup: no such file", name)
        return node

    def entry(self, parent: Node, name: bytes) -> Entry[Node]:
        """``child`` with its attributes."""
        node, status = self._find(parent, name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "lookup: no such file", name)
        return Entry(node, self.attr(node) if status is None else self._shown(node, status))

    def find_child(self, parent: Node, name: bytes) -> Node | None:
        """The file ``name`` of a directory, or None."""
        return self._find(parent, name)[0]

    def _find(self, parent: Node, name: bytes) -> tuple[Node | None, os.stat_result | None]:
        """The file, and its attributes in the upper if they had to be read."""
        self.check_name(parent, name)
        known = parent.children.get(name)
        if known is not None and (known.has_upper or self.lowers.is_immutable):
            return known, None
        if self.is_removed(parent):
            return None, None
        found = self._resolve(parent, name)
        if known is not None:
            if found is not None and _is_same(known, found):
                return known, None
            self.drop_name(known, parent, name)
        return (None, None) if found is None else (self._adopt(parent, name, found), found.upper)

    def check_name(self, parent: Node, name: bytes) -> None:
        """Raises OSError unless ``name`` can be a name in ``parent``."""
        if not parent.is_directory:
            raise NotADirectoryError(errno.ENOTDIR, "no directory to look in", name)
        if len(name) > _NAME_MAX:
            raise OSError(errno.ENAMETOOLONG, "name is too long", name)
        if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
            raise OSError(errno.EINVAL, "not a file name", name)

    def is_removed(self, node: Node) -> bool:
        """Whether a directory has been removed."""
        return not node.names and node is not self.root

    def lower_has(self, parent: Node, name: bytes) -> bool:
        """Whether a name would be there without the upper."""
        return self.lowers.has(parent.lowers, name)

    def add_name(self, node: Node, parent: Node, name: bytes) -> None:
        """Notes a name that a node has got."""
        node.names.append((parent, name))
        parent.children[name] = node

    def drop_name(self, node: Node, parent: Node, name: bytes) -> None:
        """Notes that a node has lost a name."""
        if (parent, name) in node.names:
            node.names.remove((parent, name))
            node.last_name = parent, name
        if parent.children.get(name) is node:
            del parent.children[name]

    def _resolve(self, parent: Node, name: bytes) -> Resolved | None:
        status, redirect, below = None, b"", False
        if parent.has_upper:
            assert self.upper is not None
            status = self.upper.find(parent, name)
            if status is not None:
                if is_whiteout(status.st_mode, status.st_rdev):
                    return None
                if not stat.S_ISDIR(status.st_mode):
                    return Resolved(status, (), b"")
                marks = self.upper.directory_marks(Place(self.upper.directory(parent), name))
                if parent.lowers and marks.opaque:
                    return Resolved(status, (), b"")
                redirect = marks.redirect
                below = True
        lowers = self.lowers.find(parent.lowers, redirect or name, below_directory=below)
        return Resolved(status, lowers, redirect) if status is not None or lowers else None

    # Nodes --------------------------------------------------------------------------------------

    def adopt_new(self, parent: Node, name: bytes) -> Entry[Node]:
        """What was just made in the upper."""
        assert self.upper is not None
        status = os.stat(name, dir_fd=self.upper.directory(parent), follow_symlinks=False)
        node = self._adopt(parent, name, Resolved(status, (), b""))
        node.has_content = True
        return Entry(node, self._shown(node, status))

    def _adopt(self, parent: Node, name: bytes, found: Resolved) -> Node:
        if found.type_bits == stat.S_IFDIR:
            node = self._make_node(found)
            self.add_name(node, parent, name)
            return node
        node, has_name = self._linked_node(found, parent, name)
        if not has_name:
            self.add_name(node, parent, name)
        return node

    def _linked_node(self, found: Resolved, parent: Node, name: bytes) -> tuple[Node, bool]:
        """The node of a file that may have other names, and whether it has got this one."""
        if found.upper is not None:
            known = self._linked.get((_UPPER, found.upper.st_ino))
            if known is None:
                known = self._make_node(found)
                if found.upper.st_nlink > 1:
                    self.note_linked(known, found.upper.st_ino)
                    self._read_alias(known, Place(self._directory(parent), name))
            return known, False
        layer, _, attr = found.lowers[0]
        if attr.nlink < 2:
            return self._make_node(found), False
        known = self._linked.get((layer, attr.ino)) or self._copied_alias(layer, attr)
        if known is None:
            known = self._make_node(found)
        self._linked[layer, attr.ino] = known
        if known.has_upper:
            self.join_alias(known, parent, name)
            return known, True
        return known, False

    def _copied_alias(self, layer: int, attr: Attr) -> Node | None:
        """The file that another name of the same lower file was copied up to."""
        alias = self.alias_name(layer, attr)
        if self.upper is None or alias not in self.upper.aliases:
            return None
        place = Place(self.upper.alias_directory, alias)
        status = os.stat(alias, dir_fd=place.directory, follow_symlinks=False)
        node = self._linked.get((_UPPER, status.st_ino))
        if node is None:
            node = self._make_node(Resolved(status, (), b""))
            node.hold(os.open(alias, os.O_PATH | os.O_NOFOLLOW, dir_fd=place.directory))
            self._read_alias(node, place)
            self.note_linked(node, status.st_ino)
        return node

    def alias_name(self, layer: int, attr: Attr) -> bytes:
        """What a lower file with several names is called among the aliases.

        Another file in its place, or other content, has another name.
        """
        identity = self.lowers[layer].identity.hex()
        return f"{identity}-{attr.ino:x}-{attr.mtime_ns:x}-{attr.size:x}".encode()

    def _alias_numbers(self, upper: Upper) -> dict[int, int]:
        """Inode numbers of the copied-up files with aliases: those of their lower files."""
        layers = {self.lowers[layer].identity.hex(): layer for layer, _ in self.lowers.roots}
        numbers = {}
        for alias in upper.aliases:
            identity, ino = alias.decode().split("-")[:2]
            status = os.stat(alias, dir_fd=upper.alias_directory, follow_symlinks=False)
            if identity in layers:
                numbers[status.st_ino] = _number(layers[identity], int(ino, 16))
        return numbers

    def note_linked(self, node: Node, upper_ino: int) -> None:
        """Lets other names of a file in the upper lead to this node."""
        self._linked[_UPPER, upper_ino] = node

    def note_copied(self, node: Node, upper_ino: int) -> None:
        """A node keeps its inode number when it is copied up."""
        self._numbers[upper_ino] = node.ino
        node.has_upper = node.has_content = True
        node.attr = None

    def note_gone(self, upper_ino: int) -> None:
        """An inode of the upper has no name left, and its number may be used again."""
        self._numbers.pop(upper_ino, None)
        self._linked.pop((_UPPER, upper_ino), None)

    def _read_alias(self, node: Node, place: Place) -> None:
        assert self.upper is not None
        value = self.upper.mark(place, self.upper.xattrs.alias)
        if value is not None:
            count, _, alias = value.partition(b":")
            node.alias = int(count), alias

    def _make_node(self, found: Resolved) -> Node:
        lowers = tuple([(layer, node) for layer, node, _ in found.lowers])
        attr = None
        if found.upper is not None:
            ino = self._upper_number(found.upper.st_ino)
        else:
            layer, _, lower = found.lowers[0]
            ino = _number(layer, lower.ino)
            if self.lowers.is_immutable:
                attr = msgspec.structs.replace(lower, ino=ino)
        return Node(
            found.type_bits,
            ino,
            has_upper=found.upper is not None,
            lowers=lowers,
            redirect=found.redirect,
            attr=attr,
        )

    def _make_root(self) -> Node:
        lowers = self.lowers.roots
        if self.upper is not None:
            ino = os.fstat(self.upper.root).st_ino
        else:
            ino = _number(lowers[0][0], self.lowers[1].getattr(lowers[0][1]).ino)
        return Node(stat.S_IFDIR, ino, has_upper=self.upper is not None, lowers=lowers)

    def _directory(self, node: Node) -> int:
        assert self.upper is not None
        return self.upper.directory(node)

    def _upper_number(self, ino: int) -> int:
        return self._numbers.get(ino, ino)

    # Attributes and listings --------------------------------------------------------------------

    def attr(self, node: Node) -> Attr:
        """The attributes of now."""
        if node.has_upper:
            assert self.upper is not None
            return self._shown(node, self.upper.stat(node))
        attr = node.attr
        if attr is None:
            layer, lower = node.lowers[0]
            attr = msgspec.structs.replace(self.lowers[layer].getattr(lower), ino=node.ino)
        if node.is_directory:
            return attr if len(node.lowers) == 1 else msgspec.structs.replace(attr, nlink=1)
        if node.lost_names:
            return msgspec.structs.replace(attr, nlink=max(0, attr.nlink - node.lost_names))
        return attr

    def _shown(self, node: Node, status: os.stat_result) -> Attr:
        """The attributes of a file that is in the upper."""
        links = link_count(node, status.st_nlink)
        attr = Attr.from_stat(status, ino=node.ino, nlink=links)
        needed = -(-status.st_size // _SECTOR_SIZE)
        if node.has_content or status.st_blocks >= needed or node.type_bits != stat.S_IFREG:
            return attr
        assert self.upper is not None
        if not self.upper.is_metacopy(node):
            return attr
        # Programs take a file without blocks for one without data.
        return msgspec.structs.replace(attr, blocks=needed)

    def listing(self, node: Node) -> list[DirEntry]:
        """The names of a directory, each once."""
        if self.is_removed(node):
            return []
        seen: set[bytes] = set()
        made: list[DirEntry] = []
        if node.has_upper:
            for name, ino, kind in self._upper_names(node):
                seen.add(name)
                if kind is not None:
                    made.append(DirEntry(name, self._upper_number(ino), kind, len(made) + 1))
        for layer, lower in node.lowers:
            for name, ino, kind in self._lower_names(layer, lower):
                if name not in seen:
                    seen.add(name)
                    if kind is not None:
                        made.append(DirEntry(name, _number(layer, ino), kind, len(made) + 1))
        return made

    def is_empty(self, node: Node) -> bool:
        """Whether a directory shows nothing."""
        return not self.listing(node)

    def _upper_names(self, node: Node) -> Iterator[tuple[bytes, int, int | None]]:
        """Name, inode number and type; None for the type of a whiteout."""
        assert self.upper is not None
        with self.upper.scan(node) as entries:
            for entry in entries:
                kind = _entry_type(entry)
                yield os.fsencode(entry.name), entry.inode(), kind

    def _lower_names(self, layer: int, node: Any) -> Iterator[tuple[bytes, int, int | None]]:
        lower = self.lowers[layer]
        directory = lower.opendir(node)
        try:
            for entry in directory.entries():
                kind: int | None = entry.type_bits
                if kind == stat.S_IFCHR:
                    attr = lower.lookup(node, entry.name).attr
                    kind = None if is_whiteout(attr.mode, attr.rdev) else kind
                yield entry.name, entry.ino, kind
        finally:
            directory.close()


def _number(layer: int, ino: int) -> int:
    return (ino + (layer << _LAYER_SHIFT)) & 0xFFFF_FFFF_FFFF_FFFF


def link_count(node: Node, links: int) -> int:
    """How many names a file of the upper shows that has ``links`` there."""
    if node.is_directory:
        return 1 if node.lowers else links
    return links if node.alias is None else links - 1 + node.alias[0]


def _entry_type(entry: os.DirEntry[str]) -> int | None:
    """The type bits of an entry; None for a whiteout."""
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG
    status = entry.stat(follow_symlinks=False)
    return None if is_whiteout(status.st_mode, status.st_rdev) else status.st_mode & TYPE_MASK


def _is_same(node: Node, found: Resolved) -> bool:
    """Whether a node is still what its name stands for. Only a lower can have changed."""
    if node.has_upper:
        return True
    if found.upper is not None or node.type_bits != found.type_bits:
        return False
    return node.ino == _number(found.lowers[0].layer, found.lowers[0].attr.ino)


def _no_aliases(node: Node, parent: Node, name: bytes) -> None:
    raise OSError(errno.EROFS, "alias: there is no upper", name)
