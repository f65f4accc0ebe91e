"""The executor: runs the ops of a plan on lanes and records what ran when."""

from nestpipe.runtime.choose import lanes_for, spans_for
from nestpipe.runtime.cuda_lanes import CudaLanes
from nestpipe.runtime.cuda_spans import CudaSpans
from nestpipe.runtime.end import End
from nestpipe.runtime.inline import InlineLanes
from nestpipe.runtime.lanes import Act, Event, LaneQueue, Lanes, Work
from nestpipe.runtime.run import Batches, run
from nestpipe.runtime.spans import HostSpans, Spans
from nestpipe.runtime.threads import ThreadLanes
from nestpipe.runtime.wrap import inject_delays, name_collectives

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
