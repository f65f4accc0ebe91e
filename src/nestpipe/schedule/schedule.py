"""A schedule: which ops run, in which order each lane takes them, and what each waits for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from nestpipe.schedule.op import (
    COLLECTIVES,
    DENSE_GROUP_KINDS,
    REPLICA_KINDS,
    ROUTING_COLLECTIVES,
    SPECULATIVE_KINDS,
    Kind,
    Lane,
    Op,
)
from nestpipe.schedule.options import Merge, PlanOptions, Retrieval

_USUAL_LANE = {
    Kind.PREFETCH: Lane.LOADER,
    Kind.COPY: Lane.COPY,
    Kind.DEDUP: Lane.ROUTE,
    Kind.COUNTS: Lane.NET,
    Kind.KEYS: Lane.NET,
    Kind.UNION: Lane.ROUTE,
    Kind.REPLICA_KEYS: Lane.NET,
    Kind.REPLICA_UNION: Lane.ROUTE,
    Kind.STALE_MASK: Lane.NET,
    Kind.RETRIEVE: Lane.HOST,
    Kind.SYNC: Lane.COMPUTE,
    Kind.SWAP: Lane.COMPUTE,
    Kind.PATCH: Lane.NET,
    Kind.ROWS: Lane.NET,
    Kind.DENSE: Lane.COMPUTE,
    Kind.GRADS: Lane.NET,
    Kind.TOTALS: Lane.DENSE_NET,
    Kind.REDUCE: Lane.NET,
    Kind.NORM: Lane.NET,
    Kind.APPLY: Lane.COMPUTE,
    Kind.UPDATE: Lane.COMPUTE,
    Kind.REPLICA_SYNC: Lane.NET,
    Kind.WRITEBACK: Lane.HOST,
}
"""Where a kind of op runs unless the shape says otherwise; `Shape.lane` is the answer."""
DEVICE_NETWORKS = frozenset({"devices", "dense"})
"""Networks whose collectives run on the device. A rank starts all of them in one order, the same on
every rank. Each has its own communicator, but whatever keeps a rank from starting the second (the
driver loads a kernel, which waits for those that run; two streams share a hardware queue) lasts
until the first has ended, and that waits for a peer with whom it may be the other way round."""
DRAINING = frozenset({Kind.REDUCE})
"""Kinds that take all output of the op that they run alongside, so they end after it."""


@dataclass(frozen=True, kw_only=True)
class Shape(PlanOptions):
    """What a schedule promises to stay within; every op's memory follows from it.

    Options are those that the plan has a use for: `buffers` may be 1, where nothing is read ahead.
    With three, `retrieve` takes over on the device what is not yet stored: rows that the batch
    before the last has, and the last one has not. In a pool they are places (see `pooled`).
    """

    plan: str
    """The name of the plan that made it: a label for people, nothing depends on it."""
    lookahead: int
    """Batches in flight at most, from their `prefetch` to the end of their `retire` op."""
    slots: int
    """Places on the device for a batch's samples, key lists and totals, used in turn."""
    receive: int
    """Places for the rows and row gradients of a micro-batch, used in turn."""
    overlaps: bool = True
    """Whether ops of different lanes may run at a time; else each starts where the one before it in
    issue order has ended."""
    window_overlaps: bool = False
    """Whether rows and gradients of one micro-batch travel while another one computes."""
    retrieves_ahead: bool = False
    """Whether rows of a later batch are read while this one computes."""
    stale: bool = False
    """Whether batches may train on rows that miss the update of the batch before."""
    separate_key_group: bool = False
    """Whether counts and keys travel in a network of their own, that of the hosts. They then have a
    lane of their own too, and `dedup` leaves that of routing for that of the copies."""
    separate_dense_group: bool = False
    """Whether dense gradients are summed in a network and on a lane of their own, while the last
    `dense` of the batch still makes them. `apply` applies them; `update` is left with the rows."""
    gradient_norm: bool = False
    """Whether gradients are clipped by their norm, rows and dense weights together. `norm` sums it
    over all ranks before any of them is applied."""

    def __post_init__(self) -> None:
        """A plan or a file says what is so; the checker judges it."""

    def lane(self, kind: Kind) -> Lane:
        """Where an op runs, the one answer to that question."""
        if self.separate_key_group and kind in ROUTING_COLLECTIVES:
            return Lane.KEYS
        if self.separate_key_group and kind is Kind.DEDUP:
            return Lane.COPY
        if self.separate_dense_group and kind is Kind.REDUCE:
            return Lane.DENSE_NET
        if self.writes_apart and kind is Kind.WRITEBACK:
            return Lane.WRITE
        return _USUAL_LANE[kind]

    def network(self, kind: Kind) -> str | None:
        """The network of a collective; in each of them all collectives have one order."""
        if kind not in COLLECTIVES:
            return None
        if self.separate_key_group and kind in ROUTING_COLLECTIVES:
            return "hosts"
        dense = self.separate_dense_group and kind in (Kind.TOTALS, Kind.REDUCE)
        return "dense" if dense else "devices"

    def contains(self, op: Op) -> bool:
        """Whether the batch has an op of that kind."""
        if op.kind in (Kind.SYNC, Kind.SWAP):
            return op.kind is self.handover
        if op.kind in REPLICA_KINDS:
            return self.merges_replicas(op.batch)
        if op.kind in SPECULATIVE_KINDS:
            return self.speculative_rows
        if op.kind is Kind.NORM:
            return self.gradient_norm
        return self.separate_dense_group or op.kind not in DENSE_GROUP_KINDS

    def alongside(self, op: Op) -> Op | None:
        """The op that this one starts with, and whose output it takes as it comes.

        The last `dense` of a batch has its loss before it has gradients, and the gradients of the
        last layers long before those of the first.
        """
        streams = self.separate_dense_group and self.overlaps
        if streams and op.kind in (Kind.TOTALS, Kind.REDUCE):
            return self.last_dense(op.batch)
        return None

    def last_dense(self, batch: int) -> Op:
        """The op after which dense gradients are complete."""
        return Op(Kind.DENSE, batch, self.micro_batches - 1)

    def retire(self, batch: int) -> Op:
        """The op after which a batch counts as done.

        Where a batch's write-back needs the keys of a later one, the batch itself ends when its
        rows are final.
        """
        if self.leaving_known_after == 0:
            return Op(Kind.WRITEBACK, batch)
        return self.last_write(batch)

    def place(self, batch: int, micro: int) -> int:
        """Where the rows of a micro-batch come to; those that come early have two places more."""
        early = self.speculative_rows and micro == 0
        return self.receive + batch % 2 if early else micro % self.receive

    def is_early(self, op: Op) -> bool:
        """Whether the op sends rows before they are refreshed."""
        return self.speculative_rows and op.kind is Kind.ROWS and op.micro == 0

    @property
    def pooled(self) -> bool:
        """Whether all batches use rows in place, in one pool of device memory.

        A row's place is its own until it makes room for another. `union t` gives places away, but
        none that batch t-1 or t uses. So rows of batch t that were not there have a memory of their
        own beside those of batch t-1, as in two buffers: `retrieve t` waits for `writeback t-2`.

        With three buffers these places are for batch t+1, so that `retrieve t` waits for
        `writeback t-3` only. Where they are too few, batch t takes places that no batch from t-2 on
        uses; `retrieve t` itself stores what was there.
        """
        return self.retrieval is Retrieval.POOLED

    @property
    def leaving_known_after(self) -> int:
        """How many batches later the keys come that tell which rows `writeback` stores."""
        return {Retrieval.WHOLE: 0, Retrieval.NEW: 1, Retrieval.POOLED: 2}[self.retrieval]

    @property
    def refreshes_ahead(self) -> bool:
        """Whether such rows are refreshed before use: the batch before may change them."""
        return self.retrieves_ahead and self.handover is Kind.SYNC

    @property
    def takes_over(self) -> bool:
        """Whether `retrieve` takes rows from the buffer of the batch before the last."""
        return self.buffers > 2 and not self.pooled

    @property
    def stores_while_reading(self) -> bool:
        """Whether `retrieve` itself stores rows whose places it needs and nobody has emptied."""
        return self.buffers > 2 and self.pooled

    @property
    def writes_apart(self) -> bool:
        """Whether rows are written back while others are read."""
        return self.takes_over or (self.pooled and self.retrieves_ahead)

    @property
    def places(self) -> int:
        """Places for rows that come."""
        return self.receive + 2 * self.speculative_rows

    @property
    def handover(self) -> Kind:
        """The op after which a batch's rows may be sent out."""
        if self.stale:
            return Kind.SWAP
        # In a pool there is nothing to refresh: batches share the memory of the rows they share.
        return Kind.SYNC if self.buffers > 1 and not self.pooled else Kind.RETRIEVE

    def merges_replicas(self, batch: int) -> bool:
        """Whether replicas of rows are merged in that batch."""
        return self.merge_every > 0 and (batch + 1) % self.merge_every == 0

    def last_union(self, batch: int) -> Op:
        """The op after which the keys of the batch's working set are final."""
        return Op(Kind.REPLICA_UNION if self.merges_replicas(batch) else Kind.UNION, batch)

    def merged_batches(self, batch: int) -> range:
        """The batches whose keys are merged in a batch that merges replicas."""
        return range(batch - self.merge_every + 1, batch + 1)

    def last_write(self, batch: int) -> Op:
        """The op that leaves the batch's rows in their final state."""
        merged = self.merge is Merge.AVERAGED and self.merges_replicas(batch)
        return Op(Kind.REPLICA_SYNC if merged else Kind.UPDATE, batch)

    def sums_replica_gradients(self, batch: int) -> bool:
        """Whether the batch's gradients are summed over replicas before they are applied."""
        return self.merge is Merge.EXACT and self.merges_replicas(batch)


