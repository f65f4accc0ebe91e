"""The fused kernels of HSTU's attention, forward and backward.

Forward: a block of queries adds up what blocks of keys give it, with scores in registers. Keys and
values come through tensor descriptors, which the GPU's copy engine reads ahead. Blocks that all
queries see go through a loop without a mask.

Backward: queries add up their gradient in one pass, keys and values in another. Each pass computes
scores and their gradients again. Every sum has one owner that adds in a fixed order, so the same
input gives the same bits.
"""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from nestpipe.kernels.attention.fused_pairs import (
    add_biases,
    add_by_time,
    half_silu,
    half_silu_and_slope,
    is_near,
    keys_of_queries,
    kind_of,
    locate,
    masked_keys,
    queries_of_keys,
    sample_rows,
    store_rows,
    visible,
    zero_past_end,
)

# Shapes: B samples, H heads, M queries and N keys of a tile, A width of queries and keys, V width
# of values, P and Q buckets of the biases


@triton.jit(do_not_specialize=["side", "units", "heads", "blocks", "group", "window"])
def attend_forward(
    q_HTA,
    k_HTA,
    v_HTV,
    out_THV,
    offsets_B,
    num_targets_B,
    half_position_HP,
    half_time_HQ,
    times_T,
    short_T,
    kinds_BXY,
    side,
    half_scale,
    inverse_norm,
    window,
    units,
    heads,
    blocks,
    group,
    V: tl.constexpr,
    A_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    FAST: tl.constexpr,
):
    """Writes the weighted sums of values of M queries."""
    sample, head, rank = locate(units, heads, blocks, group)
    start, length, history = sample_rows(offsets_B, num_targets_B, sample)
    first = (tl.cdiv(length, M) - 1 - rank) * M
    if first < 0:
        return
    left, full_start, full_stop, own, num_left, num_right, num_masked = keys_of_queries(
        first, min(first + M, length), history, window, M, N
    )
    query_M1 = first + tl.arange(0, M)[:, None]
    q_MA = q_HTA.load([head, start + first, 0]).reshape(M, A_BLOCK)
    sum_MV = tl.zeros([M, V_BLOCK], tl.float32)
    kind = kind_of(kinds_BXY, sample, side, length, first, full_start, M, N)
    for key in range(full_start, full_stop, N):
        next_kind = kind_of(kinds_BXY, sample, side, length, first, key + N, M, N)
        near = is_near(first, key, history, half_position_HP, P, N)
        key_1N = key + tl.arange(0, N)[None, :]
        k_NA = k_HTA.load([head, start + key, 0]).reshape(N, A_BLOCK)
        score_MN = tl.dot(q_MA, k_NA.T, input_precision="ieee")
        half_MN = add_biases(
            score_MN, half_scale, query_M1, key_1N, key, near, kind, start, length, history, head,
            half_position_HP, half_time_HQ, times_T, short_T, P, Q, FAST,
        )  # fmt: skip
        v_NV = v_HTV.load([head, start + key, 0]).reshape(N, V_BLOCK)
        weight_MN = half_silu(half_MN, FAST).to(v_NV.dtype)
        sum_MV = tl.dot(weight_MN, v_NV, sum_MV, input_precision="ieee")
        kind = next_kind
    for number in range(num_masked):
        key = masked_keys(number, left, full_stop, own, num_left, num_right, N)
        kind = kind_of(kinds_BXY, sample, side, length, first, key, M, N)
        near = is_near(first, key, history, half_position_HP, P, N)
        key_1N = key + tl.arange(0, N)[None, :]
        k_NA = k_HTA.load([head, start + key, 0]).reshape(N, A_BLOCK)
        score_MN = tl.dot(q_MA, k_NA.T, input_precision="ieee")
        half_MN = add_biases(
            score_MN, half_scale, query_M1, key_1N, key, near, kind, start, length, history, head,
            half_position_HP, half_time_HQ, times_T, short_T, P, Q, FAST,
        )  # fmt: skip
        seen_MN = visible(query_M1, key_1N, length, history, window)
        v_NV = v_HTV.load([head, start + key, 0]).reshape(N, V_BLOCK)
        v_NV = zero_past_end(v_NV, key, length, N)
        weight_MN = tl.where(seen_MN, half_silu(half_MN, FAST), 0.0).to(v_NV.dtype)
        sum_MV = tl.dot(weight_MN, v_NV, sum_MV, input_precision="ieee")
    store_rows(out_THV, sum_MV * inverse_norm, start, first, length, head, heads, V)


# Shapes: B samples, H heads, M queries and N keys of a tile, A width of queries and keys, V width
# of values, P and Q buckets of the biases


