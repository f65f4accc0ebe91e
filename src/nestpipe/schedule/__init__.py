"""A schedule is data: ops, lanes and edges; plans that make them; a checker that proves them."""

from nestpipe.deprecated import old_names
from nestpipe.schedule.check import (
    HappensBefore,
    Violation,
    check,
    happens_before,
    redundant_edges,
    violations,
)
from nestpipe.schedule.op import COLLECTIVES, MICRO_KINDS, Kind, Lane, Op
from nestpipe.schedule.options import (
    Exchange,
    Merge,
    PipelineOptions,
    PlanOptions,
    ReplicaOptions,
    Retrieval,
    plan_options_of,
    with_default,
)
from nestpipe.schedule.plans import (
    PLANS,
    Plan,
    plan,
    usable,
    with_early_rows,
    with_separate_dense_group,
    with_separate_key_group,
    with_third_buffer,
)
from nestpipe.schedule.schedule import Schedule, Shape, Step
from nestpipe.schedule.text import from_text, nominal_trace, to_text

__all__ = [
    "COLLECTIVES",
    "MICRO_KINDS",
    "PLANS",
    "Exchange",
    "HappensBefore",
    "Kind",
    "Lane",
    "Merge",
    "Op",
    "PipelineOptions",
    "Plan",
    "PlanOptions",
    "ReplicaOptions",
    "Retrieval",
    "Schedule",
    "Shape",
    "Step",
    "Violation",
    "check",
    "from_text",
    "happens_before",
    "nominal_trace",
    "plan",
    "plan_options_of",
    "redundant_edges",
    "to_text",
    "usable",
    "violations",
    "with_default",
    "with_early_rows",
    "with_separate_dense_group",
    "with_separate_key_group",
    "with_third_buffer",
]

__getattr__ = old_names(__name__)
