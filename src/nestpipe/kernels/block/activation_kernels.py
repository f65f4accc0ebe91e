"""Kernels of activations between two products: SiLU of packed projections, and a gated SiLU."""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from nestpipe.kernels.block.norm_kernels import silu_and_slope

# Shapes: T rows of all samples together, R rows and C columns of a tile, W columns of all parts, U
# columns of the gate, P parts of a sum


@triton.jit(do_not_specialize=["total"])
def silu_forward(
    mixed_TW,
    bias_W,
    out_TC,
    total,
    width,
    gate_width,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Writes SiLU(mixed + bias) of all columns but those of the gate."""
    row_R1 = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    column_1C = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    out_width = width - gate_width
    inside_RC = (row_R1 < total) & (column_1C < out_width)
    from_RC = row_R1 * width + gate_width + column_1C
    x_RC = tl.load(mixed_TW + from_RC, mask=inside_RC, other=0).to(tl.float32)
    if bias_W is not None:
        bias_1C = tl.load(bias_W + gate_width + column_1C, mask=column_1C < out_width, other=0)
        x_RC += bias_1C.to(tl.float32)
    made_RC = (x_RC * tl.sigmoid(x_RC)).to(out_TC.dtype.element_ty)
    tl.store(out_TC + row_R1 * out_width + column_1C, made_RC, mask=inside_RC)


@triton.jit
def tile_of(grad_TC, row_R1, first, width, total, R: tl.constexpr, C: tl.constexpr):
    """A tile of one part's gradient, from its column `first` on."""
    column_1C = first + tl.arange(0, C)[None, :]
    inside_RC = (row_R1 < total) & (column_1C < width)
    return tl.load(grad_TC + row_R1 * width + column_1C, mask=inside_RC, other=0).to(tl.float32)


@triton.jit(do_not_specialize=["total"])
def silu_backward(
    mixed_TW,
    bias_W,
    grad_gate_TU,
    grad_value_TC,
    grad_query_TC,
    grad_key_TC,
    out_TW,
    bias_PW,
    total,
    gate_width,
    value_width,
    query_width,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Writes the gradient of all columns side by side, and parts of the bias' sum.

    That of the gate comes as it is: its SiLU belongs to `norm_gate_backward`.
    """
    gate_blocks, value_blocks = tl.cdiv(gate_width, C), tl.cdiv(value_width, C)
    query_blocks = tl.cdiv(query_width, C)
    width = gate_width + value_width + 2 * query_width
    part, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    own_width, start, first = gate_width, 0, block * C
    if block >= gate_blocks + value_blocks + query_blocks:
        own_width, start = query_width, gate_width + value_width + query_width
        first = (block - gate_blocks - value_blocks - query_blocks) * C
    elif block >= gate_blocks + value_blocks:
        own_width, start = query_width, gate_width + value_width
        first = (block - gate_blocks - value_blocks) * C
    elif block >= gate_blocks:
        own_width, start = value_width, gate_width
        first = (block - gate_blocks) * C
    column_1C = first + tl.arange(0, C)[None, :]
    bias_1C = tl.zeros([1, C], tl.float32)
    if bias_W is not None:
        bias_1C += tl.load(bias_W + start + column_1C, mask=column_1C < own_width, other=0)
    sum_RC = tl.zeros([R, C], tl.float32)
    for step in range(0, ROWS, R):
        row_R1 = (part * ROWS + step + tl.arange(0, R))[:, None]
        inside_RC = (row_R1 < total) & (column_1C < own_width)
        at_RC = row_R1 * width + start + column_1C
        if block < gate_blocks:
            grad_RC = tile_of(grad_gate_TU, row_R1, first, own_width, total, R, C)
        else:
            if block < gate_blocks + value_blocks:
                grad_RC = tile_of(grad_value_TC, row_R1, first, own_width, total, R, C)
            elif block < gate_blocks + value_blocks + query_blocks:
                grad_RC = tile_of(grad_query_TC, row_R1, first, own_width, total, R, C)
            else:
                grad_RC = tile_of(grad_key_TC, row_R1, first, own_width, total, R, C)
            x_RC = tl.load(mixed_TW + at_RC, mask=inside_RC, other=0).to(tl.float32) + bias_1C
            _, slope_RC = silu_and_slope(x_RC)
            grad_RC *= slope_RC
        sum_RC += grad_RC
        tl.store(out_TW + at_RC, grad_RC.to(out_TW.dtype.element_ty), mask=inside_RC)
    if bias_W is not None:
        column_C = first + tl.arange(0, C)
        at_C = part * width + start + column_C
        tl.store(bias_PW + at_C, tl.sum(sum_RC, 0), mask=column_C < own_width)


@triton.jit(do_not_specialize=["total"])
def gated_silu_forward(mixed_TW, out_TC, total, width, R: tl.constexpr, C: tl.constexpr):
    """Writes SiLU of the first half of the columns times the second."""
    row_R1 = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    column_1C = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    inside_RC = (row_R1 < total) & (column_1C < width)
    from_RC = row_R1 * 2 * width + column_1C
    x_RC = tl.load(mixed_TW + from_RC, mask=inside_RC, other=0).to(tl.float32)
    straight_RC = tl.load(mixed_TW + from_RC + width, mask=inside_RC, other=0).to(tl.float32)
    made_RC = x_RC * tl.sigmoid(x_RC) * straight_RC
    at_RC = row_R1 * width + column_1C
    tl.store(out_TC + at_RC, made_RC.to(out_TC.dtype.element_ty), mask=inside_RC)


@triton.jit(do_not_specialize=["total"])
def gated_silu_backward(
    mixed_TW, grad_out_TC, out_TW, total, width, R: tl.constexpr, C: tl.constexpr
):
    """Writes the gradients of both halves side by side."""
    row_R1 = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    column_1C = (tl.program_id(1) * C + tl.arange(0, C))[None, :]
    inside_RC = (row_R1 < total) & (column_1C < width)
    from_RC = row_R1 * 2 * width + column_1C
    x_RC = tl.load(mixed_TW + from_RC, mask=inside_RC, other=0).to(tl.float32)
    straight_RC = tl.load(mixed_TW + from_RC + width, mask=inside_RC, other=0).to(tl.float32)
    at_RC = row_R1 * width + column_1C
    grad_RC = tl.load(grad_out_TC + at_RC, mask=inside_RC, other=0).to(tl.float32)
    active_RC, slope_RC = silu_and_slope(x_RC)
    first_RC = (grad_RC * straight_RC * slope_RC).to(out_TW.dtype.element_ty)
    second_RC = (grad_RC * active_RC).to(out_TW.dtype.element_ty)
    tl.store(out_TW + from_RC, first_RC, mask=inside_RC)
    tl.store(out_TW + from_RC + width, second_RC, mask=inside_RC)
