"""A schedule: which ops run, in which order each lane takes them, and what each waits for.

The nouns come first: a `Kind` of work, one `Op` of it, and the lanes that ops run on. The text form
comes last. It parses back to an equal value:

    schedule nested
    batches 2
    micro_batches 1
    ...
    prefetch 0
    copy 0 after prefetch 0

A step names the ops that it starts `after`, the one that it runs `alongside`, and those that it
issues its collectives `behind`. Blank lines and whatever follows a `#` are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum
from typing import Any

from nestpipe.deprecated import WORDS, current_word
from nestpipe.errors import ParseError
from nestpipe.schedule.options import Merge, PlanOptions, Retrieval
from nestpipe.trace import Span, Trace


class Lane(StrEnum):
    """A resource that does one thing at a time, in the order of the schedule."""

    LOADER = "loader"
    COPY = "copy"
    HOST = "host"
    WRITE = "write"
    """Where rows are written back while others are read; else `host` does both."""
    NET = "net"
    KEYS = "keys"
    """Where hosts exchange keys in a network of their own; else `net` does."""
    ROUTE = "route"
    COMPUTE = "compute"
    DENSE_NET = "dense_net"
    """Where dense gradients are summed in a network of their own; else `net` does."""


class Kind(StrEnum):
    """What an op does; the order is that of one batch's life."""

    PREFETCH = "prefetch"
    """Read, decode, cluster into micro-batches, pin."""
    COPY = "copy"
    """The batch to the device."""
    DEDUP = "dedup"
    """The requester's unique keys, bucketed by owner."""
    COUNTS = "counts"
    """All2All of how many keys each owner will get; agrees on the end of the data."""
    KEYS = "keys"
    """All2All of the keys."""
    UNION = "union"
    """The owner's working set of the batch, and what it shares with the batch before."""
    REPLICA_KEYS = "replica_keys"
    """Replicas of a shard exchange the keys that they touched since they were last merged; only
    in batches that merge them (2D parallelism)."""
    REPLICA_UNION = "replica_union"
    """The working set widens to all of these keys; only in batches that merge replicas."""
    STALE_MASK = "stale_mask"
    """All2All of which rows of the first micro-batch the batch before has too; only where rows are
    sent early."""
    RETRIEVE = "retrieve"
    """Rows with their optimizer state from host memory into the idle device buffer."""
    SYNC = "sync"
    """Shared rows, state too, from the active to the idle buffer; then the buffers swap."""
    SWAP = "swap"
    """The buffers swap and nothing is refreshed: only a stale plan has it."""
    PATCH = "patch"
    """Those rows of the first micro-batch again, after their refresh; only where rows are sent
    early."""
    ROWS = "rows"
    """The owner sends a micro-batch's rows to the workers that asked."""
    DENSE = "dense"
    """Forward and backward of one micro-batch."""
    GRADS = "grads"
    """Row gradients back to the owner, accumulated."""
    TOTALS = "totals"
    """Loss and weight of the batch summed over all ranks; only where dense gradients have a network
    of their own, else `reduce` sums them too."""
    REDUCE = "reduce"
    """Dense gradients summed over all ranks, bucket by bucket where they have their own network."""
    NORM = "norm"
    """The norm of all gradients of the batch, summed over all ranks; only where gradients of rows
    are clipped by it."""
    APPLY = "apply"
    """One optimizer application per dense parameter; only where dense gradients have a network of
    their own, else `update` does it."""
    UPDATE = "update"
    """One optimizer application per row, and per dense parameter where there is no `apply`."""
    REPLICA_SYNC = "replica_sync"
    """Replicas of a row in other groups of ranks are merged: rows after `update`, or gradients
    before it (2D parallelism)."""
    WRITEBACK = "writeback"
    """Updated rows that leave device memory go to host memory."""


ROUTING_COLLECTIVES = frozenset({Kind.COUNTS, Kind.KEYS, Kind.REPLICA_KEYS, Kind.STALE_MASK})
"""Collectives that only hosts need to take part in: their data is in host memory."""
COLLECTIVES = ROUTING_COLLECTIVES | {
    *(Kind.PATCH, Kind.ROWS, Kind.GRADS, Kind.TOTALS, Kind.REDUCE, Kind.NORM, Kind.REPLICA_SYNC)
}
"""Kinds that every rank of a group takes part in, on whatever lane a plan puts them."""
SPECULATIVE_KINDS = frozenset({Kind.STALE_MASK, Kind.PATCH})
"""Kinds that there are only where rows of the first micro-batch are sent early."""
REPLICA_KINDS = frozenset({Kind.REPLICA_KEYS, Kind.REPLICA_UNION, Kind.REPLICA_SYNC})
"""Kinds that there are only in batches that merge replicas."""
DENSE_GROUP_KINDS = frozenset({Kind.TOTALS, Kind.APPLY})
"""Kinds that there are only where dense gradients are summed in a network of their own."""
MICRO_KINDS = frozenset({Kind.ROWS, Kind.DENSE, Kind.GRADS})
"""Kinds that come once per micro-batch; every other comes once per batch."""

