"""The server that is tested, a connection to it, and the image that it prepared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from snapshotter.projection.image_reader import ImageInode, ImageReader
from tests.support.cache_v1 import Client
from tests.support.cache_v1_target import Target, target_of


@pytest.fixture(scope="package")
def target(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Target]:
    with target_of(pytestconfig, tmp_path_factory.mktemp("conformance")) as found:
        yield found


@pytest.fixture
def client(target: Target) -> Iterator[Client]:
    with target.client() as connected:
        yield connected


@pytest.fixture(scope="package")
def prepared(target: Target) -> dict[str, Any]:
    with target.client() as connected:
        answer = connected.ask(target.prepare())
    assert answer["status"] == "prepared", answer
    return answer


@pytest.fixture(scope="package")
def reader(target: Target, prepared: dict[str, Any]) -> ImageReader:
    image = prepared["metadata_image"]
    with target.client() as connected:
        return ImageReader(connected.content(image["content"], image["size"]))


@pytest.fixture(scope="package")
def tree(reader: ImageReader) -> dict[bytes, ImageInode]:
    return dict(reader.walk())
