"""What ops cost, batch by batch, read from traces of `serial`; and other plans predicted from it.

Costs that are typical for a kind, as `fit` reads them, leave out that batches and ranks differ, and
everybody waits for the slowest. Here a replay meets the very costs that were measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import numpy as np

from nestpipe.errors import ParseError
from nestpipe.schedule import Retrieval, Shape
from nestpipe.schedule.plans import Plan
from nestpipe.schedule.schedule import (
    COLLECTIVES,
    MICRO_KINDS,
    SPECULATIVE_KINDS,
    Kind,
    Op,
    parse_kind,
)
from nestpipe.sim.costs import Cluster, Costs, Scale, costs
from nestpipe.sim.replay import USUAL_BUCKETS, CostOf, Sharing, replay_shared
from nestpipe.trace import Span, Trace

WARM_UP = 2
"""Batches at the start of a trace that are left out."""
REFRESH_KINDS = frozenset({Kind.UNION, Kind.REPLICA_UNION, Kind.SYNC})
"""What plans with two buffers do for the rows that neighbours share, whatever they retrieve; of the
serial runs only the one that retrieves new rows does it."""
BUCKETS = "dense_buckets"
"""A fact of a trace: in how many buckets dense gradients are summed alongside `dense`."""


@dataclass(frozen=True, slots=True)
class SerialRuns:
    """Traces of `serial` in the forms of retrieval, and what the ranks shared."""

    whole: Sequence[Trace]
    new: Sequence[Trace]
    sharing: Sharing
    pooled: Sequence[Trace] = ()
    """With a pool that has filled; only plans that have one need them."""

    def predict(self, plan: Plan, *, batches: int) -> Trace:
        """The trace that another plan of as many micro-batches would have."""
        shape = plan.shape
        cost_of = SerialCosts(self.pooled, self.sharing) if shape.pooled else self._copied(shape)
        return replay_shared(plan, cost_of, self.sharing, batches=batches, buckets=self._buckets)

    def _copied(self, shape: Shape) -> CostOf:
        """Costs of a plan whose batches have copies of the rows that they share."""
        whole, new = (SerialCosts(runs, self.sharing) for runs in (self.whole, self.new))

        def cost_of(op: Op, rank: int) -> float:
            if op.kind in SPECULATIVE_KINDS:
                return _early_cost(op, rank, whole, new)
            refreshes = shape.buffers > 1 and op.kind in REFRESH_KINDS
            return (new if shape.retrieval is Retrieval.NEW or refreshes else whole)(op, rank)

        return cost_of

    @property
    def _buckets(self) -> int:
        return int((*self.whole, *self.pooled)[0].facts.get(BUCKETS, USUAL_BUCKETS))


def _early_cost(op: Op, rank: int, whole: CostOf, new: CostOf) -> float:
    """What no serial run does: marks are as short a message as counts, and of the rows of the first
    micro-batch those come again that the batch before has too, the part that `new` need not read.
    """
    if op.kind is Kind.STALE_MASK:
        return whole(Op(Kind.COUNTS, op.batch), rank)
    retrieve = Op(Kind.RETRIEVE, op.batch)
    all_rows = whole(retrieve, rank)
    shared = max(0.0, 1 - new(retrieve, rank) / all_rows) if all_rows else 1.0
    return shared * whole(Op(Kind.ROWS, op.batch, 0), rank)


class SerialCosts:
    """What every op took out of its pool, batch by batch, in traces of `serial`.

    In a serial run nothing overlaps on a rank, so an op has had all the time since the op before it
    ended. A collective counts from when its last member came.
    """

    def __init__(self, traces: Sequence[Trace], sharing: Sharing) -> None:
        self._batches: list[dict[tuple[Kind, int | None, int], float]] = []
        for trace in traces:
            costs = op_costs(trace, sharing)
            batches = sorted({batch for _, batch, _, _ in costs})
            # The last batches end unlike the others: no keys tell which rows leave.
            pooled = trace.facts.get("retrieval") == Retrieval.POOLED
            for batch in batches[WARM_UP : -2 if pooled else -1]:
                self._batches.append(
                    {(k, m, r): ms for (k, b, m, r), ms in costs.items() if b == batch}
                )
        if not self._batches:
            raise ParseError(
                f"a trace needs more than {WARM_UP + 1} batches to tell costs; trace more"
            )

    def __call__(self, op: Op, rank: int) -> float:
        """Batches take turns, as often as needed; a kind that was not seen costs nothing."""
        batch = self._batches[op.batch % len(self._batches)]
        return batch.get((op.kind, op.micro, rank), 0.0)


_Key = tuple[Kind, int, int | None, int]


def op_costs(trace: Trace, sharing: Sharing) -> dict[_Key, float]:
    """What each op of each rank took: (kind, batch, micro, rank) to milliseconds."""
    turns = [turn for rank in trace.ranks for turn in _turns(trace.of_rank(rank))]
    turns = _without_waiting(turns)
    in_pool: dict[int, list[_Turn]] = defaultdict(list)
    for turn in turns:
        in_pool[sharing.pools[turn.span.rank]].append(turn)
    pools = {pool: _Pool(members, sharing) for pool, members in in_pool.items()}
    return {
        (Kind(t.span.kind), t.span.batch, t.span.micro, t.span.rank): (
            pools[sharing.pools[t.span.rank]].work_of(t)
        )
        for t in turns
    }


@dataclass(frozen=True, slots=True)
class _Turn:
    """An op, and when its turn came."""

    span: Span
    begin: float


def _turns(spans: Sequence[Span]) -> list[_Turn]:
    """Each op of a rank; its turn came when the one before it ended."""
    ordered = sorted(spans, key=lambda span: (span.end, span.start))
    begins = [ordered[0].start, *(span.end for span in ordered[:-1])]
    return [
        _Turn(span, min(begin, span.start)) for span, begin in zip(ordered, begins, strict=True)
    ]


def _without_waiting(turns: Sequence[_Turn]) -> list[_Turn]:
    """The turn of a collective comes when its last member is there."""
    last: dict[str, float] = defaultdict(float)
    for turn in turns:
        last[turn.span.name] = max(last[turn.span.name], turn.begin)
    return [
        _Turn(t.span, min(t.span.end, last[t.span.name])) if t.span.kind in COLLECTIVES else t
        for t in turns
    ]


class _Pool:
    """What was asked of one pool at any moment."""

    def __init__(self, turns: Sequence[_Turn], sharing: Sharing) -> None:
        self._sharing = sharing
        changes: dict[float, float] = defaultdict(float)
        for turn in turns:
            own = sharing.draw(turn.span.kind, turn.span.lane)
            changes[turn.begin] += own
            changes[turn.span.end] -= own
        self._times = sorted(changes)
        self._drawn = list(accumulate(changes[time] for time in self._times))

    def work_of(self, turn: _Turn) -> float:
        """How long an op would have taken alone, given all that ran beside it."""
        first, last = (bisect_left(self._times, t) for t in (turn.begin, turn.span.end))
        own = self._sharing.draw(turn.span.kind, turn.span.lane)
        return sum(
            (self._times[i + 1] - self._times[i]) * self._sharing.speed(own, self._drawn[i])
            for i in range(first, last)
        )


# Costs from a measured trace instead of a hardware file.
#
# What an op cost is read from its spans; how it changes with the number of micro-batches is fitted
# where traces with different numbers are given. How it changes with the number of workers no single
# trace can tell: there the hardware description answers, as a ratio to the measured scale.


NEEDED = frozenset({Kind.DENSE, Kind.UPDATE})
"""A trace without these cannot be one of a training run."""


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Measured milliseconds per op, and the scale they were measured at."""

    scale: Scale
    per_batch: Costs
    """Kinds that come once per batch."""
    per_micro: dict[Kind, tuple[float, float]]
    """Kinds that come per micro-batch: fixed part, and the part that is shared out, for N = 1."""
    samples: float | None
    """Samples per worker and batch, where the trace says so."""

    @property
    def missing(self) -> tuple[Kind, ...]:
        """Kinds that the traces did not contain; they are taken to cost nothing."""
        return tuple(k for k in Kind if k not in self.per_batch and k not in self.per_micro)

    def at(self, plan: Plan, cluster: Cluster, scale: Scale) -> Costs:
        """Costs of one op of each kind for that plan and scale."""
        shape = plan.shape
        measured = dict.fromkeys(Kind, 0.0)
        measured.update(self.per_batch)
        for kind, (fixed, shared) in self.per_micro.items():
            measured[kind] = fixed + shared / shape.micro_batches
        here, there = costs(cluster, shape, self.scale), costs(cluster, shape, scale)
        return {
            kind: ms * (there[kind] / here[kind] if here[kind] > 0 else 1.0)
            for kind, ms in measured.items()
        }


