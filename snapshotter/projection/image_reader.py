"""Reads a metadata image, straight from a mapping of it. Trusts nothing that it finds there.

Only the profile that write_image produces is understood (docs/formats/metadata-image.md); anything
else, and anything out of bounds, is a CorruptError.
"""

from __future__ import annotations

import mmap
import re
import stat
import struct
from collections.abc import Iterator

import msgspec

from snapshotter.errors import CorruptError
from snapshotter.names import MAX_COMPONENT_BYTES, ContentName
from snapshotter.projection import erofs, image_xattrs
from snapshotter.projection.erofs import BLOCK_SIZE, DIRENT_SIZE, INODE_SIZE, SLOT_SIZE
from snapshotter.projection.tree import Inode

_META_START = erofs.SUPERBLOCK_OFFSET + erofs.SUPERBLOCK_SIZE
_NS = 1_000_000_000
_TYPE = 0o170000
_DEVICES = (stat.S_IFCHR, stat.S_IFBLK)
_DOTS = (b".", b"..")
_TYPE_BITS = {number: bits for bits, number in erofs.FILE_TYPES.items()}
_DIRENT_NID = struct.Struct("<Q")
_NAME_START = struct.Struct("<H")
_NEVER_IN_NAMES = re.compile(rb"[/\0]")


class ImageInode(msgspec.Struct, frozen=True, gc=False):
    """The attributes of one inode. ``rdev`` is 0 for anything but a device (new_encode_dev)."""

    nid: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    nlink: int
    rdev: int
    layout: int
    """How the data lies (erofs.LAYOUT_*)."""
    start: int
    """The first of its own blocks, erofs.NO_BLOCK, or the chunk format."""
    xattr_size: int
    """Bytes of xattrs between inode and inline data."""

    @property
    def is_directory(self) -> bool:
        """Whether this is a directory."""
        return self.mode & _TYPE == stat.S_IFDIR


class DirectoryEntry(msgspec.Struct, frozen=True, gc=False):
    """One name in a directory."""

    name: bytes
    nid: int
    type_bits: int
    """The type bits of a mode (S_IFREG …)."""
    next_offset: int
    """Where ``entries`` goes on after this one."""


