"""A real containerd of its own for tests: it unpacks images, and runs containers of them.

Everything of it is below one directory, but for what its shims and runc keep below /run/containerd
and in the cgroup hierarchies; ``containerd_leftovers`` takes that away.
"""

from __future__ import annotations

import itertools
import json
import secrets
import subprocess
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support import containerd_leftovers
from tests.support.debian_image import LocalImage, required_tool
from tests.support.images import sha256_of
from tests.support.mounts import detach_all

SNAPSHOTTER = "snapshotter"
"""What the tests' containerd calls the snapshotter that is tried."""
_START_DEADLINE_S = 30.0
_COMMAND_TIMEOUT_S = 120.0
_CONFIG = """\
version = 2
root = "{directory}/root"
state = "{directory}/state"
disabled_plugins = [{disabled}]
[grpc]
  address = "{directory}/containerd.sock"
"""
_WITHOUT_GC = """\
[plugins."io.containerd.gc.v1.scheduler"]  # views have no owner; nothing may collect them
  startup_delay = "24h"
  schedule_delay = "24h"
"""
_PROXY = """\
[proxy_plugins.{name}]
  type = "snapshot"
  address = "{socket}"
"""
_CRI = """\
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{sandbox_image}"
  restrict_oom_score_adj = true  # lowering it may not be allowed here
  disable_apparmor = true
  disable_tcp_service = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "{name}"
  disable_snapshot_annotations = {without_names}
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".registry.mirrors."{registry}"]
  endpoint = ["http://{registry}"]
"""


class ContainerdError(Exception):
    """containerd refused; the text is what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What of containerd is used besides its content store and its overlayfs snapshotter.

    ``snapshotter`` is the socket of the one that is tried. ``cri`` has CRI use that, and
    ``sandbox_image`` from ``registry``, a plain HTTP address.
    """

    snapshotter: Path | None = None
    collects_garbage: bool = True
    cri: bool = False
    registry: str = ""
    sandbox_image: str = ""
    names_images: bool = True
    """Whether CRI tells the snapshotter of which image a layer is; not by default, in 1.6."""

    def config(self, directory: Path) -> str:
        """The text of config.toml for a containerd below ``directory``."""
        disabled = ["io.containerd.internal.v1.opt"]
        if not self.cri:
            disabled.append("io.containerd.grpc.v1.cri")
        text = _CONFIG.format(directory=directory, disabled=str(disabled)[1:-1].replace("'", '"'))
        if not self.collects_garbage:
            text += _WITHOUT_GC
        if self.snapshotter is not None:
            text += _PROXY.format(name=SNAPSHOTTER, socket=self.snapshotter)
        if self.cri:
            text += _CRI.format(
                name=SNAPSHOTTER,
                registry=self.registry,
                sandbox_image=self.sandbox_image,
                without_names=str(not self.names_images).lower(),
            )
        return text


