"""What an owner is told in one message: the keys of every micro-batch, then the lengths of sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.embedding.requests import Request
from nestpipe.embedding.routing import Asked, seats

# Shapes: R ranks, M micro-batches, C tables


def letters_to_owners(requests: Sequence[Request], rank: int) -> list[Tensor]:
    """One letter for each rank, this one last."""
    ranks = len(requests[0].key_counts_RC)
    order = seats(rank, ranks)
    keys = [torch.split(r.keys_A, r.key_counts_RC.sum(1)[order].tolist()) for r in requests]
    if not any(len(r.lengths_L) for r in requests):
        return [joined([of[seat] for of in keys]) for seat in range(ranks)]
    lengths = [
        torch.split(
            r.lengths_L, _lengths_sent(r.key_counts_RC, r.row_counts_RC).sum(1)[order].tolist()
        )
        for r in requests
    ]
    return [
        torch.cat([*(of[seat] for of in keys), *(of[seat] for of in lengths)])
        for seat in range(ranks)
    ]


def expected_numbers(key_counts_RMC: Tensor, row_counts_RMC: Tensor) -> list[int]:
    """How long the letter of each rank is."""
    lengths = _lengths_sent(key_counts_RMC, row_counts_RMC)
    return (key_counts_RMC + lengths).sum((1, 2)).tolist()


def open_letters(
    letters: Tensor, key_counts_RMC: Tensor, row_counts_RMC: Tensor, rank: int
) -> Asked:
    """Keys and lengths apart; the letters come in the order of seats."""
    order = seats(rank, len(key_counts_RMC))
    keys = key_counts_RMC.sum((1, 2))[order].tolist()
    lengths = _lengths_sent(key_counts_RMC, row_counts_RMC).sum((1, 2))[order].tolist()
    if not any(lengths):
        return Asked(letters, letters[:0], key_counts_RMC, row_counts_RMC, rank)
    parts = torch.split(letters, [n for pair in zip(keys, lengths, strict=True) for n in pair])
    return Asked(
        torch.cat(parts[::2]), torch.cat(parts[1::2]), key_counts_RMC, row_counts_RMC, rank
    )


def in_rank_order(of_seats: Sequence[int], rank: int) -> list[int]:
    """Numbers that came by seat, by rank."""
    found = dict(zip(seats(rank, len(of_seats)), of_seats, strict=True))
    return [found[r] for r in range(len(of_seats))]


def joined(parts: Sequence[Tensor], like: Tensor | None = None) -> Tensor:
    """Several tensors behind each other; nothing of the kind of `like` where there are none."""
    if not parts:
        assert like is not None
        return like[:0]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _lengths_sent(key_counts: Tensor, row_counts: Tensor) -> Tensor:
    """Sums have a length each; where there are as many rows as keys, all would be one."""
    return torch.where(row_counts < key_counts, row_counts, 0)
