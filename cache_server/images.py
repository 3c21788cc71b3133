"""What is answered for an image: from its manifest and config, without I/O."""

from __future__ import annotations

import hashlib

import msgspec

from cache_server.sources.manifest import ResolvedImage, RunConfig
from snapshotter.cache_v1.protocol import Layer, MetadataImage, Prepared, Totals
from snapshotter.digest import format_digest, sha256
from snapshotter.errors import UnsupportedError
from snapshotter.framing import MAX_FRAME_BYTES
from snapshotter.names import ContentName
from snapshotter.projection.image_writer import METADATA_GENERATION

_MAX_ANSWER_BYTES = MAX_FRAME_BYTES - 4096
"""What an answer may take as JSON before it names a metadata image."""

MAX_DOCUMENTS_BYTES = 192 << 10
"""The most bytes of manifest and indexes that are kept, so that they fit an answer's frame too."""

_GENERATION = str(METADATA_GENERATION)


def image_handle(manifest_digest: str, architecture: str) -> str:
    """The handle of an image: opaque to clients, the same for the same manifest for ever."""
    return _handle("image", manifest_digest, architecture)


def unmerged(image: ResolvedImage, architecture: str) -> Prepared:
    """The answer for an image that has no metadata image yet.

    Raises UnsupportedError for a config that does not fit an answer.
    """
    prepared = _unmerged(image, architecture)
    answer_bytes = len(msgspec.json.encode(prepared))
    if answer_bytes > _MAX_ANSWER_BYTES and prepared.documents is not None:
        prepared = msgspec.structs.replace(prepared, documents=None)
        answer_bytes = len(msgspec.json.encode(prepared))
    if answer_bytes > _MAX_ANSWER_BYTES:
        raise UnsupportedError(
            f"image {image.digest}: its config of {len(image.config)} bytes, with its environment"
            f" and {len(image.layers)} layers, takes {answer_bytes} bytes of an answer"
            f" ({_MAX_ANSWER_BYTES} at most)"
        )
    return prepared


def _unmerged(image: ResolvedImage, architecture: str) -> Prepared:
    run = image.parsed_config.config or RunConfig()
    diff_ids = [layer.diff_id for layer in image.layers]
    return Prepared(
        image_handle=image_handle(image.digest, architecture),
        metadata_generation="0",
        digest=image.digest,
        architecture=architecture,
        env=_environment(run.env or []),
        entrypoint=run.entrypoint or [],
        cmd=run.cmd or [],
        config=image.config.decode(),
        totals=None,
        layers=[
            Layer(
                digest=layer.blob.digest,
                diff_id=layer.diff_id,
                chain_id=chain_id,
                size=layer.blob.size,
                media_type=layer.blob.media_type,
            )
            for layer, chain_id in zip(image.layers, chain_ids(diff_ids), strict=True)
        ],
        metadata_image=None,
        documents=documents(image),
    )


def documents(image: ResolvedImage) -> list[str] | None:
    """The indexes that led to the image and its manifest, as texts; None if they are too large."""
    found = [*image.indexes, image.manifest]
    if sum(map(len, found)) > MAX_DOCUMENTS_BYTES:
        return None
    return [document.decode() for document in found]


def merged(prepared: Prepared, name: ContentName, totals: Totals) -> Prepared:
    """The answer once its metadata image is made."""
    image = MetadataImage(format_digest(name.content_id), name.size)
    return msgspec.structs.replace(
        prepared, metadata_generation=_GENERATION, metadata_image=image, totals=totals
    )


def is_merged(prepared: Prepared) -> bool:
    """Whether it has a metadata image, of the layout that is written now."""
    return prepared.metadata_image is not None and prepared.metadata_generation == _GENERATION


def of_chain(prepared: Prepared, chain_id: str) -> Prepared:
    """The unmerged answer for the layers of an image up to ``chain_id``, which it has."""
    count = [layer.chain_id for layer in prepared.layers].index(chain_id) + 1
    return Prepared(
        image_handle=_handle("chain", chain_id, prepared.architecture),
        metadata_generation="0",
        digest=None,
        architecture=prepared.architecture,
        env={},
        entrypoint=[],
        cmd=[],
        config=None,
        totals=None,
        layers=prepared.layers[:count],
        metadata_image=None,
    )


def chain_ids(diff_ids: list[str]) -> list[str]:
    """The chain id of each layer with those below it (image-spec, config.md)."""
    chains: list[str] = []
    for diff_id in diff_ids:
        below = f"{chains[-1]} " if chains else ""
        chains.append(format_digest(sha256((below + diff_id).encode())) if below else diff_id)
    return chains


def _handle(*parts: str) -> str:
    return "sha256:" + hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _environment(entries: list[str]) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in entries)
    return {name: value for name, _, value in pairs if name}
