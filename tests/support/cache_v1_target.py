"""The server that is tested for conformance, and the image that ours is tested with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cache_server.app import Limits
from tests.support.cache_v1 import Client, running_server
from tests.support.images import (
    Image,
    Layer,
    device,
    directory,
    fifo,
    file,
    hard_link,
    symlink,
    write_layout,
)

BIG = bytes(range(251)) * 9_000
"""More than two chunks, the last one short."""
SAMPLE = Image(
    [
        Layer(
            [
                directory("many", mode=0o1777, uid=1, gid=70_000),
                *(file(f"many/{number:04}", b"%d" % number) for number in range(600)),
                *(symlink(b"long/" + b"%03d" % n + b"l" * 252, b"t" * 2000) for n in range(200)),
            ]
        ),
        Layer(
            [
                file("big", BIG, mode=0o4755, uid=4_000_000_000),
                file("chunk", b"c" * (1 << 20)),
                file("empty"),
                file("old", b"old", mtime_ns=-1_500_000_000),
                file(b"not-\xff-text", b"x"),
                hard_link("again", "old"),
                symlink("link", "many"),
                symlink("nowhere", "/is/not/there"),
                fifo("pipe"),
                device("null", 1, 3),
            ],
            compression="zstd",
        ),
    ],
    env=["A=1", "A=2", "B=x=y"],
    entrypoint=["/run"],
    cmd=None,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, what it wants, and an image that it can prepare."""

    path: Path
    token: str | None
    image: str
    architecture: str

    def client(self, **options: Any) -> Client:
        """A new connection."""
        return Client(self.path, **{"token": self.token, **options})

    def prepare(self, **fields: Any) -> dict[str, Any]:
        """The request that prepares the image."""
        known = {"op": "prepare", "image": self.image, "architecture": self.architecture}
        return {**known, **fields}


@contextmanager
def target_of(config: pytest.Config, directory: Path) -> Iterator[Target]:
    """The server that the options name or, without any, ours with a token and SAMPLE."""
    socket = config.getoption("--cache-v1-socket")
    if socket is not None:
        yield Target(
            path=Path(socket),
            token=config.getoption("--cache-v1-token"),
            image=config.getoption("--cache-v1-image"),
            architecture=config.getoption("--cache-v1-architecture"),
        )
        return
    write_layout(directory / "oci", {"v1": SAMPLE})
    with running_server(directory, token="secret", limits=Limits(idle_s=30)) as running:
        image = f"oci:{directory}/oci:v1"
        yield Target(path=running.path, token="secret", image=image, architecture="amd64")
