"""Fixtures of the tests with guests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.guests import Guests, guest_kernels
from tests.support.product import CacheServer, Product

__all__ = ["guest_kernels", "guests"]


@pytest.fixture(scope="module")
def guests(cache_server: CacheServer, guest_kernels: Path) -> Iterator[Guests]:
    """A product whose guests may be started."""
    product = Product(server=cache_server.socket)
    try:
        yield Guests(product, guest_kernels)
    finally:
        product.close()