_WORDS = frozenset(kind.value for kind in Kind)
_OP_TEXT = re.compile(r"([a-z_]+) (\d{1,18})(?:\.(\d{1,18}))?")


def parse_kind(word: str) -> Kind | None:
    """The kind of that word; one of an earlier release works too, with a warning."""
    word = current_word(word)
    return Kind(word) if word in _WORDS else None


@dataclass(frozen=True, slots=True)
class Op:
    """One unit of work, e.g. `dense 7.1`: batch 7, micro-batch 1. Its lane: `Shape.lane`."""

    kind: Kind
    batch: int
    micro: int | None = None

    @property
    def collective(self) -> bool:
        """Whether every rank of a group takes part."""
        return self.kind in COLLECTIVES

    def __str__(self) -> str:
        return f"{self.kind} {self.batch}" + ("" if self.micro is None else f".{self.micro}")

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read what `str(op)` wrote."""
        match = _OP_TEXT.fullmatch(text.strip())
        if match is None:
            raise ParseError(
                f"{text.strip()!r} is not an op; write it like `update 3` or `rows 3.0`"
            )
        word, batch, micro = match.groups()
        kind = parse_kind(word)
        if kind is None:
            known = ", ".join(Kind)
            raise ParseError(
                f"unknown kind of op {word!r} in {text.strip()!r}; the kinds are {known}"
            )
        if (micro is not None) != (kind in MICRO_KINDS):
            want = f"{kind} 3.0" if kind in MICRO_KINDS else f"{kind} 3"
            raise ParseError(f"{text.strip()!r} does not fit its kind; write it like `{want}`")
        return cls(kind, int(batch), None if micro is None else int(micro))


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
        """How many batches later the keys come that decide which rows `writeback` stores."""
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
        """Whether `retrieve` itself stores rows whose places it needs: no write-back has yet."""
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
    def joined(self) -> tuple[Op, ...]:
        """Ops that have started when it starts, and may still run."""
        return self.behind if self.alongside is None else (self.alongside, *self.behind)

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


_TOLD_FIRST = [
    "micro_batches",
    "retrieval",
    "lookahead",
    "slots",
    "buffers",
    "receive",
    "merge_every",
]
_ALWAYS_TOLD = frozenset((*_TOLD_FIRST, "stale"))
"""Facts that a reader looks for; the others are told where they are not as usual."""
_KNOWN = {known.name: known for known in fields(Shape) if known.name != "plan"}
FACTS = (*_TOLD_FIRST, *(name for name in _KNOWN if name not in _TOLD_FIRST))
"""The fields of the shape, in the order of the text."""
_EXAMPLES = {
    "schedule": "nested",
    "batches": "3",
    "micro_batches": "2",
    "lookahead": "5",
    "slots": "5",
    "receive": "2",
    "merge": "exact",
    "exchange": "window",
}
"""Values for facts that have no usual one, or one that would teach little."""
_HEADER_WORDS = {"schedule", "batches", *FACTS}
OLD_FACTS = frozenset(old for old, new in WORDS.items() if new in _HEADER_WORDS)


def to_text(schedule: Schedule) -> str:
    """The schedule as text: a line per fact, then a line per step in issue order."""
    shape = schedule.shape
    head = [f"schedule {shape.plan}", f"batches {schedule.batches}"]
    for name in FACTS:
        value = getattr(shape, name)
        if name in _ALWAYS_TOLD or value != _KNOWN[name].default:
            head.append(f"{name} {_word(value)}")
    return "\n".join([*head, "", *map(str, schedule), ""])


def _word(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


def from_text(text: str) -> Schedule:
    """Read what `to_text` wrote; says which line is wrong and what belongs there."""
    facts: dict[str, str] = {}
    steps: list[Step] = []
    lines = _meaningful_lines(text)
    for number, line in lines:
        word, _, rest = line.partition(" ")
        word = current_word(word) if word in OLD_FACTS else word
        if word in _HEADER_WORDS:
            if steps:
                raise ParseError(f"line {number}: {line!r} is a fact; put it above the first op")
            if word in facts:
                raise ParseError(f"line {number}: {word!r} is given twice; keep one of them")
            facts[word] = rest.strip()
        else:
            steps.append(_step(number, line))
    return _schedule(facts, steps)


def _meaningful_lines(text: str) -> Iterator[tuple[int, str]]:
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if line:
            yield number, line


_TIES = re.compile(r" (after|alongside|behind) ")


def _step(number: int, line: str) -> Step:
    op_text, *rest = _TIES.split(line)
    try:
        ties: dict[str, tuple[Op, ...]] = {}
        for how, befores in zip(rest[::2], rest[1::2], strict=True):
            if how in ties:
                raise ParseError(f"`{how}` is there twice; name all its ops behind one of them")
            ties[how] = tuple(Op.parse(part) for part in befores.split(","))
        first, *more = ties.get(How.ALONGSIDE, (None,))
        if more:
            raise ParseError("an op runs alongside one other; keep one of them")
        after, behind = ties.get(How.AFTER, ()), ties.get(How.BEHIND, ())
        return Step(Op.parse(op_text), after, first, behind)
    except ParseError as error:
        raise ParseError(f"line {number}: {error}") from None


def _schedule(facts: dict[str, str], steps: list[Step]) -> Schedule:
    if not steps:
        raise ParseError("the schedule has no op; add lines like `prefetch 0`")
    told = [name for name in FACTS if name in facts or name in _ALWAYS_TOLD]
    values = {name: _read(facts, name) for name in told}
    shape = Shape(plan=_read(facts, "schedule"), **values)
    batches = _read(facts, "batches")
    for name, count in (("batches", batches), ("micro_batches", shape.micro_batches)):
        if count > len(steps):
            raise ParseError(f"{count} {name} cannot fit into {len(steps)} ops; correct that line")
    return Schedule(shape, batches, tuple(steps))


def _read(facts: dict[str, str], name: str) -> Any:
    """The value of a fact, of the type that the field has."""
    usual = _KNOWN[name].default if name in _KNOWN else MISSING
    example = f"{name} {_EXAMPLES.get(name, _word(usual))}"
    if name not in facts:
        raise ParseError(f"the schedule does not say its {name!r}; add a line like `{example}`")
    try:
        return _value(name, facts[name], usual)
    except ValueError:
        raise ParseError(f"{name!r} cannot be {facts[name]!r}; write it like `{example}`") from None


def _value(name: str, text: str, usual: object) -> object:
    if name == "schedule":
        if not text.isidentifier():
            raise ValueError
        return text
    if isinstance(usual, StrEnum):
        return type(usual)(text)
    if isinstance(usual, bool):
        if text not in ("yes", "no"):
            raise ValueError
        return text == "yes"
    least = 0 if usual == 0 else 1
    if int(text) < least:
        raise ValueError
    return int(text)


# A schedule laid out in time with nominal durations, so that it can be drawn.


TICKS_OF = {Kind.PREFETCH: 3, Kind.RETRIEVE: 3, Kind.DENSE: 2}
"""Nominal durations in ticks where they are not 1; they only make a drawing look like a run."""


def nominal_trace(schedule: Schedule) -> Trace:
    """Each op as early as its lane and its ties allow; ties to ops issued later are ignored.

    Where nothing overlaps, no op starts before the one that is issued before it has ended.
    """
    free_at = dict.fromkeys(Lane, 0)
    start_of: dict[Op, int] = {}
    end_of: dict[Op, int] = {}
    spans: list[Span] = []
    for step in schedule:
        op = step.op
        lane = schedule.shape.lane(op.kind)
        starts = [start_of.get(tie.before, 0) for tie in step.ties if tie.how is not How.AFTER]
        start = max(free_at[lane], *starts, *(end_of.get(before, 0) for before in step.after), 0)
        if not schedule.shape.overlaps:
            start = max(start, max(free_at.values()))
        end = start + TICKS_OF.get(op.kind, 1)
        if step.alongside is not None and op.kind in DRAINING:
            end = max(end, end_of.get(step.alongside, 0) + 1)
        start_of[op], free_at[lane], end_of[op] = start, end, end
        spans.append(Span(op.kind, lane, op.batch, op.micro, 0, float(start), float(end)))
    shape = schedule.shape
    facts = {
        "plan": shape.plan,
        "micro_batches": shape.micro_batches,
        "retrieval": str(shape.retrieval),
    }
    return Trace(tuple(spans), facts)
