import msgspec
import pytest

from cache_server.images import (
    MAX_DOCUMENTS_BYTES,
    chain_ids,
    image_handle,
    of_chain,
    unmerged,
)
from cache_server.sources.manifest import ResolvedImage, resolved
from snapshotter.digest import format_digest, parse_digest, sha256
from snapshotter.errors import UnsupportedError
from tests.support.images import Image, Layer, file

LAYERS = [Layer([file(name)]) for name in "abc"]


def resolve(image: Image) -> ResolvedImage:
    return resolved(image.manifest, image.config, "amd64", "x")


def test_chain_ids_follow_the_image_specification() -> None:
    assert chain_ids([]) == []
    assert chain_ids(["sha256:a"]) == ["sha256:a"]
    second = format_digest(sha256(b"sha256:a sha256:b"))
    third = format_digest(sha256(f"{second} sha256:c".encode()))
    assert chain_ids(["sha256:a", "sha256:b", "sha256:c"]) == ["sha256:a", second, third]


def test_handle_depends_on_manifest_and_architecture_alone() -> None:
    handle = image_handle("sha256:a", "amd64")
    assert handle == image_handle("sha256:a", "amd64")
    assert handle not in {image_handle("sha256:b", "amd64"), image_handle("sha256:a", "arm64")}
    assert len(parse_digest(handle)) == 32


def test_environment_keeps_the_last_and_what_follows_the_first_equals_sign() -> None:
    image = Image(LAYERS, env=["A=1", "B=x=y", "A=2", "C", "=nameless"])
    assert unmerged(resolve(image), "amd64").env == {"A": "2", "B": "x=y", "C": ""}


def test_image_without_config_section_runs_nothing() -> None:
    image = Image(LAYERS, env=[], cmd=None)
    answer = unmerged(resolve(image), "amd64")
    assert (answer.env, answer.entrypoint, answer.cmd) == ({}, [], [])


def test_config_that_does_not_fit_is_refused() -> None:
    fitting = Image(LAYERS, labels={"long": "x" * (1000 << 10)})
    assert unmerged(resolve(fitting), "amd64").config == fitting.config.decode()
    for image in (
        Image(LAYERS, labels={"long": "x" * (1 << 20)}),
        Image(LAYERS, labels={"quotes": '"' * (400 << 10)}),
        Image(LAYERS, env=[f"A{number}={'x' * 1000}" for number in range(600)]),
    ):
        with pytest.raises(UnsupportedError, match="1044480 at most"):
            unmerged(resolve(image), "amd64")


def test_documents_give_way_to_a_large_config() -> None:
    image = msgspec.structs.replace(
        resolve(Image(LAYERS, labels={"long": "x" * (900 << 10)})), indexes=[b"x" * (150 << 10)]
    )
    answer = unmerged(image, "amd64")
    assert (answer.documents, len(answer.config or "")) == (None, len(image.config))


def test_documents_end_with_the_manifest_and_have_a_limit() -> None:
    image = msgspec.structs.replace(resolve(Image(LAYERS)), indexes=[b"outer", b"inner"])
    assert unmerged(image, "amd64").documents == ["outer", "inner", image.manifest.decode()]
    large = msgspec.structs.replace(image, indexes=[b"x" * MAX_DOCUMENTS_BYTES])
    assert unmerged(large, "amd64").documents is None


def test_chain_has_its_layers_and_a_handle_of_its_own() -> None:
    whole = unmerged(resolve(Image(LAYERS)), "amd64")
    lower = of_chain(whole, whole.layers[1].chain_id)
    assert lower.layers == whole.layers[:2]
    assert (lower.digest, lower.config, lower.cmd) == (None, None, [])
    assert lower.image_handle not in (whole.image_handle, whole.layers[1].chain_id)
