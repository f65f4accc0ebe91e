"""The checker: proves from its ties alone that a schedule trains exactly and cannot hang.

It holds for every order that the ties allow, whatever the lanes do. Plans repeat themselves with a
period of one batch and their edges reach back `lookahead + 1` batches at most, so a finite
schedule of a few batches more than that stands for the endless stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise

from nestpipe.errors import ScheduleError
from nestpipe.schedule.effects import (
    CARRIES,
    CONTENT_OF,
    STATE,
    STREAMED,
    SUMS,
    WRITTEN_AT_START,
    Cell,
    effects,
    reference_position,
)
from nestpipe.schedule.options import Retrieval
from nestpipe.schedule.schedule import (
    DEVICE_NETWORKS,
    DRAINING,
    MICRO_KINDS,
    How,
    Kind,
    Op,
    Schedule,
    Shape,
    Tie,
    nominal_trace,
)
from nestpipe.trace import Trace, grid

K = Kind


@dataclass(frozen=True, slots=True)
class Violation:
    """Why a schedule is refused: one sentence, and the edge that is missing."""

    rule: str
    sentence: str
    ops: tuple[Op, ...]
    missing: tuple[Op, Op] | None = None
    """(before, after): the edge to add; None where no single edge helps."""
    how: How = How.AFTER
    """How the second must be tied to the first."""


def check(
    schedule: Schedule,
    *,
    stale: str | None = None,
    carries: Mapping[Kind, frozenset[str]] = CARRIES,
) -> None:
    """Refuse a schedule that could change results or hang, with a sentence and the marked grid.

    A stale plan passes only when the caller names it: `check(schedule, stale="stale_prefetch")`.
    """
    for violation in violations(schedule, stale=stale, carries=carries):
        marks = {str(op) for op in violation.ops}
        picture = grid(_around(nominal_trace(schedule), marks), marks=marks)
        raise ScheduleError(f"{violation.sentence}\n\n{picture}")


def _around(trace: Trace, marks: set[str]) -> Trace:
    """What happens shortly before and after the marked ops; all of a trace without them."""
    marked = [span for span in trace.spans if span.name in marks]
    if not marked:
        return trace
    start, end = min(s.start for s in marked) - 12, max(s.end for s in marked) + 12
    return replace(trace, spans=tuple(s for s in trace.spans if s.end > start and s.start < end))


def violations(
    schedule: Schedule,
    *,
    stale: str | None = None,
    carries: Mapping[Kind, frozenset[str]] = CARRIES,
) -> Iterator[Violation]:
    """Every reason to refuse the schedule; none means that it is exact and cannot hang."""
    broken = False
    for sentence, ops in malformations(schedule):
        broken = True
        yield Violation("order", sentence, ops)
    if broken:
        return
    order = happens_before(schedule)
    shape = schedule.shape
    allow_stale = shape.stale and stale == shape.plan
    yield from _one_network_order(schedule, order)
    yield from _one_issue_order(schedule)
    yield from _bounded_lookahead(schedule, order)
    yield from _safe_memory(schedule, order)
    yield from _stored_rows_land_in_order(schedule, order)
    if allow_stale:
        yield from _staleness_is_certain(schedule, order)
    else:
        yield from _fresh_rows(schedule, order)
    yield from _state_travels(schedule, carries)


def _one_network_order(schedule: Schedule, order: HappensBefore) -> Iterator[Violation]:
    networks: dict[str, list[Op]] = {}
    for op in schedule.ops:
        if (network := schedule.shape.network(op.kind)) is not None:
            networks.setdefault(network, []).append(op)
    for first, second in chain.from_iterable(pairwise(ops) for ops in networks.values()):
        if not order(first, second):
            yield Violation(
                "one network order",
                f"`{first}` and `{second}` have no fixed order on the network, so ranks can start "
                f"them in different orders and hang; make `{second}` wait for `{first}`",
                (first, second),
                (first, second),
            )


def _one_issue_order(schedule: Schedule) -> Iterator[Violation]:
    """Collectives of all networks of the devices start in one order, the same on every rank."""
    on_device = [op for op in schedule.ops if schedule.shape.network(op.kind) in DEVICE_NETWORKS]
    order = issued_before(schedule)
    for first, second in pairwise(on_device):
        if not order(first, second):
            yield Violation(
                "one issue order",
                f"`{first}` and `{second}` have no fixed order of issue on the device, so ranks "
                f"can start them in different orders and hang; issue `{second}` behind `{first}`",
                (first, second),
                (first, second),
                How.BEHIND,
            )


def _bounded_lookahead(schedule: Schedule, order: HappensBefore) -> Iterator[Violation]:
    shape = schedule.shape
    for batch in range(shape.lookahead, schedule.batches):
        retire, prefetch = shape.retire(batch - shape.lookahead), Op(K.PREFETCH, batch)
        if not order(retire, prefetch):
            yield Violation(
                "bounded look-ahead",
                f"`{prefetch}` can start while the look-ahead of {shape.lookahead} is used up; "
                f"make `{prefetch}` wait for `{retire}`",
                (prefetch, retire),
                (retire, prefetch),
            )


@dataclass(frozen=True, slots=True)
class _Access:
    op: Op
    reads: bool
    writes: bool


@lru_cache(maxsize=8)
def _accesses(ops: tuple[Op, ...], shape: Shape, batches: int) -> Mapping[Cell, Sequence[_Access]]:
    """Who touches each cell, in the order of the serial reference; edges play no part."""
    touched: dict[Cell, list[_Access]] = {}
    later = shape.leaving_known_after
    for op in sorted(ops, key=lambda op: reference_position(op, shape)):
        does = effects(op, shape)
        reads = does.reads
        if op.kind is K.WRITEBACK and later and op.batch + later >= batches:
            # After the last batch there are no later keys to tell which rows leave.
            reads = tuple(c for c in reads if c != ("owned", (op.batch + later) % shape.slots))
        for cell in dict.fromkeys((*reads, *does.writes)):
            access = _Access(op, cell in reads, cell in does.writes)
            touched.setdefault(cell, []).append(access)
    return touched


def _safe_memory(schedule: Schedule, order: HappensBefore) -> Iterator[Violation]:
    """Ops that share memory keep the serial order: written before read, read before reused."""
    touched = _accesses(schedule.ops, schedule.shape, schedule.batches)
    alongside = {step.op: step.alongside for step in schedule if step.alongside is not None}
    for cell, accesses in touched.items():
        writer: Op | None = None
        readers: list[Op] = []
        for access in accesses:
            if access.reads:
                streamed = cell[0] in STREAMED and alongside.get(access.op) == writer
                if writer is not None and not streamed and not order(writer, access.op):
                    yield _read_too_early(access.op, writer, cell)
                if writer is None and cell[0] not in WRITTEN_AT_START:
                    yield _never_written(access.op, cell)
            if access.writes:
                for reader in readers:
                    if not order(reader, access.op):
                        yield _reused_too_early(access.op, reader, cell)
                if writer is not None and not access.reads and not order(writer, access.op):
                    yield _reused_too_early(access.op, writer, cell)
                writer, readers = access.op, []
            else:
                readers.append(access.op)


def _read_too_early(reader: Op, writer: Op, cell: Cell) -> Violation:
    if cell[0] in SUMS and reader.kind is writer.kind:
        return _out_of_turn(reader, writer, cell)
    content = CONTENT_OF[cell[0]]
    sentence = (
        f"`{reader}` can read the {content} before `{writer}` has run; "
        f"make `{reader}` wait for `{writer}`"
    )
    rule = "data before use"
    if cell[0] in ("buffer", "pool") and writer.batch < reader.batch:
        rule = "freshness"
        first_use = Op(K.ROWS, reader.batch, 0)
        sentence = (
            f"`{first_use}` can read rows that `{writer}` has not written; "
            f"make `{reader}` wait for `{writer}`"
        )
    return Violation(rule, sentence, (reader, writer), (writer, reader))


def _out_of_turn(late: Op, early: Op, cell: Cell) -> Violation:
    sentence = (
        f"`{late}` can change the {CONTENT_OF[cell[0]]} before `{early}` has had its turn; "
        f"make `{late}` wait for `{early}`"
    )
    return Violation("fixed summation order", sentence, (late, early), (early, late))


def _never_written(reader: Op, cell: Cell) -> Violation:
    sentence = (
        f"`{reader}` reads the {CONTENT_OF[cell[0]]}, which no earlier op writes; add that op"
    )
    return Violation("data before use", sentence, (reader,))


def _reused_too_early(writer: Op, user: Op, cell: Cell) -> Violation:
    if cell[0] in SUMS:
        return _out_of_turn(writer, user, cell)
    content = CONTENT_OF[cell[0]]
    rule, why = "safe buffer reuse", f"overwrite the {content} before `{user}` is done with them"
    if writer.kind is K.UPDATE and writer.batch == user.batch:
        rule = "frozen window"
        why = f"change the {content} while `{user}` of the same window still reads them"
    sentence = f"`{writer}` can {why}; make `{writer}` wait for `{user}`"
    return Violation(rule, sentence, (writer, user), (user, writer))


def _stored_rows_land_in_order(schedule: Schedule, order: HappensBefore) -> Iterator[Violation]:
    """Two write-backs that can hold the same row must not pass each other."""
    # With `new`, a row that leaves after batch t is not in batch t+1, so neighbours never meet.
    nearest = 2 if schedule.shape.retrieval is Retrieval.NEW else 1
    for late in range(schedule.batches):
        for early in range(late - nearest + 1):
            first, second = Op(K.WRITEBACK, early), Op(K.WRITEBACK, late)
            if not order(first, second):
                yield Violation(
                    "freshness",
                    f"`{first}` can overwrite in host memory what `{second}` has stored; "
                    f"make `{second}` wait for `{first}`",
                    (first, second),
                    (first, second),
                )


def _fresh_rows(schedule: Schedule, order: HappensBefore) -> Iterator[Violation]:
    """What a batch reads from host memory has been written there before."""
    shape = schedule.shape
    refreshed = shape.handover is K.SYNC or shape.pooled
    for batch in range(1, schedule.batches):
        retrieve = Op(K.RETRIEVE, batch)
        # `sync` brings the rows of the batch just before, and with three buffers `retrieve` those
        # of the one before it from the device; all older ones come from host memory. In a pool, the
        # rows of the batch just before are where they were.
        newest_stored = batch - shape.buffers if refreshed else batch - 1
        for earlier in range(newest_stored, -1, -1):
            writeback = Op(K.WRITEBACK, earlier)
            if not order(writeback, retrieve):
                yield _stale(shape, batch, earlier)
                break
        before = Op(K.RETRIEVE, batch - 1)
        if shape.stores_while_reading and not order(before, retrieve):
            yield Violation(
                "freshness",
                f"`{retrieve}` can read rows that `{before}` is about to store; "
                f"make `{retrieve}` wait for `{before}`",
                (before, retrieve),
                (before, retrieve),
            )


def _stale(shape: Shape, batch: int, earlier: int) -> Violation:
    retrieve, writeback = Op(K.RETRIEVE, batch), Op(K.WRITEBACK, earlier)
    first_use = Op(K.ROWS, batch, 0)
    sentence = (
        f"`{first_use}` can read rows that `{Op(K.UPDATE, earlier)}` has not written, because "
        f"`{writeback}` may store them too late; make `{retrieve}` wait for `{writeback}`"
    )
    if shape.stale:
        sentence = (
            f"plan {shape.plan} is stale: `{first_use}` can read rows that "
            f"`{Op(K.UPDATE, earlier)}` has not written; make `{retrieve}` wait for `{writeback}`, "
            f"or ask for the stale plan by its name"
        )
    return Violation("freshness", sentence, (first_use, retrieve), (writeback, retrieve))


def _staleness_is_certain(schedule: Schedule, order: HappensBefore) -> Iterator[Violation]:
    """A stale plan misses the same updates on every run: reads and stores have a fixed order."""
    for batch in range(1, schedule.batches):
        retrieve = Op(K.RETRIEVE, batch)
        for earlier in range(batch):
            writeback = Op(K.WRITEBACK, earlier)
            if not order(writeback, retrieve) and not order(retrieve, writeback):
                lands_first = earlier <= batch - schedule.shape.buffers
                first, second = (writeback, retrieve) if lands_first else (retrieve, writeback)
                yield Violation(
                    "freshness",
                    f"whether `{retrieve}` sees what `{writeback}` stores is left to chance; "
                    f"make `{second}` wait for `{first}`",
                    (first, second),
                    (first, second),
                )


def _state_travels(
    schedule: Schedule, carries: Mapping[Kind, frozenset[str]]
) -> Iterator[Violation]:
    movers = [op for op in schedule.ops if op.batch == min(1, schedule.batches - 1)]
    for op in movers:
        if op.kind in CARRIES and STATE not in carries.get(op.kind, frozenset()):
            reader, writer = Op(K.UPDATE, op.batch), Op(K.UPDATE, max(op.batch - 1, 0))
            yield Violation(
                "freshness",
                f"`{reader}` can use optimizer state that `{writer}` has not written, because "
                f"`{op}` moves rows without it; let `{op.kind}` carry the state with the row",
                (op, reader),
            )


# Is it a schedule at all: every op there once, no op waiting for itself or for a later one.


Malformation = tuple[str, tuple[Op, ...]]


def malformations(schedule: Schedule) -> Iterator[Malformation]:
    """A sentence and the ops concerned, for everything that makes further proofs meaningless."""
    ops = schedule.ops
    seen: set[Op] = set()
    for op in ops:
        if op in seen:
            yield f"`{op}` is there twice; remove one of them", (op,)
        seen.add(op)
    wanted = _all_ops(schedule.shape, schedule.batches)
    if seen == wanted:
        yield from _deadlocks(schedule)
        return
    for op in sorted(wanted - seen, key=str):
        yield f"`{op}` is missing from a schedule of {schedule.batches} batches; add it", ()
    for op in sorted(seen - wanted, key=str):
        yield f"`{op}` has no place in this schedule (see its facts); remove it", (op,)


@lru_cache(maxsize=8)
def _all_ops(shape: Shape, batches: int) -> Set[Op]:
    return frozenset(op for batch in range(batches) for op in ops_of_batch(batch, shape))


def ops_of_batch(batch: int, shape: Shape) -> Iterator[Op]:
    """Every op that one batch consists of."""
    for kind in Kind:
        if not shape.contains(Op(kind, batch)):
            continue
        if kind in MICRO_KINDS:
            yield from (Op(kind, batch, micro) for micro in range(shape.micro_batches))
        else:
            yield Op(kind, batch)


def _deadlocks(schedule: Schedule) -> Iterator[Malformation]:
    position = {op: i for i, op in enumerate(schedule.ops)}
    backwards: list[tuple[Op, Op]] = []
    for i, step in enumerate(schedule):
        if step.alongside != (due := schedule.shape.alongside(step.op)) and step.alongside:
            instead = f"let it run alongside `{due}`" if due else "remove that"
            yield f"`{step.op}` cannot run alongside `{step.alongside}`; {instead}", (step.op,)
            return
        for before in (tie.before for tie in step.ties):
            if (place := position.get(before)) is None:
                yield (
                    f"`{step.op}` waits for `{before}`, which never runs; remove the edge",
                    (step.op,),
                )
                return
            if place >= i:
                backwards.append((step.op, before))
    if not backwards:  # then there is no ring either
        return
    cycle = _find_cycle(schedule)
    if cycle:
        around = " waits for ".join(f"`{op}`" for op in (*cycle, cycle[0]))
        yield f"deadlock: {around}; remove one of these edges", tuple(cycle)
        return
    for op, before in backwards:
        yield (
            f"`{op}` waits for `{before}`, which is issued after it, so a lane can "
            f"block itself; issue `{before}` first",
            (op, before),
        )


def _find_cycle(schedule: Schedule) -> list[Op]:
    """Ops that wait for each other in a ring, each for the next; empty when there is none."""
    after = {step.op: tuple(tie.before for tie in step.ties) for step in schedule}
    waiting = {op: len(set(befores)) for op, befores in after.items()}
    followers: dict[Op, list[Op]] = {}
    for op, befores in after.items():
        for before in set(befores):
            followers.setdefault(before, []).append(op)
    free = [op for op, count in waiting.items() if count == 0]
    while free:
        done = free.pop()
        del waiting[done]
        for op in followers.get(done, ()):
            waiting[op] -= 1
            if waiting[op] == 0:
                free.append(op)
    if not waiting:
        return []
    path = [next(iter(waiting))]
    while True:
        following = next(before for before in after[path[-1]] if before in waiting)
        if following in path:
            return path[path.index(following) :]
        path.append(following)


# Happens-before, from the ties alone: who is certain to have finished before whom.


@dataclass(frozen=True, slots=True)
class HappensBefore:
    """The transitive closure of a schedule's ties; the order of lanes plays no part."""

    index: Mapping[Op, int]
    earlier: tuple[int, ...]
    """For each op, the set of ops certain to end before it starts, as a bit mask."""
    by_end: tuple[int, ...]
    """For each op, those certain to end before it ends."""

    def __call__(self, before: Op, after: Op) -> bool:
        """Whether `before` has certainly ended when `after` starts."""
        return bool(self.earlier[self.index[after]] >> self.index[before] & 1)

    def __contains__(self, op: Op) -> bool:
        return op in self.index


