"""What labels say, as the clients in the field write them."""

import pytest

from snapshotter.containerd.labels import IMAGE, REF, chain_in, image_in, wanted_by
from tests.support.snapshots import chain_id

CRI = "containerd.io/snapshot/cri."
STARGZ = "containerd.io/snapshot/remote/stargz."
D = chain_id("x")


@pytest.mark.parametrize(
    ("labels", "image"),
    [
        ({}, None),
        ({IMAGE: "oci:/images:v1", f"{CRI}image-ref": "h/r:1"}, "oci:/images:v1"),
        ({f"{CRI}image-ref": "h/r:1"}, "docker://h/r:1"),
        ({f"{CRI}image-ref": "h/r:1", f"{CRI}manifest-digest": D}, f"docker://h/r:1@{D}"),
        ({f"{CRI}image-ref": f"h/r@{D}", f"{CRI}manifest-digest": D}, f"docker://h/r@{D}"),
        ({f"{STARGZ}reference": "h/r:1", f"{STARGZ}digest": D}, "docker://h/r:1"),
        ({f"{CRI}image-ref": "h/cri:1", f"{STARGZ}reference": "h/sg:1"}, "docker://h/cri:1"),
    ],
)
def test_image_is_found_by_the_best_label(labels: dict[str, str], image: str | None) -> None:
    assert image_in(labels) == image


def test_chain_must_be_a_digest() -> None:
    assert chain_in({REF: D}) == D
    assert chain_in({REF: "../../etc"}) is None
    assert chain_in({}) is None


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ([f'labels."{REF}"=={D},parent==""'], (D, "")),
        ([f'labels."{REF}"=={D},parent=="default/3/p"'], (D, "default/3/p")),
        ([f'labels."{REF}"=={D},parent==default/3/p'], (D, "default/3/p")),
        ([f'labels."{REF}"=={D}'], None),
        ([], None),
        (["a", "b"], None),
    ],
)
def test_filter_of_the_unpacker_is_understood(
    filters: list[str], wanted: tuple[str, str] | None
) -> None:
    assert wanted_by(filters) == wanted
