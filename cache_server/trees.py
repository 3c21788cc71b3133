"""The trees of prepared images, for clients that ask for names and bytes of files by their paths.

Everything is read from an image's metadata image and from chunks, both verified; nothing is looked
up by a tag. Only a name that the tree does not have is a NotFoundError: what should be in the
library and is not is another error, so that no client takes it for a file that is not there.
"""

from __future__ import annotations

import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from cache_server.images import image_handle
from cache_server.library import Library
from snapshotter.cache_v1.protocol import (
    MAX_LIST_ENTRIES,
    Entries,
    List,
    Metadata,
    MetadataImage,
    Prepared,
    Read,
    Stat,
)
from snapshotter.digest import parse_digest
from snapshotter.errors import CorruptError, InvalidInputError, NotFoundError, SnapshotterError
from snapshotter.framing import MAX_FRAME_BYTES
from snapshotter.names import CHUNK_SIZE, MAX_PATH_BYTES, ContentName, check_component
from snapshotter.projection.image_reader import DirectoryEntry, ImageInode, ImageReader
from snapshotter.store.chunk_table import chunk_length

_KEPT_IMAGES = 8
_KEPT_BYTES = 256 << 20
"""Of metadata images in memory; one that is larger than this is kept alone."""
_KEPT_PLACES = 1024
_ENTRY_BYTES = 320
"""What an entry takes in a frame besides its name and target, at most: its keys and numbers."""
_BYTE_BYTES = 4
"""What a byte of a name or target takes at most: three digits and a comma."""
_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


