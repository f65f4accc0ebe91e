"""Random draws of a model as functions of (seed, sample, pass, place): hashes, no generator.

So a sample draws the same on every device, rank and micro-batch, in any plan and in any batch, and
once more when activations are computed again. Whole numbers only: nothing rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.kernels.block.fused import Dropout

# Shapes: B samples, T rows of all samples together, D width, M items drawn for a sample, J ranges
# of items

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_PARTS = 1 << 16
"""Chances are whole numbers of these: four draws fit a hash of 64 bits."""


def draw_state(batch: Batch, seed: int) -> Tensor:
    """(B,) 64 bits for each sample and pass, from `sample_id` and, where there is one, `step`.

    A batch without ids draws from what a sample holds: the sum of its history.
    """
    ids = [batch.dense[name] for name in ("sample_id", "step") if name in batch.dense]
    return hash_of(ids or [_content_id(batch)], seed)


def hash_of(ids: Sequence[Tensor], seed: int) -> Tensor:
    """(B,) 64 bits that follow from the seed and int64 columns."""
    state_B = torch.full_like(ids[0], _signed(seed))
    for id_B in ids:
        state_B = _mix(state_B + _signed(_GOLDEN)) ^ id_B
    return _mix(state_B)


def _content_id(batch: Batch) -> Tensor:
    """(B,) a number that follows from the sample's own history."""
    history = batch.sparse["history"]
    sample_T = torch.repeat_interleave(history.lengths, output_size=len(history.values))
    return torch.zeros_like(history.lengths).index_add_(0, sample_T, history.values)


def of_each_row(state_B: Tensor, lengths_B: Tensor, positions_T: Tensor) -> Tensor:
    """(T,) 64 bits for each row, from its sample's and its place in the sample."""
    state_T = torch.repeat_interleave(state_B, lengths_B, output_size=len(positions_T))
    return _mix(state_T + positions_T * _signed(_GOLDEN))


def keep(state_T: Tensor, width: int, chance: float, *, site: int) -> Tensor:
    """(T, D) whether each number of a row is kept, with a chance of about `chance`.

    `site` tells the places apart at which one row is drawn for. The chance is a whole number of
    1/65,536: `chance_of` says which.
    """
    words = -(-width // 4)
    site_T = _mix(state_T + _site_bits(site))
    slots_W = _multiples(1, words + 1, state_T.device)
    bits_TW = _mix(site_T[:, None] + slots_W)
    # Each hash is read as four signed numbers of 16 bits, the lowest first.
    quarters_TD = bits_TW.view(torch.int16)[:, :width]
    return quarters_TD <= _limit(chance)


def chance_of(chance: float) -> float:
    """The chance with which `keep` keeps a number."""
    return _parts(chance) / _PARTS


def _site_bits(site: int) -> int:
    return _signed(_SECOND * (2 * site + 1))


def _limit(chance: float) -> int:
    """The largest signed number of 16 bits that is kept."""
    return _parts(chance) - _PARTS // 2 - 1


def _parts(chance: float) -> int:
    """At least one of 65,536, so that something can be kept."""
    return max(1, round(chance * _PARTS))


def dropout(x_TD: Tensor, state_T: Tensor, share: float, *, site: int) -> Tensor:
    """`x_TD` with about `share` of its numbers 0 and the others larger, so that the mean stays."""
    kept = chance_of(1 - share)
    kept_TD = keep(state_T, x_TD.shape[1], 1 - share, site=site)
    return x_TD * (kept_TD.to(x_TD.dtype) / kept)


def kernel_dropout(state_T: Tensor, share: float, *, site: int) -> Dropout:
    """What a kernel needs to know to drop the numbers that `dropout` drops."""
    kept = 1 - share
    return Dropout(state_T, _site_bits(site), _limit(kept), 1 / chance_of(kept))


# Negative sampling.


@dataclass(frozen=True, slots=True)
class ItemSampler:
    """Draws from the items 1 .. num_items.

    `log_uniform` first draws one of J ranges, each about twice as long as the one before it, then
    an item of the range: small keys come up more often, about as 1 / key.
    """

    num_items: int
    sampling: Literal["uniform", "log_uniform"] = "uniform"
    seed: int = 0

    def draw(self, ids: Sequence[Tensor], count: int) -> Tensor:
        """(B, M) items for each sample, with replacement; `ids` are int64 columns that name it."""
        return self.draw_from(hash_of(ids, self.seed), count)

    def draw_from(self, state_B: Tensor, count: int) -> Tensor:
        """(B, M) items for each sample, from its 64 bits."""
        slots_M = _multiples(0, 2 * count, state_B.device)
        bits_BM = _shift(_mix(state_B[:, None] + slots_M), 1)
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


def _multiples(start: int, end: int, device: torch.device) -> Tensor:
    """(end - start,) a constant times `start` and what follows; int64 that wraps around."""
    # Without `^ 0` torch's compiler takes the product for an index, and finds it too large for one.
    return (torch.arange(start, end, device=device) ^ 0) * _signed(_GOLDEN)


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
