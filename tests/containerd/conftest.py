"""Nodes for the tests with a real containerd; each ends with what asked for it."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.box_image import Pushed, box_image, pause_image, push_image
from tests.support.images import Image
from tests.support.node import Node
from tests.support.product import CacheServer
from tests.support.registry import Registry

NewNode = Callable[..., Node]
Push = Callable[[Image], Pushed]


@pytest.fixture
def new_node() -> Iterator[NewNode]:
    """Makes nodes (options as of Node) that are up and end with the test."""
    with ExitStack() as stack:

        def make(**options: Any) -> Node:
            node = Node(**options)
            stack.callback(node.close)
            node.start()
            return node

        yield make


@pytest.fixture(scope="module")
def node(
    cache_server: CacheServer, registry: Registry, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    """A node with CRI that the tests of a module share, over the session's cache server."""
    pause = push_image(pause_image(), tmp_path_factory.mktemp("pause"), registry, "pause")
    shared = Node(
        server=cache_server.socket,
        cri=True,
        registry=registry.address,
        sandbox_image=pause.reference,
    )
    try:
        shared.start()
        yield shared
    finally:
        shared.close()


@pytest.fixture
def push(registry: Registry, tmp_path: Path, request: pytest.FixtureRequest) -> Push:
    """Pushes an image under a name that no other test has."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    numbers = itertools.count()

    def push_it(image: Image) -> Pushed:
        number = next(numbers)
        return push_image(image, tmp_path / f"oci-{number}", registry, f"{name}-{number}")

    return push_it


@pytest.fixture
def box(push: Push, request: pytest.FixtureRequest) -> Pushed:
    """A box image whose second layer no other test has."""
    return push(box_image(seed=zlib.crc32(request.node.nodeid.encode())))
