"""Fixtures that tests of every kind share, and how property tests choose their examples."""

import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.support.debian_image import debian
from tests.support.five_layers import five, five_layers
from tests.support.product import cache_server, new_product
from tests.support.registry import registry

# A shell's background job starts with SIGINT ignored, which everything started here would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["cache_server", "debian", "five", "five_layers", "new_product", "registry"]

# The same examples everywhere and no limit in wall-clock time: a busy machine changes no verdict.
# (Hypothesis takes some from the modules that are loaded: a file alone may see others than all do.)
# A test that takes minutes is most likely one that failed and whose example is being made smaller.
# A time limit of pytest's that strikes while an example is drawn shows up as hypothesis'
# FlakyStrategyDefinition, so slow work in a property test is what to look for then.
# `--hypothesis-profile=search` looks for examples that nobody has seen yet.
_ANY_MACHINE = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("repeatable", derandomize=True, database=None, **_ANY_MACHINE)
settings.register_profile("search", max_examples=1000, **_ANY_MACHINE)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the cache-v1 conformance tests find their server (docs/protocol/cache-v1.md)."""
    group = parser.getgroup("cache-v1", "cache-v1 conformance; by default of a server of our own")
    group.addoption("--cache-v1-socket", help="of the server to be tested")
    group.addoption("--cache-v1-token", help="that it wants")
    group.addoption("--cache-v1-image", help="an image that it can prepare")
    group.addoption("--cache-v1-architecture", default="amd64", help="of that image")
