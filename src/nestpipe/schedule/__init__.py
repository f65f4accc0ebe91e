"""A schedule is data: ops, lanes and edges; plans that make them; a checker that proves them."""

from nestpipe.schedule.check import Violation, check, violations
from nestpipe.schedule.nominal import nominal_trace
from nestpipe.schedule.op import LANE_OF, MICRO_KINDS, Kind, Lane, Op
from nestpipe.schedule.order import HappensBefore, happens_before, redundant_edges
from nestpipe.schedule.plans import (
    PLANS,
    Plan,
    PlanOptions,
    plan,
    with_early_rows,
    with_keys_apart,
    with_sums_apart,
    with_third_buffer,
)
from nestpipe.schedule.schedule import Exchange, Merge, Retrieval, Schedule, Shape, Step
from nestpipe.schedule.text import from_text, to_text
from nestpipe.schedule.toy import Interpreter, Outcome, ToyData

__all__ = [
    "LANE_OF",
    "MICRO_KINDS",
    "PLANS",
    "Exchange",
    "HappensBefore",
    "Interpreter",
    "Kind",
    "Lane",
    "Merge",
    "Op",
    "Outcome",
    "Plan",
    "PlanOptions",
    "Retrieval",
    "Schedule",
    "Shape",
    "Step",
    "ToyData",
    "Violation",
    "check",
    "from_text",
    "happens_before",
    "nominal_trace",
    "plan",
    "redundant_edges",
    "to_text",
    "violations",
    "with_early_rows",
    "with_keys_apart",
    "with_sums_apart",
    "with_third_buffer",
]
