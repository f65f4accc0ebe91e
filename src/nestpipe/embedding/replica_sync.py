"""Synchronisation of replicas: rows averaged, or gradients summed, over all groups of ranks.

One collective for all stores. Every rank gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.comm.communicator import Communicator
from nestpipe.embedding.optimizers import RowOptimizer
from nestpipe.embedding.pool import SlotRows
from nestpipe.embedding.replica_union import MergedKeys
from nestpipe.embedding.routing.owners import ReplicaRows
from nestpipe.embedding.store.protocol import RowStore
from nestpipe.kernels.rows.native import RowPointers, copy_rows
from nestpipe.kernels.rows.segments import empty_rows

# Shapes: U rows that are merged, K rows of a working set, W numbers of a row


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
