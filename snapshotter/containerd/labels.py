"""What the labels of a snapshot say about its layer. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from snapshotter.digest import parse_digest
from snapshotter.errors import InvalidInputError

REF = "containerd.io/snapshot.ref"
"""The chain id that is to be unpacked. Only with this label may a Prepare find it done already."""
IMAGE = "containerd.io/snapshot/lazy-snapshotter.image"
"""Our own: the image, spelled as our commands spell it."""
_CRI = "containerd.io/snapshot/cri."
_STARGZ = "containerd.io/snapshot/remote/stargz."
_FILTER = re.compile(r'labels\."containerd\.io/snapshot\.ref"==([^,"]+),parent==(?:"([^"]*)"|(.*))')


def chain_in(labels: Mapping[str, str]) -> str | None:
    """The chain id that these labels ask for, or None; so too when it is no digest."""
    chain = labels.get(REF)
    if chain is None:
        return None
    try:
        parse_digest(chain)
    except InvalidInputError:
        return None
    return chain


def image_in(labels: Mapping[str, str]) -> str | None:
    """The image whose layer this is, or None when nothing says so.

    Our own label is asked first, then what CRI, ctr 2.x and docker send, then what the clients of
    the stargz snapshotter send. A manifest's digest, where there is one, is part of the answer: a
    tag may have moved.
    """
    if image := labels.get(IMAGE):
        return image
    reference = labels.get(f"{_CRI}image-ref") or labels.get(f"{_STARGZ}reference")
    if not reference:
        return None
    manifest = labels.get(f"{_CRI}manifest-digest")
    if manifest and "@" not in reference:
        reference = f"{reference}@{manifest}"
    return f"docker://{reference}"


def wanted_by(filters: list[str]) -> tuple[str, str] | None:
    """Chain id and parent that the only filter of a List wants, as containerd's unpacker asks.

    None for any other filter: then everything may be listed, for containerd looks again itself.
    """
    match = _FILTER.fullmatch(filters[0]) if len(filters) == 1 else None
    return None if match is None else (match[1], match[2] or match[3] or "")
