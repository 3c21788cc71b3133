"""The kernel view against the same tree as a plain directory, warm and cold, and its copy-up."""

import hashlib
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import fixture, operations
from benchmarks.measure import Case, Sample, timed
from benchmarks.world import World, run_quietly

Bind = Callable[[Path], Callable[[], object]]
"""Prepares an operation on a tree; what it returns is timed and compared."""

_COPY_UPS = 32
_COLD_SAMPLES = 10


def view_cases(world: World) -> list[Case]:
    """Correctness first: a wrong byte in the view raises here, before anything is timed."""
    view = world.view()
    operations.check_small_contents(view)
    expected = hashlib.sha256(fixture.large_content()).hexdigest()
    if operations.digest(view / fixture.LARGE) != expected:
        raise AssertionError("the large file differs")
    world.unmount(view)
    entries = operations.traverse(world.native)
    total = fixture.DIRECTORIES * fixture.FILES_PER_DIRECTORY * fixture.FILE_BYTES
    return [
        *_first_and_second(world, "traverse", "Stat of all names", _traversal, entries, 1.3),
        *_first_and_second(
            world,
            "read-small",
            "Open, read, close of 2,048 files",
            operations.reader_of_all,
            total,
            1.7,
        ),
        *_first_and_second(
            world,
            "read-large",
            "SHA-256 of a 64 MiB file",
            _digest_of_large,
            expected,
            1.3,
        ),
        _cold_small(world, total),
        _cold_large(world, expected),
        _cold_large_against_warm(world, expected),
        _copy_up(world),
    ]


def _first_and_second(
    world: World, name: str, title: str, bind: Bind, expected: object, target_second: float
) -> list[Case]:
    """The operation in a mount where nobody did it before, and again in the same mount.

    Content is local in both. "First" starts without cached names for both arms.
    """

    def once(root: Path) -> float:
        operation = bind(root)
        with timed() as watch:
            result = operation()
        if result != expected:
            raise AssertionError(f"{name} on {root}: {result!r} instead of {expected!r}")
        return watch.seconds

    def first_native() -> float:
        operations.forget_names()
        return once(world.native)

    def first_view() -> float:
        view = world.view()
        operations.forget_names()
        seconds = once(view)
        world.unmount(view)
        return seconds

    standing = world.view()

    def second(root: Path) -> Sample:
        def sample() -> float:
            bind(root)()
            return once(root)

        return sample

    first_arms: dict[str, Sample] = {"native": first_native, "kernel view": first_view}
    second_arms: dict[str, Sample] = {
        "native": second(world.native),
        "kernel view": second(standing),
    }
    return [
        Case(f"{name}-first", f"{title}, first", first_arms, "kernel view", "native"),
        Case(
            f"{name}-second",
            f"{title}, second",
            second_arms,
            "kernel view",
            "native",
            target_second,
        ),
    ]


def _cold(world: World, bind: Bind, expected: object) -> Sample:
    """The operation in a mount of a snapshotter that has no content; the server has it all."""

    def sample() -> float:
        product = world.new_product()
        try:
            view = product.mount(world.image.reference, "cold")
            operation = bind(view)
            with timed() as watch:
                result = operation()
            if result != expected:
                raise AssertionError(f"cold read: {result!r} instead of {expected!r}")
            return watch.seconds
        finally:
            product.end()
            operations.uncache(product.root)

    return sample


def _copied(world: World, source: Path) -> Sample:
    """``cp -a`` of the same bytes on the same disk."""

    def sample() -> float:
        target = world.directory("copy")
        with timed() as watch:
            run_quietly("cp", "-a", source, target)
        operations.uncache(target)
        return watch.seconds

    return sample


def _cold_small(world: World, total: int) -> Case:
    arms = {
        "cp -a": _copied(world, world.native / "small"),
        "kernel view": _cold(world, operations.reader_of_all, total),
    }
    title = "Open, read, close of 2,048 files, cold"
    return Case("cold-small", title, arms, "kernel view", "cp -a", 5.0, max_samples=_COLD_SAMPLES)


def _cold_large(world: World, expected: str) -> Case:
    arms = {
        "cp -a": _copied(world, world.native / fixture.LARGE),
        "kernel view": _cold(world, _digest_of_large, expected),
    }
    title = "SHA-256 of a 64 MiB file, cold"
    return Case("cold-large", title, arms, "kernel view", "cp -a", max_samples=_COLD_SAMPLES)


def _cold_large_against_warm(world: World, expected: str) -> Case:
    """What the first reader pays: every byte fetched, verified and kept on the way."""
    standing = world.view()

    def warm() -> float:
        with timed() as watch:
            result = operations.digest(standing / fixture.LARGE)
        if result != expected:
            raise AssertionError(f"warm read: {result!r}")
        return watch.seconds

    arms: dict[str, Sample] = {"warm": warm, "cold": _cold(world, _digest_of_large, expected)}
    title = "SHA-256 of a 64 MiB file, cold against warm"
    return Case("cold-warm-large", title, arms, "cold", "warm", 2.0, max_samples=_COLD_SAMPLES)


def _copy_up(world: World) -> Case:
    """32 files are rewritten; every sample uses files that were not copied up before."""
    paths = fixture.small_names()
    chosen = random.Random(3).sample(paths, len(paths))
    standing = {"overlayfs": world.overlay(world.native), "kernel view": world.view()}
    taken = dict.fromkeys(standing, 0)

    def sample_of(arm: str) -> Sample:
        def sample() -> float:
            number = taken[arm]
            taken[arm] += 1
            part = chosen[number * _COPY_UPS : (number + 1) * _COPY_UPS]
            targets = [str(standing[arm] / path) for path in part]
            operations.read_all(targets)
            with timed() as watch:
                operations.rewrite(targets)
            return watch.seconds

        return sample

    arms = {arm: sample_of(arm) for arm in standing}
    title = "Copy-up of 32 small files"
    return Case("copy-up", title, arms, "kernel view", "overlayfs", 2.0)


def _traversal(root: Path) -> Callable[[], int]:
    return partial(operations.traverse, root)


def _digest_of_large(root: Path) -> Callable[[], str]:
    return partial(operations.digest, root / fixture.LARGE)