def happens_before(schedule: Schedule) -> HappensBefore:
    """Who has ended when whom starts, in a schedule whose issue order respects its ties."""
    return _closure(schedule, (How.AFTER,))


def issued_before(schedule: Schedule) -> HappensBefore:
    """Who has started all its collectives when whom starts its own.

    An op that another waits for has been issued by then, and so has one that it is issued behind.
    """
    return _closure(schedule, (How.AFTER, How.BEHIND))


def _closure(schedule: Schedule, hows: tuple[How, ...]) -> HappensBefore:
    index = {op: i for i, op in enumerate(schedule.ops)}
    earlier: list[int] = []
    by_end: list[int] = []
    for step in schedule:
        before_start, drained = 0, 0
        for tie in step.ties:
            i = index[tie.before]
            if tie.how is How.ALONGSIDE:
                before_start |= earlier[i]
                drained = by_end[i] | 1 << i if step.op.kind in DRAINING else 0
            elif tie.how in hows:
                before_start |= by_end[i] | 1 << i
        earlier.append(before_start)
        by_end.append(before_start | drained)
    return HappensBefore(index, tuple(earlier), tuple(by_end))


def redundant_ties(schedule: Schedule) -> frozenset[Tie]:
    """Ties that others imply: without one of them the same orders stay legal."""
    ended, issued = happens_before(schedule), issued_before(schedule)
    return frozenset(
        tie
        for step in schedule
        for tie in step.ties
        if tie.how is not How.ALONGSIDE
        and _implied(tie, step.ties, ended if tie.how is How.AFTER else issued)
    )


def _implied(tie: Tie, ties: Sequence[Tie], order: HappensBefore) -> bool:
    """Whether the other ties of its op hold it back for as long."""
    i = order.index[tie.before]
    for other in ties:
        place = order.index[other.before]
        if other == tie or (tie.how is How.AFTER and other.how is How.BEHIND):
            continue
        if other.how is How.ALONGSIDE:
            if order.earlier[place] >> i & 1:
                return True
        elif (order.by_end[place] | 1 << place) >> i & 1:
            return True
    return False


def redundant_edges(schedule: Schedule) -> frozenset[tuple[Op, Op]]:
    """Edges that other ties imply."""
    ties = redundant_ties(schedule)
    return frozenset((tie.before, tie.op) for tie in ties if tie.how is How.AFTER)
