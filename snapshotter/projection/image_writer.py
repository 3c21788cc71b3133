"""Writes the metadata image of a tree: all its names and attributes, and no content.

The bytes depend on the tree alone, so equal trees have equal images (docs/formats/metadata-image.md
describes them). The kernel mounts the image, ImageReader reads it.

Two passes. The first places every inode and writes it: a directory's children lie together, in the
order of their names, after the directory itself. The second fills in the directories, since only
now every child's nid is known.
"""

from __future__ import annotations

import hashlib
import stat
import struct
from dataclasses import dataclass, field
from itertools import accumulate

from msgspec.structs import replace

from snapshotter.digest import DIGEST_SIZE
from snapshotter.errors import InvalidInputError
from snapshotter.names import MAX_COMPONENT_BYTES, check_component
from snapshotter.projection import erofs
from snapshotter.projection.erofs import BLOCK_SIZE, DIRENT_SIZE, INODE_SIZE, SLOT_SIZE
from snapshotter.projection.image_xattrs import content_area, xattr_area
from snapshotter.projection.tree import Inode

METADATA_GENERATION = 1
"""Part of the key under which an image is kept: raised when the same tree gives other bytes."""

_TYPE = 0o170000
_NS = 1_000_000_000
_PAD = tuple(bytes(-length % SLOT_SIZE) for length in range(SLOT_SIZE))
_pack_inode = erofs.INODE.pack
_OUTSIDE_CHUNK = erofs.OUTSIDE.to_bytes(4, "little")
_META_START = erofs.SUPERBLOCK_OFFSET + erofs.SUPERBLOCK_SIZE


def write_image(root: Inode) -> bytearray:
    """The metadata image of ``root``.

    A 0/0 character device is left out: to overlayfs it is a whiteout, a name that is not there.
    Raises InvalidInputError, naming the path, for what EROFS or Linux cannot represent.
    """
    if root.children is None:
        raise InvalidInputError("metadata image: the root is not a directory")
    return _ImageWriter(root).write()


@dataclass(slots=True)
class _Directory:
    """A directory that has its place: what the second pass needs."""

    nid: int
    parent_nid: int
    names: list[bytes]
    """Sorted, with ``.`` and ``..``."""
    children: dict[bytes, Inode]
    ends: list[int]
    """Where each of its blocks ends among the names."""
    tail_offset: int
    """Where the last block lies in the image, or 0 if it is a whole block of its own."""


