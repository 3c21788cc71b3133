"""Decoding what somebody else wrote: nothing but an error of ours comes of it, anywhere."""

from pathlib import Path

import msgspec
import pytest

from snapshotter.decoding import DECODE_ERRORS

SOURCES = Path(__file__).parents[2]


@pytest.mark.parametrize("raw", [b"{", b"[" * 9999, b'{"a":' * 9999, b'"\xff"', b"[1e999]", b""])
def test_whatever_is_wrong_is_one_of_them(raw: bytes) -> None:
    with pytest.raises(DECODE_ERRORS):
        msgspec.json.decode(raw)
    with pytest.raises(DECODE_ERRORS):
        msgspec.json.decode(raw, type=list[dict[str, msgspec.Raw]])


def test_no_module_has_a_shorter_list_of_its_own() -> None:
    modules = [*SOURCES.glob("snapshotter/**/*.py"), *SOURCES.glob("cache_server/**/*.py")]
    own = [path.name for path in modules if "msgspec.MsgspecError" in path.read_text()]
    assert own == ["decoding.py"]
