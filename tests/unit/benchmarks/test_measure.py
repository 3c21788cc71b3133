"""The benchmark runner samples fairly and computes what it says."""

import pytest

from benchmarks.measure import Case, CaseResult, bootstrap_median, run_case


def case(calls: list[str], *, samples: int = 30) -> Case:
    def arm(name: str, seconds: float) -> float:
        calls.append(name)
        return seconds

    arms = {"slow": lambda: arm("slow", 3.0), "fast": lambda: arm("fast", 2.0)}
    return Case("name", "Title", arms, "slow", "fast", target_ratio=1.5, max_samples=samples)


def test_every_round_has_every_arm_and_warm_ups_are_not_kept() -> None:
    calls: list[str] = []
    result = run_case(case(calls), warm_ups=2, samples=5)
    rounds = [set(calls[start : start + 2]) for start in range(0, len(calls), 2)]
    assert rounds == [{"slow", "fast"}] * 7
    assert len(set(zip(calls[::2], calls[1::2], strict=True))) == 2, "the order is shuffled"
    assert result.samples == {"slow": [3.0] * 5, "fast": [2.0] * 5}


def test_order_is_the_same_every_time() -> None:
    first: list[str] = []
    second: list[str] = []
    for calls in (first, second):
        run_case(case(calls), warm_ups=0, samples=20)
    assert first == second


def test_a_case_may_allow_fewer_samples() -> None:
    assert len(run_case(case([], samples=4), warm_ups=0, samples=9).samples["fast"]) == 4


def test_failed_check_voids_the_case() -> None:
    def wrong() -> float:
        raise AssertionError("wrong bytes")

    arms = {"wrong": wrong, "right": lambda: 1.0}
    with pytest.raises(AssertionError, match="wrong bytes"):
        run_case(Case("n", "T", arms, "wrong", "right"), warm_ups=0, samples=1)


def result(slow: list[float], fast: list[float], target: float | None) -> CaseResult:
    samples = {"slow": slow, "fast": fast}
    return CaseResult("n", "T", "slow", "fast", target, None, samples)


def test_ratio_is_of_pairs() -> None:
    ratio = result([2.0, 40.0, 600.0], [1.0, 10.0, 100.0], None).ratio("slow")
    assert ratio.median == 4.0
    assert (ratio.low, ratio.high) == (2.0, 6.0)


def test_target_is_met_at_the_bound_and_missed_beyond() -> None:
    assert result([3.0], [2.0], 1.5).is_met is True
    assert result([3.0], [2.0], 1.4).is_met is False
    assert result([3.0], [2.0], None).is_met is None


def test_interval_of_a_constant_is_a_point() -> None:
    ratio = bootstrap_median([2.0] * 10)
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)


def test_percentiles() -> None:
    sampled = result([float(n) for n in range(1, 101)], [1.0] * 100, None)
    assert sampled.p50("slow") == 50.5
    assert sampled.p95("slow") == 96.0
