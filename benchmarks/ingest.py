"""How long a layer takes to ingest, against unpacking it: ``tar xzf`` and ``sha256sum``.

    mmdebstrap --variant=minbase --include=python3 bookworm layer.tar && gzip layer.tar
    python -m benchmarks.ingest layer.tar.gz --rounds 5

The arms alternate in each round, on the file system of ``--directory``; what ingest stored is
checked against the tar's own digest before its time counts.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cache_server.ingest import ingest_layer
from cache_server.library import BlobDescriptor, Library

READ_BYTES = 256 << 10


def pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            yield piece


def time_unpack(blob: Path, directory: Path) -> float:
    start_s = time.perf_counter()
    subprocess.run(["tar", "xzf", blob, "-C", directory], check=True)
    subprocess.run(["sha256sum", blob], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start_s


def time_ingest(blob: Path, directory: Path, descriptor: BlobDescriptor, diff_id: str) -> float:
    start_s = time.perf_counter()
    with Library(directory) as library:
        ingest_layer(library, pieces(blob), descriptor=descriptor, diff_id=diff_id)
        return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("blob", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None)
    options = parser.parse_args()
    digest, diff_digest = hashlib.sha256(), hashlib.sha256()
    for piece in pieces(options.blob):
        digest.update(piece)
    with gzip.open(options.blob) as tar:
        while piece := tar.read(READ_BYTES):
            diff_digest.update(piece)
    size = options.blob.stat().st_size
    descriptor = BlobDescriptor("sha256:" + digest.hexdigest(), size, "")
    ratios = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            unpack_s = time_unpack(options.blob, Path(directory))
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            ingest_s = time_ingest(
                options.blob, Path(directory), descriptor, "sha256:" + diff_digest.hexdigest()
            )
        ratios.append(ingest_s / unpack_s)
        print(f"round {number + 1}: unpack {unpack_s:.2f} s, ingest {ingest_s:.2f} s")
    print(f"ingest / unpack, median of {options.rounds}: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
