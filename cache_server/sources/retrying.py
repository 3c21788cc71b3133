"""Trying again what may pass: connections that fail or stall, 429 and 5xx."""

from __future__ import annotations

import asyncio
import email.utils
import random
import ssl
from datetime import UTC, datetime

import httpx

from snapshotter.errors import UnavailableError

ATTEMPTS = 4
MAX_RETRY_AFTER_S = 60.0
"""A registry that wants to be left alone for longer is not waited for."""


class TryAgain(Exception):  # noqa: N818 - never leaves the sources
    """A failure that may pass; ``after_s`` is how long the registry wants to be left alone."""

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


PASSING = (TryAgain, httpx.TransportError, ssl.SSLError)
"""What ``Patience.pause`` takes."""


class Patience:
    """Counts failures of one request and waits ever longer between them."""

    def __init__(self, what: str, *, backoff_s: float) -> None:
        self._what = what
        self._backoff_s = backoff_s
        self._failures = 0

    def renew(self) -> None:
        """Forgets the failures: there was progress."""
        self._failures = 0

    async def pause(self, error: Exception) -> None:
        """Waits before the next try. UnavailableError once there were enough, or at once where the
        registry wants a longer pause than is taken.
        """
        self._failures += 1
        cause = str(error) or type(error).__name__
        if self._failures >= ATTEMPTS:
            raise UnavailableError(
                f"{self._what}: failed {self._failures} times, last: {cause}"
            ) from error
        wished_s = error.after_s if isinstance(error, TryAgain) else 0.0
        if wished_s > MAX_RETRY_AFTER_S:
            raise UnavailableError(
                f"{self._what}: {cause}; try again in {wished_s:.0f} s"
            ) from error
        # many hosts that failed together must not come back together
        spread = random.uniform(0.5, 1.5)  # noqa: S311 - no secret
        await asyncio.sleep(max(self._backoff_s * 2 ** (self._failures - 1) * spread, wished_s))


def retry_after_s(text: str, now: datetime | None = None) -> float:
    """A Retry-After header in seconds from ``now``: it has seconds or a date (RFC 9110, 10.2.3).

    What is neither, or past, counts as 0.
    """
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        at = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return max((at - (now or datetime.now(UTC))).total_seconds(), 0.0)
