"""Replicas of a shard: the union of the keys that they touched, and their rows made one again.

Every group of ranks has a replica of each shard. A batch that merges replicas works on all rows
that any of them touched since the last merge: its own, then those of other groups and of earlier
batches. So merging finds all it needs in the device's buffer, and the next batch is refreshed from
there as from any other.

Rows are averaged, or gradients summed, over all groups of ranks: one collective for all stores.
Every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from nestpipe.comm.communicator import Communicator
from nestpipe.embedding.optimizers import RowOptimizer
from nestpipe.embedding.pool import SlotRows
from nestpipe.embedding.routing.lists import KeyUnion
from nestpipe.embedding.routing.owners import ReplicaRows
from nestpipe.embedding.store.protocol import RowStore
from nestpipe.kernels.rows.native import RowPointers, copy_rows
from nestpipe.kernels.rows.segments import Segments, empty_rows, ends_of
from nestpipe.schedule import Merge, Shape

# Shapes: K keys or rows of a working set, U of them that replicas merge, S all of their keys as
# they come, W numbers of a row, G groups of ranks, C tables


@dataclass(frozen=True, slots=True)
class MergedKeys:
    """The keys of one store that replicas merge, the same on all of them."""

    keys_U: Tensor
    table_counts: list[int]
    groups_U: Tensor
    """How many groups touched each."""
    of_groups: list[Tensor]
    """[group] where in `keys_U` the keys stand that it touched, in ascending order."""


@dataclass(frozen=True, slots=True)
class ReplicaUnion:
    """The union over groups: an owner's keys, extended by all that its replicas merge."""

    union: KeyUnion
    own_K: Tensor
    """Where the rows stand that this batch itself asked for."""
    merged_U: Tensor
    """Where the rows stand that are merged, in an order that all replicas have."""
    groups_U: Tensor
    of_groups: list[Tensor]


class Replicas:
    """The keys that this rank's shard has touched since it was merged with its replicas."""

    def __init__(self, comm: Communicator, tables: Sequence[int], shape: Shape) -> None:
        """`comm`: among the replicas, for this alone; `tables`: how many each store has."""
        self._comm = comm
        self._tables = list(tables)
        self._shape = shape
        self._touched: dict[int, list[Tensor]] = {}
        """[batch][table of any store] the keys that it asked for, until they are merged."""

    def note(self, batch: int, unions: Sequence[KeyUnion]) -> None:
        """Remember what a batch touches."""
        self._touched[batch] = [
            keys for one in unions for keys in torch.split(one.keys_K, one.table_counts)
        ]

    def exchange(self, batch: int) -> list[list[Tensor]]:
        """[table][group] the keys that each replica has touched up to a batch that merges."""
        return self._exchange(self._shape.merged_batches(batch))

    def extend(
        self, unions: Sequence[KeyUnion], touched: Sequence[Sequence[Tensor]]
    ) -> list[ReplicaUnion]:
        """The working sets of a batch that merges replicas, from its own keys and all touched."""
        exact = self._shape.merge is Merge.EXACT
        merged = self._merged(touched)
        return [extend_union(o, m, exact=exact) for o, m in zip(unions, merged, strict=True)]

    @property
    def pending(self) -> bool:
        """Whether batches have touched rows that are not merged yet; the same on all ranks."""
        return bool(self._touched)

    def take_rest(self) -> list[MergedKeys]:
        """What any replica has touched since the last merge, store by store."""
        return self._merged(self._exchange(sorted(self._touched)))

    def _exchange(self, batches: Iterable[int]) -> list[list[Tensor]]:
        of_batches = [self._touched.pop(batch) for batch in batches]
        mine = [unique_keys(parts) for parts in zip(*of_batches, strict=True)]
        return everyones_keys(self._comm, mine)

    def _merged(self, touched: Sequence[Sequence[Tensor]]) -> list[MergedKeys]:
        tables = iter(touched)
        return [merged_keys(list(islice(tables, count))) for count in self._tables]


def merged_keys(of_groups_C: Sequence[Sequence[Tensor]]) -> MergedKeys:
    """What all groups touched, from [table][group] the keys of each, all different."""
    unique = [torch.unique(torch.cat(list(keys)), return_counts=True) for keys in of_groups_C]
    counts = [len(keys) for keys, _ in unique]
    starts = [sum(counts[:table]) for table in range(len(counts))]
    of_groups = [
        torch.cat(
            [
                torch.searchsorted(keys, mine) + start
                for (keys, _), mine, start in zip(unique, of_group, starts, strict=True)
            ]
        )
        for of_group in zip(*of_groups_C, strict=True)
    ]
    return MergedKeys(
        torch.cat([keys for keys, _ in unique]),
        counts,
        torch.cat([groups for _, groups in unique]),
        of_groups,
    )


