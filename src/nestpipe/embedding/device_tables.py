"""`DeviceTables`: what every op does with rows where a GPU routes its own keys into its pool.

Keys stay on the device; the host knows counts alone. `dedup` lays a batch's keys side by side and,
with several ranks, finds the unique ones of each owner. `union` finds the slots of all keys that
this rank was asked for and sorts them into segments. `rows` looks rows up for whoever asked,
`update` sums gradients by row and applies them in the same pass. With one rank nothing travels:
rows go from the pool straight to the model.

`ShardedTables` with a pool is the twin: the same bits, with keys routed by the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.batch import BatchLayout, PackedColumns
from nestpipe.comm.communicator import Communicator, Mesh
from nestpipe.embedding.optimizers import RowOptimizer
from nestpipe.embedding.pool import PoolRows, RowPool, SlotRows
from nestpipe.embedding.routing.all_to_all import exchange
from nestpipe.embedding.store.protocol import RowStore
from nestpipe.embedding.table_groups import TableGroup, check_features
from nestpipe.jagged import Jagged
from nestpipe.kernels.index import library
from nestpipe.kernels.index.dedup import DedupedKeys, Owners, dedup, plain_dedup
from nestpipe.kernels.index.device_index import KeyCells
from nestpipe.kernels.index.segments import (
    Pooling,
    TermGradients,
    TermSegments,
    look_up,
    plain_drop_faults,
    plain_look_up,
    plain_segment_sums,
    sort_segments,
    update_segments,
)
from nestpipe.kernels.index.steady import (
    StepNews,
    TermBuffers,
    plain_pool_outputs,
    pool_outputs,
)
from nestpipe.kernels.rows.segments import empty_rows, lists_on, round_in_place
from nestpipe.schedule import Kind, Op, Retrieval, Shape

# Shapes: T keys of a batch, repeats included, O outputs that the model sees, A unique keys that are
# sent, P keys that this rank is asked for, D weights of a row, C tables of a group, R ranks

MOST_LISTS = 16
"""Lists of counts that are kept on the device."""
MOST_DIM = 512
"""Weights of a row that the kernels know."""


@dataclass(slots=True)
class TermSums:
    """Gradients of terms, summed for the row that each belongs to: sorted ahead on a GPU."""

    ids_T: Tensor
    outputs_T: Tensor | None
    sorted: TermSegments | None

    @classmethod
    def of(cls, ids_T: Tensor, num_ids: int, outputs_T: Tensor | None) -> TermSums:
        by_kernels = library.has_kernels(ids_T.device)
        made = sort_segments(ids_T, num_ids, outputs_T) if by_kernels else None
        return cls(ids_T, outputs_T, made)

    def store(self, gradients_OD: Tensor, out_AD: Tensor) -> None:
        """Write the sum of every row that has terms."""
        if self.sorted is not None:
            update_segments(self.sorted, TermGradients(gradients_OD), out_AD, None)
            return
        ids_S, sums_SD = plain_segment_sums(self.ids_T, TermGradients(gradients_OD, self.outputs_T))
        out_AD.index_copy_(0, ids_S.long(), sums_SD)

    def apply(
        self,
        optimizer: RowOptimizer,
        gradients_OD: Tensor,
        rows_SW: Tensor,
        times: float | Tensor,
        step: int,
        *,
        clip: bool,
    ) -> Tensor:
        """Update every row that has terms with their sum times a number.

        Sums that are not finite are dropped before; returns how many.
        """
        if self.sorted is not None:
            faults = torch.zeros(1, dtype=torch.int32, device=rows_SW.device)
            gradients = TermGradients(gradients_OD)
            if not isinstance(times, Tensor):  # as an argument of a kernel: no copy from the host
                times = torch.full((1,), times, device=rows_SW.device)
            times = times.reshape(1)
            update_segments(
                *(self.sorted, gradients, rows_SW, optimizer.struct(step), times),
                faults=faults,
                clip=clip,
            )
            return faults
        ids_K, sums_KD = plain_segment_sums(self.ids_T, TermGradients(gradients_OD, self.outputs_T))
        faults = plain_drop_faults(sums_KD, clip=clip).reshape(1)
        optimizer.update_times(rows_SW, sums_KD, times, step, slots_K=ids_K)
        return faults


@dataclass(slots=True)
class Asked:
    """What other ranks and this one ask each other for; lists have this rank itself last."""

    request: DedupedKeys
    counts_told: _ToldCounts
    keys_P: Tensor | None = None
    """Keys that this rank is asked for ..."""
    slots_P: Tensor | None = None
    """... and their slots."""
    received_RC: Tensor | None = None
    """How many keys of each table each rank asks this one for, on the host."""
    gradients_PD: Tensor | None = None
    """Of rows that this rank gave away and of its own."""


@dataclass(slots=True)
class GroupBatch:
    """One batch in the tables of one group."""

    keys_T: Tensor
    cells: KeyCells
    sizes: dict[str, int]
    """Outputs of each feature, in order."""
    pooling: Pooling | None
    """None: each key is an output."""
    outputs_T: Tensor | None
    """The output of each key, where there is pooling."""
    asked: Asked | None = None
    """None: there is one rank."""
    seen_sums: TermSums | None = None
    """Gradients of what the model sees, summed for the rows that came."""
    owner_sums: TermSums | None = None
    """Gradients of rows, summed by slot."""
    slots: Tensor | None = None
    terms: TermBuffers | None = None
    """Slots and sums where one rank has nothing to move: in place of the two above."""
    came_AD: Tensor | None = None
    """The rows that this rank asked for, with several ranks."""
    seen_OD: Tensor | None = None
    gradients_OD: Tensor | None = None
    lengths_O: Tensor | None = None
    """Keys of each output, where there is pooling."""

    def gradients(self) -> Tensor:
        """(O, D) of what the model saw; zero where it did not use it."""
        assert self.seen_OD is not None
        return torch.zeros_like(self.seen_OD) if self.gradients_OD is None else self.gradients_OD


@dataclass(frozen=True, slots=True)
class _Laid:
    """Where a packed batch has the keys of a group: the same for all batches of one layout."""

    cells: KeyCells
    sizes: dict[str, int]
    keys: slice
    lengths: slice | None
    """None: each key is an output."""


class _ToldCounts:
    """Counts of keys on their way to the host."""

    def __init__(self, request: DedupedKeys, ranks: int) -> None:
        self._event: torch.cuda.Event | None = None
        self._shape = (ranks, request.num_tables)
        self._numbers = request.counts
        if request.counts.is_cuda:
            self._numbers = torch.empty(
                len(request.counts), dtype=request.counts.dtype, pin_memory=True
            )
            self._numbers.copy_(request.counts, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def counts_RC(self) -> Tensor:  # noqa: N802 - its shape
        """(R, C) keys of each table for each owner; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers[:-1].view(self._shape).long()