class Trees:
    """Finds names and bytes in prepared images; safe from any thread."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._open_images = _OpenImages(library)
        self._handles: dict[str, str] = {}
        """Manifest digest to handle, of images that were asked for by their manifest."""
        self._places = _Places()

    def find(self, digest: str) -> Prepared:
        """The image of that handle or, as older clients name it, manifest digest.

        Raises InvalidInputError for what is neither, SnapshotterError if none was prepared.
        """
        parse_digest(digest)
        stored = self._library.find_image(self._handles.get(digest, digest))
        if stored is not None:
            return stored.prepared
        for image in self._library.images():
            prepared = image.prepared
            if prepared.digest == digest and prepared.image_handle == image_handle(
                digest, prepared.architecture
            ):
                self._handles[digest] = prepared.image_handle
                return prepared
        raise SnapshotterError(f"image {digest}: not prepared here; prepare it first")

    def stat(self, image: MetadataImage, request: Stat) -> Metadata:
        """The attributes of a path. Raises NotFoundError, InvalidInputError, CorruptError."""
        reader = self._open_images.reader(image)
        return _metadata(reader, _resolve(reader, bytes(request.path)))

    def list(self, image: MetadataImage, request: List) -> Entries:
        """A part of a directory, as much as fits a frame.

        Raises NotFoundError, InvalidInputError for what is no directory, CorruptError.
        """
        reader = self._open_images.reader(image)
        path = bytes(request.path)
        inode = _resolve(reader, path)
        if not inode.is_directory:
            raise InvalidInputError(f"list {_show(path)}: it is no directory")
        place = image.content, inode.nid, request.offset
        begin = self._places.find(*place)
        entries: Iterator[DirectoryEntry] = reader.entries(inode.nid, begin or 0)
        if begin is None:
            entries = islice(entries, request.offset, None)
        names: list[list[int]] = []
        metadata: list[Metadata] = []
        left_bytes, end = MAX_FRAME_BYTES - _ENTRY_BYTES, 0
        for entry in entries:
            found = _metadata(reader, reader.inode(entry.nid))
            left_bytes -= _ENTRY_BYTES + _BYTE_BYTES * (len(entry.name) + len(found.target or ()))
            if left_bytes < 0 or len(names) == MAX_LIST_ENTRIES:
                next_offset = request.offset + len(names)
                self._places.keep(image.content, inode.nid, next_offset, end)
                return Entries(names, metadata, next_offset)
            names.append([*entry.name])
            metadata.append(found)
            end = entry.next_offset
        return Entries(names, metadata, None)

    def read(self, image: MetadataImage, request: Read) -> bytes:
        """Bytes of a regular file, fewer only at its end.

        Raises NotFoundError if there is no such path, InvalidInputError for what is no regular
        file, CorruptError or SnapshotterError if its content cannot be had.
        """
        reader = self._open_images.reader(image)
        path = bytes(request.path)
        inode = _resolve(reader, path)
        if not stat.S_ISREG(inode.mode):
            raise InvalidInputError(f"read {_show(path)}: it is no regular file")
        name = reader.content(inode.nid)
        if name is None or request.offset >= name.size:
            return b""
        end = min(request.offset + request.length, name.size)
        try:
            return self._range(name, request.offset, end)
        except NotFoundError as error:
            raise SnapshotterError(f"read {_show(path)}: {error}") from error

    def _range(self, name: ContentName, begin: int, end: int) -> bytes:
        digests = self._library.chunk_digests(name)
        first, last = begin // CHUNK_SIZE, (end - 1) // CHUNK_SIZE
        chunks = []
        for index in range(first, last + 1):
            chunk = self._library.read_chunk(digests[index])
            if len(chunk) != chunk_length(name, index):
                raise CorruptError(f"content {name}: chunk {index} has {len(chunk)} bytes")
            chunks.append(chunk)
        skipped = first * CHUNK_SIZE
        return b"".join(chunks)[begin - skipped : end - skipped]


class _OpenImages:
    """The metadata images asked for most lately, in memory."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        """Of one image at a time, so that those who wait for the same load it once."""
        self._readers: OrderedDict[str, tuple[ImageReader, int]] = OrderedDict()
        """By content, with the size in bytes."""

    def reader(self, image: MetadataImage) -> ImageReader:
        """Raises CorruptError for an image that is damaged, SnapshotterError if it is missing."""
        found = self._find(image.content)
        if found is not None:
            return found
        with self._loading:
            return self._find(image.content) or self._load(image)

    def _find(self, content: str) -> ImageReader | None:
        with self._lock:
            found = self._readers.get(content)
            if found is None:
                return None
            self._readers.move_to_end(content)
            return found[0]

    def _load(self, image: MetadataImage) -> ImageReader:
        name = ContentName(parse_digest(image.content), image.size)
        try:
            reader = ImageReader(self._library.read_content(name))
        except NotFoundError as error:
            raise SnapshotterError(f"metadata image {name}: {error}") from error
        with self._lock:
            self._readers[image.content] = reader, image.size
            while len(self._readers) > 1 and (
                len(self._readers) > _KEPT_IMAGES or self._size_bytes() > _KEPT_BYTES
            ):
                self._readers.popitem(last=False)
        return reader

    def _size_bytes(self) -> int:
        return sum(size for _, size in self._readers.values())


class _Places:
    """Where directories go on that were listed in part: clients count names, images count bytes.

    A place that is forgotten is found again by counting.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: OrderedDict[tuple[str, int, int], int] = OrderedDict()

    def find(self, content: str, nid: int, offset: int) -> int | None:
        """The reader's offset behind that many names, 0 for none, None if it is not known."""
        with self._lock:
            return self._places.get((content, nid, offset)) if offset else 0

    def keep(self, content: str, nid: int, offset: int, place: int) -> None:
        """Remembers a place."""
        with self._lock:
            self._places[content, nid, offset] = place
            if len(self._places) > _KEPT_PLACES:
                self._places.popitem(last=False)


def _resolve(reader: ImageReader, path: bytes) -> ImageInode:
    """The inode of a path; links are not followed."""
    names = path.split(b"/") if path else []
    if len(path) > MAX_PATH_BYTES:
        raise InvalidInputError(f"path of {len(path)} bytes ({MAX_PATH_BYTES} at most)")
    for name in names:
        check_component(name)
    inode = reader.inode(reader.root)
    for name in names:
        nid = reader.lookup(inode.nid, name) if inode.is_directory else None
        if nid is None:
            raise NotFoundError(f"{_show(path)}: not in the image")
        inode = reader.inode(nid)
    return inode


def _metadata(reader: ImageReader, inode: ImageInode) -> Metadata:
    seconds, nanoseconds = divmod(inode.mtime_ns, 1_000_000_000)
    return Metadata(
        kind=_KINDS.get(stat.S_IFMT(inode.mode), "special"),
        size=inode.size,
        mode=inode.mode,
        uid=inode.uid,
        gid=inode.gid,
        inode=inode.nid,
        nlink=inode.nlink,
        mtime=seconds,
        mtime_nsec=nanoseconds,
        target=[*reader.readlink(inode.nid)] if stat.S_ISLNK(inode.mode) else None,
    )


def _show(path: bytes) -> str:
    return "/" + path[:200].decode(errors="backslashreplace")
