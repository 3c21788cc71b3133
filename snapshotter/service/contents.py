"""What is in the store and which images it belongs to; what a purge would take.

Users: commands that look after the disk, each in a process of its own: walking a metadata image is
work for the processor, which neither the store nor the daemon may do. Only reads; what is
removed is removed by the store (see ``control.Evict`` and ``control.Discard``).
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from snapshotter.errors import NotFoundError
from snapshotter.names import ContentName
from snapshotter.paths import Paths
from snapshotter.projection.image_reader import ImageReader
from snapshotter.service.images import metadata_name
from snapshotter.store import images
from snapshotter.store.images import ImageRecord
from snapshotter.store.inventory import (
    StoredFile,
    find_object_fault,
    find_partial_fault,
    list_files,
)

NAMES_PER_REQUEST = 4096


@dataclass(frozen=True, slots=True)
class Amount:
    """So many contents, which take so many bytes of disk."""

    contents: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ImageUse:
    """An image's part of the store. ``own``: what no other image uses.

    ``total`` counts the image's contents and their sizes, here or not; None for an image whose
    metadata image is not here, so that its contents are not known.
    """

    number: int
    references: list[str]
    total: Amount | None
    here: Amount
    own: Amount


@dataclass(frozen=True, slots=True)
class Usage:
    """What the root holds. ``metadata`` are the metadata images of ``images``, ``unused`` is what
    none of them uses; ``packs_bytes`` is what the cache server below this root keeps.
    """

    objects: Amount
    partial: Amount
    metadata: Amount
    unused: Amount
    packs_bytes: int
    images: list[ImageUse]


@dataclass(frozen=True, slots=True)
class Stored:
    """The store's contents by name, each with what it takes, whole or partial.

    ``arrived_at_s`` is the youngest byte's time.
    """

    objects: dict[ContentName, StoredFile] = field(default_factory=dict)
    partial: dict[ContentName, StoredFile] = field(default_factory=dict)

    def names(self) -> set[ContentName]:
        """Every content of which there is something."""
        return self.objects.keys() | self.partial.keys()

    def disk_bytes(self, name: ContentName) -> int:
        """What a content takes; a partial file that became the object is the same file."""
        files = (self.objects.get(name), self.partial.get(name))
        return sum(file.disk_bytes for file in files if file is not None)

    def arrived_at_s(self, name: ContentName) -> float:
        """When its last byte came."""
        files = (self.objects.get(name), self.partial.get(name))
        return max(file.arrived_at_s for file in files if file is not None)

    def amount(self, names: set[ContentName]) -> Amount:
        """How many of ``names`` are here, and what they take."""
        here = names & self.names()
        return Amount(len(here), sum(map(self.disk_bytes, here)))


def read_stored(paths: Paths) -> Stored:
    """Lists the store."""
    objects = {file.name: file for file in list_files(paths.arrivals)}
    objects |= {file.name: file for file in list_files(paths.objects)}
    partial = {
        file.name: file
        for file in list_files(paths.partial)
        if file.links == 1 or file.name not in objects
    }
    return Stored(objects, partial)


def image_contents(paths: Paths, record: ImageRecord) -> set[ContentName]:
    """What an image's files hold; NotFoundError if its metadata image is not here."""
    name = metadata_name(record.prepared)
    try:
        file = (paths.objects / name.path).open("rb")
    except FileNotFoundError as error:
        known_as = record.references[-1] if record.references else str(record.number)
        raise NotFoundError(
            f"contents of image {known_as}: its metadata image is not here; "
            f"snapshotter pull {known_as}"
        ) from error
    with file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        reader = ImageReader(mapping)
        try:
            found = {reader.content(inode.nid) for _, inode in reader.walk() if inode.size}
        finally:
            reader.close()
    return {content for content in found if content is not None}


def read_usage(paths: Paths) -> Usage:
    """What the root holds, and for whom."""
    stored = read_stored(paths)
    records = images.load_all(paths.images)
    contents = [_known_contents(paths, record) for record in records]
    metadata = {metadata_name(record.prepared) for record in records}
    used = metadata.union(*(each for each in contents if each is not None))
    return Usage(
        objects=stored.amount(set(stored.objects)),
        partial=Amount(len(stored.partial), sum(f.disk_bytes for f in stored.partial.values())),
        metadata=stored.amount(metadata),
        unused=stored.amount(stored.names() - used),
        packs_bytes=sum(path.stat().st_size for path in paths.server_root.glob("packs/*.pack")),
        images=list(_uses(stored, records, contents)),
    )


def _known_contents(paths: Paths, record: ImageRecord) -> set[ContentName] | None:
    try:
        return image_contents(paths, record)
    except NotFoundError:
        return None


def _uses(
    stored: Stored, records: list[ImageRecord], contents: list[set[ContentName] | None]
) -> Iterator[ImageUse]:
    for index, (record, names) in enumerate(zip(records, contents, strict=True)):
        if names is None:
            yield ImageUse(record.number, record.references, None, Amount(), Amount())
            continue
        others = (each for each in (*contents[:index], *contents[index + 1 :]) if each is not None)
        yield ImageUse(
            number=record.number,
            references=record.references,
            total=Amount(len(names), sum(name.size for name in names)),
            here=stored.amount(names),
            own=stored.amount(names.difference(*others)),
        )


def choose_for_purge(
    paths: Paths,
    stored: Stored,
    *,
    image: ImageRecord | None = None,
    older_than_s: float | None = None,
    everything: bool = False,
) -> list[ContentName]:
    """What a purge takes, oldest first. Never a metadata image of a recorded image.

    Of ``image``: what it alone uses. Else all with ``everything`` or an age, and without
    either what no image uses. Raises NotFoundError when that cannot be known.
    """
    records = images.load_all(paths.images)
    chosen = stored.names() - {metadata_name(record.prepared) for record in records}
    if image is not None:
        chosen &= image_contents(paths, image)
    if image is not None or not (everything or older_than_s is not None):
        for record in records:
            if image is None or record.number != image.number:
                chosen -= image_contents(paths, record)
    if older_than_s is not None:
        newest_s = time.time() - older_than_s
        chosen = {name for name in chosen if stored.arrived_at_s(name) <= newest_s}
    return sorted(chosen, key=stored.arrived_at_s)


def find_faults(paths: Paths) -> Iterator[tuple[ContentName, str | None]]:
    """Reads every object and partial file; each with what is wrong with it, None if nothing is."""
    checks = (
        (paths.objects, find_object_fault),
        (paths.arrivals, find_object_fault),
        (paths.partial, find_partial_fault),
    )
    for directory, find_fault in checks:
        for file in list_files(directory):
            if directory != paths.arrivals or not _is_same(paths, file.name):
                yield file.name, find_fault(directory, file.name)


def _is_same(paths: Paths, name: ContentName) -> bool:
    """Whether the arrival is the object that was checked already, under its other name."""
    try:
        return (paths.arrivals / name.path).samefile(paths.objects / name.path)
    except FileNotFoundError:
        return False


def batches(names: list[ContentName]) -> Iterator[list[str]]:
    """The names as requests carry them."""
    for start in range(0, len(names), NAMES_PER_REQUEST):
        yield [str(name) for name in names[start : start + NAMES_PER_REQUEST]]
