from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_server.library import Library
from cache_server.records import StoredImage
from snapshotter.cache_v1.protocol import Layer, MetadataImage, Prepared, Totals


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    with Library(tmp_path) as library:
        yield library


def image(
    handle: str,
    *references: str,
    time_s: float = 1.0,
    architecture: str = "amd64",
    chains: tuple[str, ...] = (),
) -> StoredImage:
    layers = [
        Layer(digest=f"d-{chain}", diff_id=f"i-{chain}", chain_id=chain, size=1, media_type="m")
        for chain in chains
    ]
    prepared = Prepared(
        image_handle=handle,
        metadata_generation="1",
        digest="sha256:" + "a" * 64,
        architecture=architecture,
        env={"PATH": "/bin"},
        entrypoint=None,
        cmd=["sh"],
        config='{"é": 1}',
        totals=Totals(files=1, bytes=2),
        layers=layers,
        metadata_image=MetadataImage(content="sha256:" + "b" * 64, size=4096),
    )
    return StoredImage(prepared=prepared, references=list(references), saved_at_s=time_s)


def test_images_come_back_as_they_were(library: Library, tmp_path: Path) -> None:
    saved = image("h", "docker.io/a:1", "docker.io/a:2", chains=("c1", "c2"))
    library.save_image(saved)
    assert library.find_image("h") == saved
    assert library.find_reference("docker.io/a:1", "amd64") == saved
    assert library.find_chain("c1", "amd64") == saved
    library.close()
    library.__init__(tmp_path)  # type: ignore[misc] # opened again, for the fixture to close
    assert library.images() == [saved]


def test_what_was_not_saved_is_none(library: Library) -> None:
    library.save_image(image("h", "r", chains=("c",)))
    assert library.find_image("other") is None
    assert library.find_reference("other", "amd64") is None
    assert library.find_reference("r", "arm64") is None
    assert library.find_chain("c", "arm64") is None


def test_a_reference_names_the_image_saved_last(library: Library) -> None:
    library.save_image(image("old", "a:latest", "a:1", time_s=1))
    library.save_image(image("new", "a:latest", "a:2", time_s=2))
    found = library.find_reference("a:latest", "amd64")
    assert found is not None
    assert (found.handle, found.references) == ("new", ["a:2", "a:latest"])
    assert [(each.handle, each.references) for each in library.images()] == [
        ("old", ["a:1"]),
        ("new", ["a:2", "a:latest"]),
    ]


def test_saving_an_image_again_adds_references(library: Library) -> None:
    library.save_image(image("h", "a:1", time_s=1))
    library.save_image(image("h", "b:1", time_s=2))
    assert library.images() == [image("h", "a:1", "b:1", time_s=2)]


def test_one_reference_names_an_image_for_each_architecture(library: Library) -> None:
    library.save_image(image("h1", "a"))
    library.save_image(image("h2", "a", architecture="arm64"))
    for handle, architecture in (("h1", "amd64"), ("h2", "arm64")):
        found = library.find_reference("a", architecture)
        assert found is not None
        assert found.handle == handle


def test_a_chain_is_found_in_the_image_that_ends_with_it(library: Library) -> None:
    library.save_image(image("a-larger", chains=("c1", "c2", "c3")))
    library.save_image(image("exact", chains=("c1", "c2")))
    handles = []
    for chain in ("c1", "c2", "c3"):
        found = library.find_chain(chain, "amd64")
        assert found is not None
        handles.append(found.handle)
    assert handles == ["exact", "exact", "a-larger"]
