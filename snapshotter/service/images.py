"""The images that were pulled: found by name, pulled once whoever asks, recorded durably."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import structlog
import trio

from snapshotter.cache_v1.protocol import Prepared, Progress
from snapshotter.digest import parse_digest
from snapshotter.errors import (
    BusyError,
    CorruptError,
    NotFoundError,
    SnapshotterError,
    UnsupportedError,
)
from snapshotter.names import ContentName
from snapshotter.platforms import host_architecture
from snapshotter.store import images as records
from snapshotter.store.images import ImageRecord

_log = structlog.get_logger()

OnProgress = Callable[[Progress], None]


def metadata_name(prepared: Prepared) -> ContentName:
    """The content of an image's metadata image; CorruptError if the server sent none."""
    image = prepared.metadata_image
    if image is None:
        raise CorruptError(f"image {prepared.image_handle}: the server made no metadata image")
    return ContentName(parse_digest(image.content), image.size)


class Preparer(Protocol):
    """What is needed of a cache-v1 client."""

    async def prepare(
        self,
        image: str,
        *,
        architecture: str,
        refresh: bool = False,
        merge: bool = True,
        authfile: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Prepared:
        """Makes an image ready at the server."""

    async def open(
        self,
        *,
        handle: str | None = None,
        chain: str | None = None,
        architecture: str,
        merge: bool = True,
        documents: bool = False,
    ) -> Prepared:
        """An image that was made ready before."""


_Key = tuple[str, str, bool, str | None]
"""What pulls must agree in to be one: image, architecture, refresh and authfile."""


class _Pull:
    """One pull under way, and who listens to it."""

    def __init__(self) -> None:
        self.listeners: list[OnProgress] = []
        self.done = trio.Event()
        self.result: ImageRecord | SnapshotterError | None = None

    def tell(self, progress: Progress) -> None:
        for listener in self.listeners:
            listener(progress)


class ImageCatalog:
    """Image records in memory and on disk. Lives on the daemon's trio loop.

    Pulls run in the daemon's nursery: an asker that goes away ends its wait, not the pull.
    ``ensure`` has content as an object on this host.
    """

    def __init__(
        self,
        directory: Path,
        preparer: Preparer,
        ensure: Callable[[ContentName], Awaitable[None]],
        nursery: trio.Nursery,
    ) -> None:
        self._directory = directory
        self._preparer = preparer
        self._ensure = ensure
        self._nursery = nursery
        self._saving = trio.Lock()
        self._pulls: dict[_Key, _Pull] = {}
        self._held: Counter[int] = Counter()
        self._records = {record.number: record for record in records.load_all(directory)}
        self._last_number = records.last_number(directory)

    def all(self) -> list[ImageRecord]:
        """Every record, oldest number first."""
        return [self._records[number] for number in sorted(self._records)]

    def find(self, image: str, architecture: str | None = None) -> ImageRecord | None:
        """The image of that reference, handle or digest; None if it was not pulled here.

        A reference means the image for ``architecture`` (by default this host's).
        """
        wanted = architecture or host_architecture()
        for record in self._records.values():
            has = record.prepared.architecture
            fits = has == wanted or has.startswith(f"{wanted}/")
            if fits and image in record.references:
                return record
        for record in self._records.values():
            if image in (record.handle, record.prepared.digest):
                return record
        return None

    def inspect(self, image: str) -> ImageRecord:
        """The image of that reference (of any architecture), handle, digest or number."""
        record = self.find(image)
        if record is None:
            anyhow = (r for r in self._records.values() if image in r.references)
            record = next(anyhow, None)
        if record is None and image.isascii() and image.isdigit():
            record = self._records.get(int(image))
        if record is None:
            raise NotFoundError(f"image {image!r} was not pulled here: snapshotter pull {image}")
        return record

    async def pull(
        self,
        image: str,
        architecture: str | None = None,
        *,
        refresh: bool = True,
        authfile: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> ImageRecord:
        """Has the image's record and metadata image here; with ``refresh`` asks the registry.

        Raises what the cache server or the store says. Asking while the same pull runs joins it.
        """
        if not refresh and (known := self.find(image, architecture)) is not None:
            await self._ensure(metadata_name(known.prepared))
            return known
        key = (image, architecture or host_architecture(), refresh, authfile)
        pull = self._pulls.get(key)
        if pull is None:
            pull = self._pulls[key] = _Pull()
            self._nursery.start_soon(self._run, key, pull)
        if on_progress is not None:
            pull.listeners.append(on_progress)
        try:
            await pull.done.wait()
        finally:
            if on_progress is not None:
                pull.listeners.remove(on_progress)
        if isinstance(pull.result, ImageRecord):
            return pull.result
        assert pull.result is not None
        raise type(pull.result)(str(pull.result)) from pull.result

    async def add(self, name: str, prepared: Prepared) -> ImageRecord:
        """Records, as ``name``, what the server made ready; its metadata image is here then.

        Raises what the store says, CorruptError for an image that was not merged, and OSError.
        """
        await self._ensure(metadata_name(prepared))
        async with self._saving:  # two may end with one record
            return await self._record(name, prepared)

    async def documents(self, record: ImageRecord) -> list[str]:
        """The image's manifest, last, and the indexes that led to it, as the server keeps them.

        Raises UnsupportedError where it does not have them, or what the server says else.
        """
        prepared = await self._preparer.open(
            handle=record.handle,
            architecture=record.prepared.architecture,
            merge=False,
            documents=True,
        )
        if not prepared.documents:
            raise UnsupportedError(
                f"image {record.references[-1]}: the cache server has not kept its manifest; it is"
                " very large, or was prepared by an older version: then pull it once more"
            )
        return prepared.documents

    @contextmanager
    def hold(self, record: ImageRecord) -> Iterator[None]:
        """Keeps an image from being removed, as long as something is made of it.

        NotFoundError if it was removed since it was found.
        """
        if record.number not in self._records:
            name = record.references[-1] if record.references else record.handle
            raise NotFoundError(f"image {name} was removed meanwhile: snapshotter pull {name}")
        self._held[record.number] += 1
        try:
            yield
        finally:
            self._held[record.number] -= 1

    async def remove(self, record: ImageRecord, name: str) -> bool:
        """Removes the name from an image that has others too, else the image; whether the latter.

        ``name`` is what it was asked for by. Content stays: see the store. BusyError, with nothing
        changed, while the image is held.
        """
        if name in record.references and len(record.references) > 1:
            changed = self._without(record, name)
            self._records[record.number] = changed
            async with self._saving:
                await trio.to_thread.run_sync(records.save, self._directory, changed)
            return False
        if self._held[record.number]:
            raise BusyError(f"remove image {name}: it is being mounted")
        del self._records[record.number]
        async with self._saving:
            await trio.to_thread.run_sync(records.remove, self._directory, record.number)
        return True

    async def _run(self, key: _Key, pull: _Pull) -> None:
        image, architecture, refresh, authfile = key
        pull.result = SnapshotterError(f"pull {image}: the daemon is ending")
        try:
            prepared = await self._preparer.prepare(
                image,
                architecture=architecture,
                refresh=refresh,
                authfile=authfile,
                on_progress=pull.tell,
            )
            pull.result = await self.add(image, prepared)
        except SnapshotterError as error:
            _log.warning("pull failed", image=image, code=error.code, error=str(error))
            pull.result = error
        except OSError as error:
            _log.warning("pull failed", image=image, error=str(error))
            pull.result = SnapshotterError(f"pull {image}: {error}")
        finally:
            del self._pulls[key]
            pull.done.set()

    async def _record(self, image: str, prepared: Prepared) -> ImageRecord:
        """Saves the record: a new one, or that of the same handle with its references updated.

        The reference leaves an older image of the architecture that it named before.
        """
        same = (r for r in self._records.values() if r.handle == prepared.image_handle)
        known = next(same, None)
        if known is None:
            self._last_number += 1
        number = known.number if known else self._last_number
        others = [name for name in (known.references if known else []) if name != image]
        record = ImageRecord(
            number=number,
            references=[*others, image],
            pulled_at_s=time.time(),
            prepared=prepared,
        )
        changed = [self._without(other, image) for other in self._moved_from(record, image)]
        for each in (record, *changed):
            self._records[each.number] = each
        for each in (record, *changed):
            await trio.to_thread.run_sync(records.save, self._directory, each)
        return record

    def _moved_from(self, record: ImageRecord, image: str) -> list[ImageRecord]:
        architecture = record.prepared.architecture
        return [
            other
            for other in self._records.values()
            if other.number != record.number
            and image in other.references
            and other.prepared.architecture == architecture
        ]

    @staticmethod
    def _without(record: ImageRecord, image: str) -> ImageRecord:
        left = [name for name in record.references if name != image]
        return msgspec.structs.replace(record, references=left)
