"""Lanes on a GPU: one host thread and one CUDA stream for each.

A thread issues the ops of its lane without waiting for the device: what an op waits for must have
been issued, and then it is the lane's stream that waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from nestpipe.runtime.executor import (
    KEEP_BATCHES,
    EndedRun,
    HostSpans,
    LastBatches,
    Spans,
    span_of,
    trace_of,
)
from nestpipe.runtime.lanes import (
    Act,
    InlineLanes,
    InlineQueue,
    Lanes,
    LaneThread,
    Mark,
    ThreadLanes,
)
from nestpipe.schedule import Lane, Op, Shape
from nestpipe.trace import Span, Trace
from nestpipe.trace.span import Fact

HOST_LANES = frozenset({Lane.LOADER, Lane.HOST, Lane.WRITE})
"""Lanes whose acts read and write host memory, which no stream can hold back."""
ROW_LANES = frozenset({Lane.HOST, Lane.WRITE})
"""Of these, those whose streams alone wait where the device routes keys: it copies rows by itself,
and an act that needs the host to be past something waits for that itself."""
DEFAULT_PRIORITY, HIGH_PRIORITY = 0, -1


class DeviceEvent(Protocol):
    """As much of `torch.cuda.Event` as lanes use."""

    def synchronize(self) -> None: ...


class LaneStream(Protocol):
    """As much of `torch.cuda.Stream` as lanes use."""

    def wait_event(self, event: Any, /) -> None: ...
    def record_event(self, event: Any, /) -> Any: ...


@dataclass(eq=False, slots=True)
class StreamMark:
    """A point in the work of a stream."""

    stream: LaneStream
    event: DeviceEvent

    def wait(self) -> None:
        self.event.synchronize()

    def wait_again(self) -> None:
        """Until all that is on the stream by now has ended."""
        self.stream.record_event(self.event)
        self.event.synchronize()


class _Here(threading.local):
    """The calling thread's current stream: asking torch takes longer."""

    stream: Any = None


_here = _Here()


def _new_event() -> DeviceEvent:
    # A host thread that waits sleeps: it would spin on a core that other lanes need.
    return torch.cuda.Event(blocking=True)


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """A thread and its stream: an op has ended when the stream has done what its act put there."""

    stream: LaneStream
    host_work: bool = False
    """Whether acts work on host memory: then each starts when all before it has ended."""
    new_event: Callable[[], DeviceEvent] = _new_event
    current: Callable[[Any], AbstractContextManager[object]] = torch.cuda.stream
    use: Callable[[Any], None] = torch.cuda.set_stream
    _own: StreamMark | None = field(init=False, default=None)
    """Where acts work on host memory: for the thread of the lane alone."""

    def __post_init__(self) -> None:
        if self.host_work:
            object.__setattr__(self, "_own", StreamMark(self.stream, self.new_event()))

    def entered(self) -> AbstractContextManager[object]:
        """The stream is the thread's current one; autograd's backward follows its forward there."""
        # Else each lane gets a team of threads for its small operations on the host, which spin
        # between them: with four ranks on 16 cores they took most of the machine.
        torch.set_num_threads(1)
        _here.stream = self.stream
        return self.current(self.stream)

    def visit(self) -> None:
        """Make the stream the current one; `CudaLanes` gives the thread its own back."""
        if _here.stream is not self.stream:
            _here.stream = self.stream
            self.use(self.stream)

    def wait_for(self, marks: Sequence[Mark]) -> None:
        if self._own is not None:
            for mark in marks:
                mark.wait()
            self._own.wait_again()
            return
        for mark in marks:
            assert isinstance(mark, StreamMark), f"{mark} is of other lanes"
            if mark.stream is not self.stream:
                self.stream.wait_event(mark.event)

    def mark(self, again: Mark | None = None) -> StreamMark:
        if again is None:
            again = StreamMark(self.stream, self.new_event())
        assert isinstance(again, StreamMark), f"{again} is of other lanes"
        self.stream.record_event(again.event)
        return again


