import json
from typing import Any

import msgspec
import pytest

from cache_server.images import unmerged
from cache_server.sources.manifest import resolved
from snapshotter.cache_v1.protocol import Prepared
from snapshotter.containerd.image_documents import ImageDocuments, image_documents
from snapshotter.errors import CorruptError
from tests.support.images import INDEX, MANIFEST, Image, Layer, descriptor, file, sha256_of

IMAGE = Image([Layer([file(name)]) for name in "abc"])
NAME = "localhost:5000/team/app:v1"


def prepared(image: Image = IMAGE) -> Prepared:
    return unmerged(resolved(image.manifest, image.config, "amd64", "x"), "amd64")


def index_of(*manifests: bytes) -> str:
    listed = [descriptor(manifest, MANIFEST) for manifest in manifests]
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed})


def made(name: str = NAME, *above: str) -> ImageDocuments:
    return image_documents(name, prepared(), [*above, IMAGE.manifest.decode()])


def test_image_without_index_stands_for_its_manifest() -> None:
    image = made()
    assert image.target == image.manifest
    assert (image.target.digest, image.target.media_type) == (IMAGE.digest, MANIFEST)
    assert image.target.data == IMAGE.manifest
    assert image.config.data == IMAGE.config
    assert image.chain_id == prepared().layers[2].chain_id


def test_manifest_keeps_its_config_and_layers_from_collection() -> None:
    layers = {
        f"containerd.io/gc.ref.content.l.{at}": layer.descriptor["digest"]
        for at, layer in enumerate(IMAGE.layers)
    }
    source = {"containerd.io/distribution.source.localhost:5000": "team/app"}
    config = {"containerd.io/gc.ref.content.config": sha256_of(IMAGE.config)}
    assert made().manifest.labels == layers | source | config
    assert made().config.labels == source


def test_index_keeps_its_manifests() -> None:
    index = index_of(b"another", IMAGE.manifest)
    image = made(NAME, index)
    assert [blob.data for blob in image.blobs] == [index.encode(), IMAGE.manifest]
    assert (image.target.media_type, image.target.digest) == (INDEX, sha256_of(index.encode()))
    assert image.target.labels["containerd.io/gc.ref.content.m.1"] == IMAGE.digest


def test_digest_of_the_name_says_what_it_stands_for() -> None:
    inner = index_of(IMAGE.manifest)
    outer = index_of(inner.encode())
    for text, above in ((outer, 3), (inner, 2), (IMAGE.manifest.decode(), 1)):
        name = f"localhost:5000/team/app@{sha256_of(text.encode())}"
        assert len(made(name, outer, inner).blobs) == above
    with pytest.raises(CorruptError, match="other documents"):
        made(f"localhost:5000/team/app@{sha256_of(b'else')}", outer, inner)


def test_labels_tell_the_layer_and_those_above_it() -> None:
    labels = made().snapshot_labels(1)
    layers = prepared().layers
    assert labels == {
        "containerd.io/snapshot.ref": layers[1].chain_id,
        "containerd.io/snapshot/lazy-snapshotter.image": f"docker://{NAME}",
        "containerd.io/snapshot/cri.image-ref": NAME,
        "containerd.io/snapshot/cri.manifest-digest": IMAGE.digest,
        "containerd.io/snapshot/cri.layer-digest": layers[1].digest,
        "containerd.io/snapshot/cri.image-layers": f"{layers[1].digest},{layers[2].digest}",
    }


def test_labels_of_many_layers_are_cut_to_what_containerd_takes() -> None:
    many = Image([Layer([file(f"{number}")]) for number in range(128)])
    image = image_documents(NAME, prepared(many), [many.manifest.decode()])
    for name, value in image.snapshot_labels(0).items():
        assert len(name) + len(value) <= 4096
    listed = image.snapshot_labels(0)["containerd.io/snapshot/cri.image-layers"].split(",")
    assert listed == [layer.descriptor["digest"] for layer in many.layers][: len(listed)]
    assert len(listed) > 50


@pytest.mark.parametrize(
    ("changes", "texts", "said"),
    [
        ({}, [index_of(b"another")], "does not list"),
        ({"config": "{}"}, [], "config"),
        ({"config": None}, [], "not the one that was prepared"),
        ({"digest": sha256_of(b"other")}, [], "not the one that was prepared"),
        ({"layers": prepared().layers[:2]}, [], "layers"),
        ({}, ["{"], "document sha256:"),
    ],
)
def test_documents_that_make_no_image_are_refused(
    changes: dict[str, Any], texts: list[str], said: str
) -> None:
    answer = msgspec.structs.replace(prepared(), **changes)
    with pytest.raises(CorruptError, match=said):
        image_documents(NAME, answer, [*texts, IMAGE.manifest.decode()])
