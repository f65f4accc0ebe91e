"""Gradient clipping by global norm, with the same bits in every order of rows and ranks.

Which row lies where depends on the plan, on the pool, and on how tables are sharded. So the squares
are summed exactly: each is a whole number of units of its binary exponent, and whole numbers are
added up exponent by exponent. Such sums have no rounding, and hence no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from nestpipe.comm.communicator import Communicator
from nestpipe.embedding.optimizers import sum_of_squares

# Shapes: K rows, D weights of a row, N numbers, B bins

MANTISSA_BITS = 24
LOWEST = -149
"""The exponent below which no float32 is but 0; `frexp` gives 0 the exponent 0."""
BINS = 279
EPSILON = 1e-6
"""Added to the norm, as `torch.nn.utils.clip_grad_norm_` does."""


def global_norm(
    dense: Sequence[Tensor],
    rows: Sequence[Tensor],
    comm: Communicator | None,
    device: torch.device,
    of_shards: Communicator | None = None,
) -> Tensor:
    """(1,) float32: the norm of dense gradients, which all ranks have, and of rows that each owns.

    `rows`: (K, D) gradients of the rows that this rank owns, over `comm`. Waits for no device. Over
    `of_shards` each rank has other parts of the dense gradients, all together once.
    """
    counts_B = torch.zeros(BINS, dtype=torch.int64, device=device)
    for gradients_KD in rows:
        if gradients_KD.numel():
            count_exactly(counts_B, sum_of_squares(gradients_KD).view(-1))
    if comm is not None:
        comm.all_reduce(counts_B)
    dense_B = torch.zeros_like(counts_B)
    for gradient in dense:
        if gradient.numel():
            # A tree of halves: its order depends on the size alone, not on threads.
            count_exactly(dense_B, sum_of_squares(gradient.float().reshape(1, -1)).view(-1))
    if of_shards is not None:
        of_shards.all_reduce(dense_B)
    counts_B += dense_B
    return exact_total(counts_B).sqrt().float()


def count_exactly(counts_B: Tensor, numbers_N: Tensor) -> None:
    """Add float32 numbers, none negative, to counts of units by exponent."""
    most = torch.finfo(torch.float32).max
    mantissa_N, exponent_N = torch.frexp(numbers_N.clamp(max=most))
    units_N = mantissa_N.double().mul_(2**MANTISSA_BITS).long()
    counts_B.index_add_(0, (exponent_N - LOWEST).long(), units_N)


def exact_total(counts_B: Tensor) -> Tensor:
    """(1,) float64: the sum of all numbers that were counted."""
    parts_B = counts_B.double() * _units(counts_B.device)
    while len(parts_B) > 1:
        half = (len(parts_B) + 1) // 2
        parts_B = torch.cat(
            [parts_B[: len(parts_B) - half] + parts_B[half:], parts_B[len(parts_B) - half : half]]
        )
    return parts_B


@cache
def _units(device: torch.device) -> Tensor:
    """(B,) what one unit of each bin is worth."""
    worth = [2.0 ** (LOWEST + b - MANTISSA_BITS) for b in range(BINS)]
    return torch.tensor(worth, dtype=torch.float64, device=device)


def clip_factor(norm: Tensor, most: float) -> Tensor:
    """What gradients of that norm are multiplied by, so that it is at most so much."""
    return (most / (norm + EPSILON)).clamp(max=1.0)
