"""Routing in plain torch: the twin of the native form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.routing.lists import (
    KeyUnion,
    KnownKeys,
    Neighbours,
    OwnerRequests,
    RoutedKeys,
    WantedKeys,
    WindowSlice,
    mixed,
    owner_of,
    peers_then_self,
    sums_pay,
    unique_at_least,
)
from nestpipe.kernels.rows.segments import Segments, ends_of, segments_of_targets

# Shapes: T keys of a table, O rows that the model sees of it, U unique keys, P rows that come back,
# S terms of what is seen, A keys that travel, R ranks, C tables


@dataclass(frozen=True, slots=True)
class _OfTable:
    """What one table needs, owner by owner."""

    keys: list[Tensor]
    lengths: list[Tensor | None]
    """[owner] keys of each sum; None where each row is that of one key"""
    rows: list[int]
    """[owner] rows that come back"""
    owner_S: Tensor
    number_S: Tensor
    """Each term of what is seen: which owner's row, and which of those"""
    seen_lengths_O: Tensor


def request(wanted: WantedKeys) -> RoutedKeys:
    """What to send, and what to do with the rows that come."""
    of_tables = [_of_table(wanted, table) for table in range(len(wanted.keys))]
    order = peers_then_self(wanted.rank, wanted.ranks)
    row_counts_RC = torch.tensor([t.rows for t in of_tables]).T.contiguous()
    starts_RC = _starts(row_counts_RC, order).to(wanted.keys[0].device)
    seen_S = torch.cat([starts_RC[t.owner_S, c] + t.number_S for c, t in enumerate(of_tables)])
    lengths_O = torch.cat([t.seen_lengths_O for t in of_tables])
    output_S = torch.repeat_interleave(lengths_O, output_size=len(seen_S))
    lengths = [length for r in order for t in of_tables if (length := t.lengths[r]) is not None]
    alone = len(lengths_O) == len(seen_S) and bool((lengths_O == 1).all())
    return RoutedKeys(
        keys_A=torch.cat([t.keys[r] for r in order for t in of_tables]),
        lengths_L=torch.cat([wanted.keys[0].new_zeros(0), *lengths]),
        key_counts_RC=torch.tensor([[len(k) for k in t.keys] for t in of_tables]).T.contiguous(),
        row_counts_RC=row_counts_RC,
        seen=Segments(seen_S, None if alone else ends_of(lengths_O)),
        back=segments_of_targets(seen_S, int(row_counts_RC.sum()), output_S),
        straight=[-1] * len(of_tables),
    )


def _of_table(wanted: WantedKeys, table: int) -> _OfTable:
    keys_T, lengths_O = wanted.keys[table], wanted.lengths[table]
    table_owner = wanted.table_owners[table]
    if wanted.pooled[table]:
        output_T = torch.repeat_interleave(lengths_O, output_size=len(keys_T))
        owner_T = owner_of(keys_T, table, wanted.ranks, table_owner)
        pairs_P, counts_P = torch.unique(output_T * wanted.ranks + owner_T, return_counts=True)
        unique = unique_at_least(mixed(keys_T, table))
        if sums_pay(len(pairs_P), len(keys_T), unique, wanted.row_bytes):
            return _sums(wanted, keys_T, owner_T, pairs_P, counts_P, len(lengths_O))
    unique_U, inverse_T = torch.unique(keys_T, return_inverse=True)
    owner_U = owner_of(unique_U, table, wanted.ranks, table_owner)
    per_owner = torch.bincount(owner_U, minlength=wanted.ranks).tolist()
    order_U = torch.argsort(owner_U, stable=True)
    return _OfTable(
        keys=list(torch.split(unique_U[order_U], per_owner)),
        lengths=[None] * wanted.ranks,
        rows=per_owner,
        owner_S=owner_U[inverse_T],
        number_S=_number_inside(owner_U, order_U, per_owner)[inverse_T],
        seen_lengths_O=lengths_O,
    )


