"""The rows of items while serving: one tensor on the device, found by sorted keys on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestpipe.embedding.first_rows import first_weights, round_to_bfloat16
from nestpipe.serve.types import Ids

# Shapes: K items of the table, T items asked for, U of them that the table does not have, D width

SPARSEST = 8
"""Keys may be spread so thin for a list of places by key: more would waste host memory."""


@dataclass(frozen=True, slots=True)
class FirstRows:
    """What training would begin with for an item that it never saw."""

    seed: int
    std: float
    dtype: str = "float32"
    """How the table keeps its weights."""

    def rows(self, items_U: Ids, dim: int) -> Tensor:
        weights_UD = first_weights(self.seed, items_U, dim, self.std)
        if self.dtype == "bfloat16":
            weights_UD = round_to_bfloat16(weights_UD)
        return torch.from_numpy(weights_UD)


class ItemRows:
    """Looks items up; those that the table does not have get their first row, or zeros.

    Unknown items are normal: new ones appear before the next training run. Where the checkpoint
    says how the table's rows begin, that is what they get, as in training; else a row of zeros.
    """

    def __init__(self, items_K: Ids, rows_KD: Tensor, first: FirstRows | None = None) -> None:
        """Items ascend, each with its row, which is on the device and of the type to serve."""
        assert len(items_K) == len(rows_KD), "every item has one row"
        self.rows_KD = rows_KD
        self.first = first
        self._items_K = items_K
        self._place_of = _place_by_key(items_K)

    @property
    def num_items(self) -> int:
        return len(self._items_K)

    def rows(self, items_T: Ids) -> Tensor:
        """(T, D) on the device."""
        places_T, known_T = self._find(items_T)
        device, dim = self.rows_KD.device, self.rows_KD.shape[1]
        if known_T.all():
            return self.rows_KD.index_select(0, torch.from_numpy(places_T).to(device))
        rows_TD = self.rows_KD.new_zeros(len(items_T), dim)
        known = torch.from_numpy(np.flatnonzero(known_T)).to(device)
        places = torch.from_numpy(places_T[known_T]).to(device)
        rows_TD.index_copy_(0, known, self.rows_KD.index_select(0, places))
        if self.first is not None:
            unknown = torch.from_numpy(np.flatnonzero(~known_T)).to(device)
            first_UD = self.first.rows(items_T[~known_T], dim)
            rows_TD.index_copy_(0, unknown, first_UD.to(device, rows_TD.dtype))
        return rows_TD

    def _find(self, items_T: Ids) -> tuple[Ids, np.ndarray]:
        """Where each item's row is, and whether there is one at all."""
        if not self.num_items:
            return np.zeros_like(items_T), np.zeros(len(items_T), dtype=bool)
        if self._place_of is not None:
            low, high = self._items_K[0], self._items_K[-1]
            inside_T = (items_T >= low) & (items_T <= high)
            places_T = self._place_of[np.where(inside_T, items_T, low) - low]
            return places_T, inside_T & (places_T >= 0)
        places_T = np.searchsorted(self._items_K, items_T)
        places_T = np.minimum(places_T, self.num_items - 1)
        return places_T, self._items_K[places_T] == items_T


def _place_by_key(items_K: Ids) -> Ids | None:
    """The place of every key from the first to the last, -1 for none; None where that is wasteful.

    It is several times faster than a search, which matters for long histories.
    """
    if not len(items_K) or int(items_K[-1]) - int(items_K[0]) >= SPARSEST * len(items_K):
        return None
    place_of = np.full(int(items_K[-1]) - int(items_K[0]) + 1, -1, dtype=np.int64)
    place_of[items_K - items_K[0]] = np.arange(len(items_K))
    return place_of
