"""Searches find the capacity that a formula has."""

import pytest

from nestpipe.errors import ConfigError
from nestpipe.loadtest.driver import FormulaService, Report, VirtualTime, drive, report
from nestpipe.loadtest.run import search
from nestpipe.loadtest.settings import WorkloadSettings
from nestpipe.loadtest.workload import Visit, legs

SETTINGS = WorkloadSettings(length=128, short=16)


def regular_run(rate: float, length: int, full_ms, **more) -> Report:
    """200 requests at equal distances."""
    short = 16
    made = [Visit(n, n / rate, n / rate + 0.1, n, length - short, short, 4) for n in range(200)]
    service = FormulaService(time=VirtualTime(), full_ms=full_ms, **more)
    driven = drive(service, list(legs(SETTINGS, made)), service.time)
    return report("", driven, target_ms=50.0, seconds=200 / rate, warmup_s=0.0)


def rate_search(ms: float, start: float, **more):
    def attempt(rate: float, seed: int) -> Report:
        return regular_run(rate, 128, lambda length: ms)

    return search(attempt, start, low=1, high=10_000, seeds=(0,), **more)


@pytest.mark.parametrize("start", [5, 95, 4000])
def test_the_highest_rate_of_a_regular_queue(start):
    # At 10 ms each the queue grows above 100/s; request i waits i (10 - 1000/rate) ms, and request
    # 197 is the P99 of 200: it stays within 50 ms up to 1000 / (10 - 40/197) per second.
    found = rate_search(10, start, tolerance=0.01)
    assert found.value == pytest.approx(1000 / (10 - 40 / 197), rel=0.011)
    assert found.value is not None
    assert found.value <= 1000 / (10 - 40 / 197)
    assert found.bounded


def test_a_wide_tolerance_ends_sooner_and_stays_below():
    most = 1000 / (10 - 40 / 197)
    close, wide = rate_search(10, 5, tolerance=0.01), rate_search(10, 5, tolerance=0.5)
    assert len(wide.steps) < len(close.steps)
    assert wide.value is not None
    assert most / 1.5 <= wide.value <= most


@pytest.mark.parametrize("tolerance", [0, -0.1, 1.01, float("nan")])
def test_a_tolerance_that_no_search_can_keep_is_refused(tolerance):
    with pytest.raises(ConfigError, match=r"tolerance is .*; give a number above 0"):
        rate_search(10, 5, tolerance=tolerance)


def test_the_longest_length_is_a_multiple_of_its_step():
    def attempt(length: float, seed: int) -> Report:
        return regular_run(10, int(length), lambda n: n / 16)  # 800 events in 50 ms

    found = search(attempt, 128, low=64, high=4096, step=64, seeds=(0,))
    assert found.value == 768
    assert found.bounded


def test_cutting_does_not_make_it_longer():
    def attempt(length: float, seed: int) -> Report:
        return regular_run(10, int(length), lambda n: n / 16, cut_length=256)

    found = search(attempt, 128, low=64, high=4096, step=64, seeds=(0,))
    assert found.value == 256


def test_nothing_may_be_found():
    found = rate_search(60, 50)
    assert found.value is None
    assert [step.value for step in found.steps] == [50, 25, 12.5, 6.25, 3.125, 1.5625, 1]


def test_the_limit_of_the_search_may_be_met():
    found = rate_search(0.001, 5000)
    assert found.value == 10_000
    assert not found.bounded


def test_most_seeds_decide_and_no_more_are_run_than_needed():
    tried: list[tuple[float, int]] = []

    def attempt(value: float, seed: int) -> Report:
        tried.append((value, seed))
        slow = value > 100 or seed == 0
        return regular_run(10, 128, lambda length: 60 if slow else 10)

    steps = []
    found = search(attempt, 100, low=1, high=400, seeds=(0, 1, 2), on_step=steps.append)
    assert tried[:5] == [(100, 0), (100, 1), (100, 2), (200, 0), (200, 1)]
    assert found.value == 100
    assert tuple(steps) == found.steps
    assert found.steps[0].kept
    assert not found.steps[1].kept


def test_a_start_outside_the_limits_is_refused():
    with pytest.raises(ConfigError, match="start between 1 and 10000"):
        rate_search(1, 20_000)
