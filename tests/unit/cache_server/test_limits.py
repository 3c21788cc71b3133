from __future__ import annotations

import msgspec
import pytest

from cache_server.limits import IngestLimits, parse_limits
from snapshotter.errors import InvalidInputError


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="layer_entries must be positive"):
        IngestLimits(layer_entries=0)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"path_depth": -1}, IngestLimits)


def test_settings() -> None:
    assert parse_limits([]) == IngestLimits()
    assert parse_limits(["layer_bytes=50G", "path_depth=7"]) == IngestLimits(
        layer_bytes=50 << 30, path_depth=7
    )


@pytest.mark.parametrize(
    "setting", ["help=1", "layer_bytes", "layer_bytes=", "layer_bytes=0", "path_depth=-1",
                "path_depth=1x", "path_depth=G", "layer_bytes=0k", "path_depth=1_0", ""]
)  # fmt: skip
def test_other_settings_are_refused_and_the_names_listed(setting: str) -> None:
    with pytest.raises(InvalidInputError, match="layer_entries, image_entries"):
        parse_limits([setting])