@dataclass(slots=True)
class _ImageWriter:
    root: Inode
    out: bytearray = field(default_factory=lambda: bytearray(_META_START))
    nids: dict[int, int] = field(default_factory=dict)
    """id(inode) to nid."""
    links: dict[int, int] = field(default_factory=dict)
    """nid to the number of names, of files with several."""
    directories: list[_Directory] = field(default_factory=list)
    long_targets: list[tuple[int, bytes]] = field(default_factory=list)
    """Symbolic links (nid, target) whose target does not fit behind its inode."""

    def write(self) -> bytearray:
        self._place_tree()
        self._pad_block()
        for nid, names in self.links.items():
            offset = nid * SLOT_SIZE + erofs.INODE_NLINK_OFFSET
            self.out[offset : offset + 4] = names.to_bytes(4, "little")
        for directory in self.directories:
            self._fill_directory(directory)
        for nid, target in self.long_targets:
            self._start_blocks(nid)
            self.out += target
            self._pad_block()
        self._seal()
        return self.out

    # First pass: places ---------------------------------------------------------------------

    def _place_tree(self) -> None:
        try:
            placed = self._place_directory(self.root, 0)
        except _REFUSALS as error:
            raise _refusal(b"/", error) from error
        placed.parent_nid = placed.nid  # where it is depends on how many names it holds
        stack = [(b"/", placed)]
        while stack:
            path, directory = stack.pop()
            stack.extend(reversed(self._place_children(path, directory)))

    def _place_children(self, path: bytes, directory: _Directory) -> list[tuple[bytes, _Directory]]:
        below: list[tuple[bytes, _Directory]] = []
        children = directory.children
        nids = self.nids
        name = b""
        try:
            for name in directory.names:
                child = children.get(name)
                if child is None:  # "." or ".."
                    continue
                known = nids.get(id(child))
                if child.children is not None:
                    if known is not None:
                        raise InvalidInputError("a directory has two places")
                    placed = self._place_directory(child, directory.nid)
                    below.append((path + name + b"/", placed))
                elif known is not None:
                    self.links[known] = self.links.get(known, 1) + 1
                else:
                    self._place_file(child)
        except _REFUSALS as error:
            raise _refusal(path + name, error) from error
        nlink = 2 + len(below)
        offset = directory.nid * SLOT_SIZE + erofs.INODE_NLINK_OFFSET
        self.out[offset : offset + 4] = nlink.to_bytes(4, "little")
        return below

    def _place_directory(self, inode: Inode, parent_nid: int) -> _Directory:
        children = _shown_children(inode)
        names = sorted([*children, b".", b".."])
        ends, tail_size = _split_blocks(names)
        size = (len(ends) - 1) * BLOCK_SIZE + tail_size
        xattrs = xattr_area(inode.xattrs)
        head = INODE_SIZE + len(xattrs)
        inline = self._make_room(head, tail_size)
        layout = erofs.LAYOUT_INLINE if inline else erofs.LAYOUT_PLAIN
        tail = bytes(tail_size) if inline else b""
        nid = self._put_inode(inode, xattrs, layout, size, erofs.NO_BLOCK, tail)
        tail_offset = nid * SLOT_SIZE + head if inline else 0
        placed = _Directory(nid, parent_nid, names, children, ends, tail_offset)
        self.directories.append(placed)
        return placed

    def _place_file(self, inode: Inode) -> None:
        kind = stat.S_IFMT(inode.mode)
        if kind == stat.S_IFREG:
            self._place_regular(inode)
        elif kind == stat.S_IFLNK:
            self._place_link(inode)
        elif kind in erofs.FILE_TYPES:
            device = kind in (stat.S_IFCHR, stat.S_IFBLK)
            start = inode.rdev if device else erofs.NO_BLOCK
            self._put_inode(inode, xattr_area(inode.xattrs), erofs.LAYOUT_PLAIN, 0, start)
        else:
            raise InvalidInputError(f"unknown type {inode.mode:o}")

    def _place_regular(self, inode: Inode) -> None:
        size = inode.size
        if not size:
            xattrs = xattr_area(inode.xattrs)
            self._put_inode(inode, xattrs, erofs.LAYOUT_PLAIN, 0, erofs.NO_BLOCK)
            return
        if not 0 < size <= erofs.MAX_CHUNKED_SIZE:
            raise InvalidInputError(f"{size} bytes; {erofs.MAX_CHUNKED_SIZE} is the limit")
        if len(inode.content) != DIGEST_SIZE:
            raise InvalidInputError("a non-empty file without a content id")
        xattrs = content_area(inode.content, size, inode.xattrs)
        bits = erofs.chunk_bits(size)
        self._put_inode(inode, xattrs, erofs.LAYOUT_CHUNKED, size, bits, _OUTSIDE_CHUNK)

    def _place_link(self, inode: Inode) -> None:
        target = inode.target
        size = len(target)
        if not 0 < size <= erofs.MAX_LINK_TARGET or b"\0" in target:
            raise InvalidInputError(f"link target of {size} bytes; 1 to 4095 without NUL are legal")
        xattrs = xattr_area(inode.xattrs)
        if self._make_room(INODE_SIZE + len(xattrs), size):
            self._put_inode(inode, xattrs, erofs.LAYOUT_INLINE, size, erofs.NO_BLOCK, target)
        else:
            nid = self._put_inode(inode, xattrs, erofs.LAYOUT_PLAIN, size, erofs.NO_BLOCK)
            self.long_targets.append((nid, target))

    def _put_inode(
        self, inode: Inode, xattrs: bytes, layout: int, size: int, start: int, tail: bytes = b""
    ) -> int:
        """Appends the inode, its xattrs and what belongs behind them; its nid."""
        out = self.out
        nids = self.nids
        nid = nids[id(inode)] = len(out) // SLOT_SIZE
        seconds, nanoseconds = divmod(inode.mtime_ns, _NS)
        out += b"".join((
            _pack_inode(
                erofs.INODE_EXTENDED | layout << 1, erofs.xattr_count(len(xattrs)), inode.mode, 0,
                size, start, len(nids), inode.uid, inode.gid, seconds, nanoseconds, 1,
            ),
            xattrs,
            tail,
            _PAD[(len(xattrs) + len(tail)) % SLOT_SIZE],
        ))  # fmt: skip
        return nid

    def _make_room(self, head: int, tail: int) -> bool:
        """Whether a tail goes behind its inode; then the inode starts where both share a block."""
        if head + tail > BLOCK_SIZE:
            return False
        room = -len(self.out) % BLOCK_SIZE
        if room < head + tail:
            self.out += bytes(room)
        return True

    def _pad_block(self) -> None:
        self.out += bytes(-len(self.out) % BLOCK_SIZE)

    # Second pass: directories ---------------------------------------------------------------

    def _start_blocks(self, nid: int) -> None:
        """Says in the inode that its blocks begin at the end of what is written."""
        offset = nid * SLOT_SIZE + erofs.INODE_START_OFFSET
        self.out[offset : offset + 4] = (len(self.out) // BLOCK_SIZE).to_bytes(4, "little")

    def _fill_directory(self, directory: _Directory) -> None:
        own_blocks = len(directory.ends) - (1 if directory.tail_offset else 0)
        if own_blocks:
            self._start_blocks(directory.nid)
        begin = 0
        for index, end in enumerate(directory.ends):
            block = self._directory_block(directory, directory.names[begin:end])
            begin = end
            if index < own_blocks:
                self.out += block
                self._pad_block()
            else:
                offset = directory.tail_offset
                self.out[offset : offset + len(block)] = block

    def _directory_block(self, directory: _Directory, names: list[bytes]) -> bytes:
        nids = self.nids
        children = directory.children
        entries: list[tuple[int, int]] = []
        for name in names:
            child = children.get(name)
            if child is not None:
                entries.append((nids[id(child)], erofs.FILE_TYPES[child.mode & _TYPE]))
            elif name == b".":
                entries.append((directory.nid, 2))
            else:
                entries.append((directory.parent_nid, 2))
        starts = accumulate(map(len, names), initial=DIRENT_SIZE * len(names))
        pack = erofs.DIRENT.pack
        packed = [
            pack(nid, start, kind, 0) for (nid, kind), start in zip(entries, starts, strict=False)
        ]
        return b"".join(packed) + b"".join(names)

    # The superblock -------------------------------------------------------------------------

    def _seal(self) -> None:
        """Puts the superblock, with the digest of everything as UUID, and its checksum."""
        out = self.out
        if len(out) // BLOCK_SIZE >= erofs.OUTSIDE:
            raise InvalidInputError("metadata image: 16 TiB is the limit")
        superblock = erofs.Superblock(
            root_nid=self.directories[0].nid,
            inode_count=len(self.nids),
            block_count=len(out) // BLOCK_SIZE,
        )
        place = slice(erofs.SUPERBLOCK_OFFSET, _META_START)
        out[place] = superblock.pack()
        uuid = hashlib.sha256(out).digest()[:16]
        out[place] = replace(superblock, uuid=uuid).pack()
        checksum = erofs.superblock_checksum(out)
        out[place] = replace(superblock, uuid=uuid, checksum=checksum).pack()


_REFUSALS = (InvalidInputError, struct.error)


def _refusal(path: bytes, error: Exception) -> InvalidInputError:
    is_range = isinstance(error, struct.error)
    problem = "mode, owner, device number or time out of range" if is_range else error
    return InvalidInputError(f"metadata image: {path!r}: {problem}")


def _shown_children(inode: Inode) -> dict[bytes, Inode]:
    """A directory's children but the whiteouts; InvalidInputError for an illegal name."""
    children = inode.children or {}
    joined = b"/".join(children)
    # One look at all names together; the slow one, name by name, only to say which is bad.
    if (
        joined.count(b"/") != max(0, len(children) - 1)
        or b"\0" in joined
        or not children.keys().isdisjoint((b"", b".", b".."))
        or max(map(len, children), default=0) > MAX_COMPONENT_BYTES
    ):
        for name in children:
            check_component(name)
    hidden = {
        name
        for name, child in children.items()
        if child.mode & _TYPE == stat.S_IFCHR and child.rdev == 0
    }
    if not hidden:
        return children
    return {name: child for name, child in children.items() if name not in hidden}


def _split_blocks(names: list[bytes]) -> tuple[list[int], int]:
    """Where each directory block ends among ``names``, and the bytes in the last one."""
    total = sum(map(len, names)) + DIRENT_SIZE * len(names)
    if total <= BLOCK_SIZE:
        return [len(names)], total
    ends: list[int] = []
    used = 0
    for index, name in enumerate(names):
        used += DIRENT_SIZE + len(name)
        if used > BLOCK_SIZE:
            ends.append(index)
            used = DIRENT_SIZE + len(name)
    return [*ends, len(names)], used
