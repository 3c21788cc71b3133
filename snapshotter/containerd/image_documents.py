"""An image as containerd is told of it: its documents, checked against each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from snapshotter.cache_v1.protocol import Layer, Prepared
from snapshotter.containerd.labels import IMAGE, REF
from snapshotter.decoding import DECODE_ERRORS
from snapshotter.digest import format_digest, sha256
from snapshotter.errors import CorruptError

_INDEX = "application/vnd.oci.image.index.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MAX_LABEL_BYTES = 4096
"""Of a label's key and value together (containerd, labels/validate.go)."""
CRI_PREFIX = "containerd.io/snapshot/cri."


class _Descriptor(msgspec.Struct, rename="camel"):
    digest: str
    media_type: str = ""


class _Document(msgspec.Struct, rename="camel"):
    """An index or a manifest: which, its content tells."""

    media_type: str = ""
    manifests: list[_Descriptor] | None = None
    config: _Descriptor | None = None
    layers: list[_Descriptor] = []


@dataclass(frozen=True, slots=True)
class Blob:
    """A small blob for the content store. ``labels`` keep from collection what it refers to."""

    digest: str
    media_type: str
    data: bytes
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class ImageDocuments:
    """What makes an image of ``name``: blobs from the one that the name stands for down to the
    manifest, then the config; and the layers, lowest first.
    """

    name: str
    blobs: list[Blob]
    config: Blob
    layers: Sequence[Layer]

    @property
    def target(self) -> Blob:
        """What the name stands for: an index or the manifest."""
        return self.blobs[0]

    @property
    def manifest(self) -> Blob:
        """The manifest of the layers."""
        return self.blobs[-1]

    @property
    def chain_id(self) -> str:
        """The chain id of all layers."""
        return self.layers[-1].chain_id if self.layers else ""

    def snapshot_labels(self, position: int) -> dict[str, str]:
        """The labels that tell a snapshotter which layer of which image is to be prepared."""
        layer = self.layers[position]
        return {
            REF: layer.chain_id,
            IMAGE: f"docker://{self.name}",
            f"{CRI_PREFIX}image-ref": self.name,
            f"{CRI_PREFIX}manifest-digest": self.manifest.digest,
            f"{CRI_PREFIX}layer-digest": layer.digest,
            f"{CRI_PREFIX}image-layers": _fitting(self.layers[position:]),
        }


def image_documents(name: str, prepared: Prepared, texts: Sequence[str]) -> ImageDocuments:
    """The image of a prepared answer and of its documents, the manifest last.

    ``name`` is the full name. If it has a digest, the documents above that one are left out.
    Raises CorruptError where they do not make one image.
    """
    raws = [text.encode() for text in texts]
    wanted = name.partition("@")[2]
    digests = [_digest(raw) for raw in raws]
    if wanted:
        if wanted not in digests:
            raise CorruptError(f"image {name}: the cache server has other documents; pull it again")
        raws = raws[digests.index(wanted) :]
    documents = [_decode(name, raw) for raw in raws]
    manifest, config = documents[-1], prepared.config
    if digests[-1] != prepared.digest or manifest.config is None or config is None:
        raise CorruptError(f"image {name}: its manifest is not the one that was prepared")
    if _digest(config.encode()) != manifest.config.digest:
        raise CorruptError(f"image {name}: its config is not the one that its manifest names")
    if [layer.digest for layer in prepared.layers] != [each.digest for each in manifest.layers]:
        raise CorruptError(f"image {name}: its layers are not those that its manifest names")
    repository = _source_label(name)
    blobs = [
        _index_blob(name, raw, document, _digest(below), repository)
        for raw, document, below in zip(raws, documents, raws[1:], strict=False)
    ]
    blobs.append(_manifest_blob(raws[-1], manifest, repository))
    return ImageDocuments(
        name=name,
        blobs=blobs,
        config=Blob(
            manifest.config.digest,
            manifest.config.media_type or _CONFIG,
            config.encode(),
            dict(repository),
        ),
        layers=prepared.layers,
    )


def _index_blob(
    name: str, raw: bytes, document: _Document, below: str, repository: dict[str, str]
) -> Blob:
    listed = [entry.digest for entry in document.manifests or []]
    if below not in listed:
        raise CorruptError(f"image {name}: index {_digest(raw)} does not list {below}")
    labels = {
        f"containerd.io/gc.ref.content.m.{at}": digest for at, digest in enumerate(listed)
    } | repository
    return Blob(_digest(raw), document.media_type or _INDEX, raw, labels)


def _manifest_blob(raw: bytes, manifest: _Document, repository: dict[str, str]) -> Blob:
    assert manifest.config is not None
    labels = {"containerd.io/gc.ref.content.config": manifest.config.digest}
    for at, layer in enumerate(manifest.layers):
        labels[f"containerd.io/gc.ref.content.l.{at}"] = layer.digest
    return Blob(_digest(raw), manifest.media_type or _MANIFEST, raw, labels | repository)


def _source_label(name: str) -> dict[str, str]:
    """Says where the blobs can be got from, for `ctr content fetch` and pushes."""
    host, _, rest = name.partition("@")[0].partition("/")
    head, slash, last = rest.rpartition("/")
    return {f"containerd.io/distribution.source.{host}": head + slash + last.partition(":")[0]}


def _fitting(layers: Sequence[Layer]) -> str:
    """The layers' digests, from the first on, as many as fit a label."""
    room = _MAX_LABEL_BYTES - len(f"{CRI_PREFIX}image-layers")
    text = ""
    for layer in layers:
        longer = f"{text},{layer.digest}" if text else layer.digest
        if len(longer) > room:
            break
        text = longer
    return text


def _digest(raw: bytes) -> str:
    return format_digest(sha256(raw))


def _decode(name: str, raw: bytes) -> _Document:
    try:
        return msgspec.json.decode(raw, type=_Document)
    except DECODE_ERRORS as error:
        raise CorruptError(f"image {name}: document {_digest(raw)}: {error}") from error
