"""A schedule is data: ops, lanes and edges; plans that make them; a checker that proves them."""

from nestpipe.deprecated import old_names
from nestpipe.schedule.check import (
    HappensBefore,
    Violation,
    check,
    happens_before,
    issued_before,
    redundant_edges,
    redundant_ties,
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
    with_gradient_norm,
    with_separate_dense_group,
    with_separate_key_group,
    with_third_buffer,
)
from nestpipe.schedule.schedule import How, Schedule, Shape, Step, Tie
from nestpipe.schedule.text import from_text, nominal_trace, to_text

__all__ = [
    "COLLECTIVES",
    "MICRO_KINDS",
    "PLANS",
    "Exchange",
    "HappensBefore",
    "How",
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
    "Tie",
    "Violation",
    "check",
    "from_text",
    "happens_before",
    "issued_before",
    "nominal_trace",
    "plan",
    "plan_options_of",
    "redundant_edges",
    "redundant_ties",
    "to_text",
    "usable",
    "violations",
    "with_default",
    "with_early_rows",
    "with_gradient_norm",
    "with_separate_dense_group",
    "with_separate_key_group",
    "with_third_buffer",
]

__getattr__ = old_names(__name__)
