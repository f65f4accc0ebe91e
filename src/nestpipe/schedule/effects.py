"""What each op reads and writes: the memory behind the edges.

The checker derives from this table which ops must not pass each other; it never looks at how a plan
came by its edges. A `Cell` is one piece of memory of one rank; cells with a number are used in turn
(`("buffer", t % 2)`). Host memory is not a cell: which of its rows an op touches depends on
the keys, so `check` has rules of its own for it. In a pool the cells of rows are: `buffer`, the
places that `retrieve t` fills and an earlier `writeback` emptied, and `pool`, all that batches
share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nestpipe.schedule.options import Exchange, Merge
from nestpipe.schedule.schedule import Kind, Op, Shape

K = Kind
Cell = tuple[str, int]
INDEX: Cell = ("index", 0)
POOL: Cell = ("pool", 0)
REPORTS: Cell = ("reports", 0)

WEIGHT, STATE = "weight", "state"
CARRIES: Mapping[Kind, frozenset[str]] = {
    K.RETRIEVE: frozenset({WEIGHT, STATE}),
    K.SYNC: frozenset({WEIGHT, STATE}),
    K.WRITEBACK: frozenset({WEIGHT, STATE}),
}
"""Which parts of a row the ops that move rows take along: optimizer state travels with the row."""

CONTENT_OF = {
    "queue": "samples on the host",
    "batch": "samples on the device",
    "wanted": "unique keys",
    "sizes": "key counts",
    "asked": "requested keys",
    "owned": "keys of the working set",
    "touched": "keys that the batch touched",
    "merged": "keys that replicas merge",
    "stale_mask": "marks of rows that come again",
    "index": "index of the pool",
    "buffer": "rows in the device buffer",
    "pool": "rows in the pool",
    "active": "marks of the active buffer",
    "received": "received rows",
    "sent": "row gradients to send",
    "window_sum": "row gradients of the window",
    "row_sum": "summed row gradients",
    "losses": "losses of the micro-batches",
    "totals": "summed loss and weight",
    "dense_sum": "summed dense gradients",
    "dense_total": "dense gradients summed over ranks",
    "weights": "dense weights",
    "reports": "reports of the batches before",
    "norm": "norm of all gradients",
    "dense_faults": "faults of dense gradients",
}
"""How a cell is called in a sentence."""

SUMS = frozenset({"window_sum", "row_sum", "losses", "dense_sum"})
"""Cells that several ops add to; the order of the terms is part of the result."""

STREAMED = frozenset({"losses", "dense_sum"})
"""Cells that an op may read while the op that it runs alongside still writes them."""

WRITTEN_AT_START = frozenset(
    {"row_sum", "dense_sum", "weights", "active", "index", "pool", "reports"}
)
"""Cells that hold something valid before the first op."""


@dataclass(frozen=True, slots=True)
class Effects:
    """The cells that an op reads and those that it writes."""

    reads: tuple[Cell, ...] = ()
    writes: tuple[Cell, ...] = ()


def effects(op: Op, shape: Shape) -> Effects:
    """What one op reads and writes."""
    t, m = op.batch, op.micro or 0
    slot = t % shape.slots
    queue = ("queue", t % shape.lookahead)
    batch, wanted, sizes = ("batch", slot), ("wanted", slot), ("sizes", slot)
    asked, owned = ("asked", slot), ("owned", slot)
    buffer, other_buffer = ("buffer", t % shape.buffers), ("buffer", (t - 1) % shape.buffers)
    received, sent = ("received", shape.place(t, m)), ("sent", m % shape.receive)
    row_sum, dense_sum = ("row_sum", 0), ("dense_sum", 0)
    active: tuple[Cell, ...] = (("active", 0),) if shape.handover is not K.RETRIEVE else ()
    compares = shape.handover is K.SYNC and t > 0
    if shape.is_early(op):
        return _early_effects(op, shape)
    match op.kind:
        case K.PREFETCH:
            return Effects(writes=(queue,))
        case K.COPY:
            return Effects(reads=(queue,), writes=(batch,))
        case K.DEDUP:
            return Effects(reads=(batch,), writes=(wanted,))
        case K.COUNTS:
            return Effects(reads=(wanted,), writes=(sizes,))
        case K.KEYS:
            return Effects(reads=(wanted, sizes), writes=(asked,))
        case K.UNION | K.REPLICA_KEYS | K.REPLICA_UNION | K.RETRIEVE:
            return _lookup_effects(op, shape)
        case K.SYNC:
            if (
                shape.speculative_rows and t == 0
            ):  # rows are being sent, and there is nothing to refresh
                return Effects(writes=active)
            reads = (owned, other_buffer) if compares else (owned,)
            return Effects(reads=reads, writes=(buffer, *active))
        case K.SWAP:
            return Effects(writes=active)
        case K.STALE_MASK | K.PATCH:
            return _early_effects(op, shape)
        case K.ROWS if shape.pooled:
            return Effects(reads=(wanted, asked, owned, buffer, POOL), writes=(received,))
        case K.ROWS:
            return Effects(reads=(wanted, asked, buffer, *active), writes=(received,))
        case K.DENSE | K.GRADS if shape.exchange is Exchange.WINDOW:
            return _window_effects(op, shape)
        case K.DENSE:
            losses = ("losses", slot)
            before = (losses,) if m > 0 else ()
            reads = (batch, received, ("weights", 0), dense_sum, *before)
            return Effects(reads=reads, writes=(sent, losses, dense_sum))
        case K.GRADS:
            return Effects(reads=(sent, asked, row_sum), writes=(row_sum,))
        case K.TOTALS | K.REDUCE | K.NORM | K.APPLY | K.UPDATE:
            return _end_effects(op, shape)
        case K.REPLICA_SYNC if shape.merge is Merge.EXACT:
            return Effects(reads=(owned, row_sum), writes=(row_sum,))
        case K.REPLICA_SYNC:
            rows = (buffer, POOL) if shape.pooled else (buffer,)
            return Effects(reads=(owned, *rows), writes=rows)
        case K.WRITEBACK:
            return _writeback_effects(op, shape)


def _end_effects(op: Op, shape: Shape) -> Effects:
    """The same for ops that sum what a window has made over ranks, and apply it."""
    slot = op.batch % shape.slots
    row_sum, dense_sum, weights = ("row_sum", 0), ("dense_sum", 0), ("weights", 0)
    losses, totals, dense_total = ("losses", slot), ("totals", slot), ("dense_total", 0)
    buffer, owned = ("buffer", op.batch % shape.buffers), ("owned", slot)
    active: tuple[Cell, ...] = (("active", 0),) if shape.handover is not K.RETRIEVE else ()
    of_batch = (buffer, POOL) if shape.pooled else (buffer,)
    norm: tuple[Cell, ...] = (("norm", slot),) if shape.gradient_norm else ()
    rows = Effects((owned, *of_batch, row_sum, totals, *norm, *active), (*of_batch, row_sum))
    dense = Effects(reads=(dense_total, totals, *norm, weights), writes=(weights, dense_sum))
    summed = Effects(reads=(dense_sum,), writes=(dense_total,))
    match op.kind:
        case K.TOTALS:
            return Effects(reads=(losses,), writes=(totals,))
        case K.NORM:
            return Effects(reads=(row_sum, dense_total), writes=norm)
        case K.APPLY:
            return Effects(dense.reads, (*dense.writes, ("dense_faults", op.batch)))
        case K.REDUCE if shape.separate_dense_group:
            return summed
        case K.REDUCE:
            return Effects((*summed.reads, losses), (*summed.writes, totals))
        case _ if shape.separate_dense_group:
            return rows
        case _:
            return Effects((*rows.reads, *dense.reads), (*rows.writes, *dense.writes))


def _lookup_effects(op: Op, shape: Shape) -> Effects:
    """The same for ops that look at earlier batches, to find and to take over what they have."""
    t = op.batch
    owned, buffer = ("owned", t % shape.slots), ("buffer", t % shape.buffers)
    takes_over = shape.takes_over and t > 1
    if op.kind is K.RETRIEVE:
        taken = (("buffer", (t - 2) % shape.buffers),) if takes_over else ()
        return Effects(reads=(owned, *taken), writes=(buffer,))
    if op.kind is K.REPLICA_KEYS:
        touched = (_touched(batch, shape) for batch in shape.merged_batches(t))
        return Effects(reads=tuple(touched), writes=(("merged", t % shape.slots),))
    index = (INDEX,) if shape.pooled else ()
    compares = shape.handover is K.SYNC and t > 0
    before = (("owned", (t - 1) % shape.slots),) if compares else ()
    older = (("owned", (t - 2) % shape.slots),) if takes_over else ()
    if op.kind is K.REPLICA_UNION:
        reads = (owned, ("merged", t % shape.slots), *before, *older, *index)
        return Effects(reads=reads, writes=(owned, *index))
    asked = ("asked", t % shape.slots)
    noted = (_touched(t, shape),) if shape.merge_every else ()
    return Effects(reads=(asked, *before, *older, *index), writes=(owned, *noted, *index))


def _writeback_effects(op: Op, shape: Shape) -> Effects:
    """The same for the op that stores rows and ends its batch.

    With a pool it stores what the union of a later batch tells it to, which in the last batches is
    nothing; what keeps them in order then is that a batch is reported after the one before it. It
    tells of dense gradients that were not finite too, as far as `apply` is over: those of the batch
    before.
    """
    t = op.batch
    faults = (("dense_faults", t - 1),) if shape.separate_dense_group and t > 0 else ()
    buffer, totals = ("buffer", t % shape.buffers), ("totals", t % shape.slots)
    leaving = ("owned", (t + shape.leaving_known_after) % shape.slots)
    if shape.pooled:
        reads = (leaving, buffer, totals, *faults, REPORTS)
        return Effects(reads=reads, writes=(REPORTS,))
    keys = dict.fromkeys((("owned", t % shape.slots), leaving))
    return Effects(reads=(*keys, buffer, totals, *faults))


def _touched(batch: int, shape: Shape) -> Cell:
    """Where a batch's own keys stay until replicas have merged them."""
    return ("touched", batch % (shape.merge_every + shape.lookahead))


