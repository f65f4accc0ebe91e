"""What every drawing of a trace shares: short codes, lane order, sub-lines and round ticks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nestpipe.trace.span import LANES, Span

CODES: Mapping[str, str] = {
    "prefetch": "p",
    "copy": "c",
    "dedup": "dd",
    "counts": "n",
    "keys": "k",
    "union": "un",
    "replica_keys": "rk",
    "replica_union": "ru",
    "stale_mask": "sm",
    "retrieve": "rt",
    "sync": "s",
    "swap": "sw",
    "patch": "pa",
    "rows": "r",
    "dense": "d",
    "grads": "g",
    "totals": "t",
    "reduce": "rd",
    "apply": "a",
    "update": "u",
    "replica_sync": "rs",
    "writeback": "w",
}
"""One or two letters per known kind, in the order in which a batch meets them."""


SHORTEST = 1e-9
"""A trace shorter than this, in milliseconds, is drawn as one moment: a scale would overflow."""


def codes_for(kinds: Collection[str]) -> dict[str, str]:
    """A distinct code of letters for each kind, in drawing order; the known kinds keep theirs."""
    chosen = {kind: code for kind, code in CODES.items() if kind in kinds}
    taken = set(CODES.values())
    for kind in sorted(set(kinds) - set(CODES)):
        chosen[kind] = next(code for code in _candidates(kind) if code not in taken)
        taken.add(chosen[kind])
    return chosen


def _candidates(kind: str) -> Iterator[str]:
    # Letters only: a digit at the end of a code would read as part of the batch number.
    letters = "".join(c for c in kind.lower() if c.isascii() and c.isalpha())
    yield from (letters[:n] for n in range(1, len(letters) + 1))
    stem = letters[:1] or "x"
    yield from (stem + "x" * n for n in range(1, 10_000))


def short_label(span: Span, codes: Mapping[str, str]) -> str:
    """The op by its code, e.g. `r1.0` for `rows 1.0`."""
    return codes[span.kind] + number(span)


def number(span: Span) -> str:
    """Batch and micro-batch without the kind, e.g. `1.0`."""
    return f"{span.batch}" + ("" if span.micro is None else f".{span.micro}")


def plain(text: str) -> str:
    """The text with everything that would break a line or an XML file replaced by `?`."""
    return "".join(c if c.isprintable() else "?" for c in text)


def is_nominal(spans: Sequence[Span]) -> bool:
    """Whether the times are small whole numbers: units of a drawn schedule, not milliseconds."""
    durations = [span.duration for span in spans if span.duration > 0]
    whole = all(float(t).is_integer() for span in spans for t in (span.start, span.end))
    return bool(durations) and whole and max(durations) <= 64 * min(durations)


def lane_order(lanes: Iterable[str]) -> list[str]:
    """The known lanes in drawing order, then the unknown ones by name."""
    present = set(lanes)
    return [lane for lane in LANES if lane in present] + sorted(present - set(LANES))


def sublines(spans: Sequence[Span], slack: float = 0.0) -> list[int]:
    """For each span the line of its lane that has room for it; overlaps up to `slack` share one."""
    lines: list[int] = [0] * len(spans)
    busy_until: dict[str, list[float]] = {}
    for index in sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].end)):
        span = spans[index]
        ends = busy_until.setdefault(span.lane, [])
        line = next((n for n, end in enumerate(ends) if span.start >= end - slack), len(ends))
        if line == len(ends):
            ends.append(span.end)
        ends[line] = max(ends[line], span.end)
        lines[index] = line
    return lines


@dataclass(frozen=True, slots=True)
class Tick:
    """A round moment of the time axis and how it is written."""

    time: float
    text: str


def ticks(start: float, end: float, step: float) -> list[Tick]:
    """The multiples of a round step between start and end."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9)
    return [Tick(n * step, f"{n * step:.{digits}f}") for n in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest 1, 2 or 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= least * (1 - 1e-9))


def short_number(value: float) -> str:
    """At most three decimals, and none that are zero."""
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
