from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_server.formats.tar_fields import (
    parse_number,
    parse_path,
    parse_pax_records,
    parse_time_ns,
    show,
)
from snapshotter.errors import CorruptError, InvalidInputError
from snapshotter.names import check_component
from tests.unit.cache_server.formats.tar_blocks import pax_record


@given(st.lists(st.sampled_from([b"", b".", b"..", b"a", b"..b", b"\0", b"x" * 130]), max_size=6))
def test_paths_are_relative_and_clean_or_refused(parts: list[bytes]) -> None:
    """What the quick check lets pass is what a look at each part gives."""
    raw = b"/".join(parts)
    kept = [part for part in parts if part not in (b"", b".")]
    if not raw or b".." in kept or b"\0" in raw:
        with pytest.raises(InvalidInputError):
            parse_path(raw)
        return
    path = parse_path(raw)
    assert path == b"/".join(kept)
    assert all(check_component(part) for part in path.split(b"/") if path)


@given(st.integers(-(1 << 62), (1 << 62) - 1))
def test_binary_numbers_are_twos_complements(number: int) -> None:
    field = bytearray(number.to_bytes(12, signed=True))
    field[0] |= 0x80
    assert parse_number(bytes(field), "size") == number


@given(st.integers(0, 0o77777777777))
def test_octal_numbers(number: int) -> None:
    for field in (b"%011o\0", b"%11o ", b"%o\0junk"):
        assert parse_number(field % number, "size") == number


HAVE_RULES = (b"path", b"linkpath", b"uname", b"gname", b"GNU.sparse.")
"""Hypothesis takes words out of the code under test, so it does come upon these keys."""


@given(
    st.dictionaries(
        st.binary(min_size=1, max_size=90).filter(lambda key: b"=" not in key and b"\0" not in key),
        st.binary(min_size=1, max_size=120),
        max_size=5,
    ).filter(lambda records: not any(key.startswith(HAVE_RULES) for key in records))
)
def test_pax_records_hold_any_bytes(records: dict[bytes, bytes]) -> None:
    data = b"".join(pax_record(key, value) for key, value in records.items())
    assert parse_pax_records(data) == records


def test_the_last_pax_record_of_a_key_counts() -> None:
    data = pax_record(b"k", b"1") + pax_record(b"k", b"2")
    assert parse_pax_records(data) == {b"k": b"2"}
    assert parse_pax_records(data + pax_record(b"k", b"")) == {}


@given(st.integers(-(1 << 62), 1 << 62))
def test_pax_times_are_exact(time_ns: int) -> None:
    sign = b"-" if time_ns < 0 else b""
    seconds, fraction = divmod(abs(time_ns), 1_000_000_000)
    assert parse_time_ns(b"%s%d.%09d" % (sign, seconds, fraction)) == time_ns


@pytest.mark.parametrize(
    "value", [b"", b"-", b".5", b"1,5", b" 1", b"1e3", b"nan", b"1.2.3", b"1_0"]
)
def test_other_times_are_refused(value: bytes) -> None:
    with pytest.raises(InvalidInputError):
        parse_time_ns(value)


def test_names_are_shown_printable_and_short() -> None:
    assert show(b"a\n\xff") == r"'a\n\xff'"
    assert len(show(b"x" * 5000)) < 220


def test_a_pax_header_of_newlines_ends() -> None:
    """A record without a blank whose header ends with a newline once led back to itself."""
    with pytest.raises(CorruptError):
        parse_pax_records(b"x" * 30 + b"\n")
