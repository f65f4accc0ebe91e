"""Rows of a first micro-batch that come twice: early, and again when they are refreshed.

Early rows are sent while the batch before still computes. Those that this one changes are useless
until its update; owners mark them ahead of time, so that both sides know, without waiting for a
device, how many come again and where they belong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.routing.lists import seats
from nestpipe.kernels.rows.segments import Bags, bags_on

# Shapes: P rows of the first micro-batch, by seat of the rank that they go to or come from,
# n those of them that come again, K rows of the working set, R ranks

_IN_ONE = 8
"""Marks are bytes; they travel in numbers of 64 bits."""


@dataclass(frozen=True, slots=True)
class Again:
    """What comes again, of one group of tables."""

    served: Bags
    """The rows to send, as sums of those of the working set, other ranks first ..."""
    served_counts: list[int]
    """... and how many go to each requester, in rank order."""
    places_n: Tensor
    """Where the rows that come belong among those that came early, other ranks first ..."""
    counts: list[int]
    """... and how many come from each owner, in rank order."""


def marks_of(serve: Bags, shared_K: Tensor, rows: int) -> Tensor:
    """(P,) which rows to send have a part that the batch before has too."""
    is_shared_K = torch.zeros(rows, dtype=torch.bool)
    is_shared_K[shared_K] = True
    shared_T = is_shared_K[serve.rows_T]
    if serve.ends_S1 is None:
        return shared_T
    before_T1 = torch.cat([torch.zeros(1, dtype=torch.int64), shared_T.cumsum(0)])
    return before_T1[serve.ends_S1].diff() > 0


def marked(serve: Bags, marks_P: Tensor) -> Bags:
    """Only the marked rows of those to send."""
    chosen_n = marks_P.nonzero().squeeze(1)
    if serve.ends_S1 is None:
        return Bags(serve.rows_T[chosen_n])
    lengths_n = serve.lengths()[chosen_n]
    ends_n1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_n.cumsum(0)])
    inside_t = torch.arange(int(ends_n1[-1])) - torch.repeat_interleave(ends_n1[:-1], lengths_n)
    starts_t = torch.repeat_interleave(serve.ends_S1[:-1][chosen_n], lengths_n)
    return Bags(serve.rows_T[starts_t + inside_t], ends_n1)


def packed(marks_P: Tensor, counts: Sequence[int], rank: int) -> Tensor:
    """What other ranks are told, by seat; `counts` in rank order."""
    parts = torch.split(marks_P, [counts[seat] for seat in seats(rank, len(counts))])
    return torch.cat([_wide(part) for part in parts[:-1]] or [_wide(marks_P[:0])])


def packed_sizes(counts: Sequence[int]) -> list[int]:
    """How many numbers the marks of so many rows are."""
    return [-(-count // _IN_ONE) for count in counts]


def make_again(
    served: Bags,
    marks_P: Tensor,
    served_counts: Sequence[int],
    told: Tensor,
    counts: Sequence[int],
    rank: int,
    device: torch.device,
) -> Again:
    """From the marks of what this rank sends, and what it was `told` of what it gets.

    `served_counts` and `counts` are those of all rows, in rank order.
    """
    order = seats(rank, len(counts))
    sent = torch.split(marks_P, [served_counts[seat] for seat in order])
    sizes = packed_sizes(counts)
    parts = torch.split(told, [sizes[seat] for seat in order[:-1]])
    theirs = [
        part.view(torch.uint8)[: counts[seat]].bool()
        for part, seat in zip(parts, order[:-1], strict=True)
    ]
    come = [*theirs, sent[-1]]
    served, places = bags_on(device, [served, Bags(torch.cat(come).nonzero().squeeze(1))])
    places_n = places.rows_T.long()
    return Again(served, _in_rank_order(sent, order), places_n, _in_rank_order(come, order))


def _wide(marks_n: Tensor) -> Tensor:
    room = torch.zeros(-(-len(marks_n) // _IN_ONE) * _IN_ONE, dtype=torch.uint8)
    room[: len(marks_n)] = marks_n
    return room.view(torch.int64)


def _in_rank_order(marks: Sequence[Tensor], order: Sequence[int]) -> list[int]:
    found = {seat: int(part.sum()) for part, seat in zip(marks, order, strict=True)}
    return [found[rank] for rank in range(len(order))]
