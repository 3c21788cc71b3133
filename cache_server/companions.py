"""Which small files are likely to be wanted next: the neighbours of one that was asked for.

An image's neighbourhood is an index of the small files of its metadata image, by content id and
in the order of a walk. The server alone decides by it what to add to a fetch.
"""

from __future__ import annotations

import stat
import struct
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import structlog

from cache_server.library import Library
from snapshotter.cache_v1.protocol import MetadataImage, Prepared
from snapshotter.digest import DIGEST_SIZE, parse_digest
from snapshotter.errors import SnapshotterError
from snapshotter.names import ContentName
from snapshotter.projection.image_reader import ImageReader

MAX_COMPANION_BYTES = 64 << 10
"""Larger files are never companions (docs/results/companions.md says why)."""
MAX_BUDGET_BYTES = 8 << 20
"""What a fetch may ask for as companions, at most."""
FIRST_WINDOW_BYTES = 16 << 10
"""How much a fetch that continues no other brings."""
_SLACK = 8
"""How many files a client may skip and still count as going on."""
_KEPT_IMAGES = 8
_PREFIX = struct.Struct(">Q24x")
"""The part of a content id that files are sorted by."""

log = structlog.get_logger(__name__)


class Neighbourhood:
    """The small files of one image. About 50 bytes a file; safe from any thread once built."""

    def __init__(self, reader: ImageReader) -> None:
        self._ids = bytearray()
        self._sizes = array("I")
        self._directories = array("I")
        """For each file, the number of its directory; directories are numbered as walked."""
        self._first_file = array("I")
        """For each directory, its first file; the next directory's first file ends it."""
        self._parents = array("I")
        self._ends = array("I")
        """For each directory, the number of the first directory that is not below it."""
        self._number_files(reader)
        self._first_file.append(len(self._sizes))
        prefixes = [prefix for (prefix,) in _PREFIX.iter_unpack(self._ids)]
        self._by_id = array("I", sorted(range(len(prefixes)), key=prefixes.__getitem__))
        self._prefixes = array("Q", sorted(prefixes))

    def __len__(self) -> int:
        return len(self._sizes)

    def positions(self, content_id: bytes) -> list[int]:
        """Where in the walk files with that content are; none if it is not a small file's."""
        (prefix,) = _PREFIX.unpack(content_id)
        low = bisect_left(self._prefixes, prefix)
        high = bisect_right(self._prefixes, prefix, lo=low)
        found = (self._by_id[at] for at in range(low, high))
        return [position for position in found if self._id(position) == content_id]

    def closest(self, content_id: bytes, position: int) -> int | None:
        """The file with that content that is closest to a position: in its directory, if it can
        be; None if it is not a small file's content.
        """
        home = self._directories[position] if self._sizes else 0
        return min(
            self.positions(content_id),
            key=lambda found: (self._directories[found] != home, abs(found - position)),
            default=None,
        )

    def name(self, position: int) -> ContentName:
        """The content at a position."""
        return ContentName(self._id(position), self._sizes[position])

    def near(self, position: int) -> Iterator[int]:
        """Positions worth having after that one, best first.

        First the files of its directory, nearest in name order, later ones before earlier ones;
        then what lies below the directory, then its later and its earlier siblings.
        """
        directory = self._directories[position]
        yield from self._around(position, *self._files(directory, directory + 1))
        yield from range(*self._files(directory + 1, self._ends[directory]))
        if directory:
            parent = self._parents[directory]
            yield from range(*self._files(self._ends[directory], self._ends[parent]))
            yield from range(*self._files(parent, directory))

    def _around(self, position: int, begin: int, end: int) -> Iterator[int]:
        for distance in range(1, end - begin):
            if position + distance < end:
                yield position + distance
            if position - distance >= begin:
                yield position - distance

    def _files(self, first_directory: int, end_directory: int) -> tuple[int, int]:
        return self._first_file[first_directory], self._first_file[end_directory]

    def _id(self, position: int) -> bytes:
        return bytes(self._ids[position * DIGEST_SIZE : (position + 1) * DIGEST_SIZE])

    def _number_files(self, reader: ImageReader) -> None:
        """Numbers directories in the order of a walk and each one's own small files in a row."""
        stack: list[tuple[int, int]] = [(reader.root, 0)]
        open_directories: list[int] = []
        while stack:
            nid, parent = stack.pop()
            if nid < 0:  # the way back up from a directory
                self._ends[open_directories.pop()] = len(self._parents)
                continue
            number = len(self._parents)
            self._parents.append(parent)
            self._ends.append(0)
            self._first_file.append(len(self._sizes))
            open_directories.append(number)
            stack.append((-1, 0))
            below = []
            for entry in reader.entries(nid):
                if entry.type_bits == stat.S_IFDIR:
                    below.append((entry.nid, number))
                elif entry.type_bits == stat.S_IFREG:
                    self._add_file(reader.content(entry.nid), number)
            stack.extend(reversed(below))

    def _add_file(self, name: ContentName | None, directory: int) -> None:
        if name is not None and name.size <= MAX_COMPANION_BYTES:
            self._ids += name.content_id
            self._sizes.append(name.size)
            self._directories.append(directory)


