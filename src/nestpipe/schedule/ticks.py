"""The building blocks of plans: what one tick of the pipeline issues, and in which order.

A tick is everything that happens while one window is open. Its slots name ops relative to the
batch of that window: with `ahead` 1, `retrieve` is that of the next batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nestpipe.schedule.op import Kind
from nestpipe.schedule.options import Merge, Retrieval
from nestpipe.schedule.schedule import Shape

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
