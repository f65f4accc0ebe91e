"""What ran when, one `Span` per op and rank, and how much of it hides under useful compute."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nestpipe.errors import NestpipeError

LANES = ("loader", "copy", "keys", "route", "host", "write", "net", "compute", "dense_net")
"""Every lane, in the order in which a batch meets them and in which they are drawn."""

Fact = str | int | float


@dataclass(frozen=True, slots=True)
class Span:
    """One op as it ran, e.g. `dense 7.1` on rank 3 from 12.5 ms to 40.0 ms."""

    kind: str
    lane: str
    batch: int
    micro: int | None
    rank: int
    start: float
    """Milliseconds since the start of the run."""
    end: float
    """Milliseconds since the start of the run."""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.batch}" + ("" if self.micro is None else f".{self.micro}")

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Trace:
    """The spans of one run, measured, simulated or nominal, with facts about the run."""

    spans: tuple[Span, ...]
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])
    """What produced the trace: `plan`, `workers`, `micro_batches`, `samples_per_worker` and
    `retrieval`."""

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.rank == rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({span.rank for span in self.spans}))

    @property
    def duration(self) -> float:
        """From the first start to the last end, in milliseconds."""
        if not self.spans:
            return 0.0
        return max(s.end for s in self.spans) - min(s.start for s in self.spans)


# How much of each kind's time hides under useful compute, read from the spans of one rank.


USEFUL = frozenset({"dense", "apply", "update"})
"""The kinds that every plan must run on the compute lane and that nothing can hide."""

IDLE = "idle"
"""Stands in `Exposure.exposed` for exposed time in which no op ran at all."""

Interval = tuple[float, float]


class ShortTraceError(NestpipeError, ValueError):
    """A trace with too few batches to have a steady state."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """An interval of one rank, split into useful compute and the kinds that it waited for."""

    total_ms: float
    compute_ms: float
    """Time in which a useful op ran; together with `exposed` it adds up to `total_ms`."""
    exposed: Mapping[str, float]
    """Time without useful compute, by the kind it is charged to, `idle` included."""
    busy: Mapping[str, float]
    """Time in which an op of the kind ran, hidden or exposed."""

    @property
    def exposed_ms(self) -> float:
        return sum(self.exposed.values())

    def hidden(self, kind: str) -> float:
        """Time of this kind that cost nothing; zero for the useful kinds, which hide the others."""
        if kind in USEFUL:
            return 0.0
        return max(0.0, self.busy.get(kind, 0.0) - self.exposed.get(kind, 0.0))


def exposure(
    spans: Iterable[Span], start: float | None = None, end: float | None = None
) -> Exposure:
    """Charge every instant of [start, end) without useful compute to the kind it waited for.

    The spans are those of one rank; without limits the interval is from first start to last end.
    """
    spans = tuple(spans)
    assert len({span.rank for span in spans}) <= 1, "exposure reads the spans of one rank"
    start = min((s.start for s in spans), default=0.0) if start is None else start
    end = max((s.end for s in spans), default=start) if end is None else end
    end = max(start, end)
    useful = _clipped((s for s in spans if s.kind in USEFUL), start, end)
    causes = _Causes([s for s in spans if s.kind not in USEFUL and s.start < s.end])
    exposed: dict[str, float] = defaultdict(float)
    for gap in _gaps(useful, start, end):
        for kind, ms in causes.charge(gap):
            exposed[kind] += ms
    return Exposure(
        total_ms=end - start,
        compute_ms=_length(useful),
        exposed=dict(sorted(exposed.items())),
        busy=_busy_by(((s.kind, s) for s in spans), start, end),
    )


class _Causes:
    """The ops a gap can be charged to, sorted so that each question is one bisection."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = sorted(spans, key=lambda s: (s.end, s.start))
        self._ends = [span.end for span in self._spans]
        # For each position, the span that started first among those that end there or later.
        self._oldest = self._spans[:]
        for i in range(len(spans) - 2, -1, -1):
            self._oldest[i] = min(self._spans[i], self._oldest[i + 1], key=lambda s: s.start)

    def charge(self, gap: Interval) -> list[tuple[str, float]]:
        """Walk the gap backwards, from each moment to the op whose end allowed it.

        What x waited for is the op that ended last by x (of two, the one that started later): an op
        that is still running at x did not delay anything. So a running op is charged, the oldest
        first, only for time that no finished op explains; what is then left is idle.
        """
        floor, x = gap
        charges: list[tuple[str, float]] = []
        while x > floor:
            place = bisect_right(self._ends, x)
            finished = self._spans[place - 1] if place else None
            until = floor if finished is None else max(floor, finished.end)
            charges += self._unexplained(until, x, place)
            if finished is None or until <= floor:
                break
            x = max(floor, finished.start)
            charges.append((finished.kind, until - x))
        return charges

    def _unexplained(self, since: float, x: float, place: int) -> list[tuple[str, float]]:
        """Split the time from the last end to x, in which only ops that end after x can run."""
        running = self._oldest[place] if place < len(self._oldest) else None
        if since >= x:
            return []
        if running is None or running.start >= x:
            return [(IDLE, x - since)]
        split = max(since, running.start)
        charges = [(running.kind, x - split)]
        return charges if split <= since else [*charges, (IDLE, split - since)]


def steady_interval(spans: Iterable[Span]) -> tuple[float, float, int]:
    """Start, end and number of batches of the steady part of one rank's run.

    It lies between the ends of two updates: after the first quarter of the batches, and after six
    batches where there are enough, and before the last quarter; at least one batch remains.
    """
    ends: dict[int, float] = {}
    for span in spans:
        if span.kind == "update":
            ends[span.batch] = max(span.end, ends.get(span.batch, span.end))
    if len(ends) < 2:
        raise ShortTraceError(
            f"a steady state needs the `update` of at least 2 batches, and the trace has"
            f" {len(ends)}; trace more batches"
        )
    moments = sorted(ends.values())
    late = len(moments) - 1 - len(moments) // 4
    early = min(max(len(moments) // 4, 6), late - 1)
    return moments[early], moments[late], late - early


def lane_busy(spans: Iterable[Span], start: float, end: float) -> dict[str, float]:
    """Milliseconds of [start, end) in which each lane ran at least one op."""
    return _busy_by(((span.lane, span) for span in spans), start, end)


def _busy_by(named: Iterable[tuple[str, Span]], start: float, end: float) -> dict[str, float]:
    groups: dict[str, list[Span]] = defaultdict(list)
    for name, span in named:
        groups[name].append(span)
    return {name: _length(_clipped(groups[name], start, end)) for name in sorted(groups)}


def _clipped(spans: Iterable[Span], start: float, end: float) -> list[Interval]:
    """The union of the spans inside [start, end), as disjoint intervals in order."""
    merged: list[Interval] = []
    for low, high in sorted((max(s.start, start), min(s.end, end)) for s in spans):
        if low >= high:
            continue
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


def _gaps(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    edges = [start, *(edge for interval in intervals for edge in interval), end]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [(low, high) for low, high in pairs if low < high]


def _length(intervals: Iterable[Interval]) -> float:
    return sum((high - low for low, high in intervals), 0.0)
