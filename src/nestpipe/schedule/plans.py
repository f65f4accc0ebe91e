"""The plans: each says in which order one tick of the pipeline issues its ops.

A plan is a value. Its `tick` lists ops relative to the batch whose window is open: with `ahead` 1,
`retrieve` is that of the next batch. What each op waits for is the same table for all plans
(`waits`), plus one chain through every collective, so that all ranks start them in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nestpipe.errors import PlanError
from nestpipe.schedule.op import Kind, Op
from nestpipe.schedule.schedule import Retrieval, Schedule, Shape, Step
from nestpipe.schedule.waits import waits

K = Kind
LOOKUP_STAGES = 4
"""Stages before forward and backward: prefetch, copy, route, retrieve."""


MOST_MICROS = 1024
"""More than any batch could be cut into with profit."""


@dataclass(frozen=True, slots=True)
class Slot:
    """An op of a tick: its kind, how many batches ahead of the open window, its micro-batch."""

    kind: Kind
    ahead: int
    micro: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """An unbounded schedule: the bounds it keeps and the order of one tick."""

    shape: Shape
    tick: tuple[Slot, ...]

    @property
    def name(self) -> str:
        return self.shape.plan

    def stream(self, batches: Callable[[], int | None] = lambda: None) -> Iterator[Step]:
        """Steps without end, or until the end that `batches` tells once it is known.

        An edge never reaches further back than `lookahead + 1` batches, so a reader needs to
        remember no more than that.
        """
        last_net: Op | None = None
        opened = -max(slot.ahead for slot in self.tick)
        drain = -min(slot.ahead for slot in self.tick)
        while True:
            for slot in self.tick:
                op = Op(slot.kind, opened + slot.ahead, slot.micro)
                end = batches()
                if op.batch < 0 or (end is not None and op.batch >= end):
                    continue
                if op.kind is K.MIRROR and not self.shape.has_mirror(op.batch):
                    continue
                chain = (last_net,) if op.collective and last_net is not None else ()
                yield Step(op, _known((*waits(op, self.shape), *chain), end))
                if op.collective:
                    last_net = op
            opened += 1
            end = batches()
            if end is not None and opened >= end + drain:
                return

    def schedule(self, batches: int) -> Schedule:
        """The finite schedule of so many batches."""
        if batches < 1:
            raise PlanError(f"cannot plan {batches} batches; ask for at least 1")
        return Schedule(self.shape, batches, tuple(self.stream(lambda: batches)))


def _known(ops: tuple[Op, ...], end: int | None) -> tuple[Op, ...]:
    """Drop repeats, and ops that lie before the first batch or after the last."""
    inside = (op for op in ops if op.batch >= 0 and (end is None or op.batch < end))
    return tuple(dict.fromkeys(inside))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a caller may choose about any plan."""

    micros: int = 1
    """Micro-batches per batch."""
    retrieval: Retrieval = Retrieval.WHOLE
    """Which rows travel between host memory and the device."""
    stages: int = LOOKUP_STAGES
    """Over how many batches the lookup may be spread; 1 prefetches in a single stage."""
    mirror_every: int = 0
    """Merge replicas after every so many batches (2D parallelism); 0: no replicas."""

    def __post_init__(self) -> None:
        if not 1 <= self.micros <= MOST_MICROS:
            raise PlanError(f"micro-batches cannot be {self.micros}; use 1 to {MOST_MICROS}")
        if not 1 <= self.stages <= LOOKUP_STAGES:
            raise PlanError(f"lookup stages cannot be {self.stages}; use 1 to {LOOKUP_STAGES}")
        if self.mirror_every < 0:
            raise PlanError(f"mirror interval cannot be {self.mirror_every}; use 0 or more")


def serial(options: PlanOptions) -> Plan:
    """Nothing overlaps: the reference for every other plan."""
    return _plan("serial", options, _Ahead(), _taking_turns)


def sparse_dist(options: PlanOptions) -> Plan:
    """Copy and key routing run ahead; retrieval, rows and gradients stay exposed."""
    depth = min(options.stages, LOOKUP_STAGES - 1)
    ahead = _Ahead(prefetch=depth, copy=min(depth, 2), route=1)
    return _plan("sparse_dist", options, ahead, _taking_turns)


def stale_prefetch(options: PlanOptions) -> Plan:
    """Rows of the next batch are fetched early and never refreshed: one step stale."""
    if options.retrieval is Retrieval.NEW:
        raise PlanError(
            "stale_prefetch cannot retrieve only new rows, because it never refreshes the others; "
            "use --retrieval whole"
        )
    return _plan("stale_prefetch", options, _full_depth(options), _taking_turns, stale=True)


def dual_buffer(options: PlanOptions) -> Plan:
    """Look up batch t+1 while batch t computes, then refresh the rows that both use."""
    return _plan("dual_buffer", options, _full_depth(options), _taking_turns)


def frozen_window(options: PlanOptions) -> Plan:
    """Exchange rows and gradients of one micro-batch under the dense compute of another."""
    return _plan("frozen_window", options, _Ahead(), _overlapped)


