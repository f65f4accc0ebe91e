"""Items drawn to be told from the right one: a function of the seed and the sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Shapes: B samples, M negatives of a sample, J ranges of items

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class ItemSampler:
    """Draws from the items 1 .. num_items with whole numbers only.

    So every device, rank and micro-batch draws the same for a sample. `log_uniform` first draws
    one of J ranges, each about twice as long as the one before it, then an item of the range:
    small keys come up more often, about as 1 / key.
    """

    num_items: int
    sampling: Literal["uniform", "log_uniform"] = "uniform"
    seed: int = 0

    def draw(self, ids: Sequence[Tensor], count: int) -> Tensor:
        """(B, M) items for each sample, with replacement; `ids` are int64 columns that name it."""
        state_B = torch.full_like(ids[0], _signed(self.seed))
        for id_B in ids:
            state_B = _mix(state_B + _signed(_GOLDEN)) ^ id_B
        slots_M = torch.arange(2 * count, device=state_B.device) * _signed(_GOLDEN)
        bits_BM = _shift(_mix(_mix(state_B)[:, None] + slots_M), 1)
        range_BM, within_BM = bits_BM[:, :count], bits_BM[:, count:]
        if self.sampling == "uniform":
            return 1 + within_BM % self.num_items
        edges_J = self._edges(state_B.device)
        range_BM = range_BM % (len(edges_J) - 1)
        low_BM, high_BM = edges_J[range_BM], edges_J[range_BM + 1]
        return low_BM + within_BM % (high_BM - low_BM)

    def log_chance(self, items: Tensor) -> Tensor:
        """How likely a draw is to be each of these items, as a natural logarithm."""
        if self.sampling == "uniform":
            chance = torch.full_like(items, 1 / self.num_items, dtype=torch.float64)
            return torch.log(chance)
        edges_J = self._edges(items.device)
        range_of = torch.bucketize(items.contiguous(), edges_J[1:-1], right=True)
        lengths = edges_J[range_of + 1] - edges_J[range_of]
        return -torch.log(lengths.double() * (len(edges_J) - 1))

    def _edges(self, device: torch.device) -> Tensor:
        """(J + 1,) where each range starts, and one past the end of the last."""
        end = self.num_items + 1
        ranges = end.bit_length() - 1
        halvings_J = torch.arange(ranges, -1, -1, device=device)
        return torch.full_like(halvings_J, end) >> halvings_J


def _mix(x: Tensor) -> Tensor:
    """The finish of splitmix64: int64 tensors wrap around, as it wants."""
    x = (x ^ _shift(x, 30)) * _signed(_FIRST)
    x = (x ^ _shift(x, 27)) * _signed(_SECOND)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right with zeros coming in; torch's own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The int64 that has the last 64 bits of x."""
    return ((x + (1 << 63)) % (1 << 64)) - (1 << 63)
