"""The service for containerd as a process, driven by calls such as containerd makes.

What it answers is mounted here as containerd mounts it; nothing else of containerd takes part.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from snapshotter.containerd.client import ContainerdClient
from snapshotter.containerd.labels import IMAGE, REF
from snapshotter.containerd.messages import SNAPSHOTS, Message
from snapshotter.errors import ExistsError
from snapshotter.kernel_view import syscalls
from tests.support.images import sha256_of
from tests.support.product import Product, await_true

_FLAGS = {
    "ro": syscalls.MS_RDONLY,
    "rw": 0,
    "rbind": syscalls.MS_BIND | syscalls.MS_REC,
}


class SnapshotsService:
    """``snapshotter containerd serve`` over a product, and a client of it."""

    def __init__(self, product: Product) -> None:
        self.product = product
        self.state = product.root / "containerd"
        self.socket = product.run / "containerd.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._count = itertools.count()
        self.client: ContainerdClient | None = None

    @property
    def pid(self) -> int:
        """The pid of the service."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts it and waits until it answers."""
        self.product.run.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self.product.run / "containerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.product.command("containerd", "serve"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.product.environment,
            )
        await_true(self._answers, "the service for containerd", log=self.product.logs)
        self.client = ContainerdClient(self.socket, "default")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends a signal and waits for the end; the exit status."""
        assert self._process is not None
        if self.client is not None:
            self.client.close()
        self._process.send_signal(number)
        status = self._process.wait(timeout=30)
        self._process = None
        return status

    def close(self) -> None:
        """Ends it, whatever state it is in."""
        if self._process is not None:
            self.end(signal.SIGKILL)

    def restart(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends it and starts it again."""
        self.end(number)
        self.start()

    def call(self, method: str, **fields: object) -> Message:
        """The answer to a call of the Snapshots service."""
        assert self.client is not None
        return self.client.call(SNAPSHOTS, method, snapshotter="snapshotter", **fields)

    def names(self) -> list[str]:
        """The names of all snapshots."""
        assert self.client is not None
        pieces = self.client.stream(SNAPSHOTS, "List", snapshotter="snapshotter")
        return [info.name for piece in pieces for info in piece.info]

    def pull(self, layout: Path, tag: str = "v1") -> str:
        """Does what containerd does for a lazy pull of an image; the name of its top snapshot.

        Raises AssertionError when a layer is not remote.
        """
        parent = ""
        for chain in chain_ids(layout):
            parent = self.pull_chain(chain, parent, f"oci:{layout}:{tag}")
        return parent

    def pull_chain(self, chain: str, parent: str, image: str) -> str:
        """One layer of that; the name of its snapshot."""
        labels = {REF: chain, IMAGE: image}
        try:
            self.call("Prepare", key=self.key(f"extract {chain}"), parent=parent, labels=labels)
        except ExistsError:
            pass
        else:
            raise AssertionError(f"{chain} is not remote:\n{self.product.logs()}")
        assert self.client is not None
        wanted = f'labels."{REF}"=={chain},parent=="{parent}"'
        (found,) = self.client.stream(
            SNAPSHOTS, "List", snapshotter="snapshotter", filters=[wanted]
        )
        return str(found.info[0].name)

    def key(self, name: str) -> str:
        """A key as containerd makes them."""
        return f"default/{next(self._count)}/{name}"

    def mount(self, mounts: list[Message], name: str) -> Path:
        """Mounts what a call answered at a new directory; its path."""
        target = self.product.base / f"mnt-{name}"
        target.mkdir(exist_ok=True)
        (mount,) = mounts
        flags = sum(_FLAGS.get(option, 0) for option in mount.options)
        data = ",".join(option for option in mount.options if option not in _FLAGS)
        syscalls.mount(mount.source, target, mount.type, flags, data)
        return target

    @contextlib.contextmanager
    def container(self, parent: str, name: str = "c") -> Iterator[Path]:
        """A new active snapshot, mounted; removed at the end."""
        key = self.key(name)
        target = self.mount(self.call("Prepare", key=key, parent=parent).mounts, name)
        try:
            yield target
        finally:
            syscalls.umount(target)
            self.call("Remove", key=key)

    def directories(self) -> set[str]:
        """Ids of snapshots that have a directory, and chains whose merged images are mounted."""
        found = set()
        for name in ("snapshots", "metadata"):
            with contextlib.suppress(FileNotFoundError):
                found |= set(os.listdir(self.state / name))
        return found

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.product.logs()
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0


def chain_ids(layout: Path) -> list[str]:
    """The chain id of each layer of the first image of a layout, the base's first."""
    index = json.loads((layout / "index.json").read_bytes())
    manifest = json.loads(_blob(layout, index["manifests"][0]["digest"]))
    chains: list[str] = []
    for diff_id in json.loads(_blob(layout, manifest["config"]["digest"]))["rootfs"]["diff_ids"]:
        chains.append(sha256_of(f"{chains[-1]} {diff_id}".encode()) if chains else diff_id)
    return chains


def _blob(layout: Path, digest: str) -> bytes:
    return (layout / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes()
