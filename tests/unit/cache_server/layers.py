"""Layers for tests: tars from (name, content) pairs, and their descriptors."""

from __future__ import annotations

import gzip
import hashlib
import io
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

from cache_server.ingest import ingest_layer
from cache_server.library import BlobDescriptor, LayerRecord, Library
from snapshotter.names import ContentName
from snapshotter.projection.tree import LayerEntry
from snapshotter.store import chunk_table

MIB = 1 << 20


def noise(size: int, seed: int) -> bytes:
    """Bytes that do not compress, the same for the same seed."""
    return random.Random(seed).randbytes(size)


FILES = {
    "empty": b"",
    "small": b"some text\n" * 20,
    "twin": b"some text\n" * 20,
    "dir/noise": noise(5000, 1),
    "one-chunk": b"x" * MIB,
    "large": noise(2 * MIB + 17, 2) + bytes(MIB),
}


def make_tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def describe(blob: bytes) -> BlobDescriptor:
    return BlobDescriptor(digest_of(blob), len(blob), "application/vnd.oci.image.layer.v1.tar+gzip")


def pieces(blob: bytes, length: int = 10_000) -> Iterator[bytes]:
    return (blob[at : at + length] for at in range(0, len(blob), length))


def ingest(library: Library, tar: bytes, blob: bytes | None = None) -> LayerRecord:
    blob = gzip.compress(tar, 1) if blob is None else blob
    return ingest_layer(library, pieces(blob), descriptor=describe(blob), diff_id=digest_of(tar))


def content_of(library: Library, entry: LayerEntry) -> bytes:
    """A file's content, read back through the library's chunks."""
    if not entry.size:
        return b""
    name = ContentName(entry.content, entry.size)
    if not name.is_chunked:
        return library.read_chunk(name.content_id)
    digests = chunk_table.decode(library.chunk_table(name), name)
    return b"".join(library.read_chunk(digest) for digest in digests)


def files_of(library: Library, diff_id: str) -> dict[str, bytes]:
    """Every file of a layer that the library gives back."""
    return {
        entry.path.decode(): content_of(library, entry) for entry in library.layer_entries(diff_id)
    }


def pack_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "packs").iterdir())
