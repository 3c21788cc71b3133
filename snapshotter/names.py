"""Names of content, and the rules that names and paths inside an image obey.

An *object name* is ``ab/<62 hex>.<size>``: a 32-byte content id in hex, its first two digits as a
directory, and the size in decimal bytes. The content id of a file of at most one chunk is the
SHA-256 of its bytes; of a larger one it is the SHA-256 of its chunk table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from snapshotter.errors import InvalidInputError

CHUNK_SIZE = 1 << 20
"""Bytes in a chunk, the unit of fetch and verification; only a file's last chunk is shorter."""

MAX_CONTENT_SIZE = (1 << 63) - 1
MAX_COMPONENT_BYTES = 255
MAX_PATH_BYTES = 16_384

_FILE = re.compile(rb"([0-9a-f]{62})\.([1-9][0-9]{0,18})")
_FAN_OUT = re.compile(rb"[0-9a-f]{2}")


@dataclass(frozen=True, slots=True, order=True)
class ContentName:
    """What a non-empty file's content is called: its content id (raw 32 bytes) and its size."""

    content_id: bytes
    size: int

    @property
    def is_chunked(self) -> bool:
        """Whether the content id is that of a chunk table (the size decides, nothing else)."""
        return self.size > CHUNK_SIZE

    @property
    def chunk_count(self) -> int:
        """Number of chunks."""
        return -(-self.size // CHUNK_SIZE)

    @property
    def directory(self) -> str:
        """The fan-out directory of the object: the first two hex digits."""
        return f"{self.content_id[0]:02x}"

    @property
    def file(self) -> str:
        """The object's file name within its fan-out directory."""
        return f"{self.content_id[1:].hex()}.{self.size}"

    @property
    def path(self) -> str:
        """The object name, ``ab/<62 hex>.<size>``."""
        return f"{self.directory}/{self.file}"

    def __str__(self) -> str:
        return self.path

    @classmethod
    def parse(cls, directory: bytes, file: bytes) -> ContentName:
        """From the two parts of an object name; InvalidInputError if it is none."""
        match = _FILE.fullmatch(file)
        if match is None or _FAN_OUT.fullmatch(directory) is None:
            raise InvalidInputError(f"not an object name: {directory!r}/{file[:100]!r}")
        size = int(match[2])
        if size > MAX_CONTENT_SIZE:
            raise InvalidInputError(f"object size out of range: {size}")
        return cls(bytes.fromhex((directory + match[1]).decode()), size)

    @classmethod
    def parse_path(cls, path: str | bytes) -> ContentName:
        """From ``ab/<62 hex>.<size>``; InvalidInputError if it is none."""
        raw = path.encode() if isinstance(path, str) else path
        directory, _, file = raw.partition(b"/")
        return cls.parse(directory, file)


def check_component(name: bytes) -> bytes:
    """``name`` if it may be one component of a path in an image; else InvalidInputError."""
    if not name or name in (b".", b"..") or b"/" in name or b"\0" in name:
        raise InvalidInputError(f"not a file name: {name[:100]!r}")
    if len(name) > MAX_COMPONENT_BYTES:
        raise InvalidInputError(f"file name of {len(name)} bytes (255 at most): {name[:40]!r}…")
    return name
