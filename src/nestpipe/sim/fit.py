"""Costs from a measured trace instead of a hardware file.

What an op cost is read from its spans; how it changes with the number of micro-batches is fitted
where traces with different numbers are given. How it changes with the number of workers no single
trace can tell: there the hardware description answers, as a ratio to the measured scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from nestpipe.errors import ParseError
from nestpipe.schedule.op import LANE_OF, MICRO_KINDS, Kind, Lane
from nestpipe.schedule.plans import Plan
from nestpipe.sim.cluster import Cluster
from nestpipe.sim.costs import Costs, Scale, costs
from nestpipe.trace import Span, Trace

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
            measured[kind] = fixed + shared / shape.micros
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
        micros = _micros(trace)
        for kind, ms in _typical_ms(trace).items():
            if kind in MICRO_KINDS:
                per_micro[kind].append((micros, ms))
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
    if LANE_OF[kind] is not Lane.NET:
        return [span.duration for span in spans]
    last_arrival = max(span.start for span in spans)
    return [max(0.0, max(span.end for span in spans) - last_arrival)]


def _over_micros(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Fixed and shared part of a cost, by least squares over 1/N; neither below zero."""
    if len({micros for micros, _ in points}) < 2:
        return 0.0, median(ms * micros for micros, ms in points)
    design = np.array([[1.0, 1.0 / micros] for micros, _ in points])
    answer = np.linalg.lstsq(design, np.array([ms for _, ms in points]), rcond=None)[0]
    fixed, shared = float(answer[0]), float(answer[1])
    if fixed < 0:
        return 0.0, median(ms * micros for micros, ms in points)
    return (fixed, shared) if shared > 0 else (median(ms for _, ms in points), 0.0)


def _kind(span: Span) -> Kind:
    try:
        return Kind(span.kind)
    except ValueError:
        known = ", ".join(Kind)
        raise ParseError(
            f"the trace has an op of unknown kind {span.kind!r}; the kinds are {known}"
        ) from None


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
