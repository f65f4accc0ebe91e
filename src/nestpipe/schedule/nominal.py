"""A schedule laid out in time with nominal durations, so that it can be drawn."""

from __future__ import annotations

from nestpipe.schedule.op import Kind, Lane, Op
from nestpipe.schedule.schedule import Schedule
from nestpipe.trace import Span, Trace

TICKS_OF = {Kind.PREFETCH: 3, Kind.RETRIEVE: 3, Kind.DENSE: 2}
"""Nominal durations in ticks where they are not 1; they only make a drawing look like a run."""


def nominal_trace(schedule: Schedule) -> Trace:
    """Each op as early as its lane and its edges allow; edges to ops issued later are ignored."""
    free_at = dict.fromkeys(Lane, 0)
    end_of: dict[Op, int] = {}
    spans: list[Span] = []
    for step in schedule:
        op = step.op
        ready = max((end_of.get(before, 0) for before in step.after), default=0)
        lane = schedule.shape.lane(op.kind)
        start = max(free_at[lane], ready)
        end = start + TICKS_OF.get(op.kind, 1)
        free_at[lane] = end_of[op] = end
        spans.append(Span(op.kind, lane, op.batch, op.micro, 0, float(start), float(end)))
    shape = schedule.shape
    facts = {"plan": shape.plan, "micros": shape.micros, "retrieval": str(shape.retrieval)}
    return Trace(tuple(spans), facts)
