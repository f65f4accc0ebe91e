"""The executor: submits the steps of a plan to lanes as room allows, and records when ops ran.

`run` is the loop. Below it stand what it issues in a steady state, the end of the data, what a run
asks of the interpreter, wrappers around work, and at last the clock: one `Span` per op, of which
those of the last batches are kept.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from nestpipe.runtime.lanes import ENDED, Act, Event, Lanes, Work
from nestpipe.schedule import COLLECTIVES, Kind, Lane, Op, Plan, Shape, Step
from nestpipe.schedule.plans import Earlier, IssueOrder, Slot, SteadyTick
from nestpipe.trace import Span, Trace
from nestpipe.trace.span import Fact

KEEP_BATCHES = 64
"""Batches whose spans are kept."""
MAY_BE_IDLE = frozenset({Kind.RETRIEVE})
"""Kinds of which some ops have nothing to do, and hand on what they wait for."""
Batches = Callable[[], int | None]
"""How many batches there are; None while that is unknown. Never grows once known."""


def run(
    plan: Plan,
    work: Work,
    lanes: Lanes,
    *,
    batches: Batches = lambda: None,
    spans: Spans | None = None,
    facts: Mapping[str, Fact] | None = None,
    host_acts: frozenset[Kind] = frozenset(),
    idle: Callable[[Op], bool] | None = None,
    steady: bool = True,
) -> Trace:
    """Do every op of the plan's stream, until the end that `batches` gives.

    The end may become known late, with ops of batches past it already issued: they are skipped
    when their turn comes. It is `counts` that finds the end, and all that follows in a batch waits
    for its `counts`. So of batches past the end nothing runs but `prefetch`, `copy` and `dedup`,
    and the one `counts` that found it; these acts must bear a batch without samples.

    `host_acts`: kinds whose acts put nothing on a device and read nothing from it. `idle` says of
    an op, when all that it waits for has been issued, whether its act would do nothing; then it is
    not called. `steady`: ticks that are all alike are issued from one list; False: the plan is
    asked about every op.

    The first failure of any op is raised here, after all lanes have stopped.
    """
    spans = spans or HostSpans()
    shape = plan.shape
    timed = {
        kind: _until(batches, spans.timed(act, shape.lane(kind), on_host=kind in host_acts))
        for kind, act in work.items()
    }
    acts = Acts(timed, host_acts, idle)
    spans.begin()
    with quiet_interpreter(), lanes:
        issue = _issue_ticks if steady else _issue_steps
        issue(plan, acts, lanes, batches)
    return spans.ended({**_facts(shape), **(facts or {})}).read()


@dataclass(frozen=True, slots=True)
class Acts:
    """What ops do."""

    of: Work
    on_host: frozenset[Kind]
    """Kinds that have nothing to do with a device."""
    idle: Callable[[Op], bool] | None
    """Whether the act of an op would do nothing; None: never."""


def _issue_steps(plan: Plan, acts: Acts, lanes: Lanes, batches: Batches) -> None:
    """The slow twin: ask the plan for every step."""
    ends = RecentEnds(plan)
    for step in plan.stream(batches):
        _issue(step, ends, acts, lanes)


def _issue(step: Step, ends: RecentEnds, acts: Acts, lanes: Lanes) -> None:
    op = step.op
    if op.kind is Kind.PREFETCH:
        ends.make_room(op.batch)
    ends[op] = lanes[ends.shape.lane(op.kind)].submit(
        acts.of[op.kind],
        op,
        [ends[before] for before in step.after],
        alongside=None if step.alongside is None else ends[step.alongside],
        behind=[ends[before] for before in step.behind],
        on_host=op.kind in acts.on_host,
    )


def _issue_ticks(plan: Plan, acts: Acts, lanes: Lanes, batches: Batches) -> None:
    """Steps of the first batches and the last ones from the plan, all others from one list."""
    ends, order, tick = RecentEnds(plan), IssueOrder(plan.shape), plan.steady_tick()
    prepared = [] if tick is None else _prepared(tick, ends, acts, lanes)
    steady = False
    for opened in plan.ticks(batches):
        was_steady, steady = steady, tick is not None and tick.covers(opened, batches())
        if steady:
            for step in prepared:
                step.issue(opened)
            continue
        if was_steady:
            for step in prepared:
                order.place(step.op(opened - 1))
        for step in plan.steps_of(opened, batches, order):
            _issue(step, ends, acts, lanes)


class RecentEnds:
    """The ends of ops that others may still wait for: for each op of a tick, batches in turns."""

    def __init__(self, plan: Plan) -> None:
        self.shape = plan.shape
        # Edges reach `lookahead + 1` back, from batches that lie about as far behind the newest.
        self.turns = 4 * (self.shape.lookahead + 1)
        self._of_op: dict[tuple[Kind, int | None], list[Event]] = {
            (slot.kind, slot.micro): [ENDED] * self.turns for slot in plan.tick
        }

    def of(self, kind: Kind, micro: int | None) -> list[Event]:
        """The ends of one op of a tick: batch b is at b modulo `turns`."""
        return self._of_op[kind, micro]

    def __getitem__(self, op: Op) -> Event:
        return self._of_op[op.kind, op.micro][op.batch % self.turns]

    def __setitem__(self, op: Op, end: Event) -> None:
        self._of_op[op.kind, op.micro][op.batch % self.turns] = end

    def make_room(self, batch: int) -> None:
        """Before a batch is issued: wait for one that must be over.

        The edge of `prefetch` itself keeps the batches in flight within the look-ahead. Waiting
        here for the batch before that one bounds the queues, and holds up no window: the rows that
        are issued next already wait for the same batch, through `retrieve` or the update before.
        """
        retired = self.shape.retire(batch - self.shape.lookahead - 1)
        if retired.batch >= 0:
            self[retired].wait()
        between_batches(batch)


# One step of every tick, with all looked up that does not change from tick to tick.


@dataclass(frozen=True, slots=True)
class _Prepared:
    slot: Slot
    act: Act
    submit: Callable[..., Event]
    ends: RecentEnds
    own: list[Event]
    after: tuple[tuple[list[Event], int], ...]
    """Of each op that it waits for: its ends, and how many batches before this one it is."""
    alongside: list[Event] | None
    """The ends of the op that it starts with, of the same batch."""
    behind: tuple[tuple[list[Event], int], ...]
    marked: bool
    on_host: bool
    idle: Callable[[Op], bool] | None

    def op(self, opened: int) -> Op:
        return Op(self.slot.kind, opened + self.slot.ahead, self.slot.micro)

    def issue(self, opened: int) -> None:
        op, turns = self.op(opened), self.ends.turns
        batch = op.batch
        if op.kind is Kind.PREFETCH:
            self.ends.make_room(batch)
        end = self.submit(
            self.act,
            op,
            [ends[(batch - back) % turns] for ends, back in self.after],
            alongside=None if self.alongside is None else self.alongside[batch % turns],
            behind=[ends[(batch - back) % turns] for ends, back in self.behind],
            marked=self.marked,
            on_host=self.on_host,
            idle=self.idle is not None and self.idle(op),
            again=self.own[batch % turns],
        )
        self.own[batch % turns] = end


def _prepared(tick: SteadyTick, ends: RecentEnds, acts: Acts, lanes: Lanes) -> list[_Prepared]:
    marked = _waited_for_elsewhere(tick, ends.shape, acts)

    def found(before: Earlier) -> tuple[list[Event], int]:
        return ends.of(before.kind, before.micro), before.back

    return [
        _Prepared(
            step.slot,
            acts.of[step.slot.kind],
            lanes[ends.shape.lane(step.slot.kind)].submit,
            ends,
            ends.of(step.slot.kind, step.slot.micro),
            tuple(map(found, step.after)),
            None if step.alongside is None else found(step.alongside)[0],
            tuple(map(found, step.behind)),
            (step.slot.kind, step.slot.micro) in marked,
            step.slot.kind in acts.on_host,
            acts.idle if step.slot.kind in MAY_BE_IDLE else None,
        )
        for step in tick.steps
    ]


def _waited_for_elsewhere(
    tick: SteadyTick, shape: Shape, acts: Acts
) -> set[tuple[Kind, int | None]]:
    """Ops that one of another lane waits for, or the issuing loop, or an act that hands them on."""
    retired = shape.retire(0)
    return {(retired.kind, retired.micro)} | {
        (before.kind, before.micro)
        for step in tick.steps
        for before in step.after
        if step.slot.kind in acts.on_host
        or step.slot.kind in MAY_BE_IDLE
        or shape.lane(before.kind) is not shape.lane(step.slot.kind)
    }


def _until(batches: Batches, act: Act) -> Act:
    def bounded(op: Op) -> None:
        end = batches()
        if end is None or op.batch < end:
            act(op)

    return bounded


def _facts(shape: Shape) -> dict[str, Fact]:
    return {
        "plan": shape.plan,
        "micro_batches": shape.micro_batches,
        "retrieval": shape.retrieval.value,
    }


# The end of the data: known to a run before it starts, or found while it runs.


class StopSignal:
    """How many batches there are, once that is known; hand it to `run` as `batches`.

    `counts t` calls `found_at(t)` when no rank has a sample in batch t. Every rank learns it from
    the same exchange, so all ranks leave out the same collectives.
    """

    def __init__(self, batches: int | None = None) -> None:
        """`batches`: an upper limit, the same on every rank."""
        self._batches = batches

    def __call__(self) -> int | None:
        return self._batches

    def found_at(self, batch: int) -> None:
        """Batch `batch` and all later ones do not exist."""
        self._batches = batch if self._batches is None else min(batch, self._batches)


# The interpreter during a run: when it collects garbage, how threads share its lock.


COLLECT_EVERY = 32
"""Batches between two collections."""
SWITCH_S = 0.0005
"""How long a thread may keep the interpreter from another lane's."""


