"""Messages between ranks: the wire format of requests, a fused all-to-all, and speculative rows.

There is one collective per op, however many tables and stores there are. Only what goes to other
ranks takes part; the caller keeps its own share.

A message of requests holds the keys of every micro-batch, then the lengths of sums, as 64-bit
numbers. In a window it also holds the last micro-batch that uses each row that is not a sum: its
gradient comes with that one's.

Speculative rows are those of a first micro-batch, sent while the batch before still computes. Rows
that the batch before changes are stale until its update. Owners tell ahead of time which ones (the
stale mask), so both sides know, without waiting for a device, how many come again and where they
belong. Once refreshed, these rows are sent again (the patch), over what came early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestpipe.comm.communicator import Communicator
from nestpipe.embedding.routing.lists import OwnerRequests, peers_then_self
from nestpipe.embedding.routing.requests import Request
from nestpipe.kernels import host_memory
from nestpipe.kernels.rows.segments import (
    Rows,
    Segments,
    concat,
    empty_rows,
    segments_on,
    sum_segments,
    to_wire,
)

if TYPE_CHECKING:
    from nestpipe.embedding.sharded import BatchState

# Shapes: n rows of one store, or stale ones among P: the rows of the first micro-batch, by the rank
# that they go to or come from, peers first; K rows of the working set, D weights of a row, R ranks,
# M micro-batches, C tables

Splits = Sequence[Sequence[int]]
"""For each store, rows per rank; what it says of this rank itself does not count."""
_MICROS_IN_ONE = 4
"""Micro-batches are counted in 16 bits."""
_ROWS_IN_ONE = 8
"""The mask has a byte for each row; it travels in numbers of 64 bits."""


def exchange(
    comm: Communicator,
    sent: Sequence[Tensor],
    sent_splits: Splits,
    received: Sequence[Tensor],
    received_splits: Splits,
    comm_dtype: torch.dtype | None = None,
) -> None:
    """Fill `received` with the rows that other ranks sent, in rank order, for each store.

    Rows may be (n,) keys or (n, D) weights; all are of one type, and travel as `comm_dtype`;
    None: as they are. Without any store, on all ranks, nothing is sent.
    """
    if comm.size == 1 or not sent:
        return
    theirs = _without(comm.rank, sent_splits)
    mine = _without(comm.rank, received_splits)
    comm_dtype = comm_dtype or sent[0].dtype
    if len(sent) == 1:
        _all_to_all(comm, received[0], sent[0], mine[0], theirs[0], comm_dtype)
        return
    widths = [_width(rows) for rows in sent]
    flat = _interleave([rows.reshape(-1) for rows in sent], theirs, widths)
    back_splits = _flat_splits(mine, widths)
    arrived = flat.new_empty(sum(back_splits))
    _all_to_all(comm, arrived, flat, back_splits, _flat_splits(theirs, widths), comm_dtype)
    _deinterleave(arrived, received, mine, widths)


def _all_to_all(
    comm: Communicator,
    received: Tensor,
    sent: Tensor,
    received_splits: Sequence[int],
    sent_splits: Sequence[int],
    comm_dtype: torch.dtype,
) -> None:
    arrived = received
    if received.dtype != comm_dtype:
        arrived = host_memory.empty(received.shape, comm_dtype, received.device)
    comm.all_to_all(arrived, to_wire(sent, comm_dtype), received_splits, sent_splits)
    if arrived is not received:
        received.copy_(arrived)


def _without(rank: int, splits: Splits) -> list[list[int]]:
    return [[0 if r == rank else rows for r, rows in enumerate(of)] for of in splits]


def _width(rows: Tensor) -> int:
    width = 1
    for size in rows.shape[1:]:
        width *= size
    return width


def _flat_splits(splits: Splits, widths: Sequence[int]) -> list[int]:
    """Numbers per rank, all stores together."""
    return [
        sum(of_store[rank] * width for of_store, width in zip(splits, widths, strict=True))
        for rank in range(len(splits[0]))
    ]


def _interleave(flats: Sequence[Tensor], splits: Splits, widths: Sequence[int]) -> Tensor:
    """Per rank, the parts of all stores behind each other."""
    parts = [
        torch.split(flat, [rows * width for rows in of_store])
        for flat, of_store, width in zip(flats, splits, widths, strict=True)
    ]
    ranks = range(len(splits[0]))
    return torch.cat([of_store[rank] for rank in ranks for of_store in parts])


def _deinterleave(
    flat: Tensor, received: Sequence[Tensor], splits: Splits, widths: Sequence[int]
) -> None:
    ranks = range(len(splits[0]))
    sizes = [
        of_store[rank] * width
        for rank in ranks
        for of_store, width in zip(splits, widths, strict=True)
    ]
    pieces = torch.split(flat, sizes)
    stores = len(splits)
    for s, rows in enumerate(received):
        rows.copy_(torch.cat([pieces[rank * stores + s] for rank in ranks]).view(rows.shape))


def pack_requests(requests: Sequence[Request], rank: int) -> list[Tensor]:
    """One message for each rank, this one last."""
    ranks = len(requests[0].key_counts_RC)
    order = peers_then_self(rank, ranks)
    parts = [_split(r.keys_A, r.key_counts_RC, order) for r in requests]
    if any(len(r.lengths_L) for r in requests):
        parts += [_split(r.lengths_L, _lengths_sent(*_counts(r)), order) for r in requests]
    lasts = [
        _split(r.window.lasts_Q, _lasts_sent(*_counts(r)), order)
        for r in requests
        if r.window is not None
    ]
    if lasts:
        parts.append([_packed(torch.cat([of[peer] for of in lasts])) for peer in range(ranks)])
    return [concat([of[peer] for of in parts]) for peer in range(ranks)]


def message_sizes(
    key_counts_RMC: Tensor, row_counts_RMC: Tensor, *, window: bool = False
) -> list[int]:
    """How long the message of each rank is."""
    return _sizes(key_counts_RMC, row_counts_RMC, window).sum(1).tolist()


def unpack_requests(
    messages: Tensor,
    key_counts_RMC: Tensor,
    row_counts_RMC: Tensor,
    rank: int,
    *,
    window: bool = False,
) -> OwnerRequests:
    """Keys, lengths and last uses apart; messages come from peers in order, then from itself."""
    counts = key_counts_RMC, row_counts_RMC
    order = peers_then_self(rank, len(key_counts_RMC))
    sizes = _sizes(*counts, window)[order]
    if not int(sizes[:, 1:].sum()) and not window:
        return OwnerRequests(messages, messages[:0], *counts, rank)
    parts = torch.split(messages, sizes.reshape(-1).tolist())
    keys, lengths = torch.cat(parts[::3]), torch.cat(parts[1::3])
    if not window:
        return OwnerRequests(keys, lengths, *counts, rank)
    rows = _lasts_sent(*counts).sum((1, 2))[order].tolist()
    lasts = [_unpacked(part, count) for part, count in zip(parts[2::3], rows, strict=True)]
    return OwnerRequests(keys, lengths, *counts, rank, torch.cat(lasts))


def in_rank_order(of_peers: Sequence[int], rank: int) -> list[int]:
    """Numbers that came by peer, by rank."""
    found = dict(zip(peers_then_self(rank, len(of_peers)), of_peers, strict=True))
    return [found[r] for r in range(len(of_peers))]


def _sizes(key_counts_RMC: Tensor, row_counts_RMC: Tensor, window: bool) -> Tensor:
    """(R, 3) numbers in the message of each rank: keys, lengths, last uses."""
    counts = key_counts_RMC, row_counts_RMC
    lasts = _lasts_sent(*counts).sum((1, 2))
    packed = lasts.add(_MICROS_IN_ONE - 1).div(_MICROS_IN_ONE, rounding_mode="floor")
    keys, lengths = key_counts_RMC.sum((1, 2)), _lengths_sent(*counts).sum((1, 2))
    return torch.stack([keys, lengths, packed if window else torch.zeros_like(packed)], 1)


def _packed(small: Tensor) -> Tensor:
    """Small numbers, several in one: they travel with keys of 64 bits."""
    room = torch.zeros(-(-len(small) // _MICROS_IN_ONE) * _MICROS_IN_ONE, dtype=torch.int16)
    room[: len(small)] = small
    return room.view(torch.int64)


def _unpacked(packed: Tensor, count: int) -> Tensor:
    return packed.view(torch.int16)[:count].long()


def _counts(request: Request) -> tuple[Tensor, Tensor]:
    return request.key_counts_RC, request.row_counts_RC


def _split(numbers: Tensor, counts_RC: Tensor, order: list[int]) -> Sequence[Tensor]:
    """What goes to each peer."""
    return torch.split(numbers, counts_RC.sum(1)[order].tolist())


def _lengths_sent(key_counts: Tensor, row_counts: Tensor) -> Tensor:
    """Sums have a length each; where there are as many rows as keys, all would be one."""
    return torch.where(row_counts < key_counts, row_counts, 0)


def _lasts_sent(key_counts: Tensor, row_counts: Tensor) -> Tensor:
    """A sum belongs to one micro-batch; any other row may be used by several."""
    return torch.where(row_counts < key_counts, 0, row_counts)


@dataclass(frozen=True, slots=True)
class RowPatch:
    """The rows of one group of tables that come again."""

    served: Segments
    """The rows to send, as sums of those of the working set, other ranks first ..."""
    served_counts: list[int]
    """... and how many go to each requester, in rank order."""
    positions_n: Tensor
    """Where they belong among the rows that came early, other ranks first ..."""
    counts: list[int]
    """... and how many come from each owner, in rank order."""


def stale_rows(serve: Segments, shared_K: Tensor, rows: int) -> Tensor:
    """(P,) which rows to send have a part that the batch before has too."""
    is_shared_K = torch.zeros(rows, dtype=torch.bool)
    is_shared_K[shared_K] = True
    shared_T = is_shared_K[serve.rows_T]
    if serve.ends_S1 is None:
        return shared_T
    before_T1 = torch.cat([torch.zeros(1, dtype=torch.int64), shared_T.cumsum(0)])
    return before_T1[serve.ends_S1].diff() > 0


def stale_only(serve: Segments, stale_P: Tensor) -> Segments:
    """Only the stale rows of those to send."""
    chosen_n = stale_P.nonzero().squeeze(1)
    if serve.ends_S1 is None:
        return Segments(serve.rows_T[chosen_n])
    lengths_n = serve.lengths()[chosen_n]
    ends_n1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_n.cumsum(0)])
    inside_t = torch.arange(int(ends_n1[-1])) - torch.repeat_interleave(ends_n1[:-1], lengths_n)
    starts_t = torch.repeat_interleave(serve.ends_S1[:-1][chosen_n], lengths_n)
    return Segments(serve.rows_T[starts_t + inside_t], ends_n1)


def pack_mask(stale_P: Tensor, counts: Sequence[int], rank: int) -> Tensor:
    """The mask as other ranks get it, peers in order; `counts` in rank order."""
    parts = torch.split(stale_P, [counts[peer] for peer in peers_then_self(rank, len(counts))])
    return torch.cat([_wide(part) for part in parts[:-1]] or [_wide(stale_P[:0])])


def mask_sizes(counts: Sequence[int]) -> list[int]:
    """How many numbers the mask of so many rows has."""
    return [-(-count // _ROWS_IN_ONE) for count in counts]


def make_patch(
    served: Segments,
    stale_P: Tensor,
    served_counts: Sequence[int],
    told: Tensor,
    counts: Sequence[int],
    rank: int,
    device: torch.device,
) -> RowPatch:
    """From the mask of what this rank sends, and the masks `told` of what it gets.

    `served_counts` and `counts` are those of all rows, in rank order.
    """
    order = peers_then_self(rank, len(counts))
    sent = torch.split(stale_P, [served_counts[peer] for peer in order])
    sizes = mask_sizes(counts)
    parts = torch.split(told, [sizes[peer] for peer in order[:-1]])
    theirs = [
        part.view(torch.uint8)[: counts[peer]].bool()
        for part, peer in zip(parts, order[:-1], strict=True)
    ]
    come = [*theirs, sent[-1]]
    served, belongs = segments_on(device, [served, Segments(torch.cat(come).nonzero().squeeze(1))])
    positions_n = belongs.rows_T.long()
    return RowPatch(served, _in_rank_order(sent, order), positions_n, _in_rank_order(come, order))


def _wide(stale_n: Tensor) -> Tensor:
    room = torch.zeros(-(-len(stale_n) // _ROWS_IN_ONE) * _ROWS_IN_ONE, dtype=torch.uint8)
    room[: len(stale_n)] = stale_n
    return room.view(torch.int64)


def _in_rank_order(masks: Sequence[Tensor], order: Sequence[int]) -> list[int]:
    found = {peer: int(part.sum()) for part, peer in zip(masks, order, strict=True)}
    return [found[rank] for rank in range(len(order))]


def exchange_stale_mask(
    comm: Communicator, state: BatchState, device: torch.device
) -> list[RowPatch]:
    """Owners tell which rows of the first micro-batch are stale, group by group."""
    rank = comm.rank
    masks = [working.stale_P for working in state.working if working.stale_P is not None]
    served = [working.stale for working in state.working if working.stale is not None]
    served_counts = [working.serve_counts[0] for working in state.working]
    counts = [of[0].rows_per_owner for of in state.requests]
    sizes = [mask_sizes(of) for of in counts]
    told = [torch.empty(sum(of) - of[rank], dtype=torch.int64) for of in sizes]
    exchange(
        comm,
        [pack_mask(mask, of, rank) for mask, of in zip(masks, served_counts, strict=True)],
        [mask_sizes(of) for of in served_counts],
        told,
        sizes,
    )
    return [
        make_patch(*group, rank, device)
        for group in zip(served, masks, served_counts, told, counts, strict=True)
    ]


def send_patch(
    comm: Communicator, state: BatchState, weights: Sequence[Rows], comm_dtype: torch.dtype
) -> None:
    """Send the stale rows, refreshed by now, and put what comes over what came early."""
    sent, came = zip(
        *(
            _gathered(rows, patch, received_PD, comm.rank, comm_dtype)
            for rows, patch, received_PD in zip(
                weights, state.patches, state.received[0], strict=True
            )
        ),
        strict=True,
    )
    exchange(
        comm,
        sent,
        [patch.served_counts for patch in state.patches],
        [
            came_nD[: len(came_nD) - patch.counts[comm.rank]]
            for came_nD, patch in zip(came, state.patches, strict=True)
        ],
        [patch.counts for patch in state.patches],
        comm_dtype,
    )
    for received_PD, came_nD, patch in zip(state.received[0], came, state.patches, strict=True):
        received_PD.index_copy_(0, patch.positions_n, came_nD)


def _gathered(
    rows: Rows, patch: RowPatch, received_PD: Tensor, rank: int, comm_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What goes to other ranks, and room for what comes, with this rank's own rows at its end."""
    own, dim, device = patch.served_counts[rank], received_PD.shape[1], received_PD.device
    sent_nD = empty_rows(sum(patch.served_counts) - own, dim, device, comm_dtype)
    came_nD = empty_rows(len(patch.positions_n), dim, device)
    own_nD = came_nD[len(came_nD) - own :]
    sum_segments(patch.served, rows, [sent_nD, own_nD], leaving=comm_dtype)
    return sent_nD, came_nD
