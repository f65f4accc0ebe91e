"""The plans: each chooses what runs ahead between batches and what overlaps inside one.

A plan is a value: the bounds it keeps, and the order of one tick. A tick is everything that happens
while one window is open. Its slots name ops relative to the batch of that window: with `ahead` 1,
`retrieve` is that of the next batch. What each op waits for is the same table for all plans
(`waits`), plus one chain through the collectives of each network and one through all that run on
the device, so that all ranks start them in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from nestpipe.errors import PlanError
from nestpipe.schedule.dependencies import waits
from nestpipe.schedule.options import (
    LOOKUP_STAGES,
    Exchange,
    Merge,
    PlanOptions,
    Retrieval,
    plan_options_of,
)
from nestpipe.schedule.schedule import DEVICE_NETWORKS, Kind, Op, Schedule, Shape, Step

K = Kind


@dataclass(frozen=True, slots=True)
class Slot:
    """An op of a tick: its kind, how many batches ahead of the open window, its micro-batch."""

    kind: Kind
    ahead: int
    micro: int | None = None


@dataclass(frozen=True, slots=True)
class Ahead:
    """How many batches ahead of the open window each stage of the lookup works."""

    prefetch: int = 0
    copy: int = 0
    route: int = 0
    retrieve: int = 0

    @property
    def samples(self) -> list[Slot]:
        return [Slot(K.PREFETCH, self.prefetch), Slot(K.COPY, self.copy)]

    @property
    def routing(self) -> list[Slot]:
        return [Slot(kind, self.route) for kind in (K.DEDUP, K.COUNTS, K.KEYS, K.UNION)]

    @property
    def replica_routing(self) -> list[Slot]:
        """What batches that merge replicas do beyond that."""
        return [Slot(kind, self.route) for kind in (K.REPLICA_KEYS, K.REPLICA_UNION)]

    @property
    def routing_is_ready(self) -> bool:
        """Whether the samples to route were copied in an earlier tick."""
        return self.copy > self.route


Window = Callable[[int, list[Slot], bool], list[Slot]]
"""The micro-batches of a window in issue order, with the routing of a later batch among them."""
Tick = Callable[[Shape, Ahead, Window], list[Slot]]
"""All of a tick in issue order."""


def fetch(shape: Shape, ahead: int) -> list[Slot]:
    """Where rows are fetched: those that they take the place of have been stored.

    With a pool these are the rows that the batch's own union gave up, so the write-back stands
    behind that; else they are those of the batch before the open window.
    """
    stored = ahead - shape.leaving_known_after if shape.pooled else -1
    return [Slot(K.WRITEBACK, stored), Slot(K.RETRIEVE, ahead)]


def end_of(shape: Shape) -> list[Slot]:
    """What ends a window."""
    reduce, update, merge = Slot(K.REDUCE, 0), Slot(K.UPDATE, 0), Slot(K.REPLICA_SYNC, 0)
    if shape.merge is Merge.EXACT:
        return [merge, reduce, update]
    return [reduce, update, merge]


def handover_of(shape: Shape) -> list[Slot]:
    """What makes the rows of the window's batch current, where `retrieve` alone does not."""
    return [] if shape.handover is K.RETRIEVE else [Slot(shape.handover, 0)]


def lookup_first(shape: Shape, ahead: Ahead, window: Window) -> list[Slot]:
    """The whole lookup of a batch, then its window: no stage runs ahead."""
    lookup = [*ahead.samples, *ahead.routing, *ahead.replica_routing]
    body, end = window(shape.micro_batches, [], True), end_of(shape)
    if shape.retrieval is Retrieval.WHOLE:
        # The write-back ends its own batch, so that nothing at all overlaps.
        return [*lookup, Slot(K.RETRIEVE, 0), *body, *end, Slot(K.WRITEBACK, 0)]
    return [*lookup, *fetch(shape, 0), *handover_of(shape), *body, *end]


def routing_ahead(shape: Shape, ahead: Ahead, window: Window) -> list[Slot]:
    """Samples and keys of later batches travel under the window; rows are fetched before it."""
    body = (
        window(shape.micro_batches, ahead.routing, ahead.routing_is_ready) + ahead.replica_routing
    )
    return [*fetch(shape, 0), *handover_of(shape), *ahead.samples, *body, *end_of(shape)]