def nested(options: PlanOptions) -> Plan:
    """Look up batch t+1 while the frozen window of batch t overlaps exchange and compute."""
    return _plan("nested", options, _full_depth(options), _overlapped)


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
    return PLANS[name](options or PlanOptions())


@dataclass(frozen=True, slots=True)
class _Ahead:
    """How many batches ahead of the open window each stage of the lookup works."""

    prefetch: int = 0
    copy: int = 0
    route: int = 0
    retrieve: int = 0


def _full_depth(options: PlanOptions) -> _Ahead:
    depth = options.stages
    return _Ahead(prefetch=depth, copy=min(depth, 3), route=min(depth, 2), retrieve=1)


def _plan(
    name: str,
    options: PlanOptions,
    ahead: _Ahead,
    window: Callable[[int, list[Slot], bool], list[Slot]],
    *,
    stale: bool = False,
) -> Plan:
    whole = options.retrieval is Retrieval.WHOLE
    lookahead = ahead.prefetch + 1
    shape = Shape(
        plan=name,
        micros=options.micros,
        retrieval=options.retrieval,
        lookahead=lookahead,
        slots=lookahead if whole else lookahead + 1,
        buffers=1 if whole and ahead.retrieve == 0 else 2,
        receive=1 if window is _taking_turns else _lead(options.micros) + 1,
        mirror_every=options.mirror_every,
        stale=stale,
    )
    return Plan(shape, tuple(_tick(shape, ahead, window)))


def _tick(
    shape: Shape, ahead: _Ahead, window: Callable[[int, list[Slot], bool], list[Slot]]
) -> Iterator[Slot]:
    """Everything that happens while one window is open, in issue order."""
    prefetch = [Slot(K.PREFETCH, ahead.prefetch), Slot(K.COPY, ahead.copy)]
    route = [Slot(kind, ahead.route) for kind in (K.DEDUP, K.COUNTS, K.KEYS, K.UNION)]
    retrieve = Slot(K.RETRIEVE, ahead.retrieve)
    handover = [Slot(shape.handover, 0)] if shape.handover is not K.RETRIEVE else []
    flush = [Slot(K.WRITEBACK, -1)]
    if ahead.route == 0:
        lookup_first = [*prefetch, *route, *flush, retrieve, *handover]
        # With `whole` the write-back ends its own batch, so that nothing at all overlaps.
        if shape.retrieval is Retrieval.WHOLE:
            lookup_first = [*prefetch, *route, retrieve]
        yield from lookup_first
        yield from window(shape.micros, [], True)
    elif ahead.retrieve == 0:
        yield from [*flush, retrieve, *handover, *prefetch]
        yield from window(shape.micros, route, ahead.copy > ahead.route)
    else:
        yield from [*handover, *flush, *prefetch]
        if ahead.route > ahead.retrieve:
            yield retrieve
        yield from window(shape.micros, route, ahead.copy > ahead.route)
        if ahead.route == ahead.retrieve:
            yield retrieve
    yield Slot(K.REDUCE, 0)
    yield Slot(K.UPDATE, 0)
    yield Slot(K.MIRROR, 0)
    if ahead.route == 0 and shape.retrieval is Retrieval.WHOLE:
        yield Slot(K.WRITEBACK, 0)


def _taking_turns(micros: int, route: list[Slot], route_is_ready: bool) -> list[Slot]:
    """Rows, dense, gradients of one micro-batch after the other; routing under a dense op."""
    order: list[Slot] = []
    host_micro = 0 if route_is_ready else micros - 1
    for micro in range(micros):
        order.append(Slot(K.ROWS, 0, micro))
        if micro == host_micro:
            order += route
        order.append(Slot(K.DENSE, 0, micro))
        order.append(Slot(K.GRADS, 0, micro))
    return order


def _lead(micros: int) -> int:
    """How many micro-batches rows run ahead: enough to sit out a long key exchange.

    One is enough for few micro-batches; with many, each hides only a little, so that the exchange
    of keys, which does not get shorter, would hold up the rows behind it.
    """
    return max(1, -(-micros // 6))


def _overlapped(micros: int, route: list[Slot], route_is_ready: bool) -> list[Slot]:
    """Rows run some micro-batches ahead of dense, gradients one behind.

    Routing of a later batch goes where the network has most room: the first dense op has no
    gradients beside it yet. Its keys follow one micro-batch after their counts, so that the
    issuing thread does not wait for the counts.
    """
    lead = _lead(micros)
    order = [Slot(K.ROWS, 0, micro) for micro in range(min(lead, micros))]
    counts_at = 0 if route_is_ready else micros - 1
    keys_at = min(counts_at + 1, micros - 1)
    for micro in range(micros):
        if micro + lead < micros:
            order.append(Slot(K.ROWS, 0, micro + lead))
        if micro == counts_at:
            order += route[:2]
        if micro == keys_at:
            order += route[2:]
        order.append(Slot(K.DENSE, 0, micro))
        order.append(Slot(K.GRADS, 0, micro))
    return order