def fit(traces: Sequence[Trace]) -> FittedCosts:
    """Read costs off one or more traces of the same job on the same workers."""
    per_batch: dict[Kind, list[float]] = defaultdict(list)
    per_micro: dict[Kind, list[tuple[int, float]]] = defaultdict(list)
    for trace in traces:
        micro_batches = _micros(trace)
        for kind, ms in _typical_ms(trace).items():
            if kind in MICRO_KINDS:
                per_micro[kind].append((micro_batches, ms))
            else:
                per_batch[kind].append(ms)
    found = {*per_batch, *per_micro}
    for kind in sorted(NEEDED - found):
        raise ParseError(f"the trace has no `{kind}` op, so it is not one of a training run")
    return FittedCosts(
        scale=_scale(traces),
        per_batch={kind: median(values) for kind, values in per_batch.items()},
        per_micro={kind: _over_micros(points) for kind, points in per_micro.items()},
        samples=_samples(traces),
    )


def _typical_ms(trace: Trace) -> dict[Kind, float]:
    """The median cost of each kind, without the first batches, which warm everything up."""
    batches = sorted({span.batch for span in trace.spans})
    warm = set(batches[min(2, len(batches) - 1) :])
    by_op: dict[tuple[Kind, int, int | None], list[Span]] = defaultdict(list)
    for span in trace.spans:
        if span.batch in warm:
            by_op[_kind(span), span.batch, span.micro].append(span)
    values: dict[Kind, list[float]] = defaultdict(list)
    for (kind, _, _), spans in by_op.items():
        values[kind] += _op_ms(kind, spans)
    return {kind: median(ms) for kind, ms in values.items()}


