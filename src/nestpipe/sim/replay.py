"""The replay: a schedule played on N workers at once, each op at its cost.

One array holds what a scalar holds in the nominal drawing: the moment at which each worker's lane
is free, or an op of it has ended. A collective ends for every member at its slowest member.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nestpipe.schedule.plans import Plan
from nestpipe.schedule.schedule import (
    COLLECTIVES,
    DRAINING,
    REPLICA_KINDS,
    Kind,
    Lane,
    Op,
    Step,
)
from nestpipe.sim.costs import Costs, Scale, Stragglers
from nestpipe.trace import Span, Trace

# Shapes: W workers
Times = npt.NDArray[np.float64]
FORWARD = 1 / 3
"""The part of a `dense` op before its first output: the forward pass, one product for the two of
each in the backward pass."""
USUAL_BUCKETS = 4
"""Parts in which dense gradients are summed alongside `dense`, where nobody says; the last one has
to wait for its end. A model of some 4 million dense parameters has so many."""


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
    buckets: int = USUAL_BUCKETS,
    progress: Callable[[int], None] = lambda batch: None,
    every_worker: bool = False,
) -> Replay:
    """Play so many batches of the plan; `progress` hears of each batch that is done.

    Workers that are all alike do everything at the same moments, so one is played for all of them,
    unless `every_worker` asks for each.
    """
    unequal = stragglers or Stragglers()
    workers = 1 if unequal.none and not every_worker else scale.workers
    factor = _Factors(unequal, workers)
    recorded = tuple(record)
    free_W = {lane: np.zeros(workers) for lane in Lane}
    started, ended = (_Memory(keep=2 * plan.shape.lookahead + 4) for _ in range(2))
    spans: list[Span] = []
    update_ends: list[float] = []
    for step in plan.stream(lambda: batches):
        op = step.op
        lane = plan.shape.lane(op.kind)
        start_W = _start(step, free_W[lane], started, ended)
        begin_W, tail = start_W, 0.0
        if step.alongside is not None:
            with_W, done_W = started[step.alongside], ended[step.alongside]
            begin_W = np.maximum(start_W, with_W + FORWARD * (done_W - with_W))
            tail = costs[op.kind] / buckets if op.kind in DRAINING else 0.0
        end_W = begin_W + costs[op.kind] * factor.of(op) - tail
        if op.collective:
            end_W = _slowest(end_W, op.kind, scale)
        if tail and step.alongside is not None:
            done_W = _slowest(ended[step.alongside], op.kind, scale)
            end_W = np.maximum(end_W, done_W) + tail
        started[op], free_W[lane], ended[op] = start_W, end_W, end_W
        spans += [_span(op, lane, rank, start_W, end_W) for rank in recorded]
        if op.kind is Kind.UPDATE:
            update_ends.append(float(end_W.max()))
            progress(op.batch)
    facts = {
        "plan": plan.name,
        "micro_batches": plan.shape.micro_batches,
        "retrieval": str(plan.shape.retrieval),
        "workers": scale.workers,
        "groups": scale.groups,
    }
    return Replay(Trace(tuple(spans), facts), np.array(update_ends))


def _start(step: Step, free_W: Times, started: _Memory, ended: _Memory) -> Times:
    start_W = free_W
    for before in step.after:
        start_W = np.maximum(start_W, ended[before])
    # What has started its collectives does not hold up others for as long as they run.
    for before in step.joined:
        start_W = np.maximum(start_W, started[before])
    return start_W


def _slowest(end_W: Times, kind: Kind, scale: Scale) -> Times:
    """Everyone in a collective waits for its last member; shards of a group are neighbours."""
    if end_W.size == 1:
        return end_W
    if kind in (Kind.TOTALS, Kind.REDUCE):
        return np.full_like(end_W, end_W.max())
    end_GS = end_W.reshape(scale.groups, scale.shards)
    across = 0 if kind in REPLICA_KINDS else 1
    return np.broadcast_to(end_GS.max(axis=across, keepdims=True), end_GS.shape).reshape(-1)


def _span(op: Op, lane: Lane, rank: int, start_W: Times, end_W: Times) -> Span:
    seat = 0 if start_W.size == 1 else rank
    return Span(op.kind, lane, op.batch, op.micro, rank, float(start_W[seat]), float(end_W[seat]))


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


# Replay on ranks that share what they compute with: hosts with half a core, ranks on one GPU.
#
# The replay of `replay.py` gives every worker a machine of its own, so that thousands of them fit
# into one array. Here the ops of few ranks draw on pools: ops that run at the same time get
# equal parts.


SOON_MS = 1e-6
"""Ops with less left than this have ended: sums of parts are not exact."""
MOVES = frozenset({Kind.RETRIEVE, Kind.WRITEBACK})
"""Kinds that move rows between host memory and the device."""
CostOf = Callable[[Op, int], float]
"""Milliseconds that an op takes a rank which has its pool for itself."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which ranks share a pool, and the lanes whose ops need it."""

    pools: tuple[int, ...]
    """The pool of each rank."""
    lanes: frozenset[Lane]
    """Ops on other lanes take their time whoever else runs."""
    capacity: float = 1.0
    """How many ops a pool can run at full speed."""
    collective_draw: float = 0.0
    """What a collective takes of its rank's pool while it runs, 0 to 1: a network is not free."""
    move_draw: float = 0.0
    """What rows take of it while they are moved, 0 to 1, on a lane that is not among `lanes`."""

    def draw(self, kind: str, lane: str) -> float:
        """How much of a pool an op asks for while it runs; a collective on any lane asks alike."""
        if kind in COLLECTIVES:
            return self.collective_draw
        if lane in self.lanes:
            return 1.0
        return self.move_draw if kind in MOVES else 0.0

    def speed(self, own: float, drawn: float) -> float:
        """How fast an op that asks for `own` runs while all ops of its pool ask for `drawn`."""
        if own == 0.0:
            return 1.0
        # The part of its time for which it needs the pool gets longer, the rest does not.
        return 1.0 / (1.0 - own + own / min(1.0, self.capacity / drawn))