def _window_effects(op: Op, shape: Shape) -> Effects:
    """The same where micro-batches share rows.

    There is a cell for each of them: rows that come with it, rows whose last use it is.
    """
    t, m = op.batch, op.micro or 0
    slot = t % shape.slots
    row_sum, dense_sum, weights = ("row_sum", 0), ("dense_sum", 0), ("weights", 0)
    if op.kind is K.GRADS:
        reads = (("window_sum", m), ("asked", slot), row_sum)
        return Effects(reads=reads, writes=(row_sum,))
    first: Cell = ("received", shape.place(t, 0))
    came: tuple[Cell, ...] = (first, *(("received", n) for n in range(1, m + 1)))
    sums: tuple[Cell, ...] = tuple(("window_sum", n) for n in range(m, shape.micro_batches))
    added = sums if m > 0 else ()  # the first micro-batch begins them
    losses: Cell = ("losses", slot)
    so_far = (losses,) if m > 0 else ()
    reads = (("batch", slot), *came, weights, dense_sum, *added, *so_far)
    return Effects(reads=reads, writes=(*sums, losses, dense_sum))


def _early_effects(op: Op, shape: Shape) -> Effects:
    """The same for rows that are sent before their refresh, and what follows from it."""
    t = op.batch
    slot = t % shape.slots
    asked, marks = ("asked", slot), ("stale_mask", slot)
    buffer, received = ("buffer", t % shape.buffers), ("received", shape.place(t, 0))
    if op.kind is K.STALE_MASK:
        return Effects(reads=(asked, ("owned", slot)), writes=(marks,))
    if op.kind is K.ROWS:
        return Effects(reads=(("wanted", slot), asked, buffer), writes=(received,))
    again: tuple[Cell, ...] = (buffer, ("active", 0)) if t > 0 else ()
    return Effects(reads=(asked, marks, received, *again), writes=(received,))


_PLACE = {kind: i for i, kind in enumerate(Kind)}
_STAGE = dict(_PLACE)
_STAGE[K.DENSE] = _STAGE[K.GRADS] = _STAGE[K.ROWS]


def reference_position(op: Op, shape: Shape) -> tuple[float, ...]:
    """Where the op stands in the serial order that every exact plan must be equal to."""
    if op.kind is K.WRITEBACK and shape.leaving_known_after:
        return (op.batch + shape.leaving_known_after, _STAGE[K.REPLICA_UNION] + 0.5)
    if shape.is_early(op):
        return (op.batch, _STAGE[K.RETRIEVE] + 0.5)
    stage = _STAGE[op.kind]
    if op.kind is K.REPLICA_SYNC and shape.merge is Merge.EXACT:
        stage = _STAGE[K.TOTALS] - 0.5
    return (op.batch, stage, op.micro or 0, _PLACE[op.kind])
