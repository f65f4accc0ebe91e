"""The replay: a schedule played on N workers at once, each op at its cost.

One array holds what a scalar holds in the nominal drawing: the moment at which each worker's lane
is free, or an op of it has ended. A collective ends for every member at its slowest member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nestpipe.schedule.op import Kind, Lane, Op
from nestpipe.schedule.plans import Plan
from nestpipe.schedule.schedule import Step
from nestpipe.sim.cluster import Stragglers
from nestpipe.sim.costs import Costs, Scale
from nestpipe.trace import Span, Trace

# Shapes: W workers
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay leaves behind."""

    trace: Trace
    """The spans of the recorded workers."""
    update_ends: Times
    """When each batch's update ended on the slowest worker, in milliseconds."""


def replay(
    plan: Plan,
    costs: Costs,
    scale: Scale,
    *,
    batches: int,
    stragglers: Stragglers | None = None,
    record: Iterable[int] = (0,),
    progress: Callable[[int], None] = lambda batch: None,
) -> Replay:
    """Play so many batches of the plan; `progress` hears of each batch that is done."""
    factor = _Factors(stragglers or Stragglers(), scale.workers)
    recorded = tuple(record)
    free_W = {lane: np.zeros(scale.workers) for lane in Lane}
    ended = _Memory(keep=2 * plan.shape.lookahead + 4)
    spans: list[Span] = []
    update_ends: list[float] = []
    for step in plan.stream(lambda: batches):
        op = step.op
        lane = plan.shape.lane(op.kind)
        start_W = _start(step, free_W[lane], ended)
        end_W = start_W + costs[op.kind] * factor.of(op)
        if op.collective:
            end_W = _slowest(end_W, op.kind, scale)
        free_W[lane] = ended[op] = end_W
        spans += [_span(op, lane, rank, start_W, end_W) for rank in recorded]
        if op.kind is Kind.UPDATE:
            update_ends.append(float(end_W.max()))
            progress(op.batch)
    facts = {
        "plan": plan.name,
        "micros": plan.shape.micros,
        "retrieval": str(plan.shape.retrieval),
        "workers": scale.workers,
        "groups": scale.groups,
    }
    return Replay(Trace(tuple(spans), facts), np.array(update_ends))


def _start(step: Step, free_W: Times, ended: _Memory) -> Times:
    start_W = free_W
    for before in step.after:
        start_W = np.maximum(start_W, ended[before])
    return start_W


def _slowest(end_W: Times, kind: Kind, scale: Scale) -> Times:
    """Everyone in a collective waits for its last member; shards of a group are neighbours."""
    if kind is Kind.REDUCE:
        return np.full_like(end_W, end_W.max())
    end_GS = end_W.reshape(scale.groups, scale.shards)
    across = 0 if kind is Kind.MIRROR else 1
    return np.broadcast_to(end_GS.max(axis=across, keepdims=True), end_GS.shape).reshape(-1)


def _span(op: Op, lane: Lane, rank: int, start_W: Times, end_W: Times) -> Span:
    return Span(op.kind, lane, op.batch, op.micro, rank, float(start_W[rank]), float(end_W[rank]))


class _Memory:
    """When ops ended, forgotten as soon as no edge can reach back to them."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._of_batch: dict[int, dict[Op, Times]] = {}

    def __getitem__(self, op: Op) -> Times:
        return self._of_batch[op.batch][op]

    def __setitem__(self, op: Op, end_W: Times) -> None:
        if op.batch not in self._of_batch:
            self._of_batch[op.batch] = {}
            self._of_batch.pop(op.batch - self._keep, None)
        self._of_batch[op.batch][op] = end_W


class _Factors:
    """How much longer each worker takes for an op that it does on its own."""

    def __init__(self, stragglers: Stragglers, workers: int) -> None:
        self._jitter = stragglers.jitter
        self._rng = np.random.default_rng(stragglers.seed)
        self._steady_W = np.ones(workers)
        num_slow = round(stragglers.slow_share * workers)
        slow = self._rng.choice(workers, size=num_slow, replace=False)
        self._steady_W[slow] = stragglers.slow_factor

    def of(self, op: Op) -> Times | float:
        if op.collective:
            return 1.0
        if not self._jitter:
            return self._steady_W
        noise_W = self._rng.lognormal(0.0, self._jitter, self._steady_W.size)
        return self._steady_W * noise_W
