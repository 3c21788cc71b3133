"""Import of a layer, mount of a large local image, and the command line's own start."""

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import fixture
from benchmarks.measure import Case, timed
from benchmarks.world import World, run_quietly
from snapshotter.paths import Paths
from snapshotter.service import control
from snapshotter.service.control_client import ControlClient
from tests.support.debian_image import LocalImage

_IMPORT_SAMPLES = 10
_MOUNT_TARGET_S = 0.05
_HELP_TARGET_S = 0.3


def start_cases(world: World) -> list[Case]:
    """All cases of this module."""
    return [_import_layer(world), _mount_many_entries(world), _help(world)]


def _import_layer(world: World) -> Case:
    image = world.debian()
    blob = _largest_blob(image)
    environment = world.product.environment

    def import_it() -> float:
        root = world.directory("import")
        command = [sys.executable, "-m", "cache_server", "import", image.reference]
        with timed() as watch:
            subprocess.run(
                [*command, "--root", str(root)], check=True, capture_output=True, env=environment
            )
        return watch.seconds

    def unpack_it() -> float:
        target = world.directory("unpack")
        with timed() as watch:
            run_quietly("sha256sum", blob)
            run_quietly("tar", "xzf", blob, "-C", target)
        return watch.seconds

    arms = {"tar xzf + sha256sum": unpack_it, "cache-server import": import_it}
    return Case(
        "import",
        f"Import of a Debian layer of {blob.stat().st_size >> 20} MiB",
        arms,
        "cache-server import",
        "tar xzf + sha256sum",
        2.5,
        max_samples=_IMPORT_SAMPLES,
    )


def _mount_many_entries(world: World) -> Case:
    """From the request to the mount's descriptor, as the daemon's client sees it."""
    paths = Paths(world.product.root, world.product.run)
    many = world.many_entries()
    for image in (many, world.image):
        world.product.do("pull", image.reference)

    def mounted(image: LocalImage, first: str, names: int) -> float:
        with ControlClient(paths.control_socket) as client:
            with timed() as watch:
                answer, descriptor = client.mount(control.Mount(image=image.reference))
            try:
                found = os.listdir(f"/proc/self/fd/{descriptor}")
                if first not in found or len(found) != names:
                    raise AssertionError(f"{image.reference}: wrong names at the root")
            finally:
                os.close(descriptor)
                client.ask(control.Unmounted(id=answer.mount.id), control.Done)
        return watch.seconds

    arms = {
        "2,194 entries": lambda: mounted(world.image, fixture.LARGE, 2),
        "100,000 entries": lambda: mounted(many, "d042", 100),
    }
    return Case(
        "mount",
        "Mount of a local image",
        arms,
        "100,000 entries",
        "2,194 entries",
        target_s=_MOUNT_TARGET_S,
    )


def _help(world: World) -> Case:
    environment = world.product.environment

    def run(*arguments: str) -> float:
        with timed() as watch:
            subprocess.run(
                [sys.executable, *arguments], check=True, capture_output=True, env=environment
            )
        return watch.seconds

    arms = {
        "python -c pass": lambda: run("-c", "pass"),
        "snapshotter --help": lambda: run("-m", "snapshotter", "--help"),
    }
    return Case(
        "help",
        "Start of the command line",
        arms,
        "snapshotter --help",
        "python -c pass",
        target_s=_HELP_TARGET_S,
    )


def _largest_blob(image: LocalImage) -> Path:
    blobs = (image.layout / "blobs" / "sha256").iterdir()
    return max(blobs, key=lambda path: path.stat().st_size)
