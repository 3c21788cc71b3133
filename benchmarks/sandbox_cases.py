"""Twenty sandboxes of one image, one after the other: the loop of who runs agents' tasks."""

import subprocess

from benchmarks.measure import Case, timed
from benchmarks.world import World
from snapshotter import api
from tests.support.product import Product

COUNT = 20
TASK = "import json, os, pathlib; pathlib.Path('/result').write_text(json.dumps(os.getpid()))"
_COMMAND = ("python3", "-c", TASK)
_WARM_SAMPLES = 10
_COLD_SAMPLES = 5


def sandbox_cases(world: World) -> list[Case]:
    """All cases of this module."""
    return [_warm(world), _cold(world)]


def _warm(world: World) -> Case:
    """Each in a sandbox of its own, by commands or by a program; and all in a single one."""
    product, image = world.product, world.debian().reference
    product.do("pull", image)

    def by_commands() -> float:
        with timed() as watch:
            for _ in range(COUNT):
                subprocess.run(
                    product.command("run", image, "--", *_COMMAND),
                    check=True,
                    capture_output=True,
                    env=product.environment,
                )
        return watch.seconds

    def in_one() -> float:
        with timed() as watch, _connected(product) as client, client.sandbox(image) as box:
            for _ in range(COUNT):
                box.run(_COMMAND, check=True)
        return watch.seconds

    arms = {
        "snapshotter run": by_commands,
        "snapshotter.api": lambda: _loop(product, image),
        "snapshotter.api, one sandbox": in_one,
    }
    return Case(
        "sandbox-loop",
        f"{COUNT} sandboxes of one image, warm",
        arms,
        "snapshotter.api",
        "snapshotter run",
        max_samples=_WARM_SAMPLES,
    )


def _cold(world: World) -> Case:
    image = world.debian().reference
    world.product.do("pull", image)

    def cold() -> float:
        product = world.new_product()
        product.do("pull", image)
        seconds = _loop(product, image)
        product.end()
        return seconds

    arms = {"warm": lambda: _loop(world.product, image), "cold": cold}
    return Case(
        "sandbox-loop-cold",
        f"{COUNT} sandboxes of one image, cold",
        arms,
        "cold",
        "warm",
        max_samples=_COLD_SAMPLES,
    )


def _loop(product: Product, image: str) -> float:
    """Seconds of a program that makes COUNT sandboxes and runs a command in each."""
    with timed() as watch, _connected(product) as client:
        for number in range(COUNT):
            with client.sandbox(image) as box:
                box.run(_COMMAND, check=True)
                if number == 0 and not box.read_file("/result").isdigit():
                    raise AssertionError("the task did not write its result")
    return watch.seconds


def _connected(product: Product) -> api.Client:
    return api.connect(root=product.root, run=product.run, config=product.config)
