"""Kernels of a block: residual and norm, norm and gate, activations, sums of rows by position.

A program holds whole rows, so that a row's result is a function of that row. Sums over rows are
made of parts of a fixed number of rows, which are then added in order: there is no atomic.
"""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

# Shapes: T rows of all samples together, R rows of a tile, D columns of a row (a power of two),
# P parts of a sum, N positions


@triton.jit
def mixed_bits(x):
    """The finish of splitmix64, as `models/draws.py` has it; x is uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def dropout_factor(draws_T, row_R1, column_1D, total, site_bits, limit, factor):
    """(R, D) 0 or `factor`: `dropout` of `models/draws.py`, number by number."""
    state_R1 = tl.load(draws_T + row_R1, mask=row_R1 < total, other=0) + site_bits.to(tl.int64)
    site_R1 = mixed_bits(state_R1.to(tl.uint64, bitcast=True))
    # A hash has four draws of 16 bits each, the lowest first.
    word_1D = (column_1D // 4 + 1).to(tl.uint64)
    bits_RD = mixed_bits(site_R1 + word_1D * 0x9E3779B97F4A7C15)
    shift_1D = ((column_1D % 4) * 16).to(tl.uint64)
    quarter_RD = ((bits_RD >> shift_1D) & 0xFFFF).to(tl.int32)
    signed_RD = tl.where(quarter_RD >= 32768, quarter_RD - 65536, quarter_RD)
    return tl.where(signed_RD <= limit, factor, 0.0)


@triton.jit
def normed_rows(x_RD, inside_RD, width, eps, CENTRE: tl.constexpr):
    """Rows of mean 0 (where CENTRE) and mean square 1, and what they were multiplied by."""
    if CENTRE:
        mean_R1 = (tl.sum(x_RD, 1) / width)[:, None]
        x_RD = tl.where(inside_RD, x_RD - mean_R1, 0.0)
    square_R = tl.sum(x_RD * x_RD, 1) / width
    factor_R1 = (1.0 / tl.sqrt(square_R + eps))[:, None]
    return x_RD * factor_R1, factor_R1


@triton.jit
def norm_gradient(grad_RD, normed_RD, factor_R1, inside_RD, width, CENTRE: tl.constexpr):
    """What a gradient of normed rows is for the rows."""
    share_R1 = (tl.sum(grad_RD * normed_RD, 1) / width)[:, None]
    own_RD = grad_RD - normed_RD * share_R1
    if CENTRE:
        own_RD -= (tl.sum(grad_RD, 1) / width)[:, None]
    return tl.where(inside_RD, own_RD * factor_R1, 0.0)


@triton.jit
def silu_and_slope(x):
    """SiLU of x, and its derivative."""
    share = tl.sigmoid(x)
    return x * share, share * (1.0 + x * (1.0 - share))


@triton.jit(do_not_specialize=["total", "site_bits", "limit"])
def add_norm_forward(
    x_TD,
    added_TD,
    weight_D,
    bias_D,
    draws_T,
    summed_TD,
    out_TD,
    total,
    width,
    eps,
    site_bits,
    limit,
    factor,
    R: tl.constexpr,
    D: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """Writes x + added, where there is something to add, and the norm of that."""
    row_R1 = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    column_1D = tl.arange(0, D)[None, :]
    inside_RD = (row_R1 < total) & (column_1D < width)
    at_RD = row_R1 * width + column_1D
    x_RD = tl.load(x_TD + at_RD, mask=inside_RD, other=0).to(tl.float32)
    if added_TD is not None:
        x_RD += tl.load(added_TD + at_RD, mask=inside_RD, other=0).to(tl.float32)
        tl.store(summed_TD + at_RD, x_RD.to(summed_TD.dtype.element_ty), mask=inside_RD)
    out_RD, _ = normed_rows(x_RD, inside_RD, width, eps, CENTRE)
    if weight_D is not None:
        out_RD *= tl.load(weight_D + column_1D, mask=column_1D < width, other=0).to(tl.float32)
        out_RD += tl.load(bias_D + column_1D, mask=column_1D < width, other=0).to(tl.float32)
    if draws_T is not None:
        out_RD *= dropout_factor(draws_T, row_R1, column_1D, total, site_bits, limit, factor)
    tl.store(out_TD + at_RD, out_RD.to(out_TD.dtype.element_ty), mask=inside_RD)


@triton.jit(do_not_specialize=["total", "site_bits", "limit"])
def add_norm_backward(
    summed_TD,
    weight_D,
    draws_T,
    grad_summed_TD,
    grad_out_TD,
    grad_x_TD,
    grad_added_TD,
    weight_PD,
    bias_PD,
    total,
    width,
    eps,
    site_bits,
    limit,
    factor,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """Writes the gradient of x, also in the type of `added`, and parts of the weights' sums."""
    part = tl.program_id(0).to(tl.int64)
    column_1D = tl.arange(0, D)[None, :]
    sum_weight_RD = tl.zeros([R, D], tl.float32)
    sum_bias_RD = tl.zeros([R, D], tl.float32)
    for first in range(0, ROWS, R):
        row_R1 = (part * ROWS + first + tl.arange(0, R))[:, None]
        inside_RD = (row_R1 < total) & (column_1D < width)
        at_RD = row_R1 * width + column_1D
        x_RD = tl.load(summed_TD + at_RD, mask=inside_RD, other=0).to(tl.float32)
        grad_RD = tl.load(grad_out_TD + at_RD, mask=inside_RD, other=0).to(tl.float32)
        normed_RD, factor_R1 = normed_rows(x_RD, inside_RD, width, eps, CENTRE)
        if draws_T is not None:
            grad_RD *= dropout_factor(draws_T, row_R1, column_1D, total, site_bits, limit, factor)
        if weight_D is not None:
            sum_weight_RD += grad_RD * normed_RD
            sum_bias_RD += grad_RD
            grad_RD *= tl.load(weight_D + column_1D, mask=column_1D < width, other=0).to(tl.float32)
        own_RD = norm_gradient(grad_RD, normed_RD, factor_R1, inside_RD, width, CENTRE)
        if grad_summed_TD is not None:
            own_RD += tl.load(grad_summed_TD + at_RD, mask=inside_RD, other=0).to(tl.float32)
        tl.store(grad_x_TD + at_RD, own_RD.to(grad_x_TD.dtype.element_ty), mask=inside_RD)
        if grad_added_TD is not None:
            tl.store(
                grad_added_TD + at_RD, own_RD.to(grad_added_TD.dtype.element_ty), mask=inside_RD
            )
    if weight_D is not None:
        column_D = tl.arange(0, D)
        at_D = part * width + column_D
        tl.store(weight_PD + at_D, tl.sum(sum_weight_RD, 0), mask=column_D < width)
        tl.store(bias_PD + at_D, tl.sum(sum_bias_RD, 0), mask=column_D < width)


