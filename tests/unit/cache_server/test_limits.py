from __future__ import annotations

import msgspec
import pytest

from cache_server.limits import IngestLimits


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="layer_entries must be positive"):
        IngestLimits(layer_entries=0)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"path_depth": -1}, IngestLimits)
