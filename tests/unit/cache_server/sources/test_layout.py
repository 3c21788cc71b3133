import asyncio
import json
import os
from pathlib import Path

import pytest

from cache_server.library import BlobDescriptor
from cache_server.sources.files import DirectoryFiles
from cache_server.sources.layout import LayoutSource
from cache_server.sources.manifest import ResolvedImage
from snapshotter.errors import CorruptError, InvalidInputError, NotFoundError
from tests.support.images import Image, Layer, file, write_layout

LAYER = Layer([file("a", b"x" * 3_000_000)], compression="none")


def source_of(directory: Path, tag: str | None) -> LayoutSource:
    return LayoutSource("oci:x", DirectoryFiles("oci:x", str(directory)), tag)


def resolve(directory: Path, tag: str | None, architecture: str = "amd64") -> ResolvedImage:
    return asyncio.run(source_of(directory, tag).resolve(architecture))


def test_tag_and_only_image(tmp_path: Path) -> None:
    one, other = Image([LAYER], cmd=["1"]), Image([LAYER], cmd=["2"])
    write_layout(tmp_path / "two", {"v1": one, "v2": other})
    assert resolve(tmp_path / "two", "v2").digest == other.digest
    write_layout(tmp_path / "one", {"v1": one})
    assert resolve(tmp_path / "one", None).digest == one.digest
    with pytest.raises(NotFoundError, match="v1, v2"):
        resolve(tmp_path / "two", None)
    with pytest.raises(NotFoundError, match="v1, v2"):
        resolve(tmp_path / "two", "v3")


def test_nested_index_by_platform(tmp_path: Path) -> None:
    images = [Image([LAYER]), Image([LAYER], architecture="arm64", variant="v8")]
    write_layout(tmp_path, {"v1": images})
    assert resolve(tmp_path, "v1", "arm64").digest == images[1].digest


def test_blob_comes_in_bounded_pieces(tmp_path: Path) -> None:
    write_layout(tmp_path, {"v1": Image([LAYER])})
    source = source_of(tmp_path, "v1")
    descriptor = BlobDescriptor(LAYER.descriptor["digest"], len(LAYER.blob), "")

    async def pieces() -> list[bytes]:
        async with source.open_blob(descriptor) as blob:
            return [piece async for piece in blob]

    read = asyncio.run(pieces())
    assert b"".join(read) == LAYER.blob
    assert max(map(len, read)) <= 1 << 20


def test_altered_blobs_are_corrupt(tmp_path: Path) -> None:
    image = Image([LAYER])
    write_layout(tmp_path, {"v1": image})
    manifest = tmp_path / "blobs" / "sha256" / image.digest.removeprefix("sha256:")
    manifest.write_bytes(image.manifest.replace(b"schemaVersion", b"SchemaVersion"))
    with pytest.raises(CorruptError, match="manifest"):
        resolve(tmp_path, "v1")


def test_missing_layout_or_blob_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"index\.json"):
        resolve(tmp_path, "v1")
    image = Image([LAYER])
    write_layout(tmp_path, {"v1": image})
    (tmp_path / "blobs" / "sha256" / image.digest.removeprefix("sha256:")).unlink()
    with pytest.raises(NotFoundError, match="blobs/sha256"):
        resolve(tmp_path, "v1")


def test_index_json_that_is_a_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_bytes(Image([LAYER]).manifest)
    with pytest.raises(InvalidInputError, match="lists no manifests"):
        resolve(tmp_path, None)


def test_blob_path_cannot_leave_the_layout(tmp_path: Path) -> None:
    entry = {"digest": "sha256:../../../etc/passwd", "size": 1}
    (tmp_path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    with pytest.raises(InvalidInputError, match="digest"):
        resolve(tmp_path, None)


def test_blob_that_is_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index.json")
    with pytest.raises(InvalidInputError, match="not a file"):
        resolve(tmp_path, None)