def unique_keys(parts: Sequence[Tensor]) -> Tensor:
    """Every key once, in ascending order."""
    return torch.unique(torch.cat(list(parts))) if parts else torch.empty(0, dtype=torch.int64)


def everyones_keys(comm: Communicator, mine_C: Sequence[Tensor]) -> list[list[Tensor]]:
    """[table][group] the keys of all members."""
    groups, ones = comm.size, [1] * comm.size
    counts_C = torch.tensor([len(keys) for keys in mine_C])
    counts_GC = torch.empty(groups, len(mine_C), dtype=torch.int64)
    comm.all_to_all(counts_GC, counts_C.expand(groups, -1).contiguous(), ones, ones)
    sent = torch.cat(list(mine_C))
    totals: list[int] = counts_GC.sum(1).tolist()
    received_S = torch.empty(sum(totals), dtype=torch.int64)
    comm.all_to_all(received_S, sent.repeat(groups), totals, [len(sent)] * groups)
    of_group = torch.split(received_S, totals)
    parts = [
        torch.split(keys, counts.tolist()) for keys, counts in zip(of_group, counts_GC, strict=True)
    ]
    return [[parts[g][c] for g in range(groups)] for c in range(len(mine_C))]


def extend_union(union: KeyUnion, merged: MergedKeys, *, exact: bool) -> ReplicaUnion:
    """Put the keys that only others touched behind a batch's own, table by table.

    `exact`: all of them get a gradient; else only those that the batch itself asked for.
    """
    keys: list[Tensor] = []
    own: list[Tensor] = []
    places: list[Tensor] = []
    start = 0
    for mine_k, all_u in zip(
        torch.split(union.keys_K, union.table_counts),
        torch.split(merged.keys_U, merged.table_counts),
        strict=True,
    ):
        place_u, foreign = _places(mine_k, all_u)
        keys += [mine_k, all_u[foreign]]
        own.append(torch.arange(len(mine_k)) + start)
        places.append(place_u + start)
        start += len(all_u)
    own_K = torch.cat(own)
    extended = replace(
        union,
        keys_K=torch.cat(keys),
        table_counts=merged.table_counts,
        serve=[_moved(segments, own_K) for segments in union.serve],
    )
    if exact:
        extended = replace(
            extended, gather_back=[_spaced(b, own_K, start) for b in union.gather_back]
        )
    return ReplicaUnion(extended, own_K, torch.cat(places), merged.groups_U, merged.of_groups)


def _places(mine_k: Tensor, all_u: Tensor) -> tuple[Tensor, Tensor]:
    """Where each of all keys stands once the foreign ones follow mine, and which are foreign."""
    if not len(mine_k):
        return torch.arange(len(all_u)), torch.ones(len(all_u), dtype=torch.bool)
    ordered, order = torch.sort(mine_k)
    nearest = torch.searchsorted(ordered, all_u).clamp_(max=len(mine_k) - 1)
    foreign = ordered[nearest] != all_u
    behind = len(mine_k) + torch.cumsum(foreign, 0) - 1
    return torch.where(foreign, behind, order[nearest]), foreign


def _moved(segments: Segments, own_K: Tensor) -> Segments:
    """Sums of rows that now stand elsewhere."""
    return replace(segments, rows_T=own_K.to(segments.rows_T.dtype)[segments.rows_T.long()])


def _spaced(segments: Segments, own_K: Tensor, size: int) -> Segments:
    """As many sums as there are rows: those that are not the batch's own are empty."""
    lengths = torch.zeros(size, dtype=torch.int64)
    lengths[own_K] = segments.lengths().long()
    return Segments(segments.rows_T, ends_of(lengths).to(segments.rows_T.dtype))