class CudaLanes:
    """A thread and a stream per lane; all streams but that of `compute` have high priority.

    The short kernels of exchange and routing would otherwise queue behind the long ones of dense
    compute. The streams live as long as the lanes: memory is cached by stream, so lanes that are
    entered again find theirs.
    """

    def __init__(
        self, device: torch.device, *, by_device: bool = False, alone: bool = False
    ) -> None:
        """`by_device`: the device routes keys, so that no op of its lanes waits for anything, and
        one thread issues them. `alone`: nor do those of `keys`, as there is one rank."""
        self._device, self._inline = device, by_device
        on_host = HOST_LANES - ROW_LANES if by_device else HOST_LANES
        self._places = {lane: _place(lane, device, on_host) for lane in Lane}
        waiting = HOST_LANES if alone else HOST_LANES | {Lane.KEYS}
        self._threads = ThreadLanes(
            self._places.__getitem__, frozenset(Lane) - waiting if by_device else frozenset()
        )

    def __enter__(self) -> Self:
        self._caller = torch.cuda.current_stream(self._device)
        self._threads_before = torch.get_num_threads()
        if self._inline:  # as in the threads of lanes, see `entered`
            torch.set_num_threads(1)
        before = StreamPlace(self._caller).mark()
        for place in self._places.values():
            place.stream.wait_event(before.event)
        self._threads.__enter__()
        return self

    def __getitem__(self, lane: Lane) -> LaneThread | InlineQueue:
        return self._threads[lane]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for the device too, unless the run failed: then it may never come to the end."""
        _here.stream = None
        torch.cuda.set_stream(self._caller)
        if self._inline:
            torch.set_num_threads(self._threads_before)
        self._threads.__exit__(kind, error, traceback)
        if error is None:
            for place in self._places.values():
                place.mark().wait()


def _place(lane: Lane, device: torch.device, on_host: frozenset[Lane]) -> StreamPlace:
    priority = DEFAULT_PRIORITY if lane is Lane.COMPUTE else HIGH_PRIORITY
    return StreamPlace(torch.cuda.Stream(device, priority=priority), host_work=lane in on_host)


# Spans by the clock of the GPU: two events around each op, read when the run is over.
#
# Ops that never touch the device are timed by the host's clock, from the same beginning.


RECORD_EVERY = 512
"""The first batches of every N are timed: events of all of them would cost host time."""
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
        self._keep = keep_batches
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

    def timed(self, act: Act, lane: Lane, *, on_host: bool = False) -> Act:
        def by_the_host(op: Op) -> None:
            if op.batch % RECORD_EVERY >= self._keep:
                act(op)
                return
            start = self._host_now()
            act(op)
            self._host.add(op.batch, span_of(op, lane, self._rank, start, self._host_now()))

        def by_the_device(op: Op) -> None:
            if op.batch % RECORD_EVERY >= self._keep:
                act(op)
                return
            first = _now()
            act(op)
            self._timed.add(op.batch, (op, lane, first, _now()))

        return by_the_host if on_host or lane in HOST_CLOCK else by_the_device

    def ended(self, facts: Mapping[str, Fact]) -> EndedRun:
        """Two clocks may run apart, so they are compared again."""
        timed, host_spans = self._timed.all(), self._host.all()
        since, began = self._start.elapsed_time, self._host_start
        between, event, host = _meet()
        self.clocks_differ_ms = max(self.clocks_differ_ms, between * 1e3)

        def read() -> Trace:
            for *_, end in timed:
                end.synchronize()
            rate = since(event) / ((host - began) * 1e3)
            device = [
                span_of(op, lane, self._rank, since(start), since(end))
                for op, lane, start, end in timed
            ]
            return trace_of([*device, *at_rate(rate, host_spans)], facts)

        return EndedRun(max(self._timed.num_batches, self._host.num_batches), read)

    def recent(self, batches: int) -> list[Span]:
        """Only what the GPU has done; the host's clock is taken as it is."""
        since = self._start.elapsed_time
        device = [
            span_of(op, lane, self._rank, since(start), since(end))
            for op, lane, start, end in self._timed.newest(batches)
            if end.query()
        ]
        return [*device, *self._host.newest(batches)]

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
    event.record(_here.stream)
    return event


# Which lanes and which clock a run gets, from its plan and its device.


def lanes_for(
    shape: Shape, device: torch.device, *, by_device: bool = False, alone: bool = False
) -> Lanes:
    """The caller itself where nothing overlaps, else threads, on a GPU with streams.

    `by_device`: keys are routed on the GPU, so that its ops never wait for the host. `alone`: there
    is one rank.
    """
    on_gpu = device.type == "cuda"
    if not shape.overlaps:
        return _one_after_the_other(device) if on_gpu else InlineLanes()
    return CudaLanes(device, by_device=by_device, alone=alone) if on_gpu else ThreadLanes()


def _one_after_the_other(device: torch.device) -> InlineLanes:
    def finish() -> None:
        torch.cuda.current_stream(device).synchronize()

    return InlineLanes(finish, HOST_LANES | HOST_CLOCK)


def spans_for(device: torch.device, rank: int) -> Spans:
    """The clock of the device, or of the host."""
    return CudaSpans(rank) if device.type == "cuda" else HostSpans(rank)
