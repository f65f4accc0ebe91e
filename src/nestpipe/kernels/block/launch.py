"""Starts the kernels of a block: tiles, outputs, and the last step of sums over rows."""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nestpipe.kernels.block import kernels
from nestpipe.kernels.block.fused import Dropout, Norm
from nestpipe.kernels.triton_launch import Constants, Starter, constants

# Shapes: T rows of all samples together, D columns of a row, W columns of all projections, U those
# of the gate, P parts of a sum, N positions

# Constants, never chosen by the batch or by timing: so the order of every sum is one.
_TILE_VALUES = 2048
"""Numbers of a tile: 16 for each thread of four warps."""
_SUM_ROWS = 16
"""Rows that one program sums for the weights of a norm, or more where a tile has more."""
_BIAS_ROWS = 64
"""Rows that one program sums for the bias of a projection."""
_COLUMNS = 256
"""Most columns of an activation's tile."""
_POSITION_ROWS, _POSITION_COLUMNS = 16, 128

_ADD_NORM = Starter(kernels.add_norm_forward)
_ADD_NORM_BACKWARD = Starter(kernels.add_norm_backward)
_NORM_GATE = Starter(kernels.norm_gate_forward)
_NORM_GATE_BACKWARD = Starter(kernels.norm_gate_backward)
_SILU = Starter(kernels.silu_forward)
_SILU_BACKWARD = Starter(kernels.silu_backward)
_GATED_SILU = Starter(kernels.gated_silu_forward)
_GATED_SILU_BACKWARD = Starter(kernels.gated_silu_backward)
_SUM_BY_POSITION = Starter(kernels.sum_rows_by_position)
_NO_DRAWS = (0, 0, 1.0)


