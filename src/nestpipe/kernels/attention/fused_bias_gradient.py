"""Gradients of the bias tables, where pairs of one tile have many buckets.

Most tiles have one or two buckets of time and no distance of their own: the pass of the queries
sums those, `is_easy` tells which. The others are computed again, by `cuda/bias_gradient.cu` where
it can (`find_hard_tiles` tells it which), else by `sum_bias_gradients` here, its twin. A program
has every so many blocks of queries of one head and adds up a part of its own; `add_parts` adds
those in order. As in the other passes, sums are without the slope's factor 1/2 and without 1/norm.

The twin has no memory that threads share and address as they like:

- Distance: the tile is written to a scratch pad and read again with a shift per query, so that
  pairs of one distance lie in one column.
- Time: the times of a tile's rows tell which buckets it can hold. Each is summed by itself.
"""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from nestpipe.kernels.attention.fused_pairs import (
    add_biases,
    half_silu_and_slope,
    is_easy,
    is_near,
    keys_of_queries,
    kind_of,
    masked_keys,
    sample_rows,
    time_bucket,
    time_passed,
    visible,
)

# Shapes: B samples, H heads, M queries and N keys of a tile, A width of queries and keys, V width
# of values, P and Q buckets of the biases, X parts


@triton.jit(do_not_specialize=["side", "samples", "blocks", "window"])
def sum_bias_gradients(
    q_HTA,
    k_HTA,
    v_HTV,
    grad_HTV,
    grad_position_XP,
    grad_time_XQ,
    scratch_XMN,
    offsets_B,
    num_targets_B,
    half_position_HP,
    half_time_HQ,
    times_T,
    short_T,
    kinds_BXY,
    side,
    half_scale,
    window,
    samples,
    blocks,
    A_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    FAST: tl.constexpr,
):
    """Writes this program's part of the gradients of one head; `grad_position_XP` has zeros."""
    head = tl.program_id(1)
    part = head * tl.num_programs(0) + tl.program_id(0)
    far_M = tl.zeros([M], tl.float32)
    time_Q = tl.zeros([Q_BLOCK], tl.float32)
    for item in range(tl.program_id(0), samples * blocks, tl.num_programs(0)):
        sample = item % samples
        start, length, history = sample_rows(offsets_B, num_targets_B, sample)
        first = (tl.cdiv(length, M) - 1 - item // samples) * M
        stop = min(first + M, length)
        left, full_start, full_stop, own, num_left, num_right, num_masked = keys_of_queries(
            first, stop, history, window, M, N
        )
        num_tiles = num_masked + (full_stop - full_start) // N
        if first < 0:
            num_tiles = 0
            first = 0
        query_M = first + tl.arange(0, M)
        q_MA = q_HTA.load([head, start + first, 0]).reshape(M, A_BLOCK)
        grad_MV = grad_HTV.load([head, start + first, 0]).reshape(M, V_BLOCK)
        for number in range(num_tiles):
            masked = masked_keys(number, left, full_stop, own, num_left, num_right, N)
            key = tl.where(number < num_masked, masked, full_start + (number - num_masked) * N)
            kind = kind_of(kinds_BXY, sample, side, length, first, key, M, N)
            near = is_near(first, key, history, half_position_HP, P, N)
            if (number < num_masked) | (not is_easy(near, kind)):
                key_N = key + tl.arange(0, N)
                k_NA = k_HTA.load([head, start + key, 0]).reshape(N, A_BLOCK)
                v_NV = v_HTV.load([head, start + key, 0]).reshape(N, V_BLOCK)
                score_MN = tl.dot(q_MA, k_NA.T, input_precision="ieee")
                grad_MN = tl.dot(grad_MV, v_NV.T, input_precision="ieee")
                half_MN = add_biases(
                    score_MN, half_scale, query_M[:, None], key_N[None, :], key, near, kind, start,
                    length, history, head, half_position_HP, half_time_HQ, times_T, short_T,
                    P, Q, FAST,
                )  # fmt: skip
                _, slope_MN = half_silu_and_slope(half_MN, FAST)
                seen_MN = visible(query_M[:, None], key_N[None, :], length, history, window)
                grad_MN = tl.where(seen_MN, grad_MN * slope_MN, 0.0)
                if half_time_HQ is not None:
                    time_Q += _by_time(
                        grad_MN, query_M, key_N, kind, length, times_T + start, Q, Q_BLOCK
                    )  # fmt: skip
                if half_position_HP is not None:
                    if near:
                        far_M += _by_distance(
                            grad_MN, query_M, key_N, first, key, history,
                            grad_position_XP + part * P, scratch_XMN + part * M * N, P, M, N,
                        )  # fmt: skip
                    else:
                        far_M += tl.sum(grad_MN, 1)
    if half_time_HQ is not None:
        bucket_Q = tl.arange(0, Q_BLOCK)
        place_Q = grad_time_XQ + part * Q + bucket_Q
        tl.store(place_Q, time_Q, mask=bucket_Q < Q)
    if half_position_HP is not None:
        tl.debug_barrier()
        last = grad_position_XP + part * P + P - 1
        tl.store(last, tl.load(last) + tl.sum(far_M, 0))


@triton.jit
def _by_time(
    grad_MN,
    query_M,
    key_N,
    kind,
    length,
    times,
    Q: tl.constexpr,
    Q_BLOCK: tl.constexpr,
):
    """(Q_BLOCK,) sums of a tile's gradients by bucket of time."""
    bucket_Q = tl.arange(0, Q_BLOCK)
    sums_Q = tl.zeros([Q_BLOCK], tl.float32)
    lowest, highest = kind & 0xFF, (kind >> 8) & 0xFF
    if lowest == highest:
        sums_Q += tl.where(bucket_Q == lowest, tl.sum(tl.sum(grad_MN, 1), 0), 0.0)
    else:
        passed_MN = time_passed(times, query_M[:, None], key_N[None, :], length)
        found_MN = time_bucket(passed_MN, Q)
        for bucket in range(lowest, highest + 1):
            sum_M = tl.sum(tl.where(found_MN == bucket, grad_MN, 0.0), 1)
            sums_Q += tl.where(bucket_Q == bucket, tl.sum(sum_M, 0), 0.0)
    return sums_Q


@triton.jit
def _by_distance(
    grad_MN,
    query_M,
    key_N,
    first,
    key,
    history,
    sums_P,
    scratch_MN,
    P: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Adds columns of one distance to `sums_P`; gives back what belongs to its last column."""
    row_M = query_M - first
    place_MN = scratch_MN + row_M[:, None] * N + (key_N - key)[None, :]
    # A candidate is at distance 0 from itself, but not on the line of that distance.
    itself_MN = (query_M[:, None] == key_N[None, :]) & (query_M >= history)[:, None]
    own = tl.sum(tl.sum(tl.where(itself_MN, grad_MN, 0.0), 1), 0)
    tl.store(place_MN, tl.where(itself_MN, 0.0, grad_MN))
    tl.debug_barrier()
    nearest = max(min(first, history) - (key + N - 1), 0)
    rest = tl.zeros([], tl.float32)
    for part in tl.static_range(0, (M + 2 * N - 2) // N):
        distance_N = nearest + part * N + tl.arange(0, N)
        shifted_MN = tl.minimum(query_M, history)[:, None] - distance_N[None, :] - key
        there_MN = (shifted_MN >= 0) & (shifted_MN < N)
        line_MN = scratch_MN + row_M[:, None] * N + shifted_MN
        sums_N = tl.sum(tl.load(line_MN, mask=there_MN, other=0.0), 0)
        sums_N += tl.where(distance_N == 0, own, 0.0)
        close_N = distance_N < P - 1
        before_N = tl.load(sums_P + distance_N, mask=close_N, other=0.0)
        tl.store(sums_P + distance_N, before_N + sums_N, mask=close_N)
        rest += tl.sum(tl.where(close_N, 0.0, sums_N), 0)
    tl.debug_barrier()
    return tl.where(tl.arange(0, M) == 0, rest, 0.0)


@triton.jit(do_not_specialize=["side", "blocks", "columns", "window"])
def find_hard_tiles(
    hard_BXY,
    offsets_B,
    num_targets_B,
    half_position_HP,
    kinds_BXY,
    side,
    window,
    blocks,
    columns,
    P: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    Y: tl.constexpr,
):
    """Writes 1 for each tile that holds visible pairs and is not easy, else 0."""
    sample, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    _, length, history = sample_rows(offsets_B, num_targets_B, sample)
    first = block * M
    stop = min(first + M, length)
    left, full_start, full_stop, own, _, num_right, _ = keys_of_queries(
        first, stop, history, window, M, N
    )
    for begin in range(0, columns, Y):
        number_Y = begin + tl.arange(0, Y)
        key_Y = number_Y * N
        kind_Y = kind_of(kinds_BXY, sample, side, length, first, key_Y, M, N)
        near_Y = is_near(first, key_Y, history, half_position_HP, P, N)
        full_Y = (key_Y >= full_start) & (key_Y < full_stop)
        seen_Y = (key_Y >= left) & (key_Y < full_stop + num_right * N)
        seen_Y = (seen_Y | ((key_Y >= own) & (key_Y < stop))) & (first < length)
        hard_Y = seen_Y & ((full_Y & is_easy(near_Y, kind_Y)) == 0)
        place_Y = hard_BXY + tl.program_id(0) * columns + number_Y
        tl.store(place_Y, hard_Y.to(tl.int8), mask=number_Y < columns)


@triton.jit(do_not_specialize=["parts", "easy_parts"])
def add_parts(
    position_XP,
    time_XQ,
    easy_XQ,
    grad_position_HP,
    grad_time_HQ,
    factor,
    parts,
    easy_parts,
    P: tl.constexpr,
    Q: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    X: tl.constexpr,
    W: tl.constexpr,
):
    """Adds up the parts of one head, X at a time: W columns by distance, or all by time."""
    head = tl.program_id(0)
    easy_HXQ = easy_XQ + head * easy_parts * Q_BLOCK
    if tl.program_id(1) == tl.num_programs(1) - 1:
        if grad_time_HQ is not None:
            bucket_Q = tl.arange(0, Q_BLOCK)
            sum_Q = _sum_of(time_XQ + head * parts * Q, parts, Q, 0, X, Q_BLOCK)
            sum_Q += _sum_of(easy_HXQ, easy_parts, Q_BLOCK, 0, X, Q_BLOCK)
            value_Q = (sum_Q * factor).to(grad_time_HQ.dtype.element_ty)
            tl.store(grad_time_HQ + head * Q + bucket_Q, value_Q, mask=bucket_Q < Q)
    elif grad_position_HP is not None:
        first = tl.program_id(1) * W
        column_W = first + tl.arange(0, W)
        sum_W = _sum_of(position_XP + head * parts * P, parts, P, first, X, W)
        if first + W >= P:  # easy tiles are far away
            easy = tl.sum(_sum_of(easy_HXQ, easy_parts, Q_BLOCK, 0, X, Q_BLOCK), 0)
            sum_W += tl.where(column_W == P - 1, easy, 0.0)
        value_W = (sum_W * factor).to(grad_position_HP.dtype.element_ty)
        tl.store(grad_position_HP + head * P + column_W, value_W, mask=column_W < P)


@triton.jit
def _sum_of(parts_XW, parts, columns, first, X: tl.constexpr, W: tl.constexpr):
    """(W,) sums of the columns from `first` on, in one order."""
    column_W = first + tl.arange(0, W)
    sum_XW = tl.zeros([X, W], tl.float32)
    for begin in range(0, parts, X):
        part_X = begin + tl.arange(0, X)
        there_XW = (part_X < parts)[:, None] & (column_W < columns)[None, :]
        place_XW = parts_XW + part_X[:, None] * columns + column_W[None, :]
        sum_XW += tl.load(place_XW, mask=there_XW, other=0.0)
    return tl.sum(sum_XW, 0)
