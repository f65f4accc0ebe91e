"""Replay on ranks that share what they compute with: hosts with half a core, ranks on one GPU.

The replay of `replay.py` gives every worker a machine of its own, so that thousands of them fit
into one array. Here the ops of few ranks draw on pools: whoever runs at the same time gets an equal
part.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nestpipe.schedule.op import LANE_OF, Kind, Lane, Op
from nestpipe.schedule.plans import Plan
from nestpipe.schedule.schedule import Step
from nestpipe.trace import Span, Trace

SOON_MS = 1e-6
"""Ops with less left than this have ended: sums of parts are not exact."""
COLLECTIVES = frozenset(kind for kind in Kind if LANE_OF[kind] is Lane.NET)
"""Kinds that all ranks take part in, on whatever lane a plan puts them."""
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


def replay_shared(plan: Plan, cost_of: CostOf, sharing: Sharing, *, batches: int) -> Trace:
    """Play so many batches of the plan on all ranks at once."""
    ranks = [_Rank(number, plan, batches) for number in range(len(sharing.pools))]
    arrived: dict[Op, list[_Running]] = defaultdict(list)
    running: list[_Running] = []
    spans: list[Span] = []
    now = 0.0
    while True:
        for rank in ranks:
            for op in rank.startable():
                together = arrived[op] if op.collective else []
                lane = plan.shape.lane(op.kind)
                together.append(_Running(op, lane, rank.number, now, cost_of(op, rank.number)))
                if not op.collective or len(together) == len(ranks):
                    running += together
                    arrived.pop(op, None)
        if not running:
            break
        speeds = _speeds(running, sharing)
        step = min(r.left / speed for r, speed in zip(running, speeds, strict=True))
        now += step
        for one, speed in zip(running, speeds, strict=True):
            one.left -= step * speed
        for one in [one for one in running if one.left <= SOON_MS]:
            ranks[one.rank].ended(one.op)
            spans.append(one.span(now))
        running = [one for one in running if one.left > SOON_MS]
    assert not arrived, f"ranks wait for each other in {', '.join(map(str, arrived))}"
    facts = {
        "plan": plan.name,
        "micros": plan.shape.micros,
        "retrieval": str(plan.shape.retrieval),
        "workers": len(ranks),
    }
    return Trace(tuple(spans), facts)


@dataclass(slots=True)
class _Running:
    op: Op
    lane: Lane
    rank: int
    start: float
    left: float

    def span(self, now: float) -> Span:
        op = self.op
        return Span(op.kind, self.lane, op.batch, op.micro, self.rank, self.start, now)


@dataclass(slots=True)
class _Rank:
    """One rank's lanes: what each has still to do, in order."""

    number: int
    plan: Plan
    batches: int
    lanes: dict[Lane, deque[Step]] = field(init=False)
    busy: set[Lane] = field(default_factory=set[Lane])
    done: set[Op] = field(default_factory=set[Op])

    def __post_init__(self) -> None:
        self.lanes = {lane: deque() for lane in Lane}
        for step in self.plan.stream(lambda: self.batches):
            self.lanes[self.plan.shape.lane(step.op.kind)].append(step)

    def startable(self) -> list[Op]:
        """Ops whose lane is free and whose waits are over; they start now."""
        found: list[Op] = []
        for lane, steps in self.lanes.items():
            if lane in self.busy or not steps:
                continue
            if self.done.issuperset(steps[0].after):
                self.busy.add(lane)
                found.append(steps.popleft().op)
        return found

    def ended(self, op: Op) -> None:
        self.busy.discard(self.plan.shape.lane(op.kind))
        self.done.add(op)


def _speeds(running: Sequence[_Running], sharing: Sharing) -> list[float]:
    """How fast each op runs, given all that run beside it."""
    own = [sharing.draw(one.op.kind, one.lane) for one in running]
    drawn: dict[int, float] = defaultdict(float)
    for one, asked in zip(running, own, strict=True):
        drawn[sharing.pools[one.rank]] += asked
    return [
        sharing.speed(asked, drawn[sharing.pools[one.rank]])
        for one, asked in zip(running, own, strict=True)
    ]
