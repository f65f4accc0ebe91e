"""The longest history, or the highest rate, at which the target is kept: brackets, then halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nestpipe.errors import ConfigError
from nestpipe.loadtest.report import Report
from nestpipe.loadtest.settings import TOLERANCE, check_tolerance

Try = Callable[[float, int], Report]
"""A run at a value, with a seed."""
Told = Callable[["SearchStep"], None]


@dataclass(frozen=True, slots=True)
class SearchStep:
    """The runs at one value."""

    value: float
    reports: tuple[Report, ...]
    kept: bool
    """Whether most of the runs kept the target."""


@dataclass(frozen=True, slots=True)
class Found:
    """The end of a search."""

    value: float | None
    """The largest value that kept the target; None: not even the smallest did."""
    bounded: bool
    """Whether a larger value was tried and did not; else the limit of the search was met."""
    steps: tuple[SearchStep, ...]


def search(
    attempt: Try,
    start: float,
    *,
    low: float,
    high: float,
    step: float = 0.0,
    tolerance: float = TOLERANCE,
    seeds: Sequence[int] = (0, 1, 2),
    told: Told = lambda step: None,
) -> Found:
    """The largest value from `low` to `high` that keeps the target, within `tolerance` of it.

    With a `step` only its multiples are tried. A value keeps the target when most of its seeds do.
    """
    check_tolerance(tolerance)
    if not low <= start <= high:
        raise ConfigError(f"the search starts at {start:g}; start between {low:g} and {high:g}")
    steps: list[SearchStep] = []

    def kept(value: float) -> bool:
        steps.append(_try(attempt, value, seeds))
        told(steps[-1])
        return steps[-1].kept

    good, bad = _bracket(kept, _round(start, step), _round(low, step), high, step)
    while good is not None and bad is not None:
        middle = _round((good * bad) ** 0.5, step)
        if bad / good <= 1 + tolerance or not good < middle < bad:
            break
        if kept(middle):
            good = middle
        else:
            bad = middle
    return Found(good, bad is not None, tuple(steps))


def _bracket(
    kept: Callable[[float], bool], start: float, low: float, high: float, step: float
) -> tuple[float | None, float | None]:
    """A value that keeps the target and a larger one that does not; either may be missing."""
    value = start
    if kept(value):
        while value < high:
            larger = min(_round(2 * value, step), high)
            if not kept(larger):
                return value, larger
            value = larger
        return value, None
    while value > low:
        smaller = max(_round(value / 2, step), low)
        if kept(smaller):
            return smaller, value
        value = smaller
    return None, value


def _try(attempt: Try, value: float, seeds: Sequence[int]) -> SearchStep:
    """Runs at one value, until most seeds agree."""
    enough = len(seeds) // 2 + 1
    reports: list[Report] = []
    for seed in seeds:
        reports.append(attempt(value, seed))
        kept = sum(report.keeps_target for report in reports)
        if kept >= enough or len(reports) - kept >= enough:
            break
    return SearchStep(value, tuple(reports), kept >= enough)


def _round(value: float, step: float) -> float:
    return max(step, round(value / step) * step) if step else value
