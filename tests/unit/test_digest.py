"""Digests at the edges."""

import hashlib

import pytest

from snapshotter.digest import format_digest, parse_digest, sha256
from snapshotter.errors import InvalidInputError


def test_text_and_raw_form_are_one_digest():
    raw = sha256(b"content")
    assert raw == hashlib.sha256(b"content").digest()
    assert parse_digest(format_digest(raw)) == raw


@pytest.mark.parametrize(
    "text",
    ["", "sha256:", "sha256:" + "0" * 63, "sha256:" + "0" * 65, "sha256:" + "A" * 64,
     "sha512:" + "0" * 128, "sha256:" + "0" * 64 + "\n"],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(InvalidInputError):
        parse_digest(text)
