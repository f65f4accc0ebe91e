"""The executor: the steps of a plan, submitted to lanes as room allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nestpipe.runtime.collective_order import CollectiveOrder
from nestpipe.runtime.interpreter import between_batches, quiet_interpreter
from nestpipe.runtime.lanes import Act, Event, Lanes, Work
from nestpipe.runtime.spans import HostSpans, Spans
from nestpipe.schedule import Kind, Op, Plan, Shape
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
    order = CollectiveOrder(plan.shape)
    spans.begin()
    with quiet_interpreter(), lanes:
        for step in plan.stream(batches):
            op = step.op
            if op.kind is Kind.PREFETCH:
                _make_room(op.batch, plan.shape, done)
                between_batches(op.batch)
            lane = lanes[lane_of[op.kind]]
            after, behind = [done[b] for b in step.after], order.behind(op)
            done[op] = lane.submit(acts[op.kind], op, after, done[behind] if behind else None)
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
    oldest = batch - 2 * shape.lookahead - 1
    for op in [op for op in done if op.batch < oldest]:
        del done[op]


def _facts(shape: Shape) -> dict[str, Fact]:
    return {"plan": shape.plan, "micros": shape.micros, "retrieval": shape.retrieval.value}
