"""The data dependencies of every op: the table of the design, as functions.

Each function lists all ops whose result or memory the op needs, also where the order of a lane or
of the network already implies the edge: the checker must see it with the lanes removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nestpipe.schedule.options import Exchange, Merge, Retrieval
from nestpipe.schedule.schedule import Kind, Op, Shape

K = Kind


def waits(op: Op, shape: Shape) -> Iterator[Op]:
    """The ops that `op` waits for; some may lie before the first batch or after the last."""
    return _WAITS_OF[op.kind](op, shape)


def _prefetch(op: Op, shape: Shape) -> Iterator[Op]:
    yield shape.retire(op.batch - shape.lookahead)


def _copy(op: Op, shape: Shape) -> Iterator[Op]:
    yield Op(K.PREFETCH, op.batch)


def _dedup(op: Op, shape: Shape) -> Iterator[Op]:
    yield Op(K.COPY, op.batch)


def _counts(op: Op, shape: Shape) -> Iterator[Op]:
    yield Op(K.DEDUP, op.batch)


def _keys(op: Op, shape: Shape) -> Iterator[Op]:
    yield Op(K.COUNTS, op.batch)


def _union(op: Op, shape: Shape) -> Iterator[Op]:
    yield Op(K.KEYS, op.batch)
    if shape.handover is K.SYNC or shape.pooled:
        # It compares its keys with those of the batch before, or changes the index of the pool.
        yield shape.last_union(op.batch - 1)
    if shape.retrieval is Retrieval.NEW:
        # Write-back still reads the working set of the slot's last batch after that batch retired.
        yield Op(K.WRITEBACK, op.batch - shape.slots)


def _replica_keys(op: Op, shape: Shape) -> Iterator[Op]:
    # What is further back than the look-ahead has ended.
    for batch in reversed(shape.merged_batches(op.batch)[-shape.lookahead :]):
        yield Op(K.UNION, batch)


def _replica_union(op: Op, shape: Shape) -> Iterator[Op]:
    yield Op(K.REPLICA_KEYS, op.batch)
    yield Op(K.UNION, op.batch)
    if shape.handover is K.SYNC:
        yield shape.last_union(op.batch - 1)


def _stale_mask(op: Op, shape: Shape) -> Iterator[Op]:
    yield Op(K.UNION, op.batch)


def _retrieve(op: Op, shape: Shape) -> Iterator[Op]:
    yield shape.last_union(op.batch)
    yield Op(K.WRITEBACK, op.batch - shape.buffers)
    if shape.stores_while_reading:
        # What the batch before stored itself may come back with this one.
        yield Op(K.RETRIEVE, op.batch - 1)
    if shape.takes_over:
        yield shape.last_write(op.batch - 2)
        if op.batch > 2:
            # The batch before took rows from the very buffer that this op fills.
            yield Op(K.RETRIEVE, op.batch - 1)
    elif shape.handover is K.SYNC and op.batch > 1:
        # The refresh of the batch before reads the very buffer that this op fills.
        yield Op(K.SYNC, op.batch - 1)


def _handover(op: Op, shape: Shape) -> Iterator[Op]:
    if shape.speculative_rows and op.batch == 0:
        return
    yield Op(K.RETRIEVE, op.batch)
    yield shape.last_write(op.batch - 1)
    if shape.speculative_rows:
        # What is sent early is read from the buffer that the refresh writes.
        yield Op(K.ROWS, op.batch, 0)


def _rows(op: Op, shape: Shape) -> Iterator[Op]:
    assert op.micro is not None
    if shape.is_early(op):
        yield Op(K.RETRIEVE, op.batch)
        return
    yield Op(shape.handover, op.batch)
    if shape.pooled:
        # Rows that both batches use are the same memory.
        yield shape.last_write(op.batch - 1)
    if shape.speculative_rows and op.batch == 0:  # there is nothing to refresh, and no wait for it
        yield Op(K.RETRIEVE, op.batch)
    before = op.micro - shape.receive
    if before >= 0 and not (shape.speculative_rows and before == 0):
        yield Op(K.DENSE, op.batch, before)


def _patch(op: Op, shape: Shape) -> Iterator[Op]:
    yield Op(K.STALE_MASK, op.batch)
    yield Op(K.ROWS, op.batch, 0)
    if op.batch > 0:
        yield Op(shape.handover, op.batch)


def _dense(op: Op, shape: Shape) -> Iterator[Op]:
    assert op.micro is not None
    for micro in _shared(op, shape):
        early = shape.speculative_rows and micro == 0
        yield Op(K.PATCH, op.batch) if early else Op(K.ROWS, op.batch, micro)
    if op.micro == 0 and shape.separate_dense_group:
        yield Op(K.APPLY, op.batch - 1)
    if op.micro > 0:
        # Dense gradients, and in a window row gradients, are summed in the order of micro-batches.
        yield Op(K.DENSE, op.batch, op.micro - 1)
    if op.micro >= shape.receive:
        yield Op(K.GRADS, op.batch, op.micro - shape.receive)


def _grads(op: Op, shape: Shape) -> Iterator[Op]:
    for micro in _shared(op, shape):
        yield Op(K.DENSE, op.batch, micro)


def _shared(op: Op, shape: Shape) -> range:
    """The micro-batches whose rows and gradients the op uses: in a window all up to its own."""
    assert op.micro is not None
    first = 0 if shape.exchange is Exchange.WINDOW else op.micro
    return range(first, op.micro + 1)


def _reduce(op: Op, shape: Shape) -> Iterator[Op]:
    if shape.alongside(op) is None:
        yield shape.last_dense(op.batch)


def _norm(op: Op, shape: Shape) -> Iterator[Op]:
    for micro in range(shape.micro_batches):
        yield Op(K.GRADS, op.batch, micro)
    yield Op(K.REDUCE, op.batch)
    if shape.sums_replica_gradients(op.batch):
        yield Op(K.REPLICA_SYNC, op.batch)


def _apply(op: Op, shape: Shape) -> Iterator[Op]:
    if shape.gradient_norm:
        yield Op(K.NORM, op.batch)
    yield Op(K.TOTALS, op.batch)
    yield Op(K.REDUCE, op.batch)
    yield shape.last_dense(op.batch)


def _update(op: Op, shape: Shape) -> Iterator[Op]:
    for micro in range(shape.micro_batches):
        yield Op(K.GRADS, op.batch, micro)
    if shape.speculative_rows:
        yield Op(shape.handover, op.batch)
    yield Op(K.TOTALS if shape.separate_dense_group else K.REDUCE, op.batch)
    if shape.sums_replica_gradients(op.batch):
        yield Op(K.REPLICA_SYNC, op.batch)
    if shape.gradient_norm:
        yield Op(K.NORM, op.batch)


def _replica_sync(op: Op, shape: Shape) -> Iterator[Op]:
    if shape.merge is Merge.AVERAGED:
        yield Op(K.UPDATE, op.batch)
        return
    for micro in range(shape.micro_batches):
        yield Op(K.GRADS, op.batch, micro)


def _writeback(op: Op, shape: Shape) -> Iterator[Op]:
    yield shape.last_write(op.batch)
    if shape.leaving_known_after:
        yield shape.last_union(op.batch + shape.leaving_known_after)
    if shape.takes_over:
        # A row that was taken over is stored twice: the later value must land last.
        yield Op(K.WRITEBACK, op.batch - 2)
    elif shape.buffers > 1 and shape.retrieval is not Retrieval.NEW:
        # Both batches may have changed the same row: the later value must land last. With a pool
        # it may also come back so soon that `retrieve` waits for the later one only.
        yield Op(K.WRITEBACK, op.batch - 1)
    if shape.stale:
        # One step stale on every run, not by luck: the next batch reads before this one writes.
        yield Op(K.RETRIEVE, op.batch + 1)


_WAITS_OF: dict[Kind, Callable[[Op, Shape], Iterator[Op]]] = {
    K.PREFETCH: _prefetch,
    K.COPY: _copy,
    K.DEDUP: _dedup,
    K.COUNTS: _counts,
    K.KEYS: _keys,
    K.UNION: _union,
    K.REPLICA_KEYS: _replica_keys,
    K.REPLICA_UNION: _replica_union,
    K.STALE_MASK: _stale_mask,
    K.RETRIEVE: _retrieve,
    K.SYNC: _handover,
    K.SWAP: _handover,
    K.PATCH: _patch,
    K.ROWS: _rows,
    K.DENSE: _dense,
    K.GRADS: _grads,
    K.TOTALS: _reduce,
    K.REDUCE: _reduce,
    K.NORM: _norm,
    K.APPLY: _apply,
    K.UPDATE: _update,
    K.REPLICA_SYNC: _replica_sync,
    K.WRITEBACK: _writeback,
}