@contextmanager
def quiet_interpreter() -> Generator[None]:
    """Inside, garbage is collected by `between_batches` alone, and lanes wait less for each other.

    Left alone the collector starts in the middle of some op, on one rank at a time, and all ranks
    wait for it.
    """
    collecting, switch_s = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(switch_s)
        if collecting:
            gc.enable()


def between_batches(batch: int) -> None:
    """Collect young garbage every N batches, after the same ones on every rank."""
    if batch % COLLECT_EVERY == COLLECT_EVERY - 1:
        gc.collect(1)


# Work around work: the same ops with a name on the network, or slower.


def name_collectives(work: Work, label: Callable[[str], AbstractContextManager[None]]) -> Work:
    """Tell the communicator which op its collectives serve: pass `comm.op_label`."""

    def named(act: Act) -> Act:
        def call(op: Op) -> None:
            with label(str(op)):
                act(op)

        return call

    return {k: named(act) if k in COLLECTIVES else act for k, act in work.items()}


def inject_delays(work: Work, *, seed: int, max_ms: float, share: float = 1.0) -> Work:
    """Delay a share of the ops by up to `max_ms`, so that a missing edge loses its race.

    The delay of an op is a function of the seed and its name, whatever thread runs it.
    """

    def delayed(act: Act) -> Act:
        def call(op: Op) -> None:
            chance = random.Random(f"{seed} {op}")
            delay_s = chance.random() * max_ms / 1e3
            if chance.random() < share:
                time.sleep(delay_s)
            act(op)

        return call

    return {kind: delayed(act) for kind, act in work.items()}


