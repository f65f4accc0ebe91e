"""The forward kernel: a block of queries adds up what blocks of keys give it.

Scores stay in registers. Keys and values come through tensor descriptors, which the GPU's copy
engine reads ahead. Blocks that all queries see go through a loop without a mask.
"""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from nestpipe.kernels.fused_attention.pairs import (
    add_biases,
    even_biases,
    half_silu,
    keys_of_queries,
    locate,
    masked_keys,
    sample_rows,
    store_rows,
    time_span,
    visible,
    zero_past_end,
)

# Shapes: B samples, H heads, M queries and N keys of a tile, A width of queries and keys, V width
# of values, P and Q buckets of the biases


@triton.jit(do_not_specialize=["units", "heads", "blocks", "group", "window"])
def attend_forward(
    q_HTA,
    k_HTA,
    v_HTV,
    out_THV,
    offsets_B,
    num_targets_B,
    position_HP,
    time_HQ,
    times_T,
    spans,
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
    span = time_span(spans, sample, start, length, first, M)
    query_M1 = first + tl.arange(0, M)[:, None]
    q_MA = q_HTA.load([head, start + first, 0]).reshape(M, A_BLOCK)
    sum_MV = tl.zeros([M, V_BLOCK], tl.float32)
    for key in range(full_start, full_stop, N):
        key_1N = key + tl.arange(0, N)[None, :]
        key_span = time_span(spans, sample, start, length, key, N)
        even, near, lowest, highest = even_biases(
            first, key, span, key_span, history, head, position_HP, time_HQ, P, Q, N
        )
        k_NA = k_HTA.load([head, start + key, 0]).reshape(N, A_BLOCK)
        half_MN = tl.dot(q_MA, k_NA.T, input_precision="ieee") * half_scale + even
        half_MN = add_biases(
            half_MN, query_M1, key_1N, near, lowest, highest, span, key_span, start, length,
            history, head, position_HP, time_HQ, times_T, P, Q, FAST,
        )  # fmt: skip
        v_NV = v_HTV.load([head, start + key, 0]).reshape(N, V_BLOCK)
        weight_MN = half_silu(half_MN, FAST).to(v_NV.dtype)
        sum_MV = tl.dot(weight_MN, v_NV, sum_MV, input_precision="ieee")
    for number in range(num_masked):
        key = masked_keys(number, left, full_stop, own, num_left, num_right, N)
        key_1N = key + tl.arange(0, N)[None, :]
        key_span = time_span(spans, sample, start, length, key, N)
        even, near, lowest, highest = even_biases(
            first, key, span, key_span, history, head, position_HP, time_HQ, P, Q, N
        )
        k_NA = k_HTA.load([head, start + key, 0]).reshape(N, A_BLOCK)
        half_MN = tl.dot(q_MA, k_NA.T, input_precision="ieee") * half_scale + even
        half_MN = add_biases(
            half_MN, query_M1, key_1N, near, lowest, highest, span, key_span, start, length,
            history, head, position_HP, time_HQ, times_T, P, Q, FAST,
        )  # fmt: skip
        seen_MN = visible(query_M1, key_1N, length, history, window)
        v_NV = v_HTV.load([head, start + key, 0]).reshape(N, V_BLOCK)
        v_NV = zero_past_end(v_NV, key, length, N)
        weight_MN = tl.where(seen_MN, half_silu(half_MN, FAST), 0.0).to(v_NV.dtype)
        sum_MV = tl.dot(weight_MN, v_NV, sum_MV, input_precision="ieee")
    store_rows(out_THV, sum_MV * inverse_norm, start, first, length, head, heads, V)
