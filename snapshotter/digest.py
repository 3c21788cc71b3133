"""SHA-256 digests: raw 32 bytes inside, ``sha256:<64 lower-case hex>`` at the edges."""

from __future__ import annotations

import hashlib
import re

from snapshotter.errors import InvalidInputError

DIGEST_SIZE = 32
_TEXT = re.compile(r"sha256:([0-9a-f]{64})")


def sha256(data: bytes | bytearray | memoryview) -> bytes:
    """The raw 32-byte SHA-256 of ``data``."""
    return hashlib.sha256(data).digest()


def format_digest(raw: bytes) -> str:
    """``sha256:<hex>`` of a raw digest."""
    return "sha256:" + raw.hex()


def parse_digest(text: str) -> bytes:
    """The raw digest of ``sha256:<64 lower-case hex>``; InvalidInputError for anything else."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InvalidInputError(f"not a sha256 digest: {text[:100]!r}")
    return bytes.fromhex(match[1])
