"""A node as its users set it up: containerd with our snapshotter, over a product of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.containerd import SNAPSHOTTER, Containerd, Setup
from tests.support.product import Product


class Node:
    """The processes of one node, all below ``product.base``; ``close`` leaves none of them."""

    def __init__(self, *, server: Path | None = None, **setup: Any) -> None:
        """``server`` is as of Product, ``setup`` as of containerd's Setup."""
        self.product = Product(server=server)
        directory = self.product.base / "ctd"
        directory.mkdir()
        self.socket = self.product.run / "containerd.sock"
        self.containerd = Containerd(
            directory,
            Setup(snapshotter=self.socket, **setup),
            namespace=self.product.base.name,
        )

    def start(self) -> None:
        """Starts everything, and waits until it answers."""
        self.product.do("daemon", "start")
        self.containerd.start()

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

    def close(self) -> None:
        """Ends everything and removes its files."""
        try:
            self.containerd.stop()
        finally:
            self.product.close()


@contextmanager
def running_node(**options: Any) -> Iterator[Node]:
    """A node that is up; ``options`` as of Node."""
    with ExitStack() as stack:
        node = Node(**options)
        stack.callback(node.close)
        node.start()
        yield node
