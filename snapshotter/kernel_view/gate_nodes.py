"""The gate's directories: which nodeid stands for which.

1 is the root, 2 is ``v``, and 0x100 + its byte a fan-out directory below ``v``. With bit 62 set, it
is of ``g<number>``: the number shifted by 9, and for a fan-out directory bit 8 and its byte. Bit 63
is set for contents (``node_journal``).
"""

from __future__ import annotations

import re

from snapshotter.fuse import wire

VERDICT_NODE = 2
FAN_OUT_BIT = 0x100
_IMAGE_NODE = 1 << 62
_IMAGE_NAME = re.compile(rb"g(0|[1-9][0-9]{0,14})")
_FAN_OUT_NAME = re.compile(rb"[0-9a-f]{2}")


def is_verdict(nodeid: int) -> bool:
    """Whether it is ``v`` or one of its fan-out directories."""
    return not nodeid & _IMAGE_NODE and nodeid != wire.ROOT_NODEID


def image_number(nodeid: int) -> int:
    """The number of the image whose directory, or fan-out directory, this is."""
    return (nodeid ^ _IMAGE_NODE) >> 9


def directory_in_root(name: bytes) -> int | None:
    """``v`` or ``g<number>``; None: there is no such directory."""
    if name == b"v":
        return VERDICT_NODE
    match = _IMAGE_NAME.fullmatch(name)
    return None if match is None else _IMAGE_NODE | int(match[1]) << 9


def fan_out(parent: int, name: bytes) -> int | None:
    """A fan-out directory below ``v`` or ``g<number>``; None: there is no such directory."""
    if _FAN_OUT_NAME.fullmatch(name) is None:
        return None
    return FAN_OUT_BIT | int(name, 16) | (0 if parent == VERDICT_NODE else parent)