def replay_shared(
    plan: Plan,
    cost_of: CostOf,
    sharing: Sharing,
    *,
    batches: int,
    buckets: int = USUAL_BUCKETS,
    cpu_of: CostOf | None = None,
) -> Trace:
    """Play so many batches of the plan on all ranks at once.

    `cpu_of`: for how much of its time a collective needs its pool; None: `collective_draw` of it.
    """
    steps = list(plan.stream(lambda: batches))
    ranks = [_Rank(number, plan, steps) for number in range(len(sharing.pools))]
    arrived: dict[Op, list[_Running]] = defaultdict(list)
    running: list[_Running] = []
    spans: list[Span] = []
    now = 0.0
    while True:
        for rank in ranks:
            for step in rank.startable():
                op, lane = step.op, plan.shape.lane(step.op.kind)
                together = arrived[op] if op.collective else []
                cost = cost_of(op, rank.number)
                tail = cost / buckets if step.alongside and op.kind in DRAINING else 0.0
                draw = sharing.draw(op.kind, lane)
                if cpu_of is not None and op.collective:
                    draw = min(1.0, cpu_of(op, rank.number) / cost) if cost > 0 else 0.0
                together.append(
                    _Running(op, lane, rank.number, now, cost, cost, draw, step.alongside, tail)
                )
                if not op.collective or len(together) == len(ranks):
                    running += together
                    arrived.pop(op, None)
        if not running:
            break
        moving = _moving(running)
        speeds = _speeds(moving, sharing)
        step = min(one.next_stop() / speed for one, speed in zip(moving, speeds, strict=True))
        now += step
        for one, speed in zip(moving, speeds, strict=True):
            one.left -= step * speed
        over = [one for one in moving if one.left <= SOON_MS]
        for one in over:
            ranks[one.rank].ended(one.op)
            spans.append(one.span(now))
        running = [one for one in running if one not in over]
    assert not arrived, f"ranks wait for each other in {', '.join(map(str, arrived))}"
    facts = {
        "plan": plan.name,
        "micro_batches": plan.shape.micro_batches,
        "retrieval": str(plan.shape.retrieval),
        "workers": len(ranks),
    }
    return Trace(tuple(spans), facts)


@dataclass(slots=True, eq=False)
class _Running:
    op: Op
    lane: Lane
    rank: int
    start: float
    cost: float
    left: float
    draw: float
    """How much of its pool it asks for."""
    alongside: Op | None = None
    """The op whose output it takes as it comes."""
    tail: float = 0.0
    """What is left of it when only the last of that output is missing."""

    @property
    def backward(self) -> float:
        """What is left of a `dense` op when its first output comes."""
        return (1 - FORWARD) * self.cost

    def next_stop(self) -> float:
        """How much it does until it ends, or until something else about it changes."""
        stop = self.backward if self.op.kind is Kind.DENSE else self.tail
        return self.left - stop if self.left > stop + SOON_MS else self.left

    def span(self, now: float) -> Span:
        op = self.op
        return Span(op.kind, self.lane, op.batch, op.micro, self.rank, self.start, now)


@dataclass(slots=True)
class _Rank:
    """One rank's lanes: what each has still to do, in order."""

    number: int
    plan: Plan
    steps: Sequence[Step]
    lanes: dict[Lane, deque[Step]] = field(init=False)
    busy: set[Lane] = field(default_factory=set[Lane])
    begun: set[Op] = field(default_factory=set[Op])
    done: set[Op] = field(default_factory=set[Op])

    def __post_init__(self) -> None:
        self.lanes = {lane: deque() for lane in Lane}
        for step in self.steps:
            self.lanes[self.plan.shape.lane(step.op.kind)].append(step)

    def startable(self) -> list[Step]:
        """Steps whose lane is free and whose waits are over; they start now."""
        found: list[Step] = []
        for lane, steps in self.lanes.items():
            if lane not in self.busy and steps and self._is_free(steps[0]):
                self.busy.add(lane)
                self.begun.add(steps[0].op)
                found.append(steps.popleft())
        # What has started may let others start with it.
        return [*found, *self.startable()] if found else []

    def _is_free(self, step: Step) -> bool:
        return self.done.issuperset(step.after) and self.begun.issuperset(step.joined)

    def ended(self, op: Op) -> None:
        self.busy.discard(self.plan.shape.lane(op.kind))
        self.done.add(op)


def _moving(running: Sequence[_Running]) -> list[_Running]:
    """All but those that wait for output of the op that they run alongside, on any rank."""
    by_op: dict[Op, list[_Running]] = defaultdict(list)
    for one in running:
        by_op[one.op].append(one)

    def waits(one: _Running) -> bool:
        makers = by_op[one.alongside] if one.alongside is not None else []
        at_tail = one.tail > 0 and one.left <= one.tail + SOON_MS
        return any(at_tail or maker.left > maker.backward + SOON_MS for maker in makers)

    return [one for one in running if not waits(one)]


def _speeds(running: Sequence[_Running], sharing: Sharing) -> list[float]:
    """How fast each op runs, given all that run beside it."""
    drawn: dict[int, float] = defaultdict(float)
    for one in running:
        drawn[sharing.pools[one.rank]] += one.draw
    return [sharing.speed(one.draw, drawn[sharing.pools[one.rank]]) for one in running]
