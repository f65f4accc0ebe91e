"""From unique rows to what a model sees, and gradients back, in a fixed order of summation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nestpipe.embedding.groups import TableGroup
from nestpipe.embedding.requests import Request
from nestpipe.kernels.rows import add_rows, pool_rows

# Shapes: U unique rows, T keys, B samples, D width


class _Spread(torch.autograd.Function):
    """Row per key: a row that several keys share gets the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor, positions_T: Tensor) -> Tensor:
        ctx.save_for_backward(positions_T)
        ctx.num_rows = rows_UD.shape[0]
        return rows_UD.index_select(0, positions_T)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (positions_T,) = ctx.saved_tensors
        (gradients_TD,) = gradients
        sums_UD = gradients_TD.new_zeros(ctx.num_rows, gradients_TD.shape[1])
        add_rows(sums_UD, positions_T, gradients_TD.contiguous())
        return sums_UD, None


class _Pool(torch.autograd.Function):
    """Sum of rows per sample, in the order of its keys."""

    @staticmethod
    def forward(ctx: Any, rows_UD: Tensor, positions_T: Tensor, lengths_B: Tensor) -> Tensor:
        ctx.save_for_backward(positions_T, lengths_B)
        ctx.num_rows = rows_UD.shape[0]
        return pool_rows(rows_UD, positions_T, lengths_B)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        positions_T, lengths_B = ctx.saved_tensors
        (gradients_BD,) = gradients
        sample_T = torch.repeat_interleave(lengths_B, output_size=positions_T.shape[0])
        gradients_TD = gradients_BD.index_select(0, sample_T)
        sums_UD = gradients_BD.new_zeros(ctx.num_rows, gradients_BD.shape[1])
        add_rows(sums_UD, positions_T, gradients_TD)
        return sums_UD, None, None


def spread_rows(rows_UD: Tensor, request: Request, group: TableGroup) -> Mapping[str, Tensor]:
    """Each feature's rows, or the sums of each sample's rows where its table pools."""
    spread: dict[str, Tensor] = {}
    for feature in group.features:
        positions_T = request.positions[feature.name]
        if feature.pooled:
            lengths_B = request.lengths[feature.name]
            spread[feature.name] = _Pool.apply(rows_UD, positions_T, lengths_B)  # type: ignore
        else:
            spread[feature.name] = _Spread.apply(rows_UD, positions_T)  # type: ignore
    return spread
