"""Learning rates: a schedule that is a function of the step alone, and rates by name.

A run that goes on from a checkpoint, or has another plan, has the same rate at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from nestpipe.config.values import fit_leaf, fraction, not_negative, positive
from nestpipe.errors import ConfigError

ScheduleName = Literal["constant", "cosine", "step"]


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """How a learning rate changes over a run, and who has another one."""

    schedule: ScheduleName = "constant"
    """What the rate does after warm-up: `constant`; `cosine`, down to `final` in `decay_steps`;
    `step`, times `decay` after every `decay_steps`."""
    warmup_steps: int = 0
    """Batches in which the rate rises evenly, up to `lr` in the last of them."""
    decay_steps: int = 0
    """Batches of a cosine, or between two steps, after warm-up."""
    decay: float = 0.1
    """step: what the rate is multiplied by."""
    final: float = 0.0
    """cosine: the part of `lr` that is left at the end, and stays."""
    rates: tuple[str, ...] = ()
    """Other rates by name, such as `["user_*=0.01"]`; the first pattern that fits counts."""

    def __post_init__(self) -> None:
        fit_leaf(ScheduleName, self.schedule, "schedule")
        not_negative("warmup_steps", self.warmup_steps)
        not_negative("decay_steps", self.decay_steps)
        positive("decay", self.decay)
        fraction("final", self.final)
        if self.schedule != "constant" and not self.decay_steps:
            raise ConfigError(
                f"decay_steps is 0 and schedule {self.schedule!r}; say in how many batches the "
                "rate falls"
            )
        rates_of(self.rates)

    def factor(self, step: int) -> float:
        """What the rate of that step, counted from 1, is over `lr`."""
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        done = step - 1 - self.warmup_steps
        if self.schedule == "cosine":
            part = min(done, self.decay_steps) / self.decay_steps
            return self.final + (1 - self.final) * (1 + math.cos(math.pi * part)) / 2
        return self.decay ** (done // self.decay_steps) if self.schedule == "step" else 1.0


def rates_of(rates: Iterable[str]) -> dict[str, float]:
    """The patterns of `pattern=rate`, with their rates."""
    found: dict[str, float] = {}
    for text in rates:
        pattern, equals, number = text.partition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = math.nan
        if not (pattern.strip() and equals and 0 < rate < math.inf):
            raise ConfigError(
                f"rates has {text!r}; write a name or pattern and a rate above 0, as in "
                "'user_*=0.01'"
            )
        found[pattern.strip()] = rate
    return found


def first_match(patterns: Mapping[str, float], name: str) -> float | None:
    """What the first pattern that fits the name says; None where none does."""
    return next((value for p, value in patterns.items() if fnmatchcase(name, p)), None)


def refuse_idle(key: str, patterns: Iterable[str], names: Iterable[str], what: str) -> None:
    """Refuse a pattern that fits nothing: it is a misspelling, and would change nothing."""
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            some = ", ".join(known[:6]) + (", ..." if len(known) > 6 else "")
            raise ConfigError(f"{key} has {pattern!r}, which fits no {what}; there are {some}")
