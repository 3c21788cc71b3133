from __future__ import annotations

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.overlay.whiteouts import TRUSTED, USER, OverlayXattrs, is_whiteout

_parts = st.sampled_from([b"trusted.", b"user.", b"overlay.", b"opaque", b"x", b"y."])


@pytest.mark.parametrize("xattrs", [TRUSTED, USER])
@given(parts=st.lists(_parts, min_size=1, max_size=6))
def test_every_own_name_comes_back_and_none_is_a_mark(
    xattrs: OverlayXattrs, parts: list[bytes]
) -> None:
    name = b"".join(parts)
    stored = xattrs.stored(name)
    assert xattrs.shown(stored) == name
    assert stored not in (xattrs.opaque, xattrs.redirect, xattrs.metacopy, xattrs.alias)


@pytest.mark.parametrize("xattrs", [TRUSTED, USER])
def test_marks_are_nobodys_attribute(xattrs: OverlayXattrs) -> None:
    for mark in (xattrs.opaque, xattrs.redirect, xattrs.metacopy, xattrs.alias):
        assert xattrs.shown(mark) is None


def test_the_other_prefix_is_a_files_own() -> None:
    assert TRUSTED.stored(USER.opaque) == TRUSTED.shown(USER.opaque) == USER.opaque


def test_whiteouts_are_devices_zero_zero_alone() -> None:
    assert is_whiteout(stat.S_IFCHR | 0o644, 0)
    assert not is_whiteout(stat.S_IFCHR, 1)
    assert not is_whiteout(stat.S_IFBLK, 0)
    assert not is_whiteout(stat.S_IFREG, 0)
