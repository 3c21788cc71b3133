import json

import pytest

from cache_server.sources.manifest import (
    Descriptor,
    Platform,
    check_described,
    choose,
    fits,
    parse_document,
    resolved,
)
from snapshotter.errors import CorruptError, InvalidInputError, NotFoundError, UnsupportedError
from tests.support.images import Image, Layer, file
from tests.support.images import sha256_of as digest_of

LAYER = Layer([file("a")])


def index_of(*platforms: tuple[str, str, str]) -> bytes:
    entries = [
        {
            "digest": f"sha256:{number:064x}",
            "size": 1,
            "platform": {"os": os, "architecture": architecture, "variant": variant},
        }
        for number, (os, architecture, variant) in enumerate(platforms)
    ]
    return json.dumps({"schemaVersion": 2, "manifests": entries}).encode()


@pytest.mark.parametrize(
    ("architecture", "chosen"),
    [("amd64", 1), ("arm", 3), ("arm/v7", 4), ("arm/v6", 3), ("arm64", 6), ("arm64/v8", 6)],
)
def test_chooses_by_platform(architecture: str, chosen: int) -> None:
    index = parse_document(
        index_of(
            ("windows", "amd64", ""),
            ("linux", "amd64", ""),
            ("unknown", "unknown", ""),
            ("linux", "arm", "v6"),
            ("linux", "arm", "v7"),
            ("linux", "arm64", "v9"),
            ("linux", "arm64", ""),
        ),
        "index",
    )
    assert choose(index, architecture, "index").digest == f"sha256:{chosen:064x}"


def test_nothing_fitting_lists_the_offer() -> None:
    index = parse_document(index_of(("linux", "arm", "v7")), "index")
    with pytest.raises(NotFoundError, match="linux/arm/v7"):
        choose(index, "amd64", "index")


def test_what_a_platform_leaves_open_fits() -> None:
    assert fits(Platform(), "amd64")
    assert not fits(Platform("amd64", "windows"), "amd64")


def test_image_for_another_architecture_is_not_found() -> None:
    image = Image([LAYER], architecture="arm64")
    with pytest.raises(NotFoundError, match=r"linux/arm64, not linux/amd64"):
        resolved(image.manifest, image.config, "amd64", "x")


def test_artifact_without_diff_ids_is_no_image() -> None:
    image = Image([LAYER])
    with pytest.raises(InvalidInputError, match="1 layers but 0 diffIDs"):
        resolved(image.manifest, b"{}", "amd64", "x")


def test_hostile_digest_in_manifest_is_refused() -> None:
    image = Image([LAYER])
    hostile = image.manifest.replace(LAYER.descriptor["digest"].encode(), b"sha256:../../x")
    with pytest.raises(InvalidInputError, match="digest"):
        resolved(hostile, image.config, "amd64", "x")


def test_size_and_digest_must_be_the_descriptors() -> None:
    data = b"data"
    right = Descriptor(digest_of(data), 4)
    assert check_described(data, right, "x") == data
    for wrong in (Descriptor(right.digest, 3), Descriptor(digest_of(b"atad"), 4)):
        with pytest.raises(CorruptError, match="x: "):
            check_described(data, wrong, "x")


CONFIG = {"digest": "sha256:" + "1" * 64, "size": 1}
BAD_DOCUMENTS: dict[str, object] = {
    "nothing": {},
    "no layers": {"config": CONFIG},
    "no config": {"layers": []},
    "list": [],
    "text": "manifest",
    "layers of another type": {"config": CONFIG, "layers": {}},
    "size of another type": {"config": {**CONFIG, "size": "1"}, "layers": []},
    "size beyond 64 bits": {"config": {**CONFIG, "size": 1 << 70}, "layers": []},
    "digest of another type": {"config": {**CONFIG, "digest": 1}, "layers": []},
    "both": {"config": CONFIG, "layers": [], "manifests": []},
    "index with layers": {"manifests": [], "layers": []},
    "index that says manifest": {
        "manifests": [],
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
    },
    "manifest that says index": {
        "config": CONFIG,
        "layers": [],
        "mediaType": "application/vnd.oci.image.index.v1+json",
    },
}


@pytest.mark.parametrize("document", BAD_DOCUMENTS.values(), ids=BAD_DOCUMENTS.keys())
def test_what_is_no_document_is_refused(document: object) -> None:
    with pytest.raises(InvalidInputError, match="some image"):
        parse_document(json.dumps(document).encode(), "some image")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"layers":1e999}'])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInputError, match="some image"):
        parse_document(data, "some image")


def test_ancient_manifests_are_told_apart() -> None:
    with pytest.raises(UnsupportedError, match="schema 1"):
        parse_document(b'{"schemaVersion": 1, "fsLayers": []}', "some image")


@pytest.mark.parametrize("config", [b"", b"[]", b'{"rootfs": {"diff_ids": "x"}}', b'{"os": 1}'])
def test_what_is_no_config_is_refused(config: bytes) -> None:
    with pytest.raises(InvalidInputError, match="config of some image"):
        resolved(Image([LAYER]).manifest, config, "amd64", "some image")


def test_layers_of_negative_size_are_refused() -> None:
    image = Image([LAYER])
    size = str(len(LAYER.blob)).encode()
    hostile = image.manifest.replace(b'"size":' + size, b'"size":-' + size)
    with pytest.raises(InvalidInputError, match="size"):
        resolved(hostile, image.config, "amd64", "some image")
