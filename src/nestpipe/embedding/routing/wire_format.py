"""The wire format of requests: one message per owner, 64-bit numbers throughout.

A message holds the keys of every micro-batch, then the lengths of sums. In a window it also holds
the last micro-batch that uses each row that is not a sum: its gradient comes with that one's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.embedding.routing.lists import OwnerRequests, peers_then_self
from nestpipe.embedding.routing.requests import Request
from nestpipe.kernels.rows.segments import concat

# Shapes: R ranks, M micro-batches, C tables

_IN_ONE = 4
"""Micro-batches are counted in 16 bits."""


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
    packed = lasts.add(_IN_ONE - 1).div(_IN_ONE, rounding_mode="floor")
    keys, lengths = key_counts_RMC.sum((1, 2)), _lengths_sent(*counts).sum((1, 2))
    return torch.stack([keys, lengths, packed if window else torch.zeros_like(packed)], 1)


def _packed(small: Tensor) -> Tensor:
    """Small numbers, several in one: they travel with keys of 64 bits."""
    room = torch.zeros(-(-len(small) // _IN_ONE) * _IN_ONE, dtype=torch.int16)
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