def lookup_ahead(shape: Shape, ahead: Ahead, window: Window) -> list[Slot]:
    """The whole lookup of later batches runs under the window, retrieval one batch ahead."""
    writeback, retrieve = fetch(shape, ahead.retrieve)
    first, ready = [*handover_of(shape), writeback], [retrieve]
    if shape.pooled:
        first, ready = [], [writeback, retrieve]
    # Behind the window: the network would wait there for the union that comes before them.
    body = (
        window(shape.micro_batches, ahead.routing, ahead.routing_is_ready) + ahead.replica_routing
    )
    body = [*ready, *body] if ahead.route > ahead.retrieve else [*body, *ready]
    return [*first, *ahead.samples, *body, *end_of(shape)]


def taking_turns(micro_batches: int, routing: list[Slot], routing_is_ready: bool) -> list[Slot]:
    """Rows, dense, gradients of one micro-batch after the other; routing under a dense op."""
    order: list[Slot] = []
    routing_at = 0 if routing_is_ready else micro_batches - 1
    for micro in range(micro_batches):
        order.append(Slot(K.ROWS, 0, micro))
        if micro == routing_at:
            order += routing
        order.append(Slot(K.DENSE, 0, micro))
        order.append(Slot(K.GRADS, 0, micro))
    return order


def overlapped(micro_batches: int, routing: list[Slot], routing_is_ready: bool) -> list[Slot]:
    """Rows run some micro-batches ahead of dense, gradients one behind.

    Routing of a later batch goes where the network has most room: the first dense op has no
    gradients beside it yet. Its keys follow one micro-batch after their counts, so that the
    issuing thread does not wait for the counts.
    """
    lead = rows_lead(micro_batches)
    order = [Slot(K.ROWS, 0, micro) for micro in range(min(lead, micro_batches))]
    counts_at = 0 if routing_is_ready else micro_batches - 1
    keys_at = min(counts_at + 1, micro_batches - 1)
    for micro in range(micro_batches):
        if micro + lead < micro_batches:
            order.append(Slot(K.ROWS, 0, micro + lead))
        if micro == counts_at:
            order += routing[:2]
        if micro == keys_at:
            order += routing[2:]
        order.append(Slot(K.DENSE, 0, micro))
        order.append(Slot(K.GRADS, 0, micro))
    return order