def _op_ms(kind: Kind, spans: list[Span]) -> Iterable[float]:
    """What one op cost: a collective counts from when its last member arrived."""
    if kind not in COLLECTIVES:
        return [span.duration for span in spans]
    last_arrival = max(span.start for span in spans)
    return [max(0.0, max(span.end for span in spans) - last_arrival)]


def _over_micros(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Fixed and shared part of a cost, by least squares over 1/N; neither below zero."""
    if len({micro_batches for micro_batches, _ in points}) < 2:
        return 0.0, median(ms * micro_batches for micro_batches, ms in points)
    design = np.array([[1.0, 1.0 / micro_batches] for micro_batches, _ in points])
    answer = np.linalg.lstsq(design, np.array([ms for _, ms in points]), rcond=None)[0]
    fixed, shared = float(answer[0]), float(answer[1])
    if fixed < 0:
        return 0.0, median(ms * micro_batches for micro_batches, ms in points)
    return (fixed, shared) if shared > 0 else (median(ms for _, ms in points), 0.0)


def _kind(span: Span) -> Kind:
    kind = parse_kind(span.kind)
    if kind is None:
        known = ", ".join(Kind)
        raise ParseError(
            f"the trace has an op of unknown kind {span.kind!r}; the kinds are {known}"
        )
    return kind


def _micros(trace: Trace) -> int:
    return 1 + max((span.micro for span in trace.spans if span.micro is not None), default=0)


def _scale(traces: Sequence[Trace]) -> Scale:
    scales = {
        Scale(int(t.facts.get("workers", len(t.ranks))), int(t.facts.get("groups", 1)))
        for t in traces
    }
    if len(scales) > 1:
        counts = sorted(scale.workers for scale in scales)
        raise ParseError(
            f"the traces are of {counts} workers; fit traces of the same number of workers"
        )
    return scales.pop()


def _samples(traces: Sequence[Trace]) -> float | None:
    known = [t.facts["samples_per_worker"] for t in traces if "samples_per_worker" in t.facts]
    return float(known[0]) if known else None
