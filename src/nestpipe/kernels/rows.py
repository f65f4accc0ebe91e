"""Sums of rows in a fixed order: what exactness rests on.

A sum of rows is a bag: the rows of a bag are added one after the other, first to last. Torch's
`embedding_bag` does just that, on CPU and GPU alike, without atomics and without copying the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Shapes: N rows, S sums, T terms of all sums together, D width


@dataclass(frozen=True, slots=True)
class Bags:
    """Which rows each sum has, in order."""

    rows_T: Tensor
    """The rows of the first sum, then those of the second, ..."""
    offsets_S1: Tensor
    """Where each sum starts in `rows_T`, and where the last one ends."""

    def sum(self, rows_ND: Tensor) -> Tensor:
        """(S, D) every sum."""
        sums = self.offsets_S1.shape[0] - 1
        if not len(self.rows_T):
            return rows_ND.new_zeros(sums, rows_ND.shape[1])
        return functional.embedding_bag(
            self.rows_T, rows_ND, self.offsets_S1, mode="sum", include_last_offset=True
        )


def bags_of_targets(targets_T: Tensor, sums: int, rows_T: Tensor | None = None) -> Bags:
    """Term i goes to sum `targets_T[i]`; it is row i, or `rows_T[i]`. Order of terms is kept."""
    order_T = torch.argsort(targets_T, stable=True)
    counts_S = torch.bincount(targets_T, minlength=sums)
    return Bags(order_T if rows_T is None else rows_T[order_T], offsets_of(counts_S))


def offsets_of(counts_S: Tensor) -> Tensor:
    """(S + 1,) where each of so many starts, and where the last one ends."""
    offsets_S1 = counts_S.new_zeros(len(counts_S) + 1)
    torch.cumsum(counts_S, 0, out=offsets_S1[1:])
    return offsets_S1
