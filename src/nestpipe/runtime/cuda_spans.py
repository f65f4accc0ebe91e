"""Spans by the clock of the GPU: two events around each op, read when the run is over."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nestpipe.runtime.kept import LastBatches
from nestpipe.runtime.lanes import Act
from nestpipe.runtime.spans import KEEP_BATCHES, span_of, trace_of
from nestpipe.schedule import Op
from nestpipe.trace import Trace
from nestpipe.trace.span import Fact

_Timed = tuple[Op, torch.cuda.Event, torch.cuda.Event]


class CudaSpans:
    """Times on the stream that is current while an op is issued; the host never waits for it.

    An op's span is what the stream did between its two events, host work inside the op included
    where the stream ran dry.
    """

    def __init__(self, rank: int = 0, *, keep_batches: int = KEEP_BATCHES) -> None:
        self._rank = rank
        self._kept = LastBatches[_Timed](keep_batches)
        self._start = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        self._kept.clear()
        self._start = _now()

    def timed(self, act: Act) -> Act:
        def recorded(op: Op) -> None:
            start = _now()
            act(op)
            self._kept.add(op.batch, (op, start, _now()))

        return recorded

    def trace(self, facts: Mapping[str, Fact]) -> Trace:
        """Waits for the GPU to reach the last event."""
        timed = self._kept.all()
        for _, _, end in timed:
            end.synchronize()
        since = self._start.elapsed_time
        return trace_of(
            [span_of(op, self._rank, since(start), since(end)) for op, start, end in timed], facts
        )


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
