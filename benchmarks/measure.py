"""Cases, arms and samples: everything is sampled in rounds, the arms of a round in random order.

A case compares arms with a baseline on the same machine within the same seconds; what is quoted is
the ratio of the paired samples of each round, with a bootstrap interval, never a bare time.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_SEED = 20_240_229
_RESAMPLES = 2_000

Sample = Callable[[], float]
"""Prepares, times one operation, checks its result (raises when it is wrong); seconds."""


@dataclass(frozen=True, slots=True)
class Case:
    """``arms`` by name; ``baseline`` names the one that the ratios refer to.

    ``target_ratio`` and ``target_s`` are what ``subject`` is meant to stay within.
    """

    name: str
    title: str
    arms: dict[str, Sample]
    subject: str
    baseline: str
    target_ratio: float | None = None
    target_s: float | None = None
    max_samples: int = 30


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of paired ratios and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


@dataclass(slots=True)
class CaseResult:
    """Samples in seconds by arm, in the order of the rounds."""

    name: str
    title: str
    subject: str
    baseline: str
    target_ratio: float | None
    target_s: float | None
    samples: dict[str, list[float]] = field(default_factory=dict)

    def p50(self, arm: str) -> float:
        """The median of an arm, in seconds."""
        return statistics.median(self.samples[arm])

    def p95(self, arm: str) -> float:
        """The 95th percentile (nearest rank) of an arm, in seconds."""
        ordered = sorted(self.samples[arm])
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]

    def ratio(self, arm: str) -> Ratio:
        """How an arm compares with the baseline, round by round."""
        pairs = zip(self.samples[arm], self.samples[self.baseline], strict=True)
        return bootstrap_median([sample / reference for sample, reference in pairs])

    @property
    def is_met(self) -> bool | None:
        """Whether the subject stays within its target; None without one."""
        if self.target_ratio is not None:
            return self.ratio(self.subject).median <= self.target_ratio
        if self.target_s is not None:
            return self.p50(self.subject) <= self.target_s
        return None


def run_case(case: Case, *, warm_ups: int, samples: int) -> CaseResult:
    """Samples every arm ``samples`` times after the warm-ups; a failed check raises."""
    result = CaseResult(
        case.name, case.title, case.subject, case.baseline, case.target_ratio, case.target_s
    )
    result.samples = {arm: [] for arm in case.arms}
    order = random.Random(_SEED)
    for round_number in range(warm_ups + min(samples, case.max_samples)):
        names = sorted(case.arms)
        order.shuffle(names)
        for name in names:
            seconds = case.arms[name]()
            if round_number >= warm_ups:
                result.samples[name].append(seconds)
    return result


def bootstrap_median(values: list[float]) -> Ratio:
    """The median with the 2.5 % and 97.5 % percentiles of resampled medians."""
    resample = random.Random(_SEED)
    medians = sorted(
        statistics.median(resample.choices(values, k=len(values))) for _ in range(_RESAMPLES)
    )
    low, high = medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1]
    return Ratio(statistics.median(values), low, high)


class Stopwatch:
    """Seconds between entering and leaving ``timed``."""

    seconds = 0.0


@contextmanager
def timed() -> Iterator[Stopwatch]:
    """Times its block, without the garbage collector in between."""
    watch = Stopwatch()
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    try:
        yield watch
        watch.seconds = time.perf_counter() - started
    finally:
        gc.enable()