def _ceil(number: int, unit: int) -> int:
    """How many units hold so many."""
    return -(-number // unit)


def _power_of_two(number: int) -> int:
    """The smallest that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


@cache
def _row_tile(width: int, centred: bool) -> tuple[int, Constants]:
    """Whole rows: how many, how wide, and by how many warps."""
    columns = max(16, _power_of_two(width))
    rows = max(1, min(16, _TILE_VALUES // columns))
    warps = 4 if columns <= 4096 else 8
    return rows, constants(R=rows, D=columns, CENTRE=centred, num_warps=warps)


@cache
def _sum_tile(width: int, centred: bool) -> tuple[int, Constants]:
    """The same with two sums beside the rows: registers for both."""
    rows, made = _row_tile(width, centred)
    total = max(_SUM_ROWS, rows)
    return total, constants(**made.named | {"num_warps": 8, "ROWS": total})


@cache
def _column_tile(width: int, least_rows: int = 0) -> tuple[int, int, Constants]:
    """Rows of a program and columns of a tile; several tiles of rows where rows are summed."""
    columns = max(16, min(_COLUMNS, _power_of_two(width)))
    rows = _TILE_VALUES // columns
    tile = {"R": rows, "C": columns, "num_warps": 4}
    if not least_rows:
        return rows, columns, constants(**tile)
    rows = max(least_rows, rows)
    return rows, columns, constants(ROWS=rows, **tile)


def _drawn(dropout: Dropout | None) -> tuple[Tensor | None, tuple[Any, ...]]:
    """Arguments of dropout; without it the kernels have none."""
    if dropout is None:
        return None, _NO_DRAWS
    return dropout.draws_T, (dropout.site_bits, dropout.limit, dropout.factor)


def run_add_norm(
    x_TD: Tensor,
    added_TD: Tensor | None,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    norm: Norm,
    dropout: Dropout | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The sum of both, and its norm in another type; without `added_TD` the sum is `x_TD`."""
    total, width = x_TD.shape
    summed_TD = x_TD.detach() if added_TD is None else torch.empty_like(x_TD)
    out_TD = torch.empty_like(x_TD, dtype=dtype)
    rows, tile = _row_tile(width, norm.centred)
    draws_T, numbers = _drawn(dropout)
    if total:
        _ADD_NORM(
            (_ceil(total, rows),),
            tile,
            (),
            (x_TD, added_TD, weight_D, bias_D, draws_T, summed_TD, out_TD),
            (total, width, norm.eps, *numbers),
        )
    return summed_TD, out_TD


def run_add_norm_backward(
    summed_TD: Tensor,
    weight_D: Tensor | None,
    norm: Norm,
    dropout: Dropout | None,
    grad_summed_TD: Tensor | None,
    grad_out_TD: Tensor,
    added_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, of what was added to it, and of the norm's weight and bias."""
    total, width = summed_TD.shape
    rows, tile = _sum_tile(width, norm.centred)
    parts = _ceil(total, rows)
    grad_x_TD = torch.empty_like(summed_TD)
    grad_added_TD = None
    if added_dtype is not None and added_dtype != summed_TD.dtype:
        grad_added_TD = torch.empty_like(summed_TD, dtype=added_dtype)
    sums_2PD = weight_PD = bias_PD = None
    if weight_D is not None:
        sums_2PD = summed_TD.new_empty(2, parts, width, dtype=torch.float32)
        weight_PD, bias_PD = sums_2PD.unbind()
    draws_T, numbers = _drawn(dropout)
    if total:
        _ADD_NORM_BACKWARD(
            (parts,),
            tile,
            (),
            (summed_TD, weight_D, draws_T, grad_summed_TD, grad_out_TD, grad_x_TD,
             grad_added_TD, weight_PD, bias_PD),
            (total, width, norm.eps, *numbers),
        )  # fmt: skip
    grad_weight_D, grad_bias_D = (None, None) if sums_2PD is None else sums_2PD.sum(1).unbind()
    if added_dtype == summed_TD.dtype:
        grad_added_TD = grad_x_TD
    return grad_x_TD, grad_added_TD, grad_weight_D, grad_bias_D


def run_norm_gate(
    x_TD: Tensor, gate_TD: Tensor, bias_D: Tensor | None, norm: Norm, dropout: Dropout | None
) -> Tensor:
    """The norm of x times SiLU(gate + bias), after dropout, in the type of the gate.

    A row of x may have several dimensions. The gate has at least as many columns as x.
    """
    total, width = x_TD.shape[0], math.prod(x_TD.shape[1:])
    out_TD = gate_TD.new_empty(total, width)
    rows, tile = _row_tile(width, norm.centred)
    draws_T, numbers = _drawn(dropout)
    if total:
        _NORM_GATE(
            (_ceil(total, rows),),
            tile,
            (),
            (x_TD, gate_TD, bias_D, draws_T, out_TD),
            (total, width, gate_TD.stride(0), norm.eps, *numbers),
        )
    return out_TD


def run_norm_gate_backward(
    x_TD: Tensor,
    gate_TD: Tensor,
    bias_D: Tensor | None,
    norm: Norm,
    dropout: Dropout | None,
    grad_out_TD: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the gate before its bias and SiLU."""
    total, width = x_TD.shape[0], math.prod(x_TD.shape[1:])
    grad_x_TD = torch.empty_like(x_TD)
    grad_gate_TD = gate_TD.new_empty(total, width)
    rows, tile = _row_tile(width, norm.centred)
    draws_T, numbers = _drawn(dropout)
    if total:
        _NORM_GATE_BACKWARD(
            (_ceil(total, rows),),
            tile,
            (),
            (x_TD, gate_TD, bias_D, draws_T, grad_out_TD, grad_x_TD, grad_gate_TD),
            (total, width, gate_TD.stride(0), norm.eps, *numbers),
        )
    return grad_x_TD, grad_gate_TD


def run_silu(mixed_TW: Tensor, bias_W: Tensor | None, gate_width: int) -> Tensor:
    """SiLU(mixed + bias) of the columns after those of the gate."""
    total, width = mixed_TW.shape
    out_TC = mixed_TW.new_empty(total, width - gate_width)
    rows, columns, tile = _column_tile(width - gate_width)
    if total:
        grid = (_ceil(total, rows), _ceil(width - gate_width, columns))
        _SILU(grid, tile, (), (mixed_TW, bias_W, out_TC), (total, width, gate_width))
    return out_TC


def run_silu_backward(
    mixed_TW: Tensor, bias_W: Tensor | None, grads: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The gradient of all projections side by side, and of their bias.

    `grads` are those of the gate before its SiLU, and of values, queries and keys after theirs; a
    row may have several dimensions.
    """
    total, width = mixed_TW.shape
    widths = [math.prod(grad.shape[1:]) for grad in grads]
    rows, columns, tile = _column_tile(min(widths), _BIAS_ROWS)
    parts = _ceil(total, rows)
    blocks = sum(_ceil(own, columns) for own in widths)
    out_TW = torch.empty_like(mixed_TW)
    sums_PW = None
    if bias_W is not None:
        sums_PW = mixed_TW.new_empty(parts, width, dtype=torch.float32)
    if total:
        tensors = (mixed_TW, bias_W, *grads, out_TW, sums_PW)
        _SILU_BACKWARD((parts, blocks), tile, (), tensors, (total, *widths[:3]))
    return out_TW, None if sums_PW is None else sums_PW.sum(0)


def run_gated_silu(mixed_TW: Tensor) -> Tensor:
    """SiLU of the first half of the columns times the second half."""
    total, width = len(mixed_TW), mixed_TW.shape[1] // 2
    out_TC = mixed_TW.new_empty(total, width)
    rows, columns, tile = _column_tile(width)
    if total:
        grid = (_ceil(total, rows), _ceil(width, columns))
        _GATED_SILU(grid, tile, (), (mixed_TW, out_TC), (total, width))
    return out_TC


def run_gated_silu_backward(mixed_TW: Tensor, grad_out_TC: Tensor) -> Tensor:
    """The gradient of both halves side by side."""
    total, width = grad_out_TC.shape
    out_TW = torch.empty_like(mixed_TW)
    rows, columns, tile = _column_tile(width)
    if total:
        grid = (_ceil(total, rows), _ceil(width, columns))
        _GATED_SILU_BACKWARD(grid, tile, (), (mixed_TW, grad_out_TC, out_TW), (total, width))
    return out_TW


def sum_by_position(grad_TD: Tensor, positions_T: Tensor, num_positions: int) -> Tensor:
    """(N, D) float32: for each position the sum of its rows, in their order."""
    sorted_T, order_T = torch.sort(positions_T, stable=True)
    edges_N = torch.arange(num_positions + 1, device=positions_T.device)
    starts_N = torch.searchsorted(sorted_T, edges_N)
    width = grad_TD.shape[1]
    out_ND = grad_TD.new_empty(num_positions, width, dtype=torch.float32)
    grid = (num_positions, _ceil(width, _POSITION_COLUMNS))
    tile = constants(R=_POSITION_ROWS, D=_POSITION_COLUMNS)
    _SUM_BY_POSITION(grid, tile, (), (grad_TD, order_T, starts_N, out_ND), (width,))
    return out_ND
