"""Tests any cache-v1 server: python -m tests.contract.cache_v1_conformance --socket PATH …"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).with_name("conformance")


def main() -> int:
    """Runs the conformance tests against the server that the arguments name."""
    parser = argparse.ArgumentParser(prog="cache_v1_conformance", description=__doc__)
    parser.add_argument("--socket", help="of a server (default: one of our own)")
    parser.add_argument("--token", help="that it wants")
    parser.add_argument("--image", help="an image that it can prepare")
    parser.add_argument("--architecture", default="amd64", help="of that image (amd64)")
    given = parser.parse_args()
    if (given.socket is None) != (given.image is None):
        parser.error("give --socket and --image, or neither")
    options = [f"--cache-v1-{name}={value}" for name, value in vars(given).items() if value]
    return pytest.main([str(TESTS), "-p", "no:cacheprovider", *options])


if __name__ == "__main__":
    sys.exit(main())
