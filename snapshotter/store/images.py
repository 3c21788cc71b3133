"""Records of pulled images: one small JSON file each, found again after any restart.

The daemon writes them; the store reads them to tell the cache server which image a cold open
belongs to. ``number`` is that link: it names the image's own directory in the gate.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from snapshotter.cache_v1.protocol import Prepared
from snapshotter.decoding import DECODE_ERRORS
from snapshotter.errors import CorruptError

_LAST_NUMBER = "last-number"


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
    raw = msgspec.json.format(msgspec.json.encode(record))
    _write(directory, f"{record.number}.json", raw)


def remove(directory: Path, number: int) -> None:
    """Removes the record of that number durably. The number is never given again."""
    if number >= last_number(directory):
        _write(directory, _LAST_NUMBER, b"%d\n" % number)
    (directory / f"{number}.json").unlink(missing_ok=True)
    _sync(directory)


def last_number(directory: Path) -> int:
    """The highest number that a record has or, as far as removals tell, had; 0 if none."""
    numbers = _numbers(directory)
    try:
        numbers.append(int((directory / _LAST_NUMBER).read_text()))
    except FileNotFoundError:
        pass
    except ValueError as error:
        path = directory / _LAST_NUMBER
        raise CorruptError(f"{path}: {error}; write the highest number ever seen there") from error
    return max(numbers, default=0)


def _write(directory: Path, name: str, raw: bytes) -> None:
    temporary = directory / f".{name}.new"
    with temporary.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(directory / name)
    _sync(directory)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _numbers(directory: Path) -> list[int]:
    return sorted(int(path.stem) for path in directory.glob("[0-9]*.json") if path.stem.isdigit())


def load(directory: Path, number: int) -> ImageRecord | None:
    """The record of that number, or None; CorruptError if the file is not a record."""
    path = directory / f"{number}.json"
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(raw, type=ImageRecord)
    except DECODE_ERRORS as error:
        raise CorruptError(f"image record {path}: {error}; remove it and pull again") from error


def load_all(directory: Path) -> list[ImageRecord]:
    """Every record that can be read, oldest number first; one that cannot is logged and left."""
    records = []
    for number in _numbers(directory):
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
