"""What companions cost and save: fetches and bytes, for several budgets and size limits.

    python -m benchmarks.companions [--rounds N] > table.md

Replays the reads of two workloads against a real server, as a snapshotter with empty caches on one
connection would ask: whatever came as a companion is not fetched again. (a) reads 2,048 files of
1,023 bytes in 32 directories, in the order of a walk and shuffled; (b) reads what
`python3 -c 'import json'` opens in a Debian image (as strace sees it).
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cache_server import companions
from snapshotter.names import CHUNK_SIZE, ContentName
from snapshotter.projection.image_reader import ImageReader
from snapshotter.store import chunk_table
from tests.support.cache_v1 import Client, RunningServer, running_server
from tests.support.debian_image import debian_image, required_tool, unpack_with_umoci
from tests.support.images import Image, Layer, directory, file, write_layout

KIB = 1 << 10


class Cell(NamedTuple):
    """The largest companion, the first window and the budget of a fetch, in bytes."""

    limit: int
    first_window: int
    budget: int


BASELINE = Cell(64 * KIB, 16 * KIB, 0)
CELLS = (
    BASELINE,
    *(Cell(64 * KIB, 16 * KIB, budget * KIB) for budget in (64, 256, 1024, 4096)),
    *(Cell(64 * KIB, first * KIB, 1024 * KIB) for first in (4, 64, 1024)),
    *(Cell(limit * KIB, 16 * KIB, 1024 * KIB) for limit in (16, 256)),
)
SEED = 7


@dataclass(slots=True)
class Counts:
    """What one replay took. ``wasted_bytes`` came as companions and were never read."""

    fetches: int = 0
    companion_bytes: int = 0
    wasted_bytes: int = 0
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="companions-") as scratch:
        base = Path(scratch)
        debian = debian_image()
        opened = python_files(unpack_with_umoci(debian, base / "bundle"))
        small = write_layout(base / "small", {"v1": small_files()})
        with running_server(base) as server:
            debian_case = Case(server, debian.reference)
            small_case = Case(server, f"oci:{small}:v1")
            walked = [path for path in small_case.names if path.startswith(b"s")]
            shuffled = random.Random(SEED).sample(walked, len(walked))
            small_case.report("2,048 small files, as walked", walked, rounds)
            small_case.report("2,048 small files, shuffled", shuffled, rounds)
            debian_case.report("python3 -c 'import json'", opened, rounds)


class Case:
    """One prepared image and its replays."""

    def __init__(self, server: RunningServer, reference: str) -> None:
        self._server = server
        with server.client() as client:
            request = {"op": "prepare", "image": reference, "architecture": "amd64"}
            self._prepared = client.ask(request)
            image = self._prepared["metadata_image"]
            name = ContentName(bytes.fromhex(image["content"][7:]), image["size"])
            content = b"".join(body for _, body in client.fetch(chunks_of(client, name)))
        reader = ImageReader(content)
        self.names = {
            path: name
            for path, inode in reader.walk()
            if (name := reader.content(inode.nid)) is not None
        }

    def report(self, title: str, paths: Sequence[bytes], rounds: int) -> None:
        """Prints a table of all budgets and limits."""
        names = [self.names[path] for path in paths if path in self.names]
        total = sum(name.size for name in set(names))
        print(f"\n### {title}: {len(set(names)):,} contents, {total:,} bytes\n")
        print("| ≤ KiB | first KiB | budget KiB | fetches | companion bytes | unread | time |")
        print("|---|---|---|---|---|---|---|")
        counts = {cell: Counts() for cell in CELLS}
        for number in range(rounds):
            for cell in random.Random(SEED + number).sample(CELLS, len(CELLS)):
                self._replay(counts[cell], names, cell)
        baseline = statistics.median(counts[BASELINE].seconds)
        for cell, seen in counts.items():
            ratio = statistics.median(seen.seconds) / baseline
            limit, first, budget = (size // KIB for size in cell)
            print(
                f"| {limit} | {first} | {budget} | {seen.fetches:,}"
                f" | {seen.companion_bytes:,} | {seen.wasted_bytes:,} | {ratio:.2f} |"
            )

    def _replay(self, counts: Counts, names: Sequence[ContentName], cell: Cell) -> None:
        companions.FIRST_WINDOW_BYTES = cell.first_window
        self._build_index(cell.limit)
        companion_sizes: dict[bytes, int] = {}
        have: set[bytes] = set()
        counts.fetches = 0
        handle = self._prepared["image_handle"]
        with self._server.client() as client:
            begun = time.perf_counter()
            for name in names:
                if name.content_id in have or name.content_id in companion_sizes:
                    continue
                have.add(name.content_id)
                counts.fetches += 1
                asked = chunks_of(client, name)
                options: dict[str, Any] = {"handle": handle, "companions_bytes": cell.budget}
                for fields, body in client.fetch(asked, **options):
                    if fields.get("companion"):
                        object_name = ContentName.parse_path(fields["object"])
                        companion_sizes[object_name.content_id] = len(body)
            counts.seconds.append(time.perf_counter() - begun)
        read = {name.content_id for name in names}
        counts.companion_bytes = sum(companion_sizes.values())
        counts.wasted_bytes = sum(
            size for content_id, size in companion_sizes.items() if content_id not in read
        )

    def _build_index(self, limit: int) -> None:
        """Makes the server index the image anew with that limit on a companion's size."""
        companions.MAX_COMPANION_BYTES = limit
        server = self._server.server._companions  # noqa: SLF001 - no product has this knob
        server._built.clear()  # noqa: SLF001
        with self._server.client() as client:
            handle = self._prepared["image_handle"]
            client.ask({"op": "open", "handle": handle, "architecture": "amd64"})
        server._thread.submit(lambda: None).result()  # noqa: SLF001


def chunks_of(client: Client, name: ContentName) -> list[str]:
    """The digests of a content's chunks."""
    content = "sha256:" + name.content_id.hex()
    if name.size <= CHUNK_SIZE:
        return [content]
    client.send({"op": "chunk_table", "content": content, "size": name.size})
    table = client.receive()[1]
    return ["sha256:" + digest.hex() for digest in chunk_table.decode(table, name)]


def small_files() -> Image:
    """2,048 files of 1,023 bytes in 32 directories."""
    entries = [directory(f"s{number:02}") for number in range(32)]
    entries += [
        file(f"s{number % 32:02}/f{number:04}", random.Random(number).randbytes(1023))
        for number in range(2048)
    ]
    return Image([Layer(entries)])


def python_files(root: Path) -> list[bytes]:
    """The files that starting Python opens in ``root``, in order, relative to it."""
    strace = required_tool("strace", "strace")
    python = root / "usr/bin/python3"
    log = root.parent / "strace.log"
    command = ("chroot", str(root), "/usr/bin/python3", "-c", "import json")
    subprocess.run([strace, "-f", "-y", "-e", "trace=openat", "-o", str(log), *command], check=True)
    # the kernel itself opens the program and its loader
    loader = next((root / "usr/lib").glob("*/ld-linux-*"))
    paths = [root / "usr/bin" / python.readlink(), loader]
    names = [str(path.relative_to(root)).encode() for path in paths]
    prefix = re.escape(str(root).encode())
    opened = re.findall(rb"= \d+<" + prefix + rb"/([^>]+)>", log.read_bytes())
    return list(dict.fromkeys([*names, *opened]))


if __name__ == "__main__":
    main()
