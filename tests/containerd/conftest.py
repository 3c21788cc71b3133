"""Nodes for the tests with a real containerd; each ends with what asked for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.box_image import box_image, push_image
from tests.support.images import Image
from tests.support.node import Node
from tests.support.product import CacheServer
from tests.support.registry import Registry

NewNode = Callable[..., Node]
Push = Callable[[Image], str]


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
def node(cache_server: CacheServer) -> Iterator[Node]:
    """A node that the tests of a module share, over the session's cache server."""
    shared = Node(server=cache_server.socket)
    try:
        shared.start()
        yield shared
    finally:
        shared.close()


@pytest.fixture
def push(registry: Registry, tmp_path: Path, request: pytest.FixtureRequest) -> Push:
    """Pushes an image under a name that no other test has; its reference."""
    name = request.node.name.partition("[")[0].lower().replace("_", "-")
    count = iter(range(1000))

    def push_it(image: Image) -> str:
        number = next(count)
        return push_image(image, tmp_path / f"oci-{number}", registry.address, f"{name}-{number}")

    return push_it


@pytest.fixture
def box(push: Push, request: pytest.FixtureRequest) -> str:
    """The reference of a box image whose second layer no other test has."""
    return push(box_image(seed=len(request.node.nodeid) * 1000 + sum(request.node.nodeid.encode())))
