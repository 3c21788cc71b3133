import json

import pytest

from cache_server.sources.manifest import Platform, choose, fits, parse_document, resolved
from snapshotter.errors import InvalidInputError, NotFoundError
from tests.support.images import Image, Layer, file

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
