"""Ingests a layer of one 300 MB file and prints by how many bytes the peak memory grew."""

from __future__ import annotations

import hashlib
import random
import resource
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from cache_server.ingest import ingest_layer
from cache_server.library import BlobDescriptor, Library
from tests.unit.cache_server.formats.tar_blocks import header

MIB = 1 << 20
CHUNKS = 300


def tar_of_noise() -> Iterator[bytes]:
    noise = random.Random(1).randbytes(MIB - 8)
    yield header(b"large", size=CHUNKS * MIB)
    for number in range(CHUNKS):
        yield number.to_bytes(8, "big") + noise
    yield bytes(1024)


def tar_of_zeros() -> Iterator[bytes]:
    yield header(b"large", size=CHUNKS * MIB)
    for _ in range(CHUNKS):
        yield bytes(MIB)
    yield bytes(1024)


def gzipped(tar: Iterator[bytes]) -> Iterator[bytes]:
    """The whole as one piece, which expands a thousandfold."""
    compressor = zlib.compressobj(1, wbits=31)
    yield b"".join([compressor.compress(piece) for piece in tar] + [compressor.flush()])


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def grown_bytes(
    root: Path, make_tar: Callable[[], Iterator[bytes]], make_blob: Callable[[], Iterator[bytes]]
) -> int:
    tar_digest, blob_digest, size = hashlib.sha256(), hashlib.sha256(), 0
    for piece in make_tar():
        tar_digest.update(piece)
    for piece in make_blob():
        blob_digest.update(piece)
        size += len(piece)
    before = peak_bytes()
    with Library(root) as library:
        record = ingest_layer(
            library,
            make_blob(),
            descriptor=BlobDescriptor("sha256:" + blob_digest.hexdigest(), size, ""),
            diff_id="sha256:" + tar_digest.hexdigest(),
        )
    assert record.content_bytes == CHUNKS * MIB
    return peak_bytes() - before


if __name__ == "__main__":
    if sys.argv[2] == "noise":
        print(grown_bytes(Path(sys.argv[1]), tar_of_noise, tar_of_noise))
    else:
        print(grown_bytes(Path(sys.argv[1]), tar_of_zeros, lambda: gzipped(tar_of_zeros())))