def _sums(
    wanted: WantedKeys,
    keys_T: Tensor,
    owner_T: Tensor,
    pairs_P: Tensor,
    counts_P: Tensor,
    outputs: int,
) -> _OfTable:
    """Owners add up: one row for each pair of a sample and an owner of some of its keys."""
    owner_P = pairs_P % wanted.ranks
    rows = torch.bincount(owner_P, minlength=wanted.ranks).tolist()
    keys = torch.bincount(owner_T, minlength=wanted.ranks).tolist()
    order_P = torch.argsort(owner_P, stable=True)
    lengths = torch.split(counts_P[order_P], rows)
    return _OfTable(
        keys=list(torch.split(keys_T[torch.argsort(owner_T, stable=True)], keys)),
        lengths=[lengths[r] if rows[r] < keys[r] else None for r in range(wanted.ranks)],
        rows=rows,
        owner_S=owner_P,
        number_S=_number_inside(owner_P, order_P, rows),
        seen_lengths_O=torch.bincount(pairs_P // wanted.ranks, minlength=outputs),
    )


def _number_inside(owner_U: Tensor, order_U: Tensor, per_owner: Sequence[int]) -> Tensor:
    """The number of each row among those of its owner."""
    starts = ends_of(torch.tensor(per_owner))[:-1].to(order_U.device)
    number_U = torch.empty_like(order_U)
    number_U[order_U] = torch.arange(len(order_U), device=order_U.device)
    return number_U - starts[owner_U]


def _starts(counts_RC: Tensor, order: Sequence[int]) -> Tensor:
    """(R, C) where the rows of each owner and table start, peers first."""
    in_order = counts_RC[list(order)]
    starts_RC = torch.empty_like(counts_RC)
    starts_RC[list(order)] = (in_order.reshape(-1).cumsum(0) - in_order.reshape(-1)).reshape(
        in_order.shape
    )
    return starts_RC


def split_window(whole: RoutedKeys, outputs_CM: Tensor, rank: int) -> list[WindowSlice]:
    """The micro-batches of a routed batch, of which each asks only for what no earlier one has."""
    micros = outputs_CM.shape[1]
    order = peers_then_self(rank, len(whole.key_counts_RC))
    rows_cells = whole.row_counts_RC[order].reshape(-1)
    cell_P = torch.repeat_interleave(rows_cells)
    summed = (whole.row_counts_RC < whole.key_counts_RC)[order].reshape(-1)[cell_P]
    lengths_P = torch.ones_like(cell_P).masked_scatter(summed, whole.lengths_L)
    keys = torch.split(whole.keys_A, lengths_P.tolist())
    # Uses: which row, by which output of which micro-batch.
    micro_O = torch.arange(micros).repeat(len(outputs_CM)).repeat_interleave(outputs_CM.reshape(-1))
    terms_O = whole.seen.lengths()
    micro_S = torch.repeat_interleave(micro_O, terms_O)
    row_S = whole.seen.rows_T.long()
    first_P = torch.full_like(cell_P, micros).scatter_reduce(0, row_S, micro_S, "amin")
    last_P = torch.full_like(cell_P, -1).scatter_reduce(0, row_S, micro_S, "amax")
    by_number = torch.argsort(first_P, stable=True)
    number_P = torch.empty_like(by_number)
    number_P[by_number] = torch.arange(len(by_number))
    peer_P = cell_P // outputs_CM.shape[0]
    slices: list[WindowSlice] = []
    for micro in range(micros):
        new = by_number[first_P[by_number] == micro]
        row_counts = torch.bincount(cell_P[new], minlength=len(rows_cells))
        key_counts = torch.bincount(
            cell_P[new], weights=lengths_P[new].double(), minlength=len(rows_cells)
        ).long()
        sums = (row_counts < key_counts)[cell_P[new]]
        seen_S = number_P[row_S[micro_S == micro]]
        seen_terms_O = terms_O[micro_O == micro]
        output_S = torch.repeat_interleave(seen_terms_O)
        start = int((first_P < micro).sum())
        reused_n = torch.unique(seen_S[seen_S < start])
        fresh = seen_S >= start
        # By owner, then by number: the owner counts rows in the order in which it was asked.
        leaving = by_number[last_P[by_number] == micro]
        leaving = leaving[torch.argsort(peer_P[leaving], stable=True)]
        of_peers = torch.bincount(peer_P[leaving], minlength=len(order)).tolist()
        slices.append(
            WindowSlice(
                keys_A=torch.cat([whole.keys_A[:0], *(keys[row] for row in new.tolist())]),
                lengths_L=lengths_P[new[sums]],
                lasts_Q=last_P[new[~sums]],
                key_counts_RC=_by_rank(key_counts, order),
                row_counts_RC=_by_rank(row_counts, order),
                seen=Segments(
                    seen_S, None if whole.seen.ends_S1 is None else ends_of(seen_terms_O)
                ),
                back=segments_of_targets(seen_S[fresh] - start, len(new), output_S[fresh]),
                reused=segments_of_targets(
                    torch.searchsorted(reused_n, seen_S[~fresh]), len(reused_n), output_S[~fresh]
                ),
                reused_n=reused_n,
                leaving_n=number_P[leaving],
                leaving_counts=[of_peers[order.index(r)] for r in range(len(order))],
            )
        )
    return slices


def _by_rank(of_cells: Tensor, order: Sequence[int]) -> Tensor:
    """(R, C) counts that came by owner, peers first, and table."""
    counts_RC = torch.empty(len(order), len(of_cells) // len(order), dtype=torch.int64)
    counts_RC[list(order)] = of_cells.view(counts_RC.shape)
    return counts_RC


def union_of(asked: OwnerRequests) -> KeyUnion:
    """The owner's unique keys, and which of them go where."""
    ranks, micros, tables = asked.key_counts_RMC.shape
    order = peers_then_self(asked.rank, ranks)
    cells = [(r, m, c) for r in order for m in range(micros) for c in range(tables)]
    key_counts, row_counts = asked.key_counts_RMC.tolist(), asked.row_counts_RMC.tolist()
    sizes = [key_counts[r][m][c] for r, m, c in cells]
    of_cell = dict(zip(cells, torch.split(asked.keys_A, sizes), strict=True))
    unique, place = [], {}
    start = 0
    for table in range(tables):
        mine = [cell for cell in cells if cell[2] == table]
        keys_U, inverse = torch.unique(torch.cat([of_cell[c] for c in mine]), return_inverse=True)
        parts = torch.split(inverse.add_(start), [len(of_cell[c]) for c in mine])
        place.update(zip(mine, parts, strict=True))
        unique.append(keys_U)
        start += len(keys_U)
    lengths = _lengths(asked, cells, key_counts, row_counts)
    serve: list[Segments] = []
    for micro in range(micros):
        mine = [(r, micro, c) for r in order for c in range(tables)]
        rows_T = torch.cat([place[c] for c in mine])
        summed = any(row_counts[r][m][c] < key_counts[r][m][c] for r, m, c in mine)
        lengths_P = torch.cat([lengths[c] for c in mine])
        serve.append(Segments(rows_T, ends_of(lengths_P) if summed else None))
    back = _gather_back(asked, [lengths[c] for c in cells], [place[c] for c in cells], start)
    return KeyUnion(torch.cat(unique), [len(u) for u in unique], serve, back)


def _gather_back(
    asked: OwnerRequests, lengths: Sequence[Tensor], places: Sequence[Tensor], unique: int
) -> list[Segments]:
    """For each micro-batch, which of the gradients that come with it each unique key gets."""
    ranks, micros, _ = asked.row_counts_RMC.shape
    order = peers_then_self(asked.rank, ranks)
    rank_P = torch.repeat_interleave(torch.tensor(order), asked.row_counts_RMC.sum((1, 2))[order])
    micro_P = asked.gradient_micros()
    lengths_P, place_A = torch.cat(list(lengths)), torch.cat(list(places))
    row_A = torch.repeat_interleave(lengths_P, output_size=len(place_A))
    back: list[Segments] = []
    for micro in range(micros):
        comes_P = micro_P == micro
        number_P = comes_P.cumsum(0) - 1
        terms = comes_P[row_A].nonzero().squeeze(1)
        terms = terms[torch.argsort(rank_P[row_A[terms]], stable=True)]
        back.append(segments_of_targets(place_A[terms], unique, number_P[row_A[terms]]))
    return back


def _lengths(
    asked: OwnerRequests,
    cells: Sequence[tuple[int, int, int]],
    key_counts: list[list[list[int]]],
    row_counts: list[list[list[int]]],
) -> dict[tuple[int, int, int], Tensor]:
    """The number of keys of each row to send, cell by cell."""
    found: dict[tuple[int, int, int], Tensor] = {}
    start = 0
    for r, m, c in cells:
        keys, rows = key_counts[r][m][c], row_counts[r][m][c]
        if rows < keys:
            found[r, m, c] = asked.lengths_L[start : start + rows]
            start += rows
        else:
            found[r, m, c] = asked.keys_A.new_ones(rows)
    return found


def index_of(keys_K: Tensor, counts: Sequence[int]) -> Tensor:
    """Nothing: the keys are in order, which is what `neighbours` finds them by."""
    return keys_K[:0]


def neighbours(
    now_K: Tensor, counts: Sequence[int], before: KnownKeys, older: KnownKeys | None
) -> Neighbours:
    """What a batch shares with the one before, and of the rest with the one before that."""
    shared_K, shared_before = _match(now_K, counts, before.keys_K, before.table_counts)
    if older is None:
        return Neighbours(shared_K, shared_before, now_K[:0], now_K[:0])
    new_n, new_counts = others(shared_K, counts)
    here_m, carried_older = _match(now_K[new_n], new_counts, older.keys_K, older.table_counts)
    return Neighbours(shared_K, shared_before, new_n[here_m], carried_older)


def _match(
    now_K: Tensor, counts: Sequence[int], before_K: Tensor, counts_before: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Positions now and before of the keys that two batches share."""
    nothing = torch.empty(0, dtype=torch.int64, device=now_K.device)
    here, there = [nothing], [nothing]
    start = start_before = 0
    for now, old in zip(
        torch.split(now_K, list(counts)), torch.split(before_K, list(counts_before)), strict=True
    ):
        if len(old):
            place = torch.searchsorted(old, now).clamp_(max=len(old) - 1)
            same = (old[place] == now).nonzero().squeeze(1)
            here.append(same + start)
            there.append(place[same] + start_before)
        start += len(now)
        start_before += len(old)
    return torch.cat(here), torch.cat(there)


def others(positions: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
    """All positions of some tables but the given ones, and how many of each table."""
    mask = torch.ones(sum(counts), dtype=torch.bool, device=positions.device)
    mask[positions] = False
    of_table = [int(part.sum()) for part in torch.split(mask, list(counts))]
    return mask.nonzero().squeeze(1), of_table
