"""The executor: runs the ops of a plan on lanes and records what ran when."""

from nestpipe.deprecated import old_names
from nestpipe.runtime.cuda import CudaLanes, CudaSpans, lanes_for, spans_for
from nestpipe.runtime.executor import (
    Batches,
    HostSpans,
    Spans,
    StopSignal,
    inject_delays,
    name_collectives,
    run,
)
from nestpipe.runtime.lanes import Act, Event, InlineLanes, LaneQueue, Lanes, ThreadLanes, Work

__all__ = [
    "Act",
    "Batches",
    "CudaLanes",
    "CudaSpans",
    "Event",
    "HostSpans",
    "InlineLanes",
    "LaneQueue",
    "Lanes",
    "Spans",
    "StopSignal",
    "ThreadLanes",
    "Work",
    "inject_delays",
    "lanes_for",
    "name_collectives",
    "run",
    "spans_for",
]

__getattr__ = old_names(__name__)
