"""Speculative rows: those of a first micro-batch, sent while the batch before still computes.

Rows that the batch before changes are stale until its update. Owners tell ahead of time which ones
(the stale mask), so both sides know, without waiting for a device, how many come again and where
they belong. Once refreshed, these rows are sent again (the patch), over what came early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestpipe.comm.communicator import Communicator
from nestpipe.embedding.routing.all_to_all import exchange
from nestpipe.embedding.routing.lists import peers_then_self
from nestpipe.kernels.rows.segments import Rows, Segments, empty_rows, segments_on, sum_segments

if TYPE_CHECKING:
    from nestpipe.embedding.sharded import BatchState

# Shapes: P rows of the first micro-batch, by the rank that they go to or come from, peers first,
# n stale ones among them, K rows of the working set, D weights, R ranks

_IN_ONE = 8
"""The mask has a byte for each row; it travels in numbers of 64 bits."""


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
    return [-(-count // _IN_ONE) for count in counts]


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
    room = torch.zeros(-(-len(stale_n) // _IN_ONE) * _IN_ONE, dtype=torch.uint8)
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
