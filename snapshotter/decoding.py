"""What msgspec raises for bytes that are not what they should be, whoever wrote them."""

from __future__ import annotations

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""To be caught around every decoding, and told as an error of ours: not JSON or not of the wanted
type, a string that is no UTF-8, values nested without end."""
