"""A real containerd of its own for tests, which unpacks images as its users get to see them.

Only its content store and its overlayfs snapshotter are used: no container is run.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.debian_image import LocalImage, required_tool
from tests.support.images import sha256_of
from tests.support.mounts import detach_all

_START_DEADLINE_S = 30.0
_COMMAND_TIMEOUT_S = 120.0
_CONFIG = """\
version = 2
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.grpc.v1.cri"]
[grpc]
  address = "{directory}/containerd.sock"
[plugins."io.containerd.gc.v1.scheduler"]  # views have no owner; nothing may collect them
  startup_delay = "24h"
  schedule_delay = "24h"
"""


class ContainerdError(Exception):
    """containerd refused; the text is what it said."""


class Containerd:
    """A containerd whose files are all below one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ctr = required_tool("ctr", "containerd")
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        config = self._directory / "config.toml"
        config.write_text(_CONFIG.format(directory=self._directory))
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [required_tool("containerd", "containerd"), "--config", config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        give_up_at = time.monotonic() + _START_DEADLINE_S
        while self._run("version").returncode:
            if time.monotonic() > give_up_at or self._process.poll() is not None:
                log_text = (self._directory / "log").read_text(errors="replace")
                raise RuntimeError(f"containerd does not answer:\n{log_text}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Ends it and everything that it mounted."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        detach_all(self._directory)

    def unpack(self, image: LocalImage) -> Path:
        """Where the image is mounted, read-only, as containers would find it.

        Raises ContainerdError if containerd does not take the image.
        """
        self._count += 1
        archive = self._directory / f"{self._count}.tar"
        with tarfile.open(archive, "w") as tar:
            for name in ("oci-layout", "index.json", "blobs"):
                tar.add(image.layout / name, name)
        self._ask("images", "import", "--base-name", f"image-{self._count}", str(archive))
        archive.unlink()
        view = f"view-{self._count}"
        self._ask("snapshots", "view", view, chain_id_of(image))
        target = self._directory / view
        target.mkdir()
        command = self._ask("snapshots", "mounts", str(target), view)
        subprocess.run(["sh", "-ec", command], check=True)
        return target

    def _ask(self, *arguments: str) -> str:
        done = self._run(*arguments)
        if done.returncode:
            raise ContainerdError(done.stderr)
        return done.stdout

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        address = str(self._directory / "containerd.sock")
        return subprocess.run(
            [self._ctr, "--address", address, "--namespace", "lazy-snapshotter-test", *arguments],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=_COMMAND_TIMEOUT_S,
        )


def chain_id_of(image: LocalImage) -> str:
    """The chainID of all layers of the only image in a layout (image-spec, config.md)."""
    index = json.loads((image.layout / "index.json").read_bytes())
    manifest = json.loads(_blob(image, index["manifests"][0]["digest"]))
    config = json.loads(_blob(image, manifest["config"]["digest"]))
    chain, *above = config["rootfs"]["diff_ids"]
    for diff_id in above:
        chain = sha256_of(f"{chain} {diff_id}".encode())
    return str(chain)


def _blob(image: LocalImage, digest: str) -> bytes:
    return (image.layout / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes()


@contextmanager
def running_containerd(directory: Path) -> Iterator[Containerd]:
    """A containerd below ``directory``, which should be short: a socket is in it."""
    containerd = Containerd(directory)
    try:
        containerd.start()
        yield containerd
    finally:
        containerd.stop()
