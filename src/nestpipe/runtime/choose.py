"""Which lanes and which clock a run gets, from its plan and its device."""

from __future__ import annotations

import torch

from nestpipe.runtime.cuda_lanes import CudaLanes
from nestpipe.runtime.cuda_spans import CudaSpans
from nestpipe.runtime.inline import InlineLanes
from nestpipe.runtime.lanes import Lanes
from nestpipe.runtime.spans import HostSpans, Spans
from nestpipe.runtime.threads import ThreadLanes


def lanes_for(plan: str, device: torch.device) -> Lanes:
    """The caller itself where nothing overlaps, else threads, on a GPU with streams."""
    if plan == "serial":
        return InlineLanes()
    return CudaLanes(device) if device.type == "cuda" else ThreadLanes()


def spans_for(device: torch.device, rank: int) -> Spans:
    """The clock of whoever does the work."""
    return CudaSpans(rank) if device.type == "cuda" else HostSpans(rank)
