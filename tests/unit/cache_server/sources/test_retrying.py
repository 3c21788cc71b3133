import asyncio
from datetime import UTC, datetime

import pytest

from cache_server.sources import retrying
from cache_server.sources.retrying import Patience, TryAgain, retry_after_s
from snapshotter.errors import UnavailableError

NOW = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        ("Fri, 01 May 2026 12:00:30 GMT", 30.0),
        ("Fri, 01 May 2026 14:00:30 +0200", 30.0),
        ("Fri, 01 May 2026 12:00:30 -0000", 30.0),
        ("Fri, 01 May 2026 11:00:00 GMT", 0.0),
        ("", 0.0),
        ("-1", 0.0),
        ("soon", 0.0),
        ("1.5", 0.0),
        ("²", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(text: str, seconds: float) -> None:
    assert retry_after_s(text, NOW) == seconds


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was slept, without sleeping."""
    times: list[float] = []

    async def sleep(seconds: float) -> None:
        times.append(seconds)

    monkeypatch.setattr(retrying.asyncio, "sleep", sleep)
    return times


def test_pauses_grow_with_jitter_and_end(slept: list[float]) -> None:
    async def run() -> None:
        patience = Patience("it", backoff_s=1.0)
        for _ in range(10):
            await patience.pause(TryAgain("503"))

    with pytest.raises(UnavailableError, match="it: failed 4 times, last: 503"):
        asyncio.run(run())
    assert len(slept) == 3
    for pause, base in zip(slept, (1.0, 2.0, 4.0), strict=True):
        assert base / 2 <= pause <= base * 1.5


def test_progress_renews_patience(slept: list[float]) -> None:
    async def run() -> None:
        patience = Patience("it", backoff_s=1.0)
        for _ in range(10):
            await patience.pause(TryAgain("cut"))
            patience.renew()

    asyncio.run(run())
    assert max(slept) <= 1.5


def test_registry_is_left_alone_for_as_long_as_it_wants_but_not_for_hours(
    slept: list[float],
) -> None:
    async def run(wish_s: float) -> None:
        await Patience("it", backoff_s=0.1).pause(TryAgain("429", wish_s))

    asyncio.run(run(20))
    assert slept == [20]
    with pytest.raises(UnavailableError, match="429; try again in 3600 s"):
        asyncio.run(run(3600))
    assert slept == [20]
