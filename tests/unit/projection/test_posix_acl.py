from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.errors import InvalidInputError
from snapshotter.projection.posix_acl import access_acl_after_chmod, parse_acl
from tests.unit.cache_server.formats.tar_blocks import make_acl

NO_ID = 0xFFFF_FFFF
OWNER, GROUP, MASK, OTHER = (1, 6, NO_ID), (4, 4, NO_ID), (0x10, 4, NO_ID), (0x20, 0, NO_ID)
USER, NAMED_GROUP = (2, 7, 1234), (8, 5, 99)
FULL = [OWNER, USER, (2, 1, 5), GROUP, NAMED_GROUP, MASK, OTHER]


def test_entries() -> None:
    assert parse_acl(make_acl(*FULL)) == FULL
    assert parse_acl(make_acl()) == parse_acl(b"") == parse_acl(b"none of this version") == []


def test_chmod_sets_owner_mask_and_others() -> None:
    changed = access_acl_after_chmod(make_acl(*FULL), 0o4753)
    assert changed == make_acl(
        (1, 7, NO_ID), USER, (2, 1, 5), GROUP, NAMED_GROUP, (0x10, 5, NO_ID), (0x20, 3, NO_ID)
    )


def test_what_the_mode_says_alone_is_not_kept() -> None:
    assert access_acl_after_chmod(make_acl(OWNER, GROUP, OTHER), 0o640) is None
    assert access_acl_after_chmod(make_acl(), 0o640) is None


def test_chmod_without_named_entries_sets_mask_or_group() -> None:
    with_mask = make_acl(OWNER, GROUP, MASK, OTHER)
    assert access_acl_after_chmod(with_mask, 0o607) == make_acl(
        OWNER, GROUP, (0x10, 0, NO_ID), (0x20, 7, NO_ID)
    )


BAD = {
    "cut version": b"\2\0\0",
    "half an entry": make_acl(OWNER, GROUP, OTHER)[:-1],
    "no owner": make_acl(GROUP, OTHER),
    "no group": make_acl(OWNER, OTHER),
    "no others": make_acl(OWNER, GROUP),
    "two owners": make_acl(OWNER, OWNER, GROUP, OTHER),
    "two masks": make_acl(OWNER, GROUP, MASK, MASK, OTHER),
    "order": make_acl(GROUP, OWNER, OTHER),
    "named, no mask": make_acl(OWNER, USER, GROUP, OTHER),
    "permissions": make_acl((1, 8, NO_ID), GROUP, OTHER),
    "named without id": make_acl(OWNER, (2, 6, NO_ID), GROUP, MASK, OTHER),
    "unknown tag": make_acl(OWNER, GROUP, OTHER, (0x40, 0, NO_ID)),
}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
def test_what_linux_refuses_is_refused(value: bytes) -> None:
    with pytest.raises(InvalidInputError):
        parse_acl(value)


@given(st.binary(max_size=60))
def test_any_bytes_are_entries_or_refused(value: bytes) -> None:
    try:
        entries = parse_acl(value)
    except InvalidInputError:
        return
    assert not entries or make_acl(*entries) == value
