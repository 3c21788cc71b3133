import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from cache_server.sources.docker_archive import DockerArchiveSource
from cache_server.sources.manifest import ResolvedImage
from cache_server.sources.opening import Sources
from cache_server.sources.reference import parse_reference
from cache_server.sources.source import Source
from snapshotter.errors import InvalidInputError, NotFoundError, UnsupportedError
from tests.support.archives import pack_layout, save
from tests.support.images import Image, Layer, file, sha256_of, write_layout

LAYERS = [Layer([file(f"f{n}", bytes([n]) * 1_500_000)]) for n in range(3)]
ONE = Image(LAYERS[:2], cmd=["one"])
OTHER = Image(LAYERS[1:], cmd=["other"])


def open_source(text: str) -> Source:
    return Sources().open(parse_reference(text), None)


def resolve(text: str, architecture: str = "amd64") -> ResolvedImage:
    return asyncio.run(open_source(text).resolve(architecture))


def blobs(text: str) -> list[bytes]:
    async def run() -> list[bytes]:
        source = open_source(text)
        read = []
        for layer in (await source.resolve("amd64")).layers:
            async with source.open_blob(layer.blob) as pieces:
                read.append(b"".join([piece async for piece in pieces]))
        return read

    return asyncio.run(run())


def test_plain_layers_are_named_by_their_diff_ids_and_links_followed(tmp_path: Path) -> None:
    archive = save(tmp_path / "a.tar", {"one:1": ONE, "docker.io/library/other:latest": OTHER})
    for name, image in (("one:1", ONE), ("other", OTHER)):
        text = f"docker-archive:{archive}:{name}"
        found = resolve(text)
        assert found.config == image.config
        assert [layer.diff_id for layer in found.layers] == [each.diff_id for each in image.layers]
        assert [layer.blob.digest for layer in found.layers] == [x.diff_id for x in image.layers]
        assert found.digest == sha256_of(found.manifest)
        assert blobs(text) == [layer.tar for layer in image.layers]


def test_compressed_layers_get_digests_of_their_own(tmp_path: Path) -> None:
    archive = save(tmp_path / "a.tar", {"one:1": ONE}, compressed=True)
    found = resolve(f"docker-archive:{archive}")
    assert [layer.blob.digest for layer in found.layers] == [sha256_of(x.blob) for x in LAYERS[:2]]
    assert {layer.blob.media_type.rpartition(".")[2] for layer in found.layers} == {"gzip"}
    assert blobs(f"docker-archive:{archive}") == [layer.blob for layer in LAYERS[:2]]


def test_same_archive_is_the_same_image_each_time(tmp_path: Path) -> None:
    first = save(tmp_path / "a.tar", {"one:1": ONE})
    second = save(tmp_path / "b.tar", {"x:2": OTHER, "y:3": ONE})
    digest = resolve(f"docker-archive:{first}").digest
    assert resolve(f"docker-archive:{second}:y:3").digest == digest


def test_image_must_be_named_where_there_are_several(tmp_path: Path) -> None:
    archive = save(tmp_path / "a.tar", {"one:1": ONE, "other:2": OTHER})
    for name in ("", ":third:1"):
        with pytest.raises(NotFoundError, match="one:1, other:2"):
            resolve(f"docker-archive:{archive}{name}")
    untagged = save(tmp_path / "b.tar", {"": ONE})
    assert resolve(f"docker-archive:{untagged}").config == ONE.config


def test_another_architecture_is_not_found(tmp_path: Path) -> None:
    archive = save(tmp_path / "a.tar", {"one:1": ONE})
    with pytest.raises(NotFoundError, match="not linux/arm64"):
        resolve(f"docker-archive:{archive}", "arm64")


def test_archives_that_are_something_else_are_told(tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "oci", {"v1": ONE})
    with pytest.raises(UnsupportedError, match="oci-archive:FILE"):
        resolve(f"docker-archive:{pack_layout(layout, tmp_path / 'a.tar')}")


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        (b"{}", r"manifest\.json"),
        (b"[{}]", r"manifest\.json"),
        (b'[{"Config":"c","Layers":["x"]}]', "1 layers but 2 diffIDs"),
    ],
)
def test_bad_manifests_are_refused(tmp_path: Path, manifest: bytes, said: str) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "manifest.json").write_bytes(manifest)
    (tmp_path / "in" / "c").write_bytes(ONE.config)
    archive = pack_layout(tmp_path / "in", tmp_path / "a.tar")
    with pytest.raises(InvalidInputError, match=said):
        resolve(f"docker-archive:{archive}")


@pytest.mark.real
@pytest.mark.parametrize("kind", ["oci-archive", "docker-archive"])
def test_archives_that_skopeo_writes(tmp_path: Path, kind: str) -> None:
    layout = write_layout(tmp_path / "oci", {"v1": ONE})
    name = "v1" if kind == "oci-archive" else "demo:1"
    text = f"{kind}:{tmp_path}/a.tar:{name}"
    copy = ("skopeo", "--insecure-policy", "copy", "--quiet", f"oci:{layout}:v1", text)
    subprocess.run(copy, check=True, capture_output=True, timeout=60)
    found = resolve(text)
    assert json.loads(found.config) == json.loads(ONE.config)
    if kind == "oci-archive":
        assert found.digest == ONE.digest
    assert blobs(text) == [
        layer.blob if kind == "oci-archive" else layer.tar for layer in ONE.layers
    ]
    assert isinstance(open_source(text), DockerArchiveSource) == (kind == "docker-archive")
