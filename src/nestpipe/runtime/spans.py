"""A run's clocks: one `Span` per op, the last batches of them kept; and the host's own time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from nestpipe.runtime.lanes import Act
from nestpipe.schedule import Kind, Lane, Op
from nestpipe.trace import Span, Trace
from nestpipe.trace.span import Fact

KEEP_BATCHES = 64


class Spans(Protocol):
    """Times the ops of one run on one rank."""

    def begin(self) -> None:
        """Forget everything; times count from now."""
        ...

    def timed(self, act: Act, lane: Lane, *, on_host: bool = False) -> Act:
        """The same act, which runs on that lane, recorded; `on_host`: no device has a part."""
        ...

    def trace(self, facts: Mapping[str, Fact]) -> Trace:
        """What was recorded so far."""
        ...

    def recent(self, batches: int) -> list[Span]:
        """Ops of the newest batches that have ended; any thread may ask, and waits for nothing."""
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

    def timed(self, act: Act, lane: Lane, *, on_host: bool = False) -> Act:
        def recorded(op: Op) -> None:
            start = self._now()
            act(op)
            self._kept.add(op.batch, span_of(op, lane, self._rank, start, self._now()))

        return recorded

    def trace(self, facts: Mapping[str, Fact]) -> Trace:
        return trace_of(self._kept.all(), facts)

    def recent(self, batches: int) -> list[Span]:
        return self._kept.newest(batches)

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

    def newest(self, batches: int) -> list[T]:
        """Of so many batches alone."""
        with self._lock:
            oldest = self._newest - batches
            return [item for b, items in self._of_batch.items() if b > oldest for item in items]

    def clear(self) -> None:
        with self._lock:
            self._of_batch, self._newest = {}, -1

    def _drop(self) -> None:
        for old in [b for b in self._of_batch if b <= self._newest - self._batches]:
            del self._of_batch[old]


# What the host spends on a batch: processor time of its acts, and of the threads that call them.


@dataclass(frozen=True, slots=True)
class HostTime:
    """Processor time of a mean batch in ms."""

    acts_ms: Mapping[str, float]
    """By kind of op, in the thread that calls the act."""
    issuing_ms: float
    """The thread that issues ops; without lanes of their own it runs their acts too."""
    lanes_ms: Mapping[str, float]
    """The threads of lanes: acts, and what is between them."""
    other_ms: float
    """All other threads: autograd's backward on a GPU, teams of math libraries."""

    @property
    def threads_ms(self) -> float:
        """The issuing thread and all lanes."""
        return self.issuing_ms + sum(self.lanes_ms.values())

    @property
    def between_ms(self) -> float:
        """What issuing, queues and waits cost: those threads without acts."""
        return self.threads_ms - sum(self.acts_ms.values())


class HostTimes:
    """A clock around another one: processor time from the end of batch `first` to that of `last`.

    A batch ends with its write-back.
    """

    def __init__(self, spans: Spans, first: int, last: int) -> None:
        assert first < last, f"no batches from {first} to {last}"
        self._spans = spans
        self._bounds = first, last
        self._acts: dict[Kind, float] = {}
        self._marks: list[_HostMoment] = []
        self._issuing = threading.current_thread()

    def begin(self) -> None:
        self._spans.begin()
        self._acts.clear()
        self._marks.clear()
        self._issuing = threading.current_thread()

    def timed(self, act: Act, lane: Lane, *, on_host: bool = False) -> Act:
        timed = self._spans.timed(act, lane, on_host=on_host)

        def counted(op: Op) -> None:
            before = time.thread_time()
            timed(op)
            # All ops of a kind run on one lane, so no other thread writes here.
            self._acts[op.kind] = self._acts.get(op.kind, 0.0) + time.thread_time() - before
            if op.kind is Kind.WRITEBACK and op.batch in self._bounds:
                self._marks.append(self._now())

        return counted

    def trace(self, facts: Mapping[str, Fact]) -> Trace:
        return self._spans.trace(facts)

    def recent(self, batches: int) -> list[Span]:
        return self._spans.recent(batches)

    def reading(self) -> HostTime:
        """After a run that came past both batches."""
        start, end = self._marks
        batches = self._bounds[1] - self._bounds[0]

        def per_batch(after: float, before: float) -> float:
            return (after - before) * 1e3 / batches

        acts = {k: per_batch(s, start.acts.get(k, 0.0)) for k, s in end.acts.items()}
        threads = {n: per_batch(s, start.threads[n]) for n, s in end.threads.items()}
        other = per_batch(end.process, start.process) - sum(threads.values())
        return HostTime(
            acts_ms={kind.value: spent for kind, spent in acts.items()},
            issuing_ms=threads.pop(self._issuing.name),
            lanes_ms=threads,
            other_ms=other,
        )

    def _now(self) -> _HostMoment:
        threads = [self._issuing, *(t for t in threading.enumerate() if t.name.startswith("lane "))]
        clocks = {t.name: time.pthread_getcpuclockid(t.ident or 0) for t in threads}
        spent = {name: time.clock_gettime(clock) for name, clock in clocks.items()}
        return _HostMoment(dict(self._acts), spent, time.process_time())


@dataclass(frozen=True, slots=True)
class _HostMoment:
    """Processor time since the beginning, in seconds."""

    acts: Mapping[Kind, float]
    threads: Mapping[str, float]
    process: float