# When each op ran, by the clock of the host.


@dataclass(frozen=True, slots=True)
class EndedRun:
    """What was recorded of a run; its trace is put together for whoever asks, at any time later.

    That takes milliseconds, and of runs that checkpoints cut short only one is ever looked at.
    """

    num_batches: int
    """Of which something was recorded."""
    read: Callable[[], Trace]


NO_RUN = EndedRun(0, lambda: Trace(()))


class Spans(Protocol):
    """Times the ops of one run on one rank."""

    def begin(self) -> None:
        """Forget everything; times count from now."""
        ...

    def timed(self, act: Act, lane: Lane, *, on_host: bool = False) -> Act:
        """The same act, which runs on that lane, recorded; `on_host`: no device has a part."""
        ...

    def ended(self, facts: Mapping[str, Fact]) -> EndedRun:
        """What was recorded so far; later runs do not change it."""
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

    def ended(self, facts: Mapping[str, Fact]) -> EndedRun:
        spans = self._kept.all()
        return EndedRun(self._kept.num_batches, lambda: trace_of(spans, facts))

    def recent(self, batches: int) -> list[Span]:
        return self._kept.newest(batches)

    def _now(self) -> float:
        return (time.perf_counter() - self._start) * 1e3


class LateSpans:
    """The spans of a run whose trace nobody needs yet: `run` gives an empty one."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self.begin, self.timed, self.recent = spans.begin, spans.timed, spans.recent
        self.run = NO_RUN
        """The run, once it has ended."""

    def ended(self, facts: Mapping[str, Fact]) -> EndedRun:
        self.run = self._spans.ended(facts)
        return NO_RUN


def span_of(op: Op, lane: Lane, rank: int, start: float, end: float) -> Span:
    """What an op leaves in the trace."""
    return Span(op.kind, lane, op.batch, op.micro, rank, start, end)


def trace_of(spans: Iterable[Span], facts: Mapping[str, Fact]) -> Trace:
    """A trace in the order of time."""
    return Trace(tuple(sorted(spans, key=lambda span: (span.start, span.end))), dict(facts))


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

    @property
    def num_batches(self) -> int:
        return len(self._of_batch)

    def all(self) -> list[T]:
        with self._lock:
            return [item for items in self._of_batch.values() for item in items]

    def newest(self, batches: int) -> list[T]:
        """Items of the newest batches alone."""
        with self._lock:
            oldest = self._newest - batches
            return [item for b, items in self._of_batch.items() if b > oldest for item in items]

    def clear(self) -> None:
        with self._lock:
            self._of_batch, self._newest = {}, -1

    def _drop(self) -> None:
        for old in [b for b in self._of_batch if b <= self._newest - self._batches]:
            del self._of_batch[old]
