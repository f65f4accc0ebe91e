"""Which lanes and which clock a run gets, from its plan and its device."""

from __future__ import annotations

import torch

from nestpipe.runtime.cuda_lanes import HOST_LANES, CudaLanes
from nestpipe.runtime.cuda_spans import HOST_CLOCK, CudaSpans
from nestpipe.runtime.inline import InlineLanes
from nestpipe.runtime.lanes import Lanes
from nestpipe.runtime.spans import HostSpans, Spans
from nestpipe.runtime.threads import ThreadLanes


def lanes_for(plan: str, device: torch.device) -> Lanes:
    """The caller itself where nothing overlaps, else threads, on a GPU with streams."""
    on_gpu = device.type == "cuda"
    if plan == "serial":
        return _one_after_the_other(device) if on_gpu else InlineLanes()
    return CudaLanes(device) if on_gpu else ThreadLanes()


def _one_after_the_other(device: torch.device) -> InlineLanes:
    def finish() -> None:
        torch.cuda.current_stream(device).synchronize()

    return InlineLanes(finish, HOST_LANES | HOST_CLOCK)


def spans_for(device: torch.device, rank: int) -> Spans:
    """The clock of whoever does the work."""
    return CudaSpans(rank) if device.type == "cuda" else HostSpans(rank)
