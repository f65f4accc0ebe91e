"""How long a history, how tight a target: chosen from what the model's work takes here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nestpipe.errors import ConfigError
from nestpipe.loadtest.target import measure_costs
from nestpipe.serve.engine.cost_model import Costs
from nestpipe.serve.model.ranker import HstuRankModel
from nestpipe.serve.types import Clock, History, RankItem

# Shapes: N events, C candidates

TARGET_MS = 100.0
"""Where neither target nor length is given."""
LEAST_TARGET_MS = 50.0
"""Below this the delays of the driver and of HTTP are too great a part of what is measured."""
INLINE_OVER_TARGET = 1.5
"""What an inline ranking takes at the length that is chosen, in targets."""
CLOSE = 0.9
"""A length that makes this much of the usual target is paired with the usual target."""
CAPPED_OVER_TARGET = 0.5
"""What an inline ranking takes at the cap: with a queue it must still be in time."""
USED = 0.06
"""Part of the time for which an instance computes: so that two prefixes seldom meet in one."""
CHUNK = 256
"""Events of a prefix that an instance computes at a time."""
SHORTEST, LONGEST, STEP = 256, 4096, 64
"""Lengths to choose from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the user fixed; None: to be chosen."""

    length: int | None = None
    target_ms: float | None = None
    rate: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is asked of the service, and what its work was predicted to take."""

    length: int
    cap: int
    """Events that the capped arm sends."""
    target_ms: float
    rate: float
    inline_ms: float
    capped_ms: float
    prefix_ms: float
    cached_ms: float


def measure(model: HstuRankModel, asked: Asked, candidates: int, short: int, clock: Clock) -> Costs:
    """Time the model as an instance does when it starts, up to lengths that may be chosen."""
    longest = asked.length
    if longest is None:
        enough_ms = INLINE_OVER_TARGET * (asked.target_ms or TARGET_MS)
        longest = SHORTEST
        while longest < LONGEST and _inline_ms(model, longest, candidates, clock) < enough_ms:
            longest *= 2
    return measure_costs(model, longest, candidates, clock, short, CHUNK)


def choose(costs: Costs, asked: Asked, candidates: int, short: int, instances: int) -> Sizes:
    """A length at which inline ranking takes longer than the target, and a low rate."""

    def inline_ms(length: int) -> float:
        return costs.inline_ms(length, candidates)

    length, target_ms = asked.length, asked.target_ms
    if length is None:
        most_ms = INLINE_OVER_TARGET * (target_ms or TARGET_MS)
        length = _longest(most_ms, inline_ms, SHORTEST, LONGEST)
    if target_ms is None:
        target_ms = round(inline_ms(length) / INLINE_OVER_TARGET, 1)
        if asked.length is None and target_ms > CLOSE * TARGET_MS:
            target_ms = TARGET_MS
        _refuse_tight(target_ms, length, inline_ms(length))
    cap = _longest(CAPPED_OVER_TARGET * target_ms, inline_ms, STEP, length - 1)
    prefix_ms = costs.prefix_ms(length - short)
    cached_ms = costs.cached_ms(length - short, candidates)
    rate = asked.rate
    if rate is None:
        rate = round(USED * instances * 1e3 / max(prefix_ms + cached_ms, inline_ms(length)), 2)
    return Sizes(
        length=length,
        cap=cap,
        target_ms=target_ms,
        rate=rate,
        inline_ms=inline_ms(length),
        capped_ms=inline_ms(cap),
        prefix_ms=prefix_ms,
        cached_ms=cached_ms,
    )


def _longest(most_ms: float, inline_ms: Callable[[int], float], least: int, most: int) -> int:
    """The longest length, in steps, whose inline ranking takes at most so long."""
    fitting = [n for n in range(least, most + 1, STEP) if inline_ms(n) <= most_ms]
    return max(fitting, default=min(least, most))


def _refuse_tight(target_ms: float, length: int, inline_ms: float) -> None:
    if target_ms < LEAST_TARGET_MS:
        raise ConfigError(
            f"{length} events are ranked in {inline_ms:.0f} ms here, and a target that this misses "
            f"would be below {LEAST_TARGET_MS:g} ms; give a longer --length, a larger --random, or "
            "--target-ms itself"
        )


def _inline_ms(model: HstuRankModel, length: int, candidates: int, clock: Clock) -> float:
    """Once for nothing, once by the clock."""
    events_N, ids_C = np.arange(length), np.arange(candidates)
    item = RankItem(History(events_N, events_N), ids_C, time=length)
    model.full([item])
    start = clock.now()
    model.full([item])
    return (clock.now() - start) * 1e3
