"""Spans by the clock of the GPU: two events around each op, read when the run is over.

Ops that never touch the device are timed by the host's clock, from the same beginning.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch

from nestpipe.runtime.kept import LastBatches
from nestpipe.runtime.lanes import Act
from nestpipe.runtime.spans import KEEP_BATCHES, span_of, trace_of
from nestpipe.schedule import Lane, Op
from nestpipe.trace import Span, Trace
from nestpipe.trace.span import Fact

TRIES = 5
"""How often the two clocks are compared; the shortest time between counts."""
_Timed = tuple[Op, Lane, torch.cuda.Event, torch.cuda.Event]
HOST_CLOCK = frozenset({Lane.LOADER, Lane.KEYS, Lane.ROUTE})
"""Lanes whose work is the host's; what they put on a stream is small."""


class CudaSpans:
    """Times on the stream that is current while an op is issued; the host never waits for it.

    The stream meets an op's first event when all that the op waits for has ended, and its last
    event when the host has put everything there and the device has done it. So the host's part of
    an op (`retrieve` gathers rows before it copies them) is in its span too.
    """

    def __init__(self, rank: int = 0, *, keep_batches: int = KEEP_BATCHES) -> None:
        self._rank = rank
        self._timed = LastBatches[_Timed](keep_batches)
        self._host = LastBatches[Span](keep_batches)
        self.clocks_differ_ms = 0.0
        """By how much at most, where ops of both are compared."""

    def begin(self) -> None:
        self._timed.clear()
        self._host.clear()
        torch.cuda.synchronize()
        between, self._start, self._host_start = _meet()
        self.clocks_differ_ms = between * 1e3

    def timed(self, act: Act, lane: Lane) -> Act:
        def by_the_host(op: Op) -> None:
            start = self._host_now()
            act(op)
            self._host.add(op.batch, span_of(op, lane, self._rank, start, self._host_now()))

        def by_the_device(op: Op) -> None:
            first = _now()
            act(op)
            self._timed.add(op.batch, (op, lane, first, _now()))

        return by_the_host if lane in HOST_CLOCK else by_the_device

    def trace(self, facts: Mapping[str, Fact]) -> Trace:
        """Waits for the GPU to reach the last event.

        Two clocks may run apart, so they are compared once more.
        """
        timed = self._timed.all()
        for *_, end in timed:
            end.synchronize()
        since = self._start.elapsed_time
        between, event, host = _meet()
        self.clocks_differ_ms = max(self.clocks_differ_ms, between * 1e3)
        rate = since(event) / ((host - self._host_start) * 1e3)
        device = [
            span_of(op, lane, self._rank, since(start), since(end))
            for op, lane, start, end in timed
        ]
        return trace_of([*device, *at_rate(rate, self._host.all())], facts)

    def _host_now(self) -> float:
        return (time.perf_counter() - self._host_start) * 1e3


def at_rate(rate: float, spans: Iterable[Span]) -> list[Span]:
    """The same spans by a clock that runs `rate` times as fast."""
    return [replace(span, start=span.start * rate, end=span.end * rate) for span in spans]


def _meet() -> tuple[float, torch.cuda.Event, float]:
    """An event on an idle device and the host's time of it, with how far that may be off."""
    return min((_meet_once() for _ in range(TRIES)), key=lambda met: met[0])


def _meet_once() -> tuple[float, torch.cuda.Event, float]:
    before = time.perf_counter()
    event = _now()
    event.synchronize()
    after = time.perf_counter()
    return after - before, event, (before + after) / 2


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
