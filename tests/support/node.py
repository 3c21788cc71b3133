"""A node as its users set it up: containerd with our snapshotter, over a product of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.containerd import SNAPSHOTTER, Containerd, ContainerdError, Setup
from tests.support.debian_image import required_tool
from tests.support.product import Product, await_true


class Node:
    """The processes of one node, all below ``product.base``; ``close`` leaves none of them."""

    def __init__(self, *, server: Path | None = None, **setup: Any) -> None:
        """``server`` is as of Product, ``setup`` as of containerd's Setup."""
        self.product = Product(server=server)
        directory = self.product.base / "ctd"
        directory.mkdir()
        self._service: subprocess.Popen[bytes] | None = None
        self.socket = self.product.run / "containerd.sock"
        self.containerd = Containerd(directory, Setup(snapshotter=self.socket, **setup))

    def start(self) -> None:
        """Starts everything, and waits until it answers."""
        self.product.do("daemon", "start")
        self.start_service()
        self.containerd.start()

    def start_service(self) -> None:
        """Starts what containerd calls, and waits until it can be reached."""
        with (self.product.base / "service.log").open("ab") as log:
            self._service = subprocess.Popen(
                self.product.command("containerd", "serve"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.product.environment,
            )
        await_true(self._is_reached, f"service on {self.socket}", log=self.service_log)

    def stop_service(self) -> None:
        """Ends it as a service manager does."""
        self._end_service(signal.SIGTERM)

    def kill_service(self) -> None:
        """SIGKILLs it."""
        self._end_service(signal.SIGKILL)

    def service_log(self) -> str:
        """What it logged."""
        return (self.product.base / "service.log").read_text(errors="replace")

    def await_up(self) -> None:
        """Waits until everything that was started again answers."""

        def is_up() -> bool:
            return None not in self.product.status()["processes"].values()

        await_true(is_up, "all processes", log=self.product.logs)

    def await_called(self) -> None:
        """Waits until containerd calls the service again: its gRPC client pauses after a refusal
        for a second or more, and fails what is asked meanwhile."""

        def is_called() -> bool:
            return not self.containerd.ctr(
                "snapshots", "--snapshotter", SNAPSHOTTER, "ls"
            ).returncode

        await_true(is_called, "containerd to call the service", log=self.service_log)

    def pids(self) -> dict[str, int]:
        """The pid of each process of ours, by name."""
        assert self._service is not None
        return {**self.product.status()["processes"], "service": self._service.pid}

    def rpull(self, reference: str, *options: str) -> dict[str, Any]:
        """Pulls an image lazily into containerd; what the command answered."""
        return dict(self.product.ask("rpull", reference, *self.where, *options))

    @property
    def where(self) -> Sequence[str]:
        """The options that name our containerd."""
        return (
            *("--address", str(self.containerd.address)),
            *("--namespace", self.containerd.namespace),
            *("--snapshotter", SNAPSHOTTER),
        )

    def end(self) -> None:
        """Ends everything; files stay."""
        try:
            self.containerd.stop()
            self.kill_service()
        finally:
            self.product.end()

    def close(self) -> None:
        """Ends everything and removes its files; closing again does nothing."""
        if self.product.base.exists():
            try:
                self.end()
            finally:
                self.product.close()

    def _end_service(self, number: signal.Signals) -> None:
        if self._service is not None:
            self._service.send_signal(number)
            self._service.wait()
            self._service = None

    def _is_reached(self) -> bool:
        assert self._service is not None
        if self._service.poll() is not None:
            raise RuntimeError(f"the service ended by itself:\n{self.service_log()}")
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self.socket)) == 0


@contextmanager
def running_node(**options: Any) -> Iterator[Node]:
    """A node that is up; ``options`` as of Node."""
    with ExitStack() as stack:
        node = Node(**options)
        stack.callback(node.close)
        node.start()
        yield node


def ctr_remote_pull(node: Node, reference: str) -> None:
    """Pulls as the users of the stargz snapshotter do."""
    where = ["--address", str(node.containerd.address), "--namespace", node.containerd.namespace]
    options = ["--plain-http", "--snapshotter", SNAPSHOTTER]
    tool = required_tool("ctr-remote", "stargz-snapshotter")
    done = subprocess.run(
        [tool, *where, "images", "rpull", *options, reference], capture_output=True, text=True
    )
    if done.returncode:
        raise ContainerdError(f"ctr-remote images rpull {reference}: {done.stderr}")
