"""Sums of rows in a fixed order: what exactness rests on."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: N rows to add, U rows to add to, T keys, B samples, D width


def add_rows(sums_UD: Tensor, positions_N: Tensor, rows_ND: Tensor) -> None:
    """Add row i to `sums_UD[positions_N[i]]`, for i = 0, 1, 2, ... in that order."""
    if sums_UD.is_cuda:
        _add_sorted(sums_UD, positions_N, rows_ND)
    else:
        sums_UD.index_add_(0, positions_N, rows_ND)


def _add_sorted(sums_UD: Tensor, positions_N: Tensor, rows_ND: Tensor) -> None:
    """Without atomics: rows of one sum brought together, then added one after the other."""
    order_N = torch.argsort(positions_N, stable=True)
    targets, counts = torch.unique_consecutive(positions_N[order_N], return_counts=True)
    if len(targets):
        parts = torch.segment_reduce(rows_ND[order_N], "sum", lengths=counts, unsafe=True)
        sums_UD[targets] = sums_UD[targets] + parts


def pool_rows(rows_UD: Tensor, positions_T: Tensor, lengths_B: Tensor) -> Tensor:
    """The sum of each sample's rows, in the order of its keys."""
    samples = lengths_B.shape[0]
    if positions_T.shape[0] == samples and bool((lengths_B == 1).all()):
        return rows_UD.index_select(0, positions_T)
    picked_TD = rows_UD.index_select(0, positions_T)
    sums_BD = rows_UD.new_zeros(samples, rows_UD.shape[1])
    sample_T = torch.repeat_interleave(lengths_B, output_size=positions_T.shape[0])
    add_rows(sums_BD, sample_T, picked_TD)
    return sums_BD
