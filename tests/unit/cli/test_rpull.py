import sys

import pytest

from snapshotter.cli import rpull
from snapshotter.errors import UnsupportedError


def test_package_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rpull._check_packages()
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(UnsupportedError, match=r"grpc is not.*'lazy-snapshotter\[containerd\]'"):
        rpull._check_packages()