class How(StrEnum):
    """How one op is tied to another."""

    AFTER = "after"
    """Starts when the other has ended."""
    ALONGSIDE = "alongside"
    """Starts when the other has started, and takes its output as it comes."""
    BEHIND = "behind"
    """Starts its collectives when the other has started its own, ended or not."""


@dataclass(frozen=True, slots=True)
class Tie:
    """One reason why an op cannot start yet."""

    how: How
    before: Op
    op: Op

    def __str__(self) -> str:
        return f"`{self.op}` {self.how} `{self.before}`"


@dataclass(frozen=True, slots=True)
class Step:
    """One op and what it waits for."""

    op: Op
    after: tuple[Op, ...] = ()
    """Ops that have ended when it starts."""
    alongside: Op | None = None
    """The op that it starts with, and whose output it takes as it comes."""
    behind: tuple[Op, ...] = ()
    """Ops that have started all their collectives when it starts its own."""

    @property
    def ties(self) -> tuple[Tie, ...]:
        with_it = () if self.alongside is None else (self.alongside,)
        groups = ((How.AFTER, self.after), (How.ALONGSIDE, with_it), (How.BEHIND, self.behind))
        return tuple(Tie(how, before, self.op) for how, befores in groups for before in befores)

    def without(self, tie: Tie) -> Step:
        """The same step without one of its ties."""
        if tie.how is How.ALONGSIDE:
            return replace(self, alongside=None)
        befores = self.after if tie.how is How.AFTER else self.behind
        return replace(self, **{tie.how: tuple(b for b in befores if b != tie.before)})

    def __str__(self) -> str:
        words = [str(self.op)]
        for how in How:
            befores = ", ".join(str(tie.before) for tie in self.ties if tie.how is how)
            words += [f"{how} {befores}"] if befores else []
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A finite schedule: `batches` batches within the bounds of `shape`.

    Iterating gives the steps in issue order: each lane takes its ops in that order.
    """

    shape: Shape
    batches: int
    steps: tuple[Step, ...]

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def ops(self) -> tuple[Op, ...]:
        return tuple(step.op for step in self.steps)

    @property
    def edges(self) -> tuple[tuple[Op, Op], ...]:
        """Every op that another waits for, as (before, after)."""
        return tuple((before, step.op) for step in self.steps for before in step.after)

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Everything that holds an op back."""
        return tuple(tie for step in self.steps for tie in step.ties)

    def without(self, tie: Tie) -> Schedule:
        """The same schedule without one tie."""
        steps = tuple(s.without(tie) if s.op == tie.op else s for s in self.steps)
        return Schedule(self.shape, self.batches, steps)

    def without_edge(self, before: Op, after: Op) -> Schedule:
        """The same schedule where `after` no longer waits for `before`."""
        return self.without(Tie(How.AFTER, before, after))