class Trail:
    """What one client was sent, where in which image it asked last, and how far to look ahead.

    Like the kernel's read-ahead: a client that comes back where its companions ended, or for one
    that is still on its way, gets twice as many; one that jumps starts again with few. Programs
    that start open a file here and there, and most of what lies around is not for them.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sent: set[bytes] = set()
        self.position = 0
        self._handle: str | None = None
        self._expected = 0
        self._window_bytes = FIRST_WINDOW_BYTES

    def enter(self, handle: str) -> None:
        """Starts afresh, unless the client is in that image already."""
        if self._handle != handle:
            self._handle = handle
            self.position = self._expected = 0

    def widen(self, asked: list[int], *, is_overtaken: bool) -> int:
        """How many bytes to send to a client that asks for these positions now.

        ``is_overtaken``: it asks for what was sent already.
        """
        if is_overtaken or any(abs(at - self._expected) <= _SLACK for at in asked):
            self._window_bytes = min(2 * self._window_bytes, MAX_BUDGET_BYTES)
        else:
            self._window_bytes = FIRST_WINDOW_BYTES
        return self._window_bytes

    def expect(self, position: int) -> None:
        """Where the client will ask next, if it goes on as it does."""
        self._expected = position


class Companions:
    """Neighbourhoods of the images asked for most lately, built in a thread of their own."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._built: OrderedDict[str, Neighbourhood | None] = OrderedDict()
        """By handle; None while it is being built, or if it cannot be."""
        self._thread = ThreadPoolExecutor(1, "companions")

    def close(self) -> None:
        """Waits for what is being built."""
        self._thread.shutdown(cancel_futures=True)

    def warm(self, prepared: Prepared) -> None:
        """Builds an image's neighbourhood before it is asked for."""
        image = prepared.metadata_image
        if image is not None:
            self._build_once(prepared.image_handle, lambda: image)

    def choose(
        self, handle: str | None, asked: Iterable[bytes], budget_bytes: int, trail: Trail
    ) -> list[ContentName]:
        """Small objects to add after ``asked`` (raw digests), each once a trail.

        None are chosen without a handle or a budget, nor until the image's neighbourhood is built,
        which this call starts.
        """
        digests = list(asked)
        with trail.lock:
            is_overtaken = any(digest in trail.sent for digest in digests)
            trail.sent.update(digests)
            neighbourhood = self._find(handle) if handle is not None and budget_bytes > 0 else None
            if handle is None or neighbourhood is None:
                return []
            trail.enter(handle)
            starts = []
            for digest in digests:
                start = neighbourhood.closest(digest, trail.position)
                if start is not None:
                    starts.append(start)
                    trail.position = start
            window_bytes = trail.widen(starts, is_overtaken=is_overtaken)
            return _take(neighbourhood, starts, min(budget_bytes, window_bytes), trail)

    def _find(self, handle: str) -> Neighbourhood | None:
        with self._lock:
            if handle in self._built:
                self._built.move_to_end(handle)
                return self._built[handle]
        self._build_once(handle, lambda: self._metadata_image(handle))
        return None

    def _build_once(self, handle: str, find_image: Callable[[], MetadataImage | None]) -> None:
        with self._lock:
            if handle in self._built:
                return
            self._built[handle] = None
            while len(self._built) > _KEPT_IMAGES:
                self._built.popitem(last=False)
        self._thread.submit(self._build, handle, find_image)

    def _build(self, handle: str, find_image: Callable[[], MetadataImage | None]) -> None:
        """An image that is unknown or unreadable has no companions; its content has other askers
        who will see the error, so here it is only logged.
        """
        try:
            image = find_image()
            if image is None:
                return
            name = ContentName(parse_digest(image.content), image.size)
            built = Neighbourhood(ImageReader(self._library.read_content(name)))
        except SnapshotterError as error:
            log.warning("no companions for image", handle=handle, error=str(error))
            return
        with self._lock:
            if handle in self._built:
                self._built[handle] = built

    def _metadata_image(self, handle: str) -> MetadataImage | None:
        stored = self._library.find_image(handle)
        return stored.prepared.metadata_image if stored else None


def _take(
    neighbourhood: Neighbourhood, starts: list[int], left_bytes: int, trail: Trail
) -> list[ContentName]:
    """The best neighbours that were not sent yet and fit, which then count as sent."""
    chosen: list[ContentName] = []
    for start in starts:
        trail.expect(start + 1)
        last = start
        for position in neighbourhood.near(start):
            name = neighbourhood.name(position)
            if name.content_id in trail.sent:
                continue
            if name.size > left_bytes:
                return chosen
            left_bytes -= name.size
            trail.sent.add(name.content_id)
            chosen.append(name)
            last = max(last, position)
            trail.expect(last + 1)
    return chosen
