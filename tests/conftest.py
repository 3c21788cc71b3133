"""Fixtures that tests of every kind share."""

from tests.support.registry import registry

__all__ = ["registry"]
