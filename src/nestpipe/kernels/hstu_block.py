"""What the kernel of HSTU's attention does with a block of queries: functions that run on a GPU."""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

# Shapes: M queries and N keys at a time, A width of queries and keys, V width of values, P and Q
# buckets of the biases


@triton.jit
def add_keys(
    sum_MV,
    q_MA,
    keys,
    values,
    k_row,
    v_row,
    start,
    stop,
    before,
    row_M,
    history,
    query_time_M,
    position,
    far_bias,
    time,
    times,
    scale,
    A: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    A_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    N: tl.constexpr,
    NEAR: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The sum, with the keys from `start` to `stop`; `before` rows come before the first of all."""
    for first in range(start, stop, N):
        row_N = first + tl.arange(0, N)
        k_NA = load_rows(keys, row_N, row_N < stop, k_row, A, A_BLOCK, ALIGNED)
        score_MN = tl.dot(q_MA, tl.trans(k_NA), input_precision="ieee") * scale
        if position is not None:
            if NEAR:
                distance_MN = tl.minimum(row_M, history)[:, None] - (before + row_N)[None, :]
                column_MN = tl.minimum(tl.maximum(distance_MN, 0), P - 1)
                score_MN += tl.load(position + column_MN).to(tl.float32)
            else:
                score_MN += far_bias
        if time is not None:
            time_N = tl.load(times + before + row_N, mask=row_N < stop, other=0)
            bucket_MN = _time_bucket(query_time_M[:, None] - time_N[None, :], Q)
            score_MN += tl.load(time + bucket_MN).to(tl.float32)
        weight_MN = _silu(score_MN)
        if NEAR:
            weight_MN = tl.where((before + row_N)[None, :] <= row_M[:, None], weight_MN, 0.0)
        # Past the end of the keys the weights are anything, and the values zero.
        v_NV = load_rows(values, row_N, row_N < stop, v_row, V, V_BLOCK, ALIGNED)
        sum_MV = tl.dot(weight_MN.to(v_NV.dtype), v_NV, sum_MV, input_precision="ieee")
    return sum_MV


@triton.jit
def from_itself(
    q_MA,
    keys,
    values,
    k_row,
    v_row,
    row_M,
    candidate_M,
    position,
    time,
    scale,
    A: tl.constexpr,
    V: tl.constexpr,
    A_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    """What each candidate sees of itself, (M, V); zeros for all others."""
    k_MA = load_rows(keys, row_M, candidate_M, k_row, A, A_BLOCK)
    v_MV = load_rows(values, row_M, candidate_M, v_row, V, V_BLOCK)
    score_M = tl.sum(q_MA.to(tl.float32) * k_MA.to(tl.float32), axis=1) * scale
    if position is not None:
        score_M += tl.load(position).to(tl.float32)
    if time is not None:
        score_M += tl.load(time).to(tl.float32)
    return _silu(score_M)[:, None] * v_MV.to(tl.float32)


@triton.jit
def load_rows(
    base,
    row_N,
    there_N,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr = False,
):
    """(N, BLOCK) numbers of a head, zeros where there are none.

    `ALIGNED` says that rows start at multiples of 16 bytes, where the compiler cannot know.
    """
    column = tl.arange(0, BLOCK)[None, :]
    place = base + row_N.to(tl.int64)[:, None] * stride + column
    if ALIGNED:
        place = tl.multiple_of(place, (1, 16))
    there = there_N[:, None]
    if WIDTH != BLOCK:
        there = there & (column < WIDTH)
    return tl.load(place, mask=there, other=0.0)


@triton.jit
def _silu(x):
    return x / (1 + tl.exp(-x))


@triton.jit
def _time_bucket(passed, Q: tl.constexpr):
    """Bits of the number that tells how much time has passed, Q - 1 at most: no rounding.

    Each bit below a set one is cleared: the float then rounds to no higher power of two, and its
    exponent is that of the highest bit.
    """
    if Q <= 32:  # what is cut off would have had the last bucket anyway
        passed = tl.minimum(tl.maximum(passed, 0), 2147483647).to(tl.int32)
    else:
        passed = tl.maximum(passed, 0)
    highest = passed & ~(passed >> 1)
    exponent = highest.to(tl.float32).to(tl.int32, bitcast=True) >> 23
    return tl.minimum(tl.maximum(exponent - 126, 0), Q - 1)
