"""Records of pulled images: one small JSON file each, found again after any restart.

The daemon writes them; the store reads them to tell the cache server which image a cold open
belongs to. ``number`` is that link: it names the image's own directory in the gate.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from snapshotter.cache_v1.protocol import Prepared
from snapshotter.errors import CorruptError


class ImageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A pulled image. ``references`` are the names it was asked for by, newest last."""

    number: int
    references: list[str]
    pulled_at_s: float
    prepared: Prepared

    @property
    def handle(self) -> str:
        """The cache server's handle of the image."""
        return self.prepared.image_handle


def save(directory: Path, record: ImageRecord) -> None:
    """Writes a record durably, replacing an older one of the same number at once."""
    target = directory / f"{record.number}.json"
    temporary = directory / f".{record.number}.json.new"
    with temporary.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(record)))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(directory: Path, number: int) -> ImageRecord | None:
    """The record of that number, or None; CorruptError if the file is not a record."""
    path = directory / f"{number}.json"
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(raw, type=ImageRecord)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"image record {path}: {error}; remove it and pull again") from error


def load_all(directory: Path) -> list[ImageRecord]:
    """Every record that can be read, oldest number first; one that cannot is logged and left."""
    numbers = sorted(
        int(path.stem) for path in directory.glob("[0-9]*.json") if path.stem.isdigit()
    )
    records = []
    for number in numbers:
        try:
            record = load(directory, number)
        except CorruptError as error:
            import structlog  # noqa: PLC0415 - a third of a command's start; no command comes here

            log = structlog.get_logger(__name__)
            log.warning("image record passed over", number=number, cause=str(error))
            continue
        if record is not None:
            records.append(record)
    return records
