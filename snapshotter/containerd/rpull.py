"""Makes an image known to containerd without its layers, as a pull through this snapshotter would.

Afterwards a plain ``ctr run --snapshotter NAME IMAGE`` works on any containerd: the image, its
manifest and its config are there, and the snapshots of its layers are committed. The order of the
calls and the labels that keep things from being collected are containerd's own (its docs,
content-flow.md and garbage-collection.md).
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from snapshotter.containerd.client import ContainerdClient
from snapshotter.containerd.image_documents import Blob, ImageDocuments
from snapshotter.containerd.messages import CONTENT, IMAGES, LEASES, MESSAGES, SNAPSHOTS, new
from snapshotter.errors import (
    BusyError,
    ExistsError,
    InvalidInputError,
    NotFoundError,
    SnapshotterError,
    UnavailableError,
    UnsupportedError,
)

_LEASE_LIFE = timedelta(hours=1)
"""When a lease that a crash left behind may go; a pull's own work takes a second."""
_COMMIT = 2
"""The action of a content write that also ends it (api/services/content/v1, WriteAction)."""


class StaleSnapshotError(NotFoundError):
    """containerd records a snapshot that the snapshotter does not have."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an rpull did. ``healed`` counts stale snapshots that were removed first."""

    created: bool
    healed: int


def rpull(client: ContainerdClient, snapshotter: str, image: ImageDocuments) -> Outcome:
    """Has the image, and a snapshot for each of its layers, in the client's namespace.

    Raises UnsupportedError when the snapshotter does not take a layer lazily, UnavailableError
    when containerd or the snapshotter cannot be reached. Doing it again changes nothing.
    """
    healed = 0
    with _lease(client):
        for blob in image.blobs:
            _write(client, blob)
        try:
            _prepare_all(client, snapshotter, image)
        except StaleSnapshotError:
            healed = _remove_stale(client, snapshotter, image)
            _prepare_all(client, snapshotter, image)
        kept = {f"containerd.io/gc.ref.snapshot.{snapshotter}": image.chain_id}
        config = image.config
        labels = config.labels | kept if image.chain_id else config.labels
        _write(client, Blob(config.digest, config.media_type, config.data, labels))
        return Outcome(created=_save(client, image), healed=healed)


@contextmanager
def _lease(client: ContainerdClient) -> Iterator[None]:
    """Nothing that is made meanwhile is collected; expires by itself if we are killed."""
    name = f"rpull-{secrets.token_hex(8)}"
    ends = (datetime.now(UTC) + _LEASE_LIFE).strftime("%Y-%m-%dT%H:%M:%SZ")
    client.call(LEASES, "Create", id=name, labels={"containerd.io/gc.expire": ends})
    client.lease = name
    try:
        yield
    finally:
        client.lease = None
        # It expires by itself; what went wrong before is what to tell.
        with suppress(UnavailableError, NotFoundError):
            client.call(LEASES, "Delete", id=name)


def _write(client: ContainerdClient, blob: Blob) -> None:
    """Adds a blob, or the labels to one that is there."""
    request = {
        "action": _COMMIT,
        "ref": f"rpull-{secrets.token_hex(8)}-{blob.digest}",
        "total": len(blob.data),
        "expected": blob.digest,
        "data": blob.data,
        "labels": blob.labels,
    }
    try:
        client.exchange(CONTENT, "Write", [request])
    except ExistsError:
        info = new("ContentInfo", digest=blob.digest, labels=blob.labels)
        mask = new("FieldMask", paths=[f"labels.{name}" for name in blob.labels])
        client.call(CONTENT, "Update", info=info, update_mask=mask)


def _prepare_all(client: ContainerdClient, snapshotter: str, image: ImageDocuments) -> None:
    below = ""
    for position, layer in enumerate(image.layers):
        labels = image.snapshot_labels(position)
        with _advice(snapshotter):
            _prepare(client, snapshotter, below, labels, layer.chain_id)
        below = layer.chain_id


@contextmanager
def _advice(snapshotter: str) -> Iterator[None]:
    """Says of containerd's snapshotter what may be done when it does not take a call."""
    try:
        yield
    except UnavailableError as error:
        raise UnavailableError(
            f"{error}; it may be its snapshotter {snapshotter!r} that does not answer:"
            " is `snapshotter containerd serve` running?"
        ) from error
    except InvalidInputError as error:
        raise InvalidInputError(
            f"{error}; does containerd know a snapshotter {snapshotter!r}?"
            " `snapshotter containerd config` prints what its config needs"
        ) from error


def _prepare(
    client: ContainerdClient, snapshotter: str, below: str, labels: dict[str, str], chain_id: str
) -> None:
    key = f"extract-{secrets.token_hex(8)} {chain_id}"
    try:
        client.call(
            SNAPSHOTS, "Prepare", snapshotter=snapshotter, key=key, parent=below, labels=labels
        )
    except ExistsError:
        try:
            client.call(SNAPSHOTS, "Stat", snapshotter=snapshotter, key=chain_id)
        except NotFoundError as error:
            raise StaleSnapshotError(f"snapshot {chain_id}: {error}") from error
        return
    except NotFoundError as error:
        if below:  # it was there a moment ago for containerd: not for the snapshotter
            raise StaleSnapshotError(f"snapshot {below}: {error}") from error
        raise
    with suppress(SnapshotterError):  # else containerd collects it
        client.call(SNAPSHOTS, "Remove", snapshotter=snapshotter, key=key)
    raise UnsupportedError(
        f"layer {chain_id}: the snapshotter {snapshotter!r} does not take it lazily (its log says"
        f" why); pull the whole image: ctr images pull --snapshotter {snapshotter} IMAGE"
    )


def _remove_stale(client: ContainerdClient, snapshotter: str, image: ImageDocuments) -> int:
    """Removes the image's snapshots from containerd, top-down; how many there were."""
    removed = 0
    for layer in reversed(image.layers):
        try:
            client.call(SNAPSHOTS, "Remove", snapshotter=snapshotter, key=layer.chain_id)
        except NotFoundError:
            continue
        except BusyError as error:
            raise BusyError(
                f"snapshot {layer.chain_id} is lost and must be made anew, but others are on it:"
                f" remove the containers and images that use it, then pull again ({error})"
            ) from error
        removed += 1
    return removed


def _save(client: ContainerdClient, image: ImageDocuments) -> bool:
    """Has the image's name stand for it; whether the name is new."""
    target = image.target
    descriptor = new(
        "Descriptor", media_type=target.media_type, digest=target.digest, size=len(target.data)
    )
    record = MESSAGES["Image"](name=image.name, target=descriptor)
    try:
        client.call(IMAGES, "Create", image=record)
    except ExistsError:
        mask = new("FieldMask", paths=["target"])
        client.call(IMAGES, "Update", image=record, update_mask=mask)
        return False
    return True