class DeviceTables:
    """One rank's shard of all tables, in pools, and the batches in flight."""

    def __init__(
        self,
        groups: Sequence[TableGroup],
        pools: Sequence[RowPool],
        optimizer: RowOptimizer,
        comm: Communicator,
        shape: Shape,
        device: torch.device,
        comm_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.groups = list(groups)
        self.optimizers = [group.tuned(optimizer) for group in groups]
        self.comm = comm
        self.shape = shape
        self.device = device
        self.comm_dtype = comm_dtype
        self.buffers = PoolRows(pools)
        self._pools = list(pools)
        self.in_flight: dict[int, list[GroupBatch]] = {}
        self._cells_known: dict[tuple[int, ...], KeyCells] = {}
        self._laid_known: dict[BatchLayout, list[_Laid]] = {}
        self._features = self.table_of.keys()
        self._owners = [_owners(group, comm, device) for group in groups]
        self._news: list[StepNews] = []

    @property
    def table_of(self) -> dict[str, str]:
        """The table of each feature."""
        return {f.name: g.tables[f.table].name for g in self.groups for f in g.features}

    def acts(self) -> dict[Kind, Callable[[Op], None]]:
        """What ops do that are about rows alone."""
        return {
            Kind.KEYS: lambda op: self.keys(op.batch),
            Kind.UNION: lambda op: self.union(op.batch),
            Kind.ROWS: lambda op: self.rows(op.batch),
            Kind.GRADS: lambda op: self.grads(op.batch),
        }

    @property
    def host_acts(self) -> frozenset[Kind]:
        """Kinds whose acts touch nothing on the device: one rank sends itself nothing."""
        alone = frozenset({Kind.COUNTS, Kind.KEYS, Kind.GRADS, Kind.REDUCE})
        return alone if self.comm.size == 1 else frozenset()

    def moves_nothing(self, batch: int) -> bool:
        """Whether all rows of a batch are in the pools or new, as `union` has found."""
        return all(pool.moves_nothing(batch) for pool in self._pools)

    # Routing

    def dedup(
        self,
        batch: int,
        micro_keys: Sequence[Mapping[str, Jagged]],
        joined: Callable[[list[Tensor]], Tensor] = torch.cat,
    ) -> None:
        """Lay the keys of each group side by side, table by table; find unique ones by owner.

        `joined` brings lists behind each other, from wherever they are to the device.
        """
        (keys,) = micro_keys
        check_features(self.groups, keys)
        self._begin(batch, [self._laid_out(keys, group, joined) for group in self.groups])

    def dedup_packed(
        self,
        batch: int,
        keys: Mapping[str, Jagged],
        packed: PackedColumns,
        joined: Callable[[list[Tensor]], Tensor],
    ) -> None:
        """The same for lists of a packed batch, with `packed` its copy on the device.

        Where they lie follows from the layout alone, which batches of equal sizes share.
        """
        layout, part = packed.layout, packed.parts[torch.int64]
        laid = self._laid_known.get(layout)
        if laid is None or keys.keys() != self._features:
            self.dedup(batch, [keys], joined)
            found = [_laid_in(part, of) for of in self.in_flight[batch]]
            if len(self._laid_known) == MOST_LISTS:
                self._laid_known.clear()
            self._laid_known[layout] = [of for of in found if of is not None]
            return
        if len(laid) < len(self.groups):  # some group has lists of several places
            self.dedup(batch, [keys], joined)
            return
        self._begin(batch, [_group_batch(of, part) for of in laid])

    def _begin(self, batch: int, found: list[GroupBatch]) -> None:
        for of, owners in zip(found, self._owners, strict=True):
            if self.comm.size > 1:
                find = dedup if library.has_kernels(self.device) else plain_dedup
                request = find(of.keys_T, of.cells.ends_G, owners)
                of.asked = Asked(request, _ToldCounts(request, self.comm.size))
                of.seen_sums = TermSums.of(request.inverse_T, len(of.keys_T), of.outputs_T)
        self.in_flight[batch] = found

    def _laid_out(
        self,
        keys: Mapping[str, Jagged],
        group: TableGroup,
        joined: Callable[[list[Tensor]], Tensor],
    ) -> GroupBatch:
        lists = [keys[f.name] for f in group.features]
        counts = [0] * len(group.tables)
        sizes: dict[str, int] = {}
        for feature, of in zip(group.features, lists, strict=True):
            terms = len(of.values)
            counts[feature.table] += terms
            sizes[feature.name] = of.num_samples if feature.pooled else terms
        cells = self._cells_of(tuple(counts))
        keys_T = joined([of.values for of in lists])
        pooled = [feature.pooled for feature in group.features]
        if not any(pooled):
            return GroupBatch(keys_T, cells, sizes, None, None)
        if all(pooled):
            lengths_O = joined([of.lengths for of in lists])
        else:
            ones = partial(torch.ones, dtype=torch.int64, device=self.device)
            parts = zip(lists, pooled, strict=True)
            lengths_O = torch.cat(
                [joined([of.lengths]) if several else ones(len(of.values)) for of, several in parts]
            )
        return _pooled_batch(keys_T, cells, sizes, lengths_O)

    def _cells_of(self, counts: tuple[int, ...]) -> KeyCells:
        """Where the keys of each table end; batches that look alike share the list."""
        if counts not in self._cells_known:
            if len(self._cells_known) == MOST_LISTS:
                self._cells_known.clear()
            ends_C = torch.tensor(counts, dtype=torch.int64).cumsum(0)
            self._cells_known[counts] = KeyCells(*lists_on(self.device, [ends_C]))
        return self._cells_known[counts]

    def keys_asked(self, batch: int) -> int:
        """How many keys this rank asks for; one rank alone does not count unique ones."""
        return sum(
            len(of.keys_T) if of.asked is None else int(of.asked.counts_told.counts_RC().sum())
            for of in self.in_flight[batch]
        )

    def counts(self, batch: int, samples: int) -> int:
        """All-to-all of key counts; returns the number of samples of all ranks."""
        ranks = self.comm.size
        if ranks == 1:
            return samples
        asked = [_asked(of) for of in self.in_flight[batch]]
        parts = [of.counts_told.counts_RC() for of in asked]
        sent = torch.cat([*parts, torch.full((ranks, 1), samples)], 1)
        received = torch.empty_like(sent)
        self.comm.all_to_all(received, sent, [1] * ranks, [1] * ranks)
        *found, all_samples = torch.split(received, [*(part.shape[1] for part in parts), 1], 1)
        for of, received_RC in zip(asked, found, strict=True):
            of.received_RC = received_RC
        return int(all_samples.sum())

    def keys(self, batch: int) -> None:
        """All-to-all of keys, through the network of the schedule: of hosts or of devices."""
        if self.comm.size == 1:
            return
        asked = [_asked(of) for of in self.in_flight[batch]]
        by_host = self.shape.network(Kind.KEYS) != "devices"
        splits = [of.counts_told.counts_RC().sum(1).tolist() for of in asked]
        expected = [_received(of).sum(1).tolist() for of in asked]
        rank = self.comm.rank
        sent: list[Tensor] = []
        received: list[Tensor] = []
        for of, to, come in zip(asked, splits, expected, strict=True):
            keys_A = of.request.keys_T[: sum(to) - to[rank]]
            sent.append(keys_A.cpu() if by_host else keys_A)
            received.append(sent[-1].new_empty(sum(come) - come[rank]))
        exchange(self.comm, sent, splits, received, expected)
        for of, to, came in zip(asked, splits, received, strict=True):
            own_A = of.request.keys_T[sum(to) - to[rank] : sum(to)]
            (there,) = lists_on(self.device, [came]) if by_host else (came,)
            of.keys_P = torch.cat([there, own_A])

    def union(self, batch: int) -> None:
        """Slots of all keys that this rank was asked for, and the segments of their gradients."""
        for of, pool in zip(self.in_flight[batch], self._pools, strict=True):
            if of.asked is None:
                found = pool.admit_terms(batch, of.keys_T, of.cells, of.outputs_T)
                if isinstance(found, TermBuffers):
                    of.terms = found
                    continue
                of.slots = found
                of.owner_sums = TermSums.of(of.slots, pool.num_slots, of.outputs_T)
                continue
            assert of.asked.keys_P is not None
            received_RC = _received(of.asked)
            cells = self._cells(received_RC)
            of.slots = of.asked.slots_P = pool.admit(batch, of.asked.keys_P, cells)
            before = int(received_RC[: self.comm.rank].sum())
            own = int(received_RC[self.comm.rank].sum())
            of.owner_sums = TermSums.of(
                _in_rank_order(of.slots, before, own),
                pool.num_slots,
                _in_rank_order(_numbers(len(of.slots), self.device), before, own),
            )

    def _cells(self, received_RC: Tensor) -> KeyCells:
        """Where the keys of each rank and table lie: other ranks in order, then this one."""
        ranks, tables = received_RC.shape
        order = [*(r for r in range(ranks) if r != self.comm.rank), self.comm.rank]
        ends_G, tables_G = lists_on(
            self.device,
            [received_RC[order].reshape(-1).cumsum(0), torch.arange(tables).repeat(ranks)],
        )
        return KeyCells(ends_G, tables_G.int())

    def retrieve(self, batch: int) -> int:
        """Rows that are not in the pool; returns how many came from the host store."""
        return sum(pool.retrieve(batch) for pool in self._pools)

    # The window

    def rows(self, batch: int) -> None:
        """Look up what the model sees; with several ranks, through their owners."""
        found = self.in_flight[batch]
        if self.comm.size > 1:
            self._exchange_rows(found)
        for of, pool, group in zip(found, self._pools, self.groups, strict=True):
            of.seen_OD = empty_rows(sum(of.sizes.values()), group.dim, self.device)
            if of.terms is not None:
                of.terms.look_up(of.seen_OD, of.pooling)
            elif of.asked is None:
                assert of.slots is not None
                _look_up(pool.rows_SW, of.slots, of.seen_OD, of.pooling)
            else:
                assert of.came_AD is not None
                _look_up(of.came_AD, of.asked.request.inverse_T, of.seen_OD, of.pooling)

    def _exchange_rows(self, found: Sequence[GroupBatch]) -> None:
        """All-to-all of rows, from owners to requesters."""
        rank = self.comm.rank
        asked = [_asked(of) for of in found]
        splits = [_received(of).sum(1).tolist() for of in asked]
        expected = [of.counts_told.counts_RC().sum(1).tolist() for of in asked]
        sent: list[Tensor] = []
        received: list[Tensor] = []
        for g, (of, pool) in enumerate(zip(found, self._pools, strict=True)):
            assert of.slots is not None
            own, dim = splits[g][rank], self.groups[g].dim
            others = len(of.slots) - own
            sent_PD = empty_rows(others, dim, self.device)
            of.came_AD = empty_rows(sum(expected[g]), dim, self.device)
            _look_up(pool.rows_SW, of.slots[:others], sent_PD, None)
            own_AD = of.came_AD[sum(expected[g]) - own :]
            _look_up(pool.rows_SW, of.slots[others:], own_AD, None)
            round_in_place(own_AD, self.comm_dtype)
            sent.append(sent_PD)
            received.append(of.came_AD[: sum(expected[g]) - own])
        exchange(self.comm, sent, splits, received, expected, self.comm_dtype)

    def lookup(self, batch: int, micro: int) -> dict[str, Tensor]:
        """The rows of every feature, as the model sees them."""
        seen: dict[str, Tensor] = {}
        for of in self.in_flight[batch]:
            # Something that wants a gradient, so that the backward pass comes by.
            anchor = torch.zeros(0, requires_grad=True)
            outputs: tuple[Tensor, ...] = _Seen.apply(anchor, of)  # type: ignore[assignment]
            seen.update(zip(of.sizes, outputs, strict=True))
        return seen

    def grads(self, batch: int) -> None:
        """All-to-all of row gradients, back to their owners, each summed by its requester."""
        if self.comm.size == 1:
            return
        rank = self.comm.rank
        both = zip(self.in_flight[batch], self.groups, strict=True)
        trained = [(of, group.dim) for of, group in both if group.trainable]
        asked = [_asked(of) for of, _ in trained]
        splits = [of.counts_told.counts_RC().sum(1).tolist() for of in asked]
        expected = [_received(of).sum(1).tolist() for of in asked]
        sent: list[Tensor] = []
        received: list[Tensor] = []
        for g, (of, dim) in enumerate(trained):
            assert of.seen_sums is not None
            own = splits[g][rank]
            sums_AD = empty_rows(sum(splits[g]), dim, self.device)
            of.seen_sums.store(of.gradients(), sums_AD)
            gradients_PD = empty_rows(sum(expected[g]), dim, self.device)
            own_PD = gradients_PD[sum(expected[g]) - own :]
            own_PD.copy_(sums_AD[sum(splits[g]) - own :])
            round_in_place(own_PD, self.comm_dtype)
            sent.append(sums_AD[: sum(splits[g]) - own])
            received.append(gradients_PD[: sum(expected[g]) - own])
            asked[g].gradients_PD = gradients_PD
        exchange(self.comm, sent, splits, received, expected, self.comm_dtype)

    def update(
        self, batch: int, times: float | Tensor, step: int, *, clip: bool = False
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Sum gradients by row and apply the optimizer, once per row, in one pass.

        Gradients of rows that are not finite are dropped, with `clip` only their numbers that are
        not; returns how many rows of each group those are, on the device, and what `round_weights`
        found. Frozen tables stay as they are.
        """
        every = zip(self.in_flight[batch], self._pools, self.groups, self.optimizers, strict=True)
        found = [
            self._updated(of, pool, group, optimizer, times, step, clip=clip)
            for of, pool, group, optimizer in every
            if group.trainable
        ]
        return [faults for faults, _ in found], [b for _, b in found if b is not None]

    def _updated(
        self,
        of: GroupBatch,
        pool: RowPool,
        group: TableGroup,
        optimizer: RowOptimizer,
        times: float | Tensor,
        step: int,
        *,
        clip: bool,
    ) -> tuple[Tensor, Tensor | None]:
        assert of.owner_sums is not None
        assert of.slots is not None
        gradients = of.gradients() if of.asked is None else of.asked.gradients_PD
        assert gradients is not None
        sums, rows_SW = of.owner_sums, pool.rows_SW
        faults = sums.apply(optimizer, gradients, rows_SW, times, step, clip=clip)
        if group.dtype == "float32":
            return faults, None
        return faults, SlotRows(rows_SW, of.slots).round_weights(group.dim, group.dtype)

    def update_alone(self, batch: int, times: float, step: int, *, clip: bool) -> StepNews:
        """The same where one rank has all of the batch: what divides gradients is known here.

        Its news know of the rows; the caller tells them the rest.
        """
        news = self._news.pop() if self._news else StepNews(len(self.groups), self.device)
        every = zip(self.in_flight[batch], self._pools, self.groups, self.optimizers, strict=True)
        for g, (of, pool, group, optimizer) in enumerate(every):
            if not group.trainable:
                continue
            if of.terms is not None:
                faults = news.faults_G.data_ptr() + 4 * g
                of.terms.update(optimizer.struct(step), of.gradients(), times, faults, clip=clip)
            else:
                found, beyond = self._updated(of, pool, group, optimizer, times, step, clip=clip)
                news.faults_G[g] = found[0]
                if beyond is not None:
                    news.beyond_G[g] = beyond
        return news

    def read_news(self, news: StepNews) -> tuple[float, int, int]:
        """What `StepNews.read` says, when the device is past it; the news are used again."""
        told = news.read()
        self._news.append(news)
        return told

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


def _pooled_batch(
    keys_T: Tensor, cells: KeyCells, sizes: dict[str, int], lengths_O: Tensor
) -> GroupBatch:
    pool = pool_outputs if library.has_kernels(keys_T.device) else plain_pool_outputs
    pooling, outputs_T = pool(lengths_O, len(keys_T))
    return GroupBatch(keys_T, cells, sizes, pooling, outputs_T, lengths_O=lengths_O)


def _laid_in(part: Tensor, of: GroupBatch) -> _Laid | None:
    """Where a part of a packed batch has what a group was laid out from; None: not all of it."""
    keys = _slice_of(part, of.keys_T)
    lengths = None if of.pooling is None else _slice_of(part, of.lengths_O)
    if keys is None or (of.pooling is not None and lengths is None):
        return None
    return _Laid(of.cells, of.sizes, keys, lengths)


def _slice_of(part: Tensor, view: Tensor | None) -> slice | None:
    if view is None or view.untyped_storage().data_ptr() != part.untyped_storage().data_ptr():
        return None
    first = view.storage_offset() - part.storage_offset()
    return slice(first, first + len(view))


def _group_batch(laid: _Laid, part: Tensor) -> GroupBatch:
    keys_T = part[laid.keys]
    if laid.lengths is None:
        return GroupBatch(keys_T, laid.cells, laid.sizes, None, None)
    return _pooled_batch(keys_T, laid.cells, laid.sizes, part[laid.lengths])


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
        ctx.of.gradients_OD = _joined(gradients)
        return None, None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """All rows in one tensor; parts that lie one after the other already are not copied."""
    first, rows, width = parts[0], sum(len(part) for part in parts), parts[0].shape[1]
    address = first.data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != address:
            return torch.cat(list(parts))
        address += part.numel() * part.element_size()
    room = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    if room < rows * width:  # neighbours by chance, in memory of their own
        return torch.cat(list(parts))
    return first.as_strided((rows, width), (width, 1))


def can_route_on_device(
    groups: Sequence[TableGroup],
    shape: Shape,
    device: torch.device,
    mesh: Mesh,
    comm_dtype: torch.dtype,
) -> bool:
    """Whether `DeviceTables` can do this work: GPUs, one micro-batch, rows of usual width."""
    rounds_alone = mesh.shards.size == 1 and comm_dtype != torch.float32
    return (
        device.type == "cuda"
        and mesh.groups == 1
        and shape.retrieval is Retrieval.POOLED
        and shape.micro_batches == 1
        # Its gradients are summed while they are applied, and a norm must be known before.
        and not shape.gradient_norm
        and not rounds_alone
        and all(group.dim <= MOST_DIM for group in groups)
    )


def _owners(group: TableGroup, comm: Communicator, device: torch.device) -> Owners:
    if max(group.table_owners) < 0:
        return Owners(comm.size, comm.rank)
    owners = [owner % comm.size if owner >= 0 else -1 for owner in group.table_owners]
    return Owners(comm.size, comm.rank, torch.tensor(owners, dtype=torch.int32, device=device))


def _look_up(rows_NW: Tensor, numbers_T: Tensor, out_OD: Tensor, pooling: Pooling | None) -> None:
    if library.has_kernels(out_OD.device):
        look_up(rows_NW, numbers_T, out_OD, pooling)
    else:
        out_OD.copy_(plain_look_up(rows_NW, numbers_T, out_OD.shape[1], pooling))


def _asked(of: GroupBatch) -> Asked:
    assert of.asked is not None
    return of.asked


def _received(asked: Asked) -> Tensor:
    assert asked.received_RC is not None
    return asked.received_RC


def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def _in_rank_order(numbers_P: Tensor, before: int, own: int) -> Tensor:
    """A list that has this rank last, with all ranks in order."""
    others = len(numbers_P) - own
    if before == others:
        return numbers_P
    return torch.cat([numbers_P[:before], numbers_P[others:], numbers_P[before:others]])
