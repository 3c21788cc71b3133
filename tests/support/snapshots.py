"""The core of the snapshots service over a directory, with remote layers that are made up."""

from __future__ import annotations

from pathlib import Path

from snapshotter.containerd.snapshots import MergedImage, Snapshots
from snapshotter.containerd.state import State
from snapshotter.digest import format_digest, sha256
from snapshotter.errors import NotFoundError
from snapshotter.telemetry import Counters


def chain_id(name: str) -> str:
    """A chain id made from a name."""
    return format_digest(sha256(name.encode()))


class MadeUpLayers:
    """RemoteLayers that know the chains in ``known``; ``calls`` are those that changed something.

    Merged images are plain directories below ``place``.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.known: set[str] = set()
        self.images: list[str | None] = []
        self.holders: set[str] = set()
        self.held: set[str] = set()
        self.forgotten: list[str] = []

    def check(self, chain: str, image: str | None) -> None:
        self.images.append(image)
        if chain not in self.known:
            raise NotFoundError(f"chain {chain} is not known")

    def lend(self, chain: str, snapshot_id: str, *, read_only: bool) -> MergedImage:
        if chain not in self.known:
            raise NotFoundError(f"chain {chain} is not known")
        self.held.add(chain)
        self.holders.add(snapshot_id)
        metadata = self.metadata(chain)
        metadata.mkdir(mode=0o751, exist_ok=True)
        metadata.chmod(0o751)
        return MergedImage(
            metadata=str(metadata),
            objects="/objects",
            arrivals="/arrivals",
            gate="/gate",
            image_number=7,
            self_contained=True,
        )

    def metadata(self, chain: str) -> Path:
        """Where the merged image of a chain is."""
        return self.place / chain.removeprefix("sha256:")

    def give_back(self, snapshot_id: str) -> None:
        self.holders.discard(snapshot_id)

    def lent(self) -> set[str]:
        return set(self.held)

    def retire(self, chain: str, *, forget: bool) -> None:
        self.held.remove(chain)
        if forget:
            self.forgotten.append(chain)


class SnapshotsWorld:
    """A state directory with its core; ``reopen`` is what a restart does."""

    def __init__(self, base: Path) -> None:
        self.path = base / "state"
        self.layers = MadeUpLayers(base)
        self.counters = Counters()
        self._open()

    def _open(self) -> None:
        self.state = State(self.path)
        self.snapshots = Snapshots(
            self.state.records, self.state.directories, self.layers, self.counters
        )

    def reopen(self) -> None:
        """Closes the state and opens it again."""
        self.close()
        self._open()

    def close(self) -> None:
        """Lets go of the state."""
        self.state.close()

    def upper(self, name: str) -> Path:
        """The directory of a snapshot's own files."""
        return self.state.directories.upper(self.state.records.get(name).id).upper

    def committed(self, name: str, parent: str = "") -> str:
        """Makes an ordinary committed snapshot; its name."""
        self.snapshots.prepare(f"{name}-key", parent, {})
        self.snapshots.commit(name, f"{name}-key", {})
        return name
