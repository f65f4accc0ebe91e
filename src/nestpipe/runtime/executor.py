"""The executor: the steps of a plan, submitted to lanes as room allows."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager

from nestpipe.runtime.lanes import Act, Event, Lanes, Work
from nestpipe.runtime.spans import HostSpans, Spans
from nestpipe.schedule import COLLECTIVES, Kind, Op, Plan, Shape
from nestpipe.trace import Trace
from nestpipe.trace.span import Fact

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
) -> Trace:
    """Do every op of the plan's stream, until the end that `batches` tells.

    The end may become known late, with ops of batches past it already issued: they are skipped
    when their turn comes. It is `counts` that finds the end, and all that follows in a batch waits
    for its `counts`. So of batches past the end nothing runs but `prefetch`, `copy` and `dedup`,
    and the one `counts` that found it; these acts must bear a batch without samples.

    The first failure of any op is raised here, after all lanes have stopped.
    """
    spans = spans or HostSpans()
    lane_of = {kind: plan.shape.lane(kind) for kind in work}
    acts = {k: _until(batches, spans.timed(act, lane_of[k])) for k, act in work.items()}
    done: dict[Op, Event] = {}
    spans.begin()
    with quiet_interpreter(), lanes:
        for step in plan.stream(batches):
            op = step.op
            if op.kind is Kind.PREFETCH:
                _make_room(op.batch, plan.shape, done)
                between_batches(op.batch)
            done[op] = lanes[lane_of[op.kind]].submit(
                acts[op.kind],
                op,
                [done[before] for before in step.after],
                alongside=None if step.alongside is None else done[step.alongside],
                behind=[done[before] for before in step.behind],
            )
    return spans.trace({**_facts(plan.shape), **(facts or {})})


def _until(batches: Batches, act: Act) -> Act:
    def bounded(op: Op) -> None:
        end = batches()
        if end is None or op.batch < end:
            act(op)

    return bounded


def _make_room(batch: int, shape: Shape, done: dict[Op, Event]) -> None:
    """Before a batch is issued: wait for one that must be over, forget those nobody waits for.

    The edge of `prefetch` itself keeps the batches in flight within the look-ahead. Waiting here
    for the batch before that one bounds the queues, and holds up no window: the rows that are
    issued next already wait for the same batch, through `retrieve` or the update before.
    """
    retired = shape.retire(batch - shape.lookahead - 1)
    if retired.batch >= 0:
        done[retired].wait()
    # The oldest batch that still gets ops lies `lookahead` behind; edges reach `lookahead + 1`.
    # With a pool it lies one further behind, but it gets a write-back only, whose edges reach 1.
    oldest = batch - 2 * shape.lookahead - 1
    for op in [op for op in done if op.batch < oldest]:
        del done[op]


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


# Python's own habits, for the time of a run: when it collects garbage, how it shares its lock.


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
    """Collect what young garbage there is, every so many batches, the same ones on every rank."""
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
