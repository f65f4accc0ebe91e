"""A run's clock: one `Span` per op, the last batches of them kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from nestpipe.runtime.lanes import Act
from nestpipe.schedule import Lane, Op
from nestpipe.trace import Span, Trace
from nestpipe.trace.span import Fact

KEEP_BATCHES = 64


class Spans(Protocol):
    """Times the ops of one run on one rank."""

    def begin(self) -> None:
        """Forget everything; times count from now."""
        ...

    def timed(self, act: Act, lane: Lane) -> Act:
        """The same act, which runs on that lane, recorded."""
        ...

    def trace(self, facts: Mapping[str, Fact]) -> Trace:
        """What was recorded so far."""
        ...


class HostSpans:
    """Times by the host's clock: right where an op has ended when its act returns."""

    def __init__(self, rank: int = 0, *, keep_batches: int = KEEP_BATCHES) -> None:
        self._rank = rank
        self._kept = LastBatches[Span](keep_batches)
        self._start = time.perf_counter()

    def begin(self) -> None:
        self._kept.clear()
        self._start = time.perf_counter()

    def timed(self, act: Act, lane: Lane) -> Act:
        def recorded(op: Op) -> None:
            start = self._now()
            act(op)
            self._kept.add(op.batch, span_of(op, lane, self._rank, start, self._now()))

        return recorded

    def trace(self, facts: Mapping[str, Fact]) -> Trace:
        return trace_of(self._kept.all(), facts)

    def _now(self) -> float:
        return (time.perf_counter() - self._start) * 1e3


def span_of(op: Op, lane: Lane, rank: int, start: float, end: float) -> Span:
    """What an op leaves in the trace."""
    return Span(op.kind, lane, op.batch, op.micro, rank, start, end)


def trace_of(spans: Iterable[Span], facts: Mapping[str, Fact]) -> Trace:
    """A trace in the order of time."""
    return Trace(tuple(sorted(spans, key=lambda span: (span.start, span.end))), dict(facts))


# A memory of the last batches: bounded however long a run is.


T = TypeVar("T")


class LastBatches(Generic[T]):
    """What several lanes note about each batch; batches too far behind the newest are dropped."""

    def __init__(self, batches: int) -> None:
        assert batches > 0, f"cannot keep {batches} batches"
        self._batches = batches
        self._newest = -1
        self._of_batch: dict[int, list[T]] = {}
        self._lock = threading.Lock()

    def add(self, batch: int, item: T) -> None:
        with self._lock:
            if batch > self._newest:
                self._newest = batch
                self._drop()
            if batch > self._newest - self._batches:
                self._of_batch.setdefault(batch, []).append(item)

    def all(self) -> list[T]:
        with self._lock:
            return [item for items in self._of_batch.values() for item in items]

    def clear(self) -> None:
        with self._lock:
            self._of_batch, self._newest = {}, -1

    def _drop(self) -> None:
        for old in [b for b in self._of_batch if b <= self._newest - self._batches]:
            del self._of_batch[old]
