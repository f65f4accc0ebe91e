"""The executor: runs the ops of a plan on lanes and records what ran when."""

from nestpipe.runtime.cuda import CudaLanes, CudaSpans, lanes_for, spans_for
from nestpipe.runtime.executor import Batches, End, inject_delays, name_collectives, run
from nestpipe.runtime.lanes import Act, Event, InlineLanes, LaneQueue, Lanes, Work
from nestpipe.runtime.spans import HostSpans, Spans
from nestpipe.runtime.thread_lanes import ThreadLanes

__all__ = [
    "Act",
    "Batches",
    "CudaLanes",
    "CudaSpans",
    "End",
    "Event",
    "HostSpans",
    "InlineLanes",
    "LaneQueue",
    "Lanes",
    "Spans",
    "ThreadLanes",
    "Work",
    "inject_delays",
    "lanes_for",
    "name_collectives",
    "run",
    "spans_for",
]
