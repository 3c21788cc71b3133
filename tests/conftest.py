"""Fixtures that tests of every kind share."""

from tests.support.debian_image import debian
from tests.support.product import cache_server, new_product
from tests.support.registry import registry

__all__ = ["cache_server", "debian", "new_product", "registry"]
