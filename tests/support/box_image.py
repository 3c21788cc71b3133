"""A small image of three layers with a shell, whose every file is known to the tests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tests.support.debian_image import required_tool
from tests.support.images import (
    Entry,
    Image,
    Layer,
    directory,
    file,
    push,
    symlink,
    whiteout,
    write_layout,
)
from tests.support.registry import Registry

COMMANDS = ("sh", "cat", "ls", "find", "sha256sum", "sleep", "mkdir", "rm", "mv", "stat", "true")
FILES = 48
GREETING = b"hello from the third layer\n"


def data_files(seed: int = 1) -> dict[str, bytes]:
    """Path and content of the second layer's files, in the order of their names."""
    noise = random.Random(seed)
    return {f"data/{n % 4}/{n:03}": noise.randbytes(500 + 977 * n) for n in range(FILES)}


def box_image(seed: int = 1) -> Image:
    """The image. Another seed gives another second layer over the same first."""
    return Image([shell_layer(), Layer(_data(seed)), top_layer()], env=["PATH=/bin"])


def pause_image() -> Image:
    """What a pod's sandbox runs."""
    return Image([shell_layer()], env=["PATH=/bin"], cmd=["sleep", "1000000"])


def shell_layer() -> Layer:
    """A root with a shell, and a file that the top layer takes away."""
    busybox = Path(required_tool("busybox", "busybox-static")).read_bytes()
    links = [symlink(f"bin/{name}", "busybox") for name in COMMANDS]
    plain = [directory("etc"), directory("tmp", mode=0o1777), directory("proc"), directory("sys")]
    files = [file("etc/passwd", b"root:x:0:0::/:/bin/sh\n"), file("etc/old", b"old\n")]
    root = directory(".", mode=0o750, uid=7, gid=8)
    return Layer([root, directory("bin"), file("bin/busybox", busybox, mode=0o755), *links,
                  *plain, directory("dev"), *files])  # fmt: skip


def top_layer() -> Layer:
    """A greeting, and the first layer's old file taken away."""
    return Layer([directory("etc"), file("etc/greeting", GREETING), whiteout("etc/old")])


@dataclass(frozen=True, slots=True)
class Pushed:
    """An image in a registry under a name of its own."""

    reference: str
    image: Image

    def layer_requests(self, registry: Registry) -> int:
        """How often a layer of it was asked for so far."""
        name = self.reference.partition("/")[2].partition(":")[0]
        return sum(
            registry.requests("GET", f"/v2/{name}/blobs/{layer.descriptor['digest']}")
            for layer in self.image.layers
        )


def push_image(image: Image, place: Path, registry: Registry, name: str) -> Pushed:
    """Pushes an image by way of a layout at ``place``."""
    push(write_layout(place, {"v1": image}), "v1", registry.address, name)
    return Pushed(f"{registry.address}/{name}:v1", image)


def _data(seed: int) -> list[Entry]:
    directories = [directory("data"), *(directory(f"data/{n}") for n in range(4))]
    return [*directories, *(file(path, data) for path, data in data_files(seed).items())]
