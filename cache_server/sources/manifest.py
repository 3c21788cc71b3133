"""Manifests, indexes and configs of OCI and Docker: parsed and checked, without I/O."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from cache_server.library import BlobDescriptor
from snapshotter.decoding import DECODE_ERRORS
from snapshotter.digest import format_digest, parse_digest, sha256
from snapshotter.errors import CorruptError, InvalidInputError, NotFoundError, UnsupportedError
from snapshotter.names import MAX_CONTENT_SIZE

T = TypeVar("T")

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
MAX_MANIFEST_BYTES = 4 << 20
"""What the distribution specification lets a registry refuse above."""
MAX_CONFIG_BYTES = 8 << 20
_OS = "linux"


class Platform(msgspec.Struct, frozen=True):
    """For whom an index lists a manifest."""

    architecture: str = ""
    os: str = ""
    variant: str = ""

    def __str__(self) -> str:
        variant = f"/{self.variant}" if self.variant else ""
        return f"{self.os or '?'}/{self.architecture or '?'}{variant}"


class Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    """A reference to a blob, as manifests and indexes hold it."""

    digest: str
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_CONTENT_SIZE)]
    media_type: str = ""
    platform: Platform | None = None
    annotations: dict[str, str] | None = None


class Document(msgspec.Struct, frozen=True, rename="camel"):
    """A manifest or an index: which, its content tells."""

    media_type: str = ""
    schema_version: int = 0
    manifests: list[Descriptor] | None = None
    config: Descriptor | None = None
    layers: list[Descriptor] | None = None

    @property
    def is_index(self) -> bool:
        """Whether it lists manifests rather than layers."""
        return self.manifests is not None


class RunConfig(msgspec.Struct, frozen=True, rename="pascal"):
    """What a container of the image runs, by default."""

    env: list[str] | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None


class _RootFs(msgspec.Struct, frozen=True):
    diff_ids: list[str] = []


class ImageConfig(msgspec.Struct, frozen=True):
    """The parts of an image's config that are used here."""

    architecture: str = ""
    variant: str = ""
    os: str = ""
    config: RunConfig | None = None
    rootfs: _RootFs | None = None


class ImageLayer(msgspec.Struct, frozen=True):
    """A layer of an image: its blob, and the digest of its tar."""

    blob: BlobDescriptor
    diff_id: str


class ResolvedImage(msgspec.Struct, frozen=True, kw_only=True):
    """What a reference stands for on one platform; every digest was checked.

    ``indexes`` are those that led to the manifest, the one that the reference names first.
    """

    digest: str
    manifest: bytes
    config: bytes
    parsed_config: ImageConfig
    layers: list[ImageLayer]
    indexes: list[bytes] = []


def check_blob(data: bytes, digest: str, what: str) -> bytes:
    """``data``, if that is its digest; else CorruptError."""
    actual = sha256(data)
    if actual != parse_digest(digest):
        raise CorruptError(f"{what}: expected {digest}, got {format_digest(actual)}")
    return data


def check_described(data: bytes, descriptor: Descriptor, what: str) -> bytes:
    """``data``, if it has the size and the digest that the descriptor says; else CorruptError."""
    if len(data) != descriptor.size:
        raise CorruptError(f"{what}: {len(data)} bytes, not {descriptor.size}")
    return check_blob(data, descriptor.digest, what)


def parse_document(data: bytes, what: str) -> Document:
    """A manifest or an index; InvalidInputError, or UnsupportedError for an ancient manifest.

    What could be read as either is neither: two readers of one digest must see one image
    (distribution-spec's advisory GHSA-mc8v-mgrf-8f4m).
    """
    document = _decode(data, Document, what)
    if document.schema_version == 1:
        raise UnsupportedError(
            f"{what}: Docker manifest schema 1 is not read here; push the image again"
            " with a current tool"
        )
    if not document.is_index and (document.config is None or document.layers is None):
        raise InvalidInputError(f"{what}: neither an image manifest nor an index")
    if document.is_index and (document.config is not None or document.layers is not None):
        raise InvalidInputError(f"{what}: an index with the fields of an image manifest")
    if document.media_type in (MANIFEST_TYPES if document.is_index else INDEX_TYPES):
        raise InvalidInputError(f"{what}: its content is not of its type {document.media_type}")
    return document


def choose(index: Document, architecture: str, what: str) -> Descriptor:
    """The index's manifest for ``architecture`` (Go's, perhaps with ``/variant``) on Linux.

    Without a variant the first manifest of the architecture is taken, one without a variant of
    its own rather than another. NotFoundError lists what there is.
    """
    listed = index.manifests or []
    fitting = [
        entry
        for entry in listed
        if entry.platform and entry.platform.architecture and fits(entry.platform, architecture)
    ]
    if not fitting:
        names = sorted({str(entry.platform) for entry in listed if entry.platform})
        offered = ", ".join(names) or "nothing"
        raise NotFoundError(f"{what}: no manifest for {_OS}/{architecture}; it offers {offered}")
    plain = [entry for entry in fitting if entry.platform and not entry.platform.variant]
    return (plain or fitting)[0]


def fits(platform: Platform, architecture: str) -> bool:
    """Whether a platform serves ``architecture``; what a platform leaves open fits."""
    wanted, _, variant = architecture.partition("/")
    if platform.os not in ("", _OS) or platform.architecture not in ("", wanted):
        return False
    if (wanted, variant) == ("arm64", "v8"):
        return platform.variant in ("", "v8")
    return not variant or platform.variant == variant


def parse_config(data: bytes, what: str) -> ImageConfig:
    """The config of image ``what``; InvalidInputError if it is none."""
    return _decode(data, ImageConfig, f"config of {what}")


def resolved(manifest: bytes, config: bytes, architecture: str, what: str) -> ResolvedImage:
    """An image from its checked manifest and config.

    Raises InvalidInputError where the two do not make an image, NotFoundError where the image is
    for another platform.
    """
    document = parse_document(manifest, what)
    parsed = parse_config(config, what)
    platform = Platform(parsed.architecture, parsed.os, parsed.variant)
    if not fits(Platform(platform.architecture, platform.os, ""), architecture.partition("/")[0]):
        raise NotFoundError(f"{what}: the image is for {platform}, not {_OS}/{architecture}")
    diff_ids = parsed.rootfs.diff_ids if parsed.rootfs else []
    blobs = document.layers or []
    if len(diff_ids) != len(blobs):
        raise InvalidInputError(
            f"{what}: not a container image: {len(blobs)} layers but {len(diff_ids)} diffIDs"
        )
    for text in (*diff_ids, *(blob.digest for blob in blobs)):
        parse_digest(text)
    return ResolvedImage(
        digest=format_digest(sha256(manifest)),
        manifest=manifest,
        config=config,
        parsed_config=parsed,
        layers=[
            ImageLayer(BlobDescriptor(blob.digest, blob.size, blob.media_type), diff_id)
            for blob, diff_id in zip(blobs, diff_ids, strict=True)
        ],
    )


def _decode(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except DECODE_ERRORS as error:
        raise InvalidInputError(f"{what}: {error}") from error
