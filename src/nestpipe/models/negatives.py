"""Items drawn to be told from the right one: a function of the seed and the sample, nothing else."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# Shapes: B samples, M negatives of a sample, J ranges of items

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def draw_items(seed: int, ids: tuple[Tensor, ...], count: int, edges_J: tuple[int, ...]) -> Tensor:
    """(B, M) items for each sample, drawn with replacement.

    `ids` are int64 columns (B,) that name the sample. A range `edges[j] .. edges[j + 1] - 1` is drawn
    first, all being equally likely, then an item of it. Whole numbers only, so that every device,
    rank and micro-batch draws the same.
    """
    state_B = torch.full_like(ids[0], _signed(seed))
    for id_B in ids:
        state_B = _mix(state_B + _signed(_GOLDEN)) ^ id_B
    slots_M = torch.arange(2 * count, device=state_B.device) * _signed(_GOLDEN)
    bits_BM = _shift(_mix(_mix(state_B)[:, None] + slots_M), 1)
    pick_BM, within_BM = bits_BM[:, :count], bits_BM[:, count:]
    ranges = len(edges_J) - 1
    right_shift_BM = ranges - pick_BM % ranges
    last = torch.full_like(within_BM, edges_J[-1])
    low_BM, high_BM = last >> right_shift_BM, last >> (right_shift_BM - 1)
    return low_BM + within_BM % (high_BM - low_BM)


def item_edges(num_items: int, sampling: Literal["uniform", "log_uniform"]) -> tuple[int, ...]:
    """Where the ranges of items 1 .. num_items start, and one past the end of the last.

    `log_uniform` has ranges that double, so that an item's chance falls about as 1 / item.
    """
    end = num_items + 1
    ranges = end.bit_length() - 1 if sampling == "log_uniform" else 1
    return tuple(max(1, end >> (ranges - j)) for j in range(ranges)) + (end,)
