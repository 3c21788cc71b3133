"""What the client's tests receive with, and an answer to receive."""

from __future__ import annotations

from snapshotter.cache_v1.connection import Body
from snapshotter.cache_v1.protocol import Prepared
from snapshotter.errors import SnapshotterError
from snapshotter.names import ContentName

PREPARED = Prepared(
    image_handle="h",
    metadata_generation="1",
    digest=None,
    architecture="amd64",
    env={},
    entrypoint=None,
    cmd=None,
    config=None,
    totals=None,
    layers=[],
    metadata_image=None,
)


class Collected:
    """Keeps what a fetch brings."""

    def __init__(self) -> None:
        self.bodies: dict[bytes, bytes] = {}
        self.ended: list[tuple[bytes, SnapshotterError | None]] = []
        self.companions: list[tuple[ContentName, bytes]] = []

    def sink(self, digest: bytes):
        def keep(body: Body) -> None:
            self.bodies[digest] = bytes(body)

        return keep

    def finish(self, digest: bytes, error: SnapshotterError | None) -> None:
        self.ended.append((digest, error))

    def companion(self, name: ContentName, body: Body) -> None:
        self.companions.append((name, bytes(body)))
