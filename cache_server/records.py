"""What the catalog's rows mean, as values that the library and its users pass around."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from snapshotter.cache_v1.protocol import Prepared
from snapshotter.names import ContentName


class Codec(IntEnum):
    """How a chunk's bytes are stored."""

    RAW = 0
    ZSTD = 1
    """One zstd frame that carries its content size."""


class Source(msgspec.Struct, frozen=True):
    """Something that holds chunks' bytes. Of kind ``pack``: a file in ``packs/``."""

    kind: str
    path: str


class ChunkLocation(msgspec.Struct, frozen=True):
    """``length`` stored bytes at ``offset`` of ``source`` hold a chunk, encoded by ``codec``."""

    source: Source
    offset: int
    length: int
    codec: int


class BlobDescriptor(msgspec.Struct, frozen=True):
    """A layer's blob as a manifest names it; ``digest`` is ``sha256:…``, ``size`` in bytes."""

    digest: str
    size: int
    media_type: str


class LayerRecord(msgspec.Struct, frozen=True):
    """An ingested layer: its blob as first seen, and how many entries, files and bytes it has."""

    diff_id: str
    blob: BlobDescriptor
    entries: int
    files: int
    content_bytes: int


class StoredImage(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared image, the references it was asked for by (newest last), and when."""

    prepared: Prepared
    references: list[str] = []
    saved_at_s: float = 0.0

    @property
    def handle(self) -> str:
        """The image's handle."""
        return self.prepared.image_handle


@dataclass(slots=True)
class PackRows:
    """Chunks added to one pack: (digest, offset, length, codec) each; and the pack's new size."""

    path: str
    size_bytes: int = 0
    chunks: list[tuple[bytes, int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Addition:
    """What one transaction adds. ``listing`` is the layer's entries as the library encodes them."""

    packs: list[PackRows]
    tables: dict[ContentName, bytes]
    layer: LayerRecord | None = None
    listing: bytes = b""