def rows_lead(micro_batches: int) -> int:
    """How many micro-batches rows run ahead: enough to sit out a long key exchange.

    One is enough for few micro-batches; with many, each hides only a little, so that the exchange
    of keys, which does not get shorter, would hold up the rows behind it.
    """
    return max(1, -(-micro_batches // 6))


@dataclass(frozen=True, slots=True)
class Plan:
    """An unbounded schedule: the bounds it keeps and the order of one tick."""

    shape: Shape
    tick: tuple[Slot, ...]

    @property
    def name(self) -> str:
        return self.shape.plan

    def stream(self, batches: Callable[[], int | None] = lambda: None) -> Iterator[Step]:
        """Steps without end, or until the end that `batches` gives once it is known.

        An edge never reaches further back than `lookahead + 1` batches, so a reader needs to
        remember no more than that.
        """
        order = IssueOrder(self.shape)
        for opened in self.ticks(batches):
            yield from self.steps_of(opened, batches, order)

    def ticks(self, batches: Callable[[], int | None]) -> Iterator[int]:
        """The number of each tick: the batch whose window is open, before the first one too."""
        opened = -max(slot.ahead for slot in self.tick)
        drain = -min(slot.ahead for slot in self.tick)
        while True:
            yield opened
            opened += 1
            end = batches()
            if end is not None and opened >= end + drain:
                return

    def steps_of(
        self, opened: int, batches: Callable[[], int | None], order: IssueOrder
    ) -> Iterator[Step]:
        """The steps of one tick; `order` has seen those of all ticks before."""
        for slot in self.tick:
            op = Op(slot.kind, opened + slot.ahead, slot.micro)
            end = batches()
            if not _exists(op, end) or not self.shape.contains(op):
                continue
            after = [b for b in waits(op, self.shape) if _exists(b, end)]
            # Also where the end became known after it: it was issued, so it counts.
            chained, behind = order.place(op)
            after = tuple(dict.fromkeys((*after, *chained)))
            yield Step(op, after, self.shape.alongside(op), behind)

    def steady_tick(self) -> SteadyTick | None:
        """What all ticks have in common; None where they differ: some batches merge replicas."""
        if self.shape.merge_every:
            return None
        first = 2 * self.shape.lookahead + 3
        order, steps = IssueOrder(self.shape), []
        for opened in range(-max(slot.ahead for slot in self.tick), first + 1):
            steps = list(self.steps_of(opened, lambda: None, order))
        ahead = max(slot.ahead for slot in self.tick)
        return SteadyTick(first, ahead, tuple(_relative(step, first) for step in steps))

    def schedule(self, batches: int) -> Schedule:
        """The finite schedule of this many batches."""
        if batches < 1:
            raise PlanError(f"cannot plan {batches} batches; ask for at least 1")
        return Schedule(self.shape, batches, tuple(self.stream(lambda: batches)))


@dataclass(frozen=True, slots=True)
class Earlier:
    """An op that another one waits for, seen from there."""

    kind: Kind
    micro: int | None
    back: int
    """How many batches before; negative: it is of a later batch."""


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """A `Step` of every tick, with what it waits for as seen from its op."""

    slot: Slot
    after: tuple[Earlier, ...]
    alongside: Earlier | None
    behind: tuple[Earlier, ...]


@dataclass(frozen=True, slots=True)
class SteadyTick:
    """The steps of every tick between the first batches and the last ones."""

    first: int
    """Earlier ticks wait for less: batches before the first do not exist."""
    ahead: int
    """The newest batch of a tick, counted from the batch whose window is open."""
    steps: tuple[SteadyStep, ...]

    def covers(self, opened: int, end: int | None) -> bool:
        """Whether that tick has these steps, as far as the end of the data is known."""
        return opened >= self.first and (end is None or opened + self.ahead < end)


def _relative(step: Step, opened: int) -> SteadyStep:
    op = step.op

    def seen(before: Op) -> Earlier:
        return Earlier(before.kind, before.micro, op.batch - before.batch)

    return SteadyStep(
        Slot(op.kind, op.batch - opened, op.micro),
        tuple(map(seen, step.after)),
        None if step.alongside is None else seen(step.alongside),
        tuple(map(seen, step.behind)),
    )


class IssueOrder:
    """One order for the collectives of each network, and one for all that run on the device."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._last_in: dict[str, Op] = {}
        self._last_on_device: Op | None = None

    def place(self, op: Op) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """What a collective waits for in its own network, and behind what of another it starts."""
        network = self._shape.network(op.kind)
        if network is None:
            return (), ()
        chained = (self._last_in[network],) if network in self._last_in else ()
        self._last_in[network] = op
        if network not in DEVICE_NETWORKS:
            return chained, ()
        last, self._last_on_device = self._last_on_device, op
        behind = () if last is None or (last,) == chained else (last,)
        return chained, behind


def with_separate_key_group(plan: Plan) -> Plan:
    """The same plan with counts and keys in a network of their own, which hold up nothing else."""
    return replace(plan, shape=replace(plan.shape, separate_key_group=True))


def with_separate_dense_group(plan: Plan) -> Plan:
    """The same plan with dense gradients summed in a network of their own.

    The sums run alongside the last `dense` of the batch. Rows need not wait for them: `apply`
    comes after `update`, and where the next batch has been looked up already, after its `sync`.
    """
    shape = replace(plan.shape, separate_dense_group=True)
    tick = [slot for slot in plan.tick if slot.kind is not K.REDUCE]
    kinds = [slot.kind for slot in tick]
    if kinds[0] is shape.handover:  # else nothing on the lane is between `update` and `apply`
        tick.insert(1, Slot(K.APPLY, -1))
    else:
        tick.insert(max(kinds.index(K.UPDATE), kinds.index(K.REPLICA_SYNC)) + 1, Slot(K.APPLY, 0))
    last = tick.index(Slot(K.DENSE, 0, shape.micro_batches - 1)) + 1
    tick[last:last] = [Slot(K.TOTALS, 0), Slot(K.REDUCE, 0)]
    return Plan(shape, tuple(tick))


def with_gradient_norm(plan: Plan) -> Plan:
    """The same plan with the norm of all gradients before they are applied.

    Comes before `with_separate_dense_group`, which moves what it waits for.
    """
    tick = list(plan.tick)
    tick.insert(tick.index(Slot(K.UPDATE, 0)), Slot(K.NORM, 0))
    return Plan(replace(plan.shape, gradient_norm=True), tuple(tick))


def with_early_rows(plan: Plan) -> Plan:
    """The same plan with the rows of the next batch's first micro-batch under this batch's last.

    Most of them are not in this batch, so they are final. Those that are follow once more, in
    `patch`, after its update; that is all that is left between two windows.
    """
    shape = replace(plan.shape, speculative_rows=True)
    if shape.pooled:
        raise PlanError(
            "rows cannot be sent early from a pool, where the batch before changes them in place; "
            "use retrieval new, or turn speculative_rows off"
        )
    if not shape.refreshes_ahead:
        raise PlanError(
            f"plan {plan.name} cannot send rows early, because it looks up no batch ahead and "
            "refreshes it; use nested or dual_buffer"
        )
    if shape.merge_every:
        raise PlanError(
            "rows cannot be sent early where replicas are merged, which may change any row; "
            "use one group, or turn speculative_rows off"
        )
    first = plan.tick.index(Slot(K.ROWS, 0, 0))
    tick = [*plan.tick[:first], Slot(K.PATCH, 0), *plan.tick[first + 1 :]]
    # Behind that `dense`, with which the sums of dense gradients start: they must not wait.
    last = max(
        tick.index(Slot(K.DENSE, 0, shape.micro_batches - 1)), tick.index(Slot(K.RETRIEVE, 1))
    )
    while shape.separate_dense_group and tick[last + 1].kind in (K.TOTALS, K.REDUCE):
        last += 1
    tick.insert(last + 1, Slot(K.ROWS, 1, 0))
    # As soon as the next batch's rows are known, but behind the keys of the batch after it: they
    # must not wait for that union, or every union waits for the exchanges after the last one.
    known = Slot(K.KEYS, 2) if Slot(K.KEYS, 2) in tick else Slot(K.UNION, 1)
    tick.insert(tick.index(known) + 1, Slot(K.STALE_MASK, 1))
    return Plan(shape, tuple(tick))


def with_third_buffer(plan: Plan) -> Plan:
    """The same plan with rows written back while the next are read: both ways at a time.

    A row that comes back after one batch without it need not have been stored by then: it is taken
    over from the third buffer, where it still is. A pool makes room one batch ahead instead.
    """
    if plan.shape.pooled and plan.shape.retrieves_ahead:
        # Rows that leave are written one batch later than else, and their list waits for that.
        slots = max(plan.shape.slots, plan.shape.lookahead + 1)
        return replace(plan, shape=replace(plan.shape, buffers=3, slots=slots))
    if not plan.shape.refreshes_ahead:
        raise PlanError(
            f"plan {plan.name} has no use for a third buffer, because it looks up no batch ahead "
            "and refreshes it; use nested or dual_buffer"
        )
    if plan.shape.retrieval is Retrieval.WHOLE:
        raise PlanError(
            "a third buffer is for rows that are not read again, and whole working sets are; "
            "use retrieval new, or two buffers"
        )
    return replace(plan, shape=replace(plan.shape, buffers=3))


def _exists(op: Op, end: int | None) -> bool:
    """Whether the op lies between the first batch and the last."""
    return op.batch >= 0 and (end is None or op.batch < end)


def serial(options: PlanOptions) -> Plan:
    """Nothing overlaps: the reference for every other plan."""
    return _plan("serial", options, Ahead(), lookup_first, taking_turns, overlaps=False)


def sparse_dist(options: PlanOptions) -> Plan:
    """Copy and key routing run ahead; retrieval, rows and gradients stay exposed."""
    depth = min(options.stages, LOOKUP_STAGES - 1)
    ahead = Ahead(prefetch=depth, copy=min(depth, 2), route=1)
    return _plan("sparse_dist", options, ahead, routing_ahead, taking_turns)


def stale_prefetch(options: PlanOptions) -> Plan:
    """Rows of the next batch are fetched early and never refreshed: one step stale."""
    if options.retrieval is Retrieval.NEW:
        raise PlanError(
            "stale_prefetch cannot retrieve only new rows, because it never refreshes the others; "
            "use --retrieval whole"
        )
    if options.retrieval is Retrieval.POOLED:
        raise PlanError(
            "stale_prefetch cannot use a pool, because batches share the rows in it and none is "
            "stale; use --retrieval whole"
        )
    ahead = _full_depth(options)
    return _plan("stale_prefetch", options, ahead, lookup_ahead, taking_turns, stale=True)


def dual_buffer(options: PlanOptions) -> Plan:
    """Look up batch t+1 while batch t computes, then refresh the rows that both use."""
    return _plan("dual_buffer", options, _full_depth(options), lookup_ahead, taking_turns)


def frozen_window(options: PlanOptions) -> Plan:
    """Exchange rows and gradients of one micro-batch under the dense compute of another."""
    return _plan("frozen_window", options, Ahead(), lookup_first, overlapped)


def nested(options: PlanOptions) -> Plan:
    """Look up batch t+1 while the frozen window of batch t overlaps exchange and compute."""
    return _plan("nested", options, _full_depth(options), lookup_ahead, overlapped)


PLANS: dict[str, Callable[[PlanOptions], Plan]] = {
    "serial": serial,
    "sparse_dist": sparse_dist,
    "stale_prefetch": stale_prefetch,
    "dual_buffer": dual_buffer,
    "frozen_window": frozen_window,
    "nested": nested,
}


def plan(name: str, options: PlanOptions | None = None) -> Plan:
    """The plan of that name."""
    if name not in PLANS:
        raise PlanError(f"unknown plan {name!r}; the plans are {', '.join(PLANS)}")
    options = options or PlanOptions()
    made = PLANS[name](options)
    made = with_third_buffer(made) if options.buffers == 3 else made
    return with_early_rows(made) if options.speculative_rows else made


def usable(name: str, options: PlanOptions) -> PlanOptions:
    """The options as far as the plan of that name has a use for them."""
    shape = plan(name, replace(options, speculative_rows=False, buffers=2)).shape
    return replace(
        options,
        speculative_rows=options.speculative_rows
        and shape.refreshes_ahead
        and shape.window_overlaps,
        buffers=options.buffers if shape.refreshes_ahead or shape.writes_apart else 2,
    )


def _full_depth(options: PlanOptions) -> Ahead:
    depth = options.stages
    return Ahead(prefetch=depth, copy=min(depth, 3), route=min(depth, 2), retrieve=1)


def _plan(
    name: str,
    options: PlanOptions,
    ahead: Ahead,
    tick: Tick,
    window: Window,
    *,
    overlaps: bool = True,
    stale: bool = False,
) -> Plan:
    whole = options.retrieval is Retrieval.WHOLE
    lookahead = ahead.prefetch + 1
    slots = {
        Retrieval.WHOLE: lookahead,
        Retrieval.NEW: lookahead + 1,  # key lists are compared after their batch has retired
        Retrieval.POOLED: max(lookahead, 2),  # totals are read when the next batch has some too
    }
    # One micro-batch is a window of its own: both exchanges are the same.
    exchange = options.exchange if options.micro_batches > 1 else Exchange.MICRO
    chosen: dict[str, Any] = dict(plan_options_of(options))
    chosen["exchange"] = exchange
    chosen["buffers"] = 1 if whole and ahead.retrieve == 0 else 2
    chosen["speculative_rows"] = False  # `with_early_rows` turns it on
    shape = Shape(
        **chosen,
        plan=name,
        lookahead=lookahead,
        slots=slots[options.retrieval],
        receive=_receive(options.micro_batches, exchange, window),
        overlaps=overlaps,
        window_overlaps=window is overlapped,
        retrieves_ahead=ahead.retrieve > 0,
        stale=stale,
    )
    return Plan(shape, tuple(tick(shape, ahead, window)))


def _receive(micro_batches: int, exchange: Exchange, window: Window) -> int:
    if exchange is Exchange.WINDOW:
        return micro_batches  # what came stays until the window ends
    return 1 if window is taking_turns else rows_lead(micro_batches) + 1
