"""`DeviceTables`: what every op does with rows where one GPU has them all and routes its own keys.

Keys never come to the host. `dedup` lays the batch's keys side by side, `union` finds their slots
in the pool and sorts them into segments, `rows` looks rows up, `update` sums gradients by row and
applies them at once. Nothing travels between ranks, so `counts`, `keys` and `grads` have nothing to
do. `ShardedTables` is the twin: the same bits, with keys routed by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.embedding.optimizers import RowOptimizer
from nestpipe.embedding.pool import PoolRows, RowPool, SlotRows
from nestpipe.embedding.store.protocol import RowStore
from nestpipe.embedding.table_groups import TableGroup, check_features
from nestpipe.jagged import Jagged
from nestpipe.kernels.index.device_index import KeyCells
from nestpipe.kernels.index.lookup import Pooling, look_up, plain_look_up
from nestpipe.kernels.index.segments import (
    TermGradients,
    TermSegments,
    plain_segment_sums,
    sort_segments,
    update_segments,
)
from nestpipe.kernels.rows.segments import empty_rows, lists_on
from nestpipe.schedule import Kind, Op, Retrieval, Shape

# Shapes: T keys of a batch, repeats included, O outputs that the model sees, D weights of a row,
# C tables of a group, S slots

MOST_DIM = 512
"""Weights of a row that the kernels know."""


@dataclass(slots=True)
class GroupBatch:
    """One batch in the tables of one group; all tensors are on the device."""

    keys_T: Tensor
    cells: KeyCells
    sizes: dict[str, int]
    """Outputs of each feature, in order."""
    pooling: Pooling | None
    """None: each key is an output."""
    outputs_T: Tensor | None
    """The output of each key, where there is pooling."""
    slots_T: Tensor | None = None
    segments: TermSegments | None = None
    seen_OD: Tensor | None = None
    gradients: Tensor | None = None
    """(O, D), once the model has made them."""


@dataclass(slots=True)
class DeviceBatch:
    """One batch, group by group; it keeps alive what a stream may still use."""

    groups: list[GroupBatch]
    kept: list[object] = field(default_factory=list[object])


class DeviceTables:
    """All tables of the only rank, and the batches in flight."""

    def __init__(
        self,
        groups: Sequence[TableGroup],
        pools: Sequence[RowPool],
        optimizer: RowOptimizer,
        shape: Shape,
        device: torch.device,
    ) -> None:
        self.groups = list(groups)
        self.optimizer = optimizer
        self.shape = shape
        self.device = device
        self.buffers = PoolRows(pools)
        self._pools = list(pools)
        self.in_flight: dict[int, DeviceBatch] = {}

    @property
    def table_of(self) -> dict[str, str]:
        """The table of each feature."""
        return {f.name: g.tables[f.table].name for g in self.groups for f in g.features}

    def acts(self) -> dict[Kind, Callable[[Op], None]]:
        """What ops do that are about rows alone; only one rank has work for them."""
        return {
            Kind.KEYS: lambda op: None,
            Kind.UNION: lambda op: self.union(op.batch),
            Kind.ROWS: lambda op: self.rows(op.batch, op.micro or 0),
            Kind.GRADS: lambda op: None,
        }

    def dedup(self, batch: int, micro_keys: Sequence[Mapping[str, Jagged]]) -> None:
        """Lay the keys of each group side by side, table by table."""
        (keys,) = micro_keys
        check_features(self.groups, keys)
        self.in_flight[batch] = DeviceBatch([self._laid_out(keys, g) for g in self.groups])

    def _laid_out(self, keys: Mapping[str, Jagged], group: TableGroup) -> GroupBatch:
        lists = [keys[f.name] for f in group.features]
        counts = [0] * len(group.tables)
        for feature, of in zip(group.features, lists, strict=True):
            counts[feature.table] += len(of.values)
        ends_C = torch.tensor(counts, dtype=torch.int64).cumsum(0)
        (ends_there,) = lists_on(self.device, [ends_C])
        keys_T = torch.cat([of.values for of in lists])
        pooled = [f.pooled for f in group.features]
        sizes = {
            f.name: of.num_samples if f.pooled else len(of.values)
            for f, of in zip(group.features, lists, strict=True)
        }
        pooling, outputs_T = None, None
        if any(pooled):
            lengths_O = torch.cat(
                [
                    of.lengths if pools else torch.ones_like(of.values)
                    for of, pools in zip(lists, pooled, strict=True)
                ]
            )
            ends_O1 = torch.zeros(len(lengths_O) + 1, dtype=torch.int32, device=self.device)
            torch.cumsum(lengths_O, 0, dtype=torch.int32, out=ends_O1[1:])
            numbers_O = torch.arange(len(lengths_O), dtype=torch.int32, device=self.device)
            outputs_T = numbers_O.repeat_interleave(lengths_O, output_size=len(keys_T))
            pooling = Pooling(ends_O1)
        return GroupBatch(keys_T, KeyCells(ends_there), sizes, pooling, outputs_T)

    def keys_asked(self, batch: int) -> int:
        """Keys of the batch, repeats included: nothing is sent, so nobody counts unique ones."""
        return sum(len(of.keys_T) for of in self.in_flight[batch].groups)

    def counts(self, batch: int, samples: int) -> int:
        """The only rank has all samples."""
        return samples

    def union(self, batch: int) -> None:
        """Slots of all keys, and the segments in which their gradients will be summed."""
        for of, pool in zip(self.in_flight[batch].groups, self._pools, strict=True):
            of.slots_T = pool.admit(batch, of.keys_T, of.cells)
            if of.slots_T.is_cuda:
                of.segments = sort_segments(of.slots_T, pool.num_slots, of.outputs_T)

    def retrieve(self, batch: int) -> int:
        """Rows that are not in the pool; returns how many came from the host store."""
        return sum(pool.retrieve(batch) for pool in self._pools)

    def rows(self, batch: int, micro: int) -> None:
        """Look up what the model sees."""
        for of, pool, group in zip(
            self.in_flight[batch].groups, self._pools, self.groups, strict=True
        ):
            assert of.slots_T is not None
            outputs = sum(of.sizes.values())
            of.seen_OD = empty_rows(outputs, group.dim, self.device)
            if of.slots_T.is_cuda:
                look_up(pool.rows_SW, of.slots_T, of.seen_OD, of.pooling)
            else:
                seen_OD = plain_look_up(pool.rows_SW, of.slots_T, group.dim, of.pooling)
                of.seen_OD.copy_(seen_OD)

    def lookup(self, batch: int, micro: int) -> dict[str, Tensor]:
        """The rows of every feature, as the model sees them."""
        seen: dict[str, Tensor] = {}
        for of in self.in_flight[batch].groups:
            # Something that wants a gradient, so that the backward pass comes by.
            anchor = torch.zeros(0, requires_grad=True)
            outputs: tuple[Tensor, ...] = _Seen.apply(anchor, of)  # type: ignore[assignment]
            seen.update(zip(of.sizes, outputs, strict=True))
        return seen

    def update(self, batch: int, times: float | Tensor, step: int) -> None:
        """Sum gradients by row and apply the optimizer, once per row, in one pass."""
        for of, pool, group in zip(
            self.in_flight[batch].groups, self._pools, self.groups, strict=True
        ):
            assert of.slots_T is not None
            assert of.seen_OD is not None
            if of.gradients is None:  # the model did not use them
                of.gradients = torch.zeros_like(of.seen_OD)
            if of.segments is not None:
                assert isinstance(times, Tensor)
                struct = self.optimizer.struct(step)
                gradients = TermGradients(of.gradients)
                update_segments(of.segments, gradients, pool.rows_SW, struct, times)
            else:
                gradients = TermGradients(of.gradients, of.outputs_T)
                slots_K, sums_KD = plain_segment_sums(of.slots_T, gradients)
                self.optimizer.update_times(pool.rows_SW, sums_KD, times, step, slots_K=slots_K)
            self._round(group, SlotRows(pool.rows_SW, of.slots_T))

    def _round(self, group: TableGroup, rows: SlotRows) -> None:
        """Round as the store would; a slot that comes twice is written twice, alike."""
        if group.tables[0].dtype == "bfloat16":
            rows_TW = rows.read()
            rows_TW[:, : group.dim].copy_(rows_TW[:, : group.dim].bfloat16())
            rows.write(rows_TW)

    def writeback(self, batch: int) -> int:
        """Rows that leave the pool into the host store; returns how many."""
        written = sum(pool.writeback(batch) for pool in self._pools)
        self.forget(batch - 1)
        return written

    def forget(self, batch: int) -> None:
        """Drop the state of a batch."""
        self.buffers.forget(batch)
        self.in_flight.pop(batch, None)

    merge_is_due = False
    """There are no replicas."""

    def merge_rest(self, stores: Sequence[RowStore]) -> None:
        """Nothing is ever due."""


class _Seen(torch.autograd.Function):
    """What the model sees, feature by feature; gradients leave by the batch, in one piece."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, of: GroupBatch) -> tuple[Tensor, ...]:
        ctx.of = of
        assert of.seen_OD is not None
        return torch.split(of.seen_OD, list(of.sizes.values()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.of.gradients = torch.cat(gradients)
        return None, None


def can_route_on_device(
    groups: Sequence[TableGroup], shape: Shape, device: torch.device, ranks: int
) -> bool:
    """Whether `DeviceTables` can do this work: one GPU, one micro-batch, rows of usual width."""
    return (
        device.type == "cuda"
        and ranks == 1
        and shape.retrieval is Retrieval.POOLED
        and shape.micro_batches == 1
        and all(group.dim <= MOST_DIM for group in groups)
    )