class Containerd:
    """A containerd whose files are all below one directory."""

    def __init__(
        self,
        directory: Path,
        setup: Setup | None = None,
        *,
        namespace: str = "",
    ) -> None:
        """``namespace`` is by default one that no other containerd here uses."""
        self._directory = directory
        self._setup = setup or Setup(collects_garbage=False)
        self.namespace = namespace or f"test-{secrets.token_hex(6)}"
        self.address = directory / "containerd.sock"
        self._ctr = required_tool("ctr", "containerd")
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0
        self._ids = itertools.count(1)

    @classmethod
    def beside(cls, other: Containerd, *, namespace: str) -> Containerd:
        """Another namespace of a containerd that is up; it ends with that one."""
        return cls(other._directory, other._setup, namespace=namespace)

    @property
    def pid(self) -> int:
        """The pid of the daemon."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        config = self._directory / "config.toml"
        config.write_text(self._setup.config(self._directory))
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [required_tool("containerd", "containerd"), "--config", config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        give_up_at = time.monotonic() + _START_DEADLINE_S
        while self.ctr("version").returncode:
            if time.monotonic() > give_up_at or self._process.poll() is not None:
                raise RuntimeError(f"containerd does not answer:\n{self.log()}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILLs the daemon alone: containers go on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Ends it, its containers, and everything that it mounted."""
        self.kill()
        containerd_leftovers.remove(self.address, self._directory / "state")
        detach_all(self._directory)

    def log(self) -> str:
        """What it logged."""
        return (self._directory / "log").read_text(errors="replace")

    def unpack(self, image: LocalImage) -> Path:
        """Where the image is mounted, read-only, as containers would find it.

        Raises ContainerdError if containerd does not take the image.
        """
        self._count += 1
        archive = self._directory / f"{self._count}.tar"
        with tarfile.open(archive, "w") as tar:
            for name in ("oci-layout", "index.json", "blobs"):
                tar.add(image.layout / name, name)
        self.do("images", "import", "--base-name", f"image-{self._count}", str(archive))
        archive.unlink()
        view = f"view-{self._count}"
        self.do("snapshots", "view", view, chain_id_of(image))
        target = self._directory / view
        target.mkdir()
        command = self.do("snapshots", "mounts", str(target), view)
        subprocess.run(["sh", "-ec", command], check=True)
        return target

    def run(self, image: str, *command: str, options: Sequence[str] = (), id_: str = "") -> str:
        """Runs a container of an image of the tried snapshotter to its end; what it printed."""
        name = id_ or self.new_id()
        where = ["--rm", "--snapshotter", SNAPSHOTTER, *options]
        return self.do("run", *where, image, name, *command)

    def start_container(self, image: str, *command: str, options: Sequence[str] = ()) -> str:
        """Starts a container that stays; its id."""
        name = self.new_id()
        where = ["--detach", "--snapshotter", SNAPSHOTTER, *options]
        self.do("run", *where, image, name, *command)
        return name

    def exec(self, container: str, *command: str) -> str:
        """Runs a command in a container that is up and has a shell; what it printed.

        ctr 1.6 stops copying when the process ends, and may not have begun by then: so it lingers.
        """
        lingering = '"$@"; status=$?; sleep 0.3; exit $status'
        return self.check(container, "sh", "-c", lingering, "sh", *command)

    def check(self, container: str, *command: str) -> str:
        """``exec`` of a command whose success alone counts: what it prints may be lost."""
        return self.do("tasks", "exec", "--exec-id", self.new_id(), container, *command)

    def pid_of(self, container: str) -> int:
        """The pid of a container's first process, as this machine counts."""
        for line in self.do("tasks", "ls").splitlines()[1:]:
            name, pid, _ = line.split()
            if name == container:
                return int(pid)
        raise ContainerdError(f"container {container} does not run")

    def end_container(self, container: str) -> None:
        """Kills a container and removes it with its snapshot."""
        self.do("tasks", "rm", "--force", container)
        self.do("containers", "rm", container)

    def new_id(self) -> str:
        """A name for a container or process that no other has."""
        return f"{self.namespace}-{next(self._ids)}"

    def names(self, *arguments: str) -> list[str]:
        """The first column of a listing of ctr's."""
        return self.do(*arguments, "--quiet").split()

    def snapshots(self) -> dict[str, tuple[str, str]]:
        """Key, parent and kind of every snapshot of the tried snapshotter in the namespace."""
        lines = self.do("snapshots", "--snapshotter", SNAPSHOTTER, "ls").splitlines()[1:]
        found = {}
        for line in lines:
            key, *parent, kind = line.split()
            found[key] = (parent[0] if parent else "", kind)
        return found

    def do(self, *arguments: str) -> str:
        """Runs ctr, which must succeed (else ContainerdError); its standard output."""
        done = self.ctr(*arguments)
        if done.returncode:
            raise ContainerdError(f"ctr {' '.join(arguments)}: {done.stderr}{done.stdout}")
        return done.stdout

    def ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs ctr to its end, whatever its status."""
        return subprocess.run(
            self.command(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=_COMMAND_TIMEOUT_S,
        )

    def command(self, *arguments: str) -> list[str]:
        """The full command line of ctr."""
        where = ["--address", str(self.address), "--namespace", self.namespace]
        return [self._ctr, *where, *arguments]


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
def running_containerd(directory: Path, setup: Setup | None = None) -> Iterator[Containerd]:
    """A containerd below ``directory``, which should be short: a socket is in it.

    Without a setup it collects no garbage, so that views live as long as it does.
    """
    containerd = Containerd(directory, setup)
    try:
        containerd.start()
        yield containerd
    finally:
        containerd.stop()
