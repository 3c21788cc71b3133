from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.overlay import acls
from tests.support.scratch import scratch_directory

_permissions = st.integers(0, 7)


@st.composite
def default_acls(draw: st.DrawFn) -> bytes:
    """A legal default ACL, with named users and groups or without."""
    named = draw(
        st.lists(st.tuples(_permissions, st.integers(1, 9)), max_size=2, unique_by=lambda n: n[1])
    )
    nobody = 0xFFFF_FFFF
    entries = [(0x01, draw(_permissions), nobody)]
    entries += [(0x02, bits, who) for bits, who in sorted(named, key=lambda n: n[1])]
    entries.append((0x04, draw(_permissions), nobody))
    if named or draw(st.booleans()):
        entries.append((0x10, draw(_permissions), nobody))
    entries.append((0x20, draw(_permissions), nobody))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@given(default_acls(), st.integers(0, 0o777))
def test_inherits_as_the_kernel_does(default: bytes, mode: int) -> None:
    with scratch_directory() as base:
        os.setxattr(base, acls.DEFAULT, default)
        os.close(os.open(base / "made", os.O_CREAT | os.O_WRONLY, mode))
        made_mode, access = acls.inherit(default, mode)
        assert oct(made_mode) == oct((base / "made").stat().st_mode & 0o7777)
        assert access == _access_acl(base / "made")


def _access_acl(path: Path) -> bytes | None:
    try:
        return os.getxattr(path, acls.ACCESS)
    except OSError:
        return None


@pytest.mark.parametrize("damaged", [b"", b"\1\0\0\0", b"\2\0\0\0\1\0"])
def test_refuses_what_is_no_acl(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="ACL"):
        acls.inherit(damaged, 0o644)