class ImageReader:
    """Random access to a metadata image in ``buffer``, which must stay unchanged.

    Opening checks the superblock, not the image: that its digest is right is the caller's concern.
    Every method raises CorruptError for an image, or a nid, that makes no sense. Safe to use from
    several threads.
    """

    __slots__ = ("_buffer", "_size", "superblock")

    def __init__(self, buffer: bytes | bytearray | memoryview | mmap.mmap) -> None:
        self._buffer = memoryview(buffer).cast("B").toreadonly()
        self._size = len(self._buffer)
        self.superblock = self._read_superblock()
        """As it stands in the image."""

    def close(self) -> None:
        """Lets go of the buffer, so that a mapping can be closed."""
        self._buffer.release()

    @property
    def root(self) -> int:
        """The root directory's nid."""
        return self.superblock.root_nid

    def inode(self, nid: int) -> ImageInode:
        """The attributes of ``nid``."""
        offset = nid * SLOT_SIZE
        if not _META_START <= offset <= self._size - INODE_SIZE:
            raise CorruptError(f"metadata image: nid {nid} lies outside")
        (head, xattrs, mode, _, size, start, _, uid, gid, seconds, nanoseconds, nlink) = (
            erofs.INODE.unpack_from(self._buffer, offset)
        )
        kind = mode & _TYPE
        limit = _SIZE_LIMITS.get(kind << 16 | head)
        if limit is None or size > limit or nanoseconds >= _NS:
            raise CorruptError(f"metadata image: no inode of ours at nid {nid}")
        layout = head >> 1
        if layout == erofs.LAYOUT_CHUNKED and not size:
            raise CorruptError(f"metadata image: nid {nid} is empty and yet has chunks")
        xattr_size = erofs.xattr_area_size(xattrs) if xattrs else 0
        if offset + INODE_SIZE + xattr_size > self._size:
            raise CorruptError(f"metadata image: xattrs of nid {nid} reach outside")
        return ImageInode(
            nid, mode, uid, gid, seconds * _NS + nanoseconds, size, nlink,
            start if kind in _DEVICES else 0, layout, start, xattr_size,
        )  # fmt: skip

    def lookup(self, nid: int, name: bytes) -> int | None:
        """The nid of ``name`` in the directory ``nid``, or None; ``..`` works too."""
        directory = self._directory(nid)
        low, high = 0, -(-directory.size // BLOCK_SIZE) - 1
        block = self._directory_block(directory, low)
        while low < high:
            middle = (low + high + 1) // 2
            candidate = self._directory_block(directory, middle)
            if candidate.name(0) <= name:
                low, block = middle, candidate
            else:
                high = middle - 1
        return block.find(name)

    def entries(self, nid: int, offset: int = 0) -> Iterator[DirectoryEntry]:
        """The directory's names in order, without ``.`` and ``..``.

        ``offset`` is 0 or some entry's ``next_offset``; past the end there is nothing.
        """
        directory = self._directory(nid)
        index, place = divmod(offset, BLOCK_SIZE)
        last = b""
        for number in range(index, -(-directory.size // BLOCK_SIZE)):
            block = self._directory_block(directory, number)
            for entry in block.entries(place // DIRENT_SIZE if number == index else 0):
                if entry.name <= last:
                    raise CorruptError(f"metadata image: names of nid {nid} are out of order")
                last = entry.name
                if last not in _DOTS:
                    yield entry

    def readlink(self, nid: int) -> bytes:
        """The target of the symbolic link ``nid``."""
        inode = self.inode(nid)
        if inode.mode & _TYPE != stat.S_IFLNK:
            raise CorruptError(f"metadata image: nid {nid} is no symbolic link")
        target = bytes(self._data(inode, 0, inode.size))
        if not target or b"\0" in target:
            raise CorruptError(f"metadata image: link target of nid {nid} is empty or has a NUL")
        return target

    def xattrs(self, nid: int) -> dict[bytes, bytes]:
        """The file's own xattrs under their own names."""
        area = self._xattr_area(self.inode(nid))
        try:
            return image_xattrs.own_xattrs(area)
        except CorruptError as error:
            raise CorruptError(f"metadata image: nid {nid}: {error}") from error

    def content(self, nid: int) -> ContentName | None:
        """The name of a non-empty regular file's content; None for anything else."""
        inode = self.inode(nid)
        if inode.layout != erofs.LAYOUT_CHUNKED:
            return None
        try:
            name = image_xattrs.content_name(self._xattr_area(inode))
        except CorruptError as error:
            raise CorruptError(f"metadata image: nid {nid}: {error}") from error
        if name.size != inode.size:
            raise CorruptError(f"metadata image: nid {nid} of {inode.size} bytes names {name}")
        return name

    def walk(self) -> Iterator[tuple[bytes, ImageInode]]:
        """Every (path, inode), parents before children, names in order; the root's path is b"".

        A file with several names comes once for each.
        """
        stack = [(b"", self._directory(self.root))]
        seen = {self.root}
        while stack:
            path, inode = stack.pop()
            yield path, inode
            if not inode.is_directory:
                continue
            prefix = path + b"/" if path else b""
            below = []
            for entry in self.entries(inode.nid):
                child = self.inode(entry.nid)
                if child.mode & _TYPE != entry.type_bits:
                    raise CorruptError(f"metadata image: {prefix + entry.name!r}: two types")
                if child.is_directory:
                    if child.nid in seen:
                        raise CorruptError(f"metadata image: {prefix + entry.name!r}: a loop")
                    seen.add(child.nid)
                below.append((prefix + entry.name, child))
            stack.extend(reversed(below))

    def to_tree(self) -> Inode:
        """The tree that this image shows, hard links shared."""
        made: dict[int, Inode] = {}
        root = self._tree_inode(self.inode(self.root))
        directories = {b"": root}
        for path, inode in self.walk():
            if not path:
                continue
            node = made.get(inode.nid)
            if node is None:
                node = made[inode.nid] = self._tree_inode(inode)
            parent, _, name = path.rpartition(b"/")
            siblings = directories[parent].children
            assert siblings is not None
            siblings[name] = node
            if inode.is_directory:
                directories[path] = node
        return root

    def _tree_inode(self, inode: ImageInode) -> Inode:
        kind = inode.mode & _TYPE
        name = self.content(inode.nid)
        return Inode(
            inode.mode,
            uid=inode.uid,
            gid=inode.gid,
            mtime_ns=inode.mtime_ns,
            size=inode.size if kind == stat.S_IFREG else 0,
            rdev=inode.rdev,
            target=self.readlink(inode.nid) if kind == stat.S_IFLNK else b"",
            content=name.content_id if name else b"",
            xattrs=self.xattrs(inode.nid),
        )

    def _read_superblock(self) -> erofs.Superblock:
        if self._size < BLOCK_SIZE or self._size % BLOCK_SIZE:
            raise CorruptError(f"metadata image of {self._size} bytes: not whole blocks of 4096")
        begin = erofs.SUPERBLOCK_OFFSET
        found = erofs.Superblock.unpack(self._buffer[begin : begin + erofs.SUPERBLOCK_SIZE])
        expected = erofs.Superblock(
            root_nid=found.root_nid,
            inode_count=found.inode_count,
            block_count=self._size // BLOCK_SIZE,
            uuid=found.uuid,
            checksum=erofs.superblock_checksum(self._buffer[:BLOCK_SIZE]),
        )
        if found != expected:
            raise CorruptError("metadata image: superblock is damaged, or not of this kind")
        return found

    def _directory(self, nid: int) -> ImageInode:
        inode = self.inode(nid)
        if not inode.is_directory:
            raise CorruptError(f"metadata image: nid {nid} is no directory")
        return inode

    def _directory_block(self, directory: ImageInode, index: int) -> _DirectoryBlock:
        begin = index * BLOCK_SIZE
        size = min(BLOCK_SIZE, directory.size - begin)
        return _DirectoryBlock(self._data(directory, begin, size), directory.nid, begin)

    def _data(self, inode: ImageInode, begin: int, size: int) -> memoryview:
        """``size`` bytes of an inode's data at ``begin``, all of them in one block."""
        if inode.layout == erofs.LAYOUT_INLINE and begin // BLOCK_SIZE == inode.size // BLOCK_SIZE:
            offset = inode.nid * SLOT_SIZE + INODE_SIZE + inode.xattr_size
        else:
            offset = inode.start * BLOCK_SIZE + begin
        if offset + size > self._size:
            raise CorruptError(f"metadata image: data of nid {inode.nid} lies outside")
        return self._buffer[offset : offset + size]

    def _xattr_area(self, inode: ImageInode) -> bytes:
        offset = inode.nid * SLOT_SIZE + INODE_SIZE
        return bytes(self._buffer[offset : offset + inode.xattr_size])


class _DirectoryBlock:
    """One block of a directory: ``count`` dirents, then their names."""

    __slots__ = ("_data", "_directory_nid", "_offset", "count")

    def __init__(self, data: memoryview, directory_nid: int, offset: int) -> None:
        self._data = bytes(data)
        self._directory_nid = directory_nid
        self._offset = offset
        first: int = _NAME_START.unpack_from(self._data, 8)[0] if len(data) >= DIRENT_SIZE else 0
        self.count = first // DIRENT_SIZE
        if not self.count or first % DIRENT_SIZE or first > len(data):
            raise self._corrupt()

    def name(self, position: int) -> bytes:
        """The bytes of the name at ``position``."""
        data = self._data
        begin = _NAME_START.unpack_from(data, position * DIRENT_SIZE + 8)[0]
        if position + 1 < self.count:
            end = _NAME_START.unpack_from(data, position * DIRENT_SIZE + 8 + DIRENT_SIZE)[0]
        else:  # A block that is not the directory's last is filled up with NULs.
            end = data.find(b"\0", begin)
            end = len(data) if end < 0 else end
        if not begin < end <= len(data):
            raise self._corrupt()
        return data[begin:end]

    def entries(self, begin: int) -> Iterator[DirectoryEntry]:
        """The entries from position ``begin`` on; CorruptError at an illegal name or type."""
        data, count = self._data, self.count
        first_name = count * DIRENT_SIZE
        dirents = list(erofs.DIRENT.iter_unpack(data[:first_name]))
        ends = [start for _, start, _, _ in dirents[1:]]
        ends.append(dirents[-1][1] + len(self.name(count - 1)))
        # Names fill one stretch: what none may hold is looked for but once.
        if _NEVER_IN_NAMES.search(data, first_name, ends[-1]):
            raise self._corrupt()
        for position in range(begin, count):
            nid, start, kind, _ = dirents[position]
            end = ends[position]
            type_bits = _TYPE_BITS.get(kind)
            if (
                type_bits is None
                or not first_name <= start < end <= ends[-1]
                or end - start > MAX_COMPONENT_BYTES
            ):
                raise self._corrupt()
            after = BLOCK_SIZE if position + 1 == count else (position + 1) * DIRENT_SIZE
            yield DirectoryEntry(data[start:end], nid, type_bits, self._offset + after)

    def find(self, name: bytes) -> int | None:
        """The nid of ``name``, or None."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            found = self.name(middle)
            if found == name:
                nid: int = _DIRENT_NID.unpack_from(self._data, middle * DIRENT_SIZE)[0]
                return nid
            if found < name:
                low = middle + 1
            else:
                high = middle
        return None

    def _corrupt(self) -> CorruptError:
        return CorruptError(
            f"metadata image: directory block at {self._offset} of nid {self._directory_nid} is"
            " malformed"
        )


_SPECIAL = (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK)
_SIZE_LIMITS = {
    kind << 16 | layout << 1 | erofs.INODE_EXTENDED: limit
    for kind, layout, limit in (
        (stat.S_IFREG, erofs.LAYOUT_PLAIN, 0),
        (stat.S_IFREG, erofs.LAYOUT_CHUNKED, erofs.MAX_CHUNKED_SIZE),
        (stat.S_IFDIR, erofs.LAYOUT_PLAIN, 1 << 48),
        (stat.S_IFDIR, erofs.LAYOUT_INLINE, 1 << 48),
        (stat.S_IFLNK, erofs.LAYOUT_PLAIN, erofs.MAX_LINK_TARGET),
        (stat.S_IFLNK, erofs.LAYOUT_INLINE, erofs.MAX_LINK_TARGET),
        *((kind, erofs.LAYOUT_PLAIN, 0) for kind in _SPECIAL),
    )
}
"""The largest size of each type of file in each layout that it may have, by type << 16 | the format
field of the inode."""
