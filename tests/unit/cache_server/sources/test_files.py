"""A layout read from its directory and from a tar of it are the same image."""

import asyncio
import gzip
from pathlib import Path

import pytest

from cache_server.library import BlobDescriptor
from cache_server.sources.files import ArchiveFiles, DirectoryFiles, Files
from cache_server.sources.layout import LayoutSource
from snapshotter.errors import CorruptError, InvalidInputError, NotFoundError, UnsupportedError
from tests.support.archives import pack_layout
from tests.support.images import Image, Layer, file, write_layout

LAYER = Layer([file("a", b"x" * 3_000_000)], compression="none")
IMAGE = Image([LAYER])


@pytest.fixture(params=["directory", "archive", "archive of ./"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    layout = write_layout(tmp_path / "layout", {"v1": IMAGE})
    if request.param == "directory":
        return DirectoryFiles("it", str(layout))
    prefix = "./" if request.param.endswith("./") else ""
    return ArchiveFiles("it", str(pack_layout(layout, tmp_path / "a.tar", prefix=prefix)))


def test_image_and_blobs_are_read(files: Files) -> None:
    source = LayoutSource("it", files, "v1")
    descriptor = BlobDescriptor(LAYER.descriptor["digest"], len(LAYER.blob), "")

    async def run() -> tuple[str, list[bytes]]:
        image = await source.resolve("amd64")
        async with source.open_blob(descriptor) as blob:
            return image.digest, [piece async for piece in blob]

    digest, pieces = asyncio.run(run())
    assert digest == IMAGE.digest
    assert b"".join(pieces) == LAYER.blob
    assert max(map(len, pieces)) <= 1 << 20


def test_missing_and_too_large_files_are_told_by_name(files: Files) -> None:
    with pytest.raises(NotFoundError, match=r"it: .*blobs/sha256/none"):
        asyncio.run(files.read("blobs/sha256/none", 10))
    with pytest.raises(InvalidInputError, match=r"it: index\.json is larger than 10 bytes"):
        asyncio.run(files.read("index.json", 10))


def test_archive_that_is_none_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    read = ArchiveFiles("it", str(path)).find
    with pytest.raises(NotFoundError, match=r"it: cannot read .*a\.tar: No such file"):
        read("index.json")
    path.write_bytes(gzip.compress(bytes(2048)))
    with pytest.raises(UnsupportedError, match=r"it: compressed \(gzip\)"):
        ArchiveFiles("it", str(path)).find("index.json")
    path.write_bytes(b"not a tar at all" * 64)
    with pytest.raises((CorruptError, InvalidInputError), match="it: "):
        ArchiveFiles("it", str(path)).find("index.json")
    with pytest.raises(InvalidInputError, match="not a file"):
        ArchiveFiles("it", str(tmp_path)).find("index.json")