@triton.jit(do_not_specialize=["side", "units", "heads", "blocks", "group", "window"])
def attend_backward_queries(
    q_HTA,
    k_HTA,
    v_HTV,
    grad_HTV,
    grad_q_THA,
    grad_time_XQ,
    offsets_B,
    num_targets_B,
    half_position_HP,
    half_time_HQ,
    times_T,
    short_T,
    kinds_BXY,
    side,
    half_scale,
    inverse_norm,
    window,
    units,
    heads,
    blocks,
    group,
    A: tl.constexpr,
    A_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    FAST: tl.constexpr,
):
    """Writes the gradient of M queries, and sums of their gradients of scores by bucket of time.

    The sums are of those tiles without a mask that `bias_gradient` leaves out.
    """
    sample, head, rank = locate(units, heads, blocks, group)
    start, length, history = sample_rows(offsets_B, num_targets_B, sample)
    first = (tl.cdiv(length, M) - 1 - rank) * M
    bucket_Q = tl.arange(0, Q_BLOCK)
    sums_Q = tl.zeros([Q_BLOCK], tl.float32)
    part = (head * (units // heads) + sample) * blocks + rank
    if first < 0:
        if grad_time_XQ is not None:
            tl.store(grad_time_XQ + part * Q_BLOCK + bucket_Q, sums_Q)
        return
    left, full_start, full_stop, own, num_left, num_right, num_masked = keys_of_queries(
        first, min(first + M, length), history, window, M, N
    )
    query_M1 = first + tl.arange(0, M)[:, None]
    inside_M = first + tl.arange(0, M) < length
    q_MA = q_HTA.load([head, start + first, 0]).reshape(M, A_BLOCK)
    grad_MV = grad_HTV.load([head, start + first, 0]).reshape(M, V_BLOCK)
    sum_MA = tl.zeros([M, A_BLOCK], tl.float32)
    bucket = 0
    run_M = tl.zeros([M], tl.float32)
    kind = kind_of(kinds_BXY, sample, side, length, first, full_start, M, N)
    for key in range(full_start, full_stop, N):
        next_kind = kind_of(kinds_BXY, sample, side, length, first, key + N, M, N)
        near = is_near(first, key, history, half_position_HP, P, N)
        key_1N = key + tl.arange(0, N)[None, :]
        k_NA = k_HTA.load([head, start + key, 0]).reshape(N, A_BLOCK)
        score_MN = tl.dot(q_MA, k_NA.T, input_precision="ieee")
        v_NV = v_HTV.load([head, start + key, 0]).reshape(N, V_BLOCK)
        grad_MN = tl.dot(grad_MV, v_NV.T, input_precision="ieee")
        half_MN = add_biases(
            score_MN, half_scale, query_M1, key_1N, key, near, kind, start, length, history, head,
            half_position_HP, half_time_HQ, times_T, short_T, P, Q, FAST,
        )  # fmt: skip
        _, slope_MN = half_silu_and_slope(half_MN, FAST)
        grad_MN *= slope_MN
        if grad_time_XQ is not None:
            bucket, run_M, sums_Q = add_by_time(
                grad_MN, bucket, run_M, sums_Q, inside_M, query_M1, key_1N, key, near, kind, start,
                short_T, bucket_Q,
            )  # fmt: skip
        sum_MA = tl.dot(grad_MN.to(k_NA.dtype), k_NA, sum_MA, input_precision="ieee")
        kind = next_kind
    for number in range(num_masked):
        key = masked_keys(number, left, full_stop, own, num_left, num_right, N)
        kind = kind_of(kinds_BXY, sample, side, length, first, key, M, N)
        near = is_near(first, key, history, half_position_HP, P, N)
        key_1N = key + tl.arange(0, N)[None, :]
        k_NA = k_HTA.load([head, start + key, 0]).reshape(N, A_BLOCK)
        score_MN = tl.dot(q_MA, k_NA.T, input_precision="ieee")
        v_NV = v_HTV.load([head, start + key, 0]).reshape(N, V_BLOCK)
        grad_MN = tl.dot(grad_MV, v_NV.T, input_precision="ieee")
        half_MN = add_biases(
            score_MN, half_scale, query_M1, key_1N, key, near, kind, start, length, history, head,
            half_position_HP, half_time_HQ, times_T, short_T, P, Q, FAST,
        )  # fmt: skip
        _, slope_MN = half_silu_and_slope(half_MN, FAST)
        seen_MN = visible(query_M1, key_1N, length, history, window)
        grad_MN = tl.where(seen_MN, grad_MN * slope_MN, 0.0).to(k_NA.dtype)
        k_NA = zero_past_end(k_NA, key, length, N)
        sum_MA = tl.dot(grad_MN, k_NA, sum_MA, input_precision="ieee")
    # half_scale is half of the scale: the other factor 1/2 is that of the slope.
    factor = half_scale * inverse_norm
    store_rows(grad_q_THA, sum_MA * factor, start, first, length, head, heads, A)
    if grad_time_XQ is not None:
        sums_Q += tl.where(bucket_Q == bucket, tl.sum(run_M, 0), 0.0)
        tl.store(grad_time_XQ + part * Q_BLOCK + bucket_Q, sums_Q)


@triton.jit(do_not_specialize=["side", "units", "heads", "blocks", "group", "window"])
def attend_backward_keys(
    q_HTA,
    k_HTA,
    v_HTV,
    grad_HTV,
    grad_k_THA,
    grad_v_THV,
    offsets_B,
    num_targets_B,
    half_position_HP,
    half_time_HQ,
    times_T,
    short_T,
    kinds_BXY,
    side,
    half_scale,
    inverse_norm,
    window,
    units,
    heads,
    blocks,
    group,
    A: tl.constexpr,
    V: tl.constexpr,
    A_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    FAST: tl.constexpr,
):
    """Writes the gradients of N keys and of their values; None in place of either leaves it out."""
    sample, head, rank = locate(units, heads, blocks, group)
    start, length, history = sample_rows(offsets_B, num_targets_B, sample)
    first = rank * N  # the oldest keys are seen by most queries
    if first >= length:
        return
    begin, full_start, full_stop, num_early, num_masked = queries_of_keys(
        first, length, history, window, M, N
    )
    key_N1 = first + tl.arange(0, N)[:, None]
    k_NA = k_HTA.load([head, start + first, 0]).reshape(N, A_BLOCK)
    v_NV = v_HTV.load([head, start + first, 0]).reshape(N, V_BLOCK)
    sum_NA = tl.zeros([N, A_BLOCK], tl.float32)
    sum_NV = tl.zeros([N, V_BLOCK], tl.float32)
    kind = kind_of(kinds_BXY, sample, side, length, full_start, first, M, N)
    for query in range(full_start, full_stop, M):
        next_kind = kind_of(kinds_BXY, sample, side, length, query + M, first, M, N)
        near = is_near(query, first, history, half_position_HP, P, N)
        query_1M = query + tl.arange(0, M)[None, :]
        q_MA = q_HTA.load([head, start + query, 0]).reshape(M, A_BLOCK)
        score_NM = tl.dot(k_NA, q_MA.T, input_precision="ieee")
        grad_MV = grad_HTV.load([head, start + query, 0]).reshape(M, V_BLOCK)
        grad_NM = score_NM
        if grad_k_THA is not None:
            grad_NM = tl.dot(v_NV, grad_MV.T, input_precision="ieee")
        half_NM = add_biases(
            score_NM, half_scale, query_1M, key_N1, first, near, kind, start, length, history, head,
            half_position_HP, half_time_HQ, times_T, short_T, P, Q, FAST,
        )  # fmt: skip
        weight_NM, slope_NM = half_silu_and_slope(half_NM, FAST)
        if grad_v_THV is not None:
            sum_NV = tl.dot(weight_NM.to(grad_MV.dtype), grad_MV, sum_NV, input_precision="ieee")
        if grad_k_THA is not None:
            grad_NM = (grad_NM * slope_NM).to(q_MA.dtype)
            sum_NA = tl.dot(grad_NM, q_MA, sum_NA, input_precision="ieee")
        kind = next_kind
    for number in range(num_masked):
        late = full_stop + (number - num_early) * M
        query = tl.where(number < num_early, begin + number * M, late)
        kind = kind_of(kinds_BXY, sample, side, length, query, first, M, N)
        near = is_near(query, first, history, half_position_HP, P, N)
        query_1M = query + tl.arange(0, M)[None, :]
        q_MA = q_HTA.load([head, start + query, 0]).reshape(M, A_BLOCK)
        score_NM = tl.dot(k_NA, q_MA.T, input_precision="ieee")
        grad_MV = grad_HTV.load([head, start + query, 0]).reshape(M, V_BLOCK)
        grad_NM = score_NM
        if grad_k_THA is not None:
            grad_NM = tl.dot(v_NV, grad_MV.T, input_precision="ieee")
        half_NM = add_biases(
            score_NM, half_scale, query_1M, key_N1, first, near, kind, start, length, history, head,
            half_position_HP, half_time_HQ, times_T, short_T, P, Q, FAST,
        )  # fmt: skip
        weight_NM, slope_NM = half_silu_and_slope(half_NM, FAST)
        seen_NM = visible(query_1M, key_N1, length, history, window)
        if grad_v_THV is not None:
            weight_NM = tl.where(seen_NM, weight_NM, 0.0).to(grad_MV.dtype)
            grad_MV = zero_past_end(grad_MV, query, length, M)
            sum_NV = tl.dot(weight_NM, grad_MV, sum_NV, input_precision="ieee")
        if grad_k_THA is not None:
            grad_NM = tl.where(seen_NM, grad_NM * slope_NM, 0.0).to(q_MA.dtype)
            q_MA = zero_past_end(q_MA, query, length, M)
            sum_NA = tl.dot(grad_NM, q_MA, sum_NA, input_precision="ieee")
    if grad_k_THA is not None:
        factor = half_scale * inverse_norm
        store_rows(grad_k_THA, sum_NA * factor, start, first, length, head, heads, A)
    if grad_v_THV is not None:
        store_rows(grad_v_THV, sum_NV * inverse_norm, start, first, length, head, heads, V)
