"""From the pull to a container's first output: our snapshotter against containerd's overlayfs.

Both pull the same image from the same registry, on nodes of their own. A sample on empty caches
has a new node each time, whose processes end with it; no files are removed before the end (see
``World``).
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.measure import Case, timed
from tests.support.containerd import SNAPSHOTTER, Containerd, Setup
from tests.support.debian_image import debian_image
from tests.support.images import push
from tests.support.node import Node
from tests.support.product import CacheServer
from tests.support.registry import running_registry

_NAME = "debian-python"
_COMMAND = ("python3", "-c", "import json, sys; print(json.dumps({'answer': 6 * 7}))")
_PRINTED = '{"answer": 42}\n'
_SUBJECT, _BASELINE = "snapshotter", "overlayfs"
_COLD_TARGET = 1 / 3
_WARM_TARGET = 1.15


class ContainerdWorld:
    """A registry with the Debian image, a cache server that has prepared it, and nodes."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.base = Path(tempfile.mkdtemp(prefix="lazy-ctb-", dir="/tmp"))
        self._stack.callback(shutil.rmtree, self.base, ignore_errors=True)
        registry = self._stack.enter_context(running_registry(self.base / "registry"))
        image = debian_image()
        push(image.layout, image.tag, registry.address, _NAME)
        self.reference = f"{registry.address}/{_NAME}:{image.tag}"
        self.server = self.new_server()
        self.new_node(self.server).rpull(self.reference)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def new_server(self) -> CacheServer:
        """A cache server that knows nothing."""
        server = CacheServer()
        self._stack.callback(server.close)
        server.start()
        return server

    def new_node(self, server: CacheServer) -> Node:
        """A node that knows nothing, with our snapshotter over that server."""
        node = Node(server=server.socket)
        self._stack.callback(node.close)
        node.start()
        return node

    def new_containerd(self) -> Containerd:
        """A containerd that knows nothing, with its own overlayfs snapshotter."""
        directory = Path(tempfile.mkdtemp(prefix="c-", dir=self.base))
        containerd = Containerd(directory, Setup())
        self._stack.callback(containerd.stop)
        containerd.start()
        return containerd


def containerd_cases(world: ContainerdWorld) -> list[Case]:
    """All cases of this module."""
    return [_cold(world), _first(world), _warm(world)]


def _cold(world: ContainerdWorld) -> Case:
    arms = {
        _BASELINE: lambda: _pull_whole(world),
        _SUBJECT: lambda: _pull_lazily(world, world.server),
    }
    return Case(
        "containerd-cold",
        "Pull and run, prepared at the cache server, node empty",
        arms,
        _SUBJECT,
        _BASELINE,
        _COLD_TARGET,
    )


def _first(world: ContainerdWorld) -> Case:
    arms = {
        _BASELINE: lambda: _pull_whole(world),
        _SUBJECT: lambda: _pull_unprepared(world),
    }
    return Case("containerd-first", "Pull and run, nothing prepared", arms, _SUBJECT, _BASELINE)


def _warm(world: ContainerdWorld) -> Case:
    node = world.new_node(world.server)
    node.rpull(world.reference)
    plain = world.new_containerd()
    plain.do("images", "pull", "--plain-http", world.reference)
    arms = {
        _BASELINE: lambda: _run(plain, world.reference),
        _SUBJECT: lambda: _run(node.containerd, world.reference, "--snapshotter", SNAPSHOTTER),
    }
    return Case("containerd-warm", "Run, all of it here", arms, _SUBJECT, _BASELINE, _WARM_TARGET)


def _pull_whole(world: ContainerdWorld) -> float:
    containerd = world.new_containerd()
    try:
        with timed() as watch:
            containerd.do("images", "pull", "--plain-http", world.reference)
        return watch.seconds + _run(containerd, world.reference)
    finally:
        containerd.stop()


def _pull_lazily(world: ContainerdWorld, server: CacheServer) -> float:
    node = world.new_node(server)
    try:
        with timed() as watch:
            node.rpull(world.reference)
        return watch.seconds + _run(node.containerd, world.reference, "--snapshotter", SNAPSHOTTER)
    finally:
        node.end()


def _pull_unprepared(world: ContainerdWorld) -> float:
    server = world.new_server()
    try:
        return _pull_lazily(world, server)
    finally:
        server.end()


def _run(containerd: Containerd, reference: str, *options: str) -> float:
    """Seconds from the start of ctr to the container's first line, which must be right."""
    command = containerd.command("run", "--rm", *options, reference, containerd.new_id(), *_COMMAND)
    with timed() as watch:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        line = process.stdout.readline()
    with process.stdout:
        rest = process.stdout.read()
    if process.wait() or line + rest != _PRINTED:
        raise AssertionError(f"{command}: exit {process.returncode}, printed {line + rest!r}")
    return watch.seconds