def sum_over_groups(comm: Communicator, parts: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors, each summed over all groups."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    if len(flat):
        comm.all_reduce(flat)
    sums = torch.split(flat, [part.numel() for part in parts])
    return [total.view_as(part) for total, part in zip(sums, parts, strict=True)]


def sum_of_touched(
    comm: Communicator, parts: Sequence[Tensor], of_groups: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """The same sums where a group's rows are zero unless it touched them: only those travel.

    `of_groups[part][group]`: the rows that the group touched. Everyone adds in the order of groups.
    """
    me, others = comm.rank, [g for g in range(comm.size) if g != comm.rank]
    numbers = [
        sum(len(rows[g]) * part.shape[1] for part, rows in zip(parts, of_groups, strict=True))
        for g in range(comm.size)
    ]
    sent = torch.cat(
        [p.index_select(0, rows[me]).view(-1) for p, rows in zip(parts, of_groups, strict=True)]
    )
    received = sent.new_empty(sum(numbers[g] for g in others))
    comm.all_to_all(
        received,
        sent.repeat(len(others)),
        [0 if g == me else numbers[g] for g in range(comm.size)],
        [0 if g == me else len(sent) for g in range(comm.size)],
    )
    came = iter(torch.split(received, [numbers[g] for g in others]))
    sums = [torch.zeros_like(part) for part in parts]
    for group in range(comm.size):
        _add(sums, [rows[group] for rows in of_groups], sent if group == me else next(came))
    return sums


def _add(sums: Sequence[Tensor], places: Sequence[Tensor], flat: Tensor) -> None:
    """Add the rows of one group to those at their places; no place comes twice."""
    widths = [total.shape[1] for total in sums]
    sizes = [len(p) * width for p, width in zip(places, widths, strict=True)]
    for total, place, part in zip(sums, places, torch.split(flat, sizes), strict=True):
        added = total.index_select(0, place) + part.view(len(place), total.shape[1])
        total.index_copy_(0, place, added)


def touched_are_fewer(parts: Sequence[Tensor], of_groups: Sequence[Sequence[Tensor]]) -> bool:
    """Whether sending touched rows to everyone is fewer bytes than a ring over all rows.

    A ring of M sends 2 (M - 1) / M of all rows per member, the other way M - 1 times its own: it
    pays where a row is touched by fewer than two groups in the mean.
    """
    touched = sum(
        sum(map(len, rows)) * part.shape[1] for part, rows in zip(parts, of_groups, strict=True)
    )
    return touched < 2 * sum(part.numel() for part in parts)


def average_over_groups(comm: Communicator, parts: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors, each the mean of all groups."""
    return [total.mul_(1 / comm.size) for total in sum_over_groups(comm, parts)]


def read_rows(rows: Tensor | RowPointers | SlotRows, at_U: Tensor) -> Tensor:
    """(U, W) some rows, wherever they are."""
    if isinstance(rows, SlotRows):
        return rows.at(at_U).read()
    if isinstance(rows, Tensor):
        return rows.index_select(0, at_U)
    out_UW = empty_rows(len(at_U), rows.width, torch.device("cpu"))
    copy_rows(rows.at(at_U), out_UW, to_store=False, threads=torch.get_num_threads())
    return out_UW


def write_rows(rows: Tensor | RowPointers | SlotRows, at_U: Tensor, values_UW: Tensor) -> None:
    """Put rows back to where they were read."""
    if isinstance(rows, SlotRows):
        rows.at(at_U).write(values_UW)
        return
    if isinstance(rows, Tensor):
        rows.index_copy_(0, at_U, values_UW)
        return
    copy_rows(rows.at(at_U), values_UW.contiguous(), to_store=True, threads=torch.get_num_threads())


def merge_gradients(
    comm: Communicator, sums: Sequence[Tensor], replicas: Sequence[ReplicaRows]
) -> None:
    """Sum the gradients of rows over all groups, in place, by whichever way is fewer bytes."""
    parts = [s.index_select(0, r.merged) for s, r in zip(sums, replicas, strict=True)]
    of_groups = [r.of_groups for r in replicas]
    if touched_are_fewer(parts, of_groups):
        totals = sum_of_touched(comm, parts, of_groups)
    else:
        totals = sum_over_groups(comm, parts)
    for of_store, r, total in zip(sums, replicas, totals, strict=True):
        of_store.index_copy_(0, r.merged, total)


def merge_rows(
    comm: Communicator,
    every: Sequence[Tensor | RowPointers | SlotRows],
    replicas: Sequence[ReplicaRows],
    optimizer: RowOptimizer,
    dims: Sequence[int],
) -> None:
    """Average rows with their state over all groups, in place."""
    parts = [read_rows(rows, r.merged) for rows, r in zip(every, replicas, strict=True)]
    means = average_over_groups(comm, parts)
    for rows, r, mean_UW, dim in zip(every, replicas, means, dims, strict=True):
        optimizer.count_groups(mean_UW, dim, r.groups)
        write_rows(rows, r.merged, mean_UW)


def merge_stored(
    comm: Communicator,
    store: RowStore,
    merged: MergedKeys,
    optimizer: RowOptimizer,
    dim: int,
    device: torch.device,
) -> None:
    """The same in host memory."""
    rows_UW = torch.empty(len(merged.keys_U), store.layout.width)
    store.gather(merged.keys_U, merged.table_counts, rows_UW)
    (mean_UW,) = average_over_groups(comm, [rows_UW.to(device)])
    optimizer.count_groups(mean_UW, dim, merged.groups_U.to(device))
    store.scatter(merged.keys_U, merged.table_counts, mean_UW.cpu().contiguous())
