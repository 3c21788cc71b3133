"""Where things are on this host: the durable root and the run directory with its sockets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

LAYOUT_VERSION = 1
"""Written to ``<root>/version``; a root with a newer one is refused."""


@dataclass(frozen=True, slots=True)
class Paths:
    """``root`` survives reboots; ``run`` holds sockets, locks and logs of this boot."""

    root: Path
    run: Path

    @property
    def objects(self) -> Path:
        """Verified content, named by object name; read by the kernel."""
        return self.root / "objects"

    @property
    def arrivals(self) -> Path:
        """Hard links of objects that are not yet known to be durable: the undo list."""
        return self.root / "arrivals"

    @property
    def partial(self) -> Path:
        """Sparse files of large content that is still filling, with their chunk maps."""
        return self.root / "partial"

    @property
    def gate(self) -> Path:
        """Mount point of the gate."""
        return self.root / "gate"

    @property
    def images(self) -> Path:
        """One record for each pulled image."""
        return self.root / "images"

    @property
    def mounts(self) -> Path:
        """One directory for each mount: its record and, where it has one, its private upper."""
        return self.root / "mounts"

    @property
    def guests(self) -> Path:
        """Kernels, initramfs and uppers of virtual machines."""
        return self.root / "vm"

    @property
    def server_root(self) -> Path:
        """Packs and catalog of the cache server that the daemon starts by itself."""
        return self.root / "server"

    @property
    def cache_socket(self) -> Path:
        """The cache server's cache-v1 socket."""
        return self.run / "cache.sock"

    @property
    def control_socket(self) -> Path:
        """The daemon's control socket."""
        return self.run / "control.sock"

    @property
    def store_socket(self) -> Path:
        """The store's control socket."""
        return self.run / "store.sock"

    @property
    def keeper_socket(self) -> Path:
        """The keeper's socket, which hands out /dev/fuse descriptors."""
        return self.run / "keeper.sock"

    @property
    def containerd_state(self) -> Path:
        """Records and directories of containerd's snapshots, by default."""
        return self.root / "containerd"

    @property
    def containerd_socket(self) -> Path:
        """The socket that containerd calls, by default."""
        return self.run / "containerd.sock"

    def log(self, process: str) -> Path:
        """The log file of one of our processes."""
        return self.run / f"{process}.log"


def default_paths(root: str | None = None, run: str | None = None) -> Paths:
    """The paths of this user, or those given; ``run`` follows ``root`` when only that is given.

    As root /var/lib/snapshotter and /run/snapshotter, else below $XDG_DATA_HOME and
    $XDG_RUNTIME_DIR. A root given alone keeps its run directory inside itself, so that two roots
    never share sockets.
    """
    root = root or os.environ.get("SNAPSHOTTER_ROOT")
    run = run or os.environ.get("SNAPSHOTTER_RUN")
    if root is not None:
        base = Path(root).absolute()
        return Paths(base, Path(run).absolute() if run else base / "run")
    if os.geteuid() == 0:
        return Paths(Path("/var/lib/snapshotter"), Path(run or "/run/snapshotter").absolute())
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/snapshotter-{os.geteuid()}")  # noqa: S108 - checked to be ours alone when it is made
    return Paths(data / "snapshotter", Path(run).absolute() if run else runtime / "snapshotter")
