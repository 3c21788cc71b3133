"""The frozen inputs: one tree as a plain directory and as an image, and an image of 100,000 names.

2,048 files of 1,023 bytes in 32 directories, every other one eight levels deep, and one file of
64 MiB. Contents come from a seeded generator and do not compress.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from tests.support.debian_image import LocalImage
from tests.support.images import Entry, Image, Layer, directory, file, write_layout

DIRECTORIES = 32
FILES_PER_DIRECTORY = 64
FILE_BYTES = 1023
LARGE_BYTES = 64 << 20
LARGE = "large.bin"
MANY_ENTRIES = 100_000
_DEPTH = 8
_ENTRIES_PER_DIRECTORY = 1000


def small_names() -> list[str]:
    """Paths of the small files, directory by directory."""
    names = []
    for number in range(DIRECTORIES):
        parent = f"small/d{number:02}"
        if number % 2:
            parent += "".join(f"/level{depth}" for depth in range(1, _DEPTH))
        names += [f"{parent}/f{index:03}" for index in range(FILES_PER_DIRECTORY)]
    return names


def small_files() -> Iterator[tuple[str, bytes]]:
    """Paths and contents of the small files."""
    source = random.Random(1)
    for name in small_names():
        yield name, source.randbytes(FILE_BYTES)


def large_content() -> bytes:
    """The content of the large file."""
    return random.Random(2).randbytes(LARGE_BYTES)


def write_native(root: Path) -> Path:
    """The tree as a plain directory."""
    for path, content in small_files():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    (root / LARGE).write_bytes(large_content())
    return root


def write_image(layout: Path) -> LocalImage:
    """The same tree as an image of one layer."""
    entries: list[Entry] = []
    known: set[str] = set()
    for path, content in small_files():
        parts = path.split("/")
        for depth in range(1, len(parts)):
            parent = "/".join(parts[:depth])
            if parent not in known:
                known.add(parent)
                entries.append(directory(parent))
        entries.append(file(path, content))
    entries.append(file(LARGE, large_content()))
    write_layout(layout, {"tree": Image([Layer(entries, compression="zstd")])})
    return LocalImage(layout, "tree")


def write_many_entries_image(layout: Path) -> LocalImage:
    """An image of 100,000 entries: 100 directories of files that share a few contents."""
    entries: list[Entry] = []
    for number in range(MANY_ENTRIES // _ENTRIES_PER_DIRECTORY):
        entries.append(directory(f"d{number:03}"))
        entries += [
            file(f"d{number:03}/name-{index:04}", b"%d\n" % (index % 100))
            for index in range(_ENTRIES_PER_DIRECTORY - 1)
        ]
    write_layout(layout, {"many": Image([Layer(entries, compression="zstd")])})
    return LocalImage(layout, "many")
