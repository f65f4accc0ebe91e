"""Starts the kernels of a block: tiles, outputs, and the last step of sums over rows."""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from nestpipe.kernels.block import kernels
from nestpipe.kernels.block.fused import Dropout, Norm

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


def _row_tile(width: int) -> dict[str, int]:
    """Whole rows: how many, how wide, and by how many warps."""
    columns = max(16, triton.next_power_of_2(width))
    rows = max(1, min(16, _TILE_VALUES // columns))
    return {"R": rows, "D": columns, "num_warps": 4 if columns <= 4096 else 8}


def _column_tile(width: int) -> dict[str, int]:
    columns = max(16, min(_COLUMNS, triton.next_power_of_2(width)))
    return {"R": _TILE_VALUES // columns, "C": columns, "num_warps": 4}


def _drawn(dropout: Dropout | None) -> dict[str, Any]:
    """Arguments of dropout; without it the kernels have none."""
    if dropout is None:
        return {"draws_T": None, "site_bits": 0, "limit": 0, "factor": 1.0}
    drawn = {"draws_T": dropout.draws_T, "site_bits": dropout.site_bits}
    return {**drawn, "limit": dropout.limit, "factor": dropout.factor}


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
    tile = _row_tile(width)
    if total:
        with _device_of(x_TD):
            kernels.add_norm_forward[(triton.cdiv(total, tile["R"]),)](
                x_TD,
                added_TD,
                weight_D,
                bias_D,
                summed_TD=summed_TD,
                out_TD=out_TD,
                total=total,
                width=width,
                eps=norm.eps,
                CENTRE=norm.centred,
                **_drawn(dropout),
                **tile,
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
    tile = _row_tile(width) | {"num_warps": 8}  # two sums beside the rows: registers for both
    rows = max(_SUM_ROWS, tile["R"])
    parts = triton.cdiv(total, rows)
    grad_x_TD = torch.empty_like(summed_TD)
    grad_added_TD = None
    if added_dtype is not None and added_dtype != summed_TD.dtype:
        grad_added_TD = torch.empty_like(summed_TD, dtype=added_dtype)
    sums_2PD = None
    if weight_D is not None:
        sums_2PD = summed_TD.new_empty(2, parts, width, dtype=torch.float32)
    if total:
        with _device_of(summed_TD):
            kernels.add_norm_backward[(parts,)](
                summed_TD,
                weight_D,
                grad_summed_TD=grad_summed_TD,
                grad_out_TD=grad_out_TD,
                grad_x_TD=grad_x_TD,
                grad_added_TD=grad_added_TD,
                weight_PD=None if sums_2PD is None else sums_2PD[0],
                bias_PD=None if sums_2PD is None else sums_2PD[1],
                total=total,
                width=width,
                eps=norm.eps,
                CENTRE=norm.centred,
                ROWS=rows,
                **_drawn(dropout),
                **tile,
            )
    grad_weight_D, grad_bias_D = (None, None) if sums_2PD is None else sums_2PD.sum(1)
    if added_dtype == summed_TD.dtype:
        grad_added_TD = grad_x_TD
    return grad_x_TD, grad_added_TD, grad_weight_D, grad_bias_D


def run_norm_gate(
    x_TD: Tensor, gate_TD: Tensor, bias_D: Tensor | None, norm: Norm, dropout: Dropout | None
) -> Tensor:
    """The norm of x times SiLU(gate + bias), after dropout, in the type of the gate."""
    total, width = x_TD.shape
    out_TD = torch.empty_like(x_TD, dtype=gate_TD.dtype)
    tile = _row_tile(width)
    if total:
        with _device_of(x_TD):
            kernels.norm_gate_forward[(triton.cdiv(total, tile["R"]),)](
                x_TD,
                gate_TD,
                bias_D,
                out_TD=out_TD,
                total=total,
                width=width,
                gate_stride=gate_TD.stride(0),
                eps=norm.eps,
                CENTRE=norm.centred,
                **_drawn(dropout),
                **tile,
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
    total, width = x_TD.shape
    grad_x_TD = torch.empty_like(x_TD)
    grad_gate_TD = torch.empty_like(x_TD, dtype=gate_TD.dtype)
    tile = _row_tile(width)
    if total:
        with _device_of(x_TD):
            kernels.norm_gate_backward[(triton.cdiv(total, tile["R"]),)](
                x_TD,
                gate_TD,
                bias_D,
                grad_out_TD=grad_out_TD,
                grad_x_TD=grad_x_TD,
                grad_gate_TD=grad_gate_TD,
                total=total,
                width=width,
                gate_stride=gate_TD.stride(0),
                eps=norm.eps,
                CENTRE=norm.centred,
                **_drawn(dropout),
                **tile,
            )
    return grad_x_TD, grad_gate_TD


def run_silu(mixed_TW: Tensor, bias_W: Tensor | None, gate_width: int) -> Tensor:
    """SiLU(mixed + bias) of the columns after those of the gate."""
    total, width = mixed_TW.shape
    out_TC = mixed_TW.new_empty(total, width - gate_width)
    tile = _column_tile(width - gate_width)
    grid = (triton.cdiv(total, tile["R"]), triton.cdiv(width - gate_width, tile["C"]))
    if total:
        with _device_of(mixed_TW):
            kernels.silu_forward[grid](mixed_TW, bias_W, out_TC, total, width, gate_width, **tile)
    return out_TC


def run_silu_backward(
    mixed_TW: Tensor, bias_W: Tensor | None, grads: Sequence[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The gradient of all projections side by side, and of their bias.

    `grads` are those of the gate before its SiLU, and of values, queries and keys after theirs.
    """
    total, width = mixed_TW.shape
    widths = [grad.shape[1] for grad in grads]
    tile = _column_tile(min(widths))
    rows = max(_BIAS_ROWS, tile["R"])
    parts = triton.cdiv(total, rows)
    blocks = sum(triton.cdiv(own, tile["C"]) for own in widths)
    out_TW = torch.empty_like(mixed_TW)
    sums_PW = None
    if bias_W is not None:
        sums_PW = mixed_TW.new_empty(parts, width, dtype=torch.float32)
    if total:
        with _device_of(mixed_TW):
            kernels.silu_backward[(parts, blocks)](
                mixed_TW,
                bias_W,
                *grads,
                out_TW,
                sums_PW,
                total,
                *widths[:3],
                ROWS=rows,
                **tile,
            )
    return out_TW, None if sums_PW is None else sums_PW.sum(0)


def run_gated_silu(mixed_TW: Tensor) -> Tensor:
    """SiLU of the first half of the columns times the second half."""
    total, width = len(mixed_TW), mixed_TW.shape[1] // 2
    out_TC = mixed_TW.new_empty(total, width)
    tile = _column_tile(width)
    grid = (triton.cdiv(total, tile["R"]), triton.cdiv(width, tile["C"]))
    if total:
        with _device_of(mixed_TW):
            kernels.gated_silu_forward[grid](mixed_TW, out_TC, total, width, **tile)
    return out_TC


def run_gated_silu_backward(mixed_TW: Tensor, grad_out_TC: Tensor) -> Tensor:
    """The gradient of both halves side by side."""
    total, width = grad_out_TC.shape
    out_TW = torch.empty_like(mixed_TW)
    tile = _column_tile(width)
    grid = (triton.cdiv(total, tile["R"]), triton.cdiv(width, tile["C"]))
    if total:
        with _device_of(mixed_TW):
            kernels.gated_silu_backward[grid](mixed_TW, grad_out_TC, out_TW, total, width, **tile)
    return out_TW


def sum_by_position(grad_TD: Tensor, positions_T: Tensor, num_positions: int) -> Tensor:
    """(N, D) float32: for each position the sum of its rows, in their order."""
    sorted_T, order_T = torch.sort(positions_T, stable=True)
    edges_N = torch.arange(num_positions + 1, device=positions_T.device)
    starts_N = torch.searchsorted(sorted_T, edges_N)
    width = grad_TD.shape[1]
    out_ND = grad_TD.new_empty(num_positions, width, dtype=torch.float32)
    grid = (num_positions, triton.cdiv(width, _POSITION_COLUMNS))
    with _device_of(grad_TD):
        kernels.sum_rows_by_position[grid](
            grad_TD, order_T, starts_N, out_ND, width, R=_POSITION_ROWS, D=_POSITION_COLUMNS
        )
    return out_ND


def _device_of(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