@triton.jit(do_not_specialize=["total", "site_bits", "limit"])
def norm_gate_forward(
    x_TD,
    gate_TD,
    gate_bias_D,
    draws_T,
    out_TD,
    total,
    width,
    gate_stride,
    eps,
    site_bits,
    limit,
    factor,
    R: tl.constexpr,
    D: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """Writes the norm of x times SiLU(gate), after dropout."""
    row_R1 = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    column_1D = tl.arange(0, D)[None, :]
    inside_RD = (row_R1 < total) & (column_1D < width)
    at_RD = row_R1 * width + column_1D
    x_RD = tl.load(x_TD + at_RD, mask=inside_RD, other=0).to(tl.float32)
    gate_at_RD = row_R1 * gate_stride + column_1D
    gate_RD = tl.load(gate_TD + gate_at_RD, mask=inside_RD, other=0).to(tl.float32)
    if gate_bias_D is not None:
        gate_RD += tl.load(gate_bias_D + column_1D, mask=column_1D < width, other=0).to(tl.float32)
    normed_RD, _ = normed_rows(x_RD, inside_RD, width, eps, CENTRE)
    out_RD = normed_RD * gate_RD * tl.sigmoid(gate_RD)
    if draws_T is not None:
        out_RD *= dropout_factor(draws_T, row_R1, column_1D, total, site_bits, limit, factor)
    tl.store(out_TD + at_RD, out_RD.to(out_TD.dtype.element_ty), mask=inside_RD)


@triton.jit(do_not_specialize=["total", "site_bits", "limit"])
def norm_gate_backward(
    x_TD,
    gate_TD,
    gate_bias_D,
    draws_T,
    grad_out_TD,
    grad_x_TD,
    grad_gate_TD,
    total,
    width,
    gate_stride,
    eps,
    site_bits,
    limit,
    factor,
    R: tl.constexpr,
    D: tl.constexpr,
    CENTRE: tl.constexpr,
):
    """Writes the gradients of x and of the gate before its SiLU."""
    row_R1 = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    column_1D = tl.arange(0, D)[None, :]
    inside_RD = (row_R1 < total) & (column_1D < width)
    at_RD = row_R1 * width + column_1D
    x_RD = tl.load(x_TD + at_RD, mask=inside_RD, other=0).to(tl.float32)
    gate_at_RD = row_R1 * gate_stride + column_1D
    gate_RD = tl.load(gate_TD + gate_at_RD, mask=inside_RD, other=0).to(tl.float32)
    if gate_bias_D is not None:
        gate_RD += tl.load(gate_bias_D + column_1D, mask=column_1D < width, other=0).to(tl.float32)
    grad_RD = tl.load(grad_out_TD + at_RD, mask=inside_RD, other=0).to(tl.float32)
    if draws_T is not None:
        grad_RD *= dropout_factor(draws_T, row_R1, column_1D, total, site_bits, limit, factor)
    normed_RD, factor_R1 = normed_rows(x_RD, inside_RD, width, eps, CENTRE)
    active_RD, slope_RD = silu_and_slope(gate_RD)
    grad_gate_RD = grad_RD * normed_RD * slope_RD
    own_RD = norm_gradient(grad_RD * active_RD, normed_RD, factor_R1, inside_RD, width, CENTRE)
    tl.store(grad_x_TD + at_RD, own_RD.to(grad_x_TD.dtype.element_ty), mask=inside_RD)
    tl.store(grad_gate_TD + at_RD, grad_gate_RD.to(grad_gate_TD.dtype.element_ty), mask=inside_RD)


@triton.jit
def sum_rows_by_position(
    grad_TD,
    order_T,
    starts_N,
    out_ND,
    width,
    R: tl.constexpr,
    D: tl.constexpr,
):
    """Writes the sum of the rows of one position, in their order; `order_T` has them together."""
    position = tl.program_id(0).to(tl.int64)
    column_D = tl.program_id(1) * D + tl.arange(0, D)
    start = tl.load(starts_N + position)
    end = tl.load(starts_N + position + 1)
    sum_D = tl.zeros([D], tl.float32)
    for first in range(start, end, R):
        place_R = first + tl.arange(0, R)
        row_R = tl.load(order_T + place_R, mask=place_R < end, other=0)
        inside_RD = (place_R < end)[:, None] & (column_D < width)[None, :]
        at_RD = row_R[:, None] * width + column_D[None, :]
        sum_D += tl.sum(tl.load(grad_TD + at_RD, mask=inside_RD, other=0).to(tl.float32), 0)
    tl.store(out_ND + position * width + column_D, sum_D, mask=column_D < width)


# Activations between two products.

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
