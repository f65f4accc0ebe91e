"""HSTU's attention on a GPU, forward only: scores live in registers, block by block.

A program has a block of queries of one sample and head, and loops over blocks of keys. It reads
only keys that some of its queries see: history up to its last query, and of candidates each one
itself. Keys so far away that all have the same position bias, and that all queries see, go through
a loop without mask and lookup. The keys of a sample may lie in two places, a cached prefix and its
new rows, and neither is copied.

A few queries of a long history, a ranking with a prefix, would be a handful of programs that each
read all of it. There keys are split (split-K), with a program for each split, and the partial sums
are added in order. Weights are not normalised over keys, so nothing else is needed. Splits begin at
fixed rows of a sample, so its result does not depend on the rest of the batch.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestpipe.kernels.attention.inference import Rule

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false

# Shapes: B samples, T rows of all samples together, H heads, A width of queries and keys, V width
# of values, P and Q buckets of the biases; in the kernel M queries and N keys at a time


_MANY_QUERIES = 1024
"""With so many, larger blocks of them still keep the GPU busy, and read keys less often."""
_ADDED = 1024
"""Numbers that a program adds up."""
# Sizes that differ from call to call are kept out of what a kernel is compiled for: else each one
# that is 1, or a multiple of 16 where others were not, would be compiled anew, for seconds.
SPLIT_KEYS = 2048
"""Keys that a program reads where there are few queries; a multiple of what it reads at a time."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys and values of all samples."""

    k_THA: Tensor
    v_THV: Tensor
    offsets_B: Tensor
    """(B + 1,) where the rows of each sample start in `k_THA`."""
    time_offsets_B: Tensor
    """(B + 1,) where the times of each sample start, those of its past included."""
    pointers_3B: Tensor | None = None
    """Rows before those: the address of their keys, of their values, and how many they are."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How much a program does at a time."""

    queries: int
    keys: int
    warps: int
    stages: int


def tile_of(dtype: torch.dtype, width: int, queries: int) -> Tile:
    """For heads of `width`: what fits registers. Products of float32 have no tensor cores."""
    if dtype == torch.float32:
        return Tile(64, 32, 8, 2) if width <= 64 else Tile(32, 32 if width <= 128 else 16, 8, 2)
    if width > 128:
        return Tile(64, 32, 8, 2)
    return Tile(64, 64, 4, 3) if queries < _MANY_QUERIES else Tile(128, 64, 8, 3)


def attend_by_kernel(
    q_THA: Tensor,
    query_offsets_B: Tensor,
    keys: Keys,
    rule: Rule,
    longest: int | None,
    longest_keys: int | None = None,
) -> Tensor:
    """(T, H, V); the host does not wait.

    `query_offsets_B` says where the queries of each sample start, its last rows; no sample has more
    than `longest` of them, and none more than `longest_keys` keys where that is known.
    """
    total, heads, width = q_THA.shape
    value_width = keys.v_THV.shape[2]
    out_THV = torch.empty(total, heads, value_width, dtype=keys.v_THV.dtype, device=q_THA.device)
    if not total:
        return out_THV
    q_THA, k_THA, v_THV = (_with_flat_heads(x) for x in (q_THA, keys.k_THA, keys.v_THV))
    position_HP, time_HQ = rule.bias.position_HP, rule.bias.time_HQ
    assert time_HQ is None or rule.bias.times_T is not None, "a bias by time needs the rows' times"
    most = total if longest is None else min(longest, total)
    tile = tile_of(q_THA.dtype, max(width, value_width), most)
    blocks = triton.cdiv(most, tile.queries)
    splits = _num_splits(most, longest_keys)
    parts_STHV = out_THV
    if splits > 1:
        parts_STHV = out_THV.new_zeros(splits, *out_THV.shape, dtype=torch.float32)
    grid = (blocks * splits, heads, len(query_offsets_B) - 1)
    with torch.cuda.device(q_THA.device) if q_THA.is_cuda else nullcontext():
        _attend[grid](
            q_THA,
            k_THA,
            v_THV,
            parts_STHV,
            query_offsets_B,
            keys.offsets_B,
            keys.pointers_3B,
            rule.num_targets_B,
            None if position_HP is None else position_HP.contiguous(),
            None if time_HQ is None else time_HQ.contiguous(),
            None if time_HQ is None else rule.bias.times_T,
            keys.time_offsets_B,
            float(rule.scale),
            float(rule.norm),
            total,
            blocks,
            q_THA.stride(0),
            q_THA.stride(1),
            k_THA.stride(0),
            k_THA.stride(1),
            v_THV.stride(0),
            v_THV.stride(1),
            A=width,
            V=value_width,
            P=1 if position_HP is None else position_HP.shape[1],
            Q=1 if time_HQ is None else time_HQ.shape[1],
            A_BLOCK=max(16, triton.next_power_of_2(width)),
            V_BLOCK=max(16, triton.next_power_of_2(value_width)),
            M=tile.queries,
            N=tile.keys,
            # What a past's addresses are multiples of, in bytes: torch's own memory is aligned
            # to more, but layers and heads of odd widths are not.
            ALIGNED=_aligned(k_THA) and _aligned(v_THV),
            SPLIT=splits > 1,
            KEYS=SPLIT_KEYS,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            _add_parts(parts_STHV, out_THV, rule.norm)
    return out_THV


def _num_splits(queries: int, longest_keys: int | None) -> int:
    """Into how many parts the keys of the longest sample are cut."""
    few = longest_keys is not None and queries < _MANY_QUERIES
    return triton.cdiv(longest_keys, SPLIT_KEYS) if few else 1


def _add_parts(parts_STHV: Tensor, out_THV: Tensor, norm: float) -> None:
    numbers = out_THV.numel()
    grid = (triton.cdiv(numbers, _ADDED),)
    _add_up[grid](parts_STHV, out_THV, float(norm), numbers, len(parts_STHV), BLOCK=_ADDED)


def _with_flat_heads(x_THA: Tensor) -> Tensor:
    """The numbers of a head side by side; rows and heads may lie anywhere."""
    return x_THA if x_THA.stride(2) == 1 else x_THA.contiguous()


def _aligned(x_THA: Tensor) -> bool:
    return x_THA.shape[2] * x_THA.element_size() % 16 == 0


@triton.jit(do_not_specialize=["total", "blocks"])
def _attend(
    q_THA,
    k_THA,
    v_THV,
    out_THV,
    query_offsets_B,
    offsets_B,
    pointers_3B,
    num_targets_B,
    position_HP,
    time_HQ,
    times_T,
    time_offsets_B,
    scale,
    norm,
    total,
    blocks,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    A: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    A_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
):
    head, sample, samples = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    heads = tl.num_programs(1)
    first_query = tl.load(query_offsets_B + sample)
    num_queries = (tl.load(query_offsets_B + sample + 1) - first_query).to(tl.int32)
    # The last queries see most: they start first.
    block = blocks - 1 - tl.program_id(0) % blocks
    split = tl.program_id(0) // blocks
    if block * M >= num_queries:
        return

    # Rows are numbered within the sample, from the oldest row of its past.
    first_new = tl.load(offsets_B + sample)
    num_new = (tl.load(offsets_B + sample + 1) - first_new).to(tl.int32)
    num_past = 0
    if pointers_3B is not None:
        num_past = tl.load(pointers_3B + 2 * samples + sample).to(tl.int32)
    history = num_past + num_new
    if num_targets_B is not None:
        history -= tl.load(num_targets_B + sample).to(tl.int32)
    start = num_past + num_new - num_queries + block * M
    stop = min(start + M, num_past + num_new)
    row_M = start + tl.arange(0, M)

    position, time, times = position_HP, time_HQ, times_T
    far_bias = 0.0
    if position_HP is not None:
        position = position_HP + head * P
        far_bias = tl.load(position + P - 1).to(tl.float32)
    query_time_M = row_M
    if time_HQ is not None:
        time = time_HQ + head * Q
        times = times_T + tl.load(time_offsets_B + sample)
        query_time_M = tl.load(times + row_M, mask=row_M < stop, other=0)

    q = q_THA + (first_query + block * M) * q_row + head * q_head
    q_MA = load_rows(q, tl.arange(0, M), row_M < stop, q_row, A, A_BLOCK)
    sum_MV = tl.zeros([M, V_BLOCK], tl.float32)

    # Of the keys up to `end`, those before `far` are seen by all queries, P - 1 positions away.
    end = min(history, stop)
    # The keys of this program; of a sample that has none in its split, the sum stays zero.
    first, last = 0, end
    if SPLIT:
        first, last = split * KEYS, min(end, (split + 1) * KEYS)
        if (first >= end) & (split > 0):
            return
    far = max(min(min(start, history) - (P - 1) + 1, end), 0)
    if pointers_3B is not None:
        past_k = tl.load(pointers_3B + sample).to(tl.pointer_type(k_THA.dtype.element_ty))
        past_v = tl.load(pointers_3B + samples + sample).to(tl.pointer_type(v_THV.dtype.element_ty))
        past_k += head * A
        past_v += head * V
        past_end = min(end, num_past)
        past_far = past_end if far >= past_end else far // N * N
        sum_MV = add_keys(
            sum_MV, q_MA, past_k, past_v, heads * A, heads * V,
            first, min(past_far, last), 0,
            row_M, history, query_time_M, position, far_bias, time, times, scale,
            A, V, P, Q, A_BLOCK, V_BLOCK, N, False, ALIGNED,
        )  # fmt: skip
        sum_MV = add_keys(
            sum_MV, q_MA, past_k, past_v, heads * A, heads * V,
            max(past_far, first), min(past_end, last), 0,
            row_M, history, query_time_M, position, far_bias, time, times, scale,
            A, V, P, Q, A_BLOCK, V_BLOCK, N, True, ALIGNED,
        )  # fmt: skip
    new_k = k_THA + first_new * k_row + head * k_head
    new_v = v_THV + first_new * v_row + head * v_head
    new_far = max(far - num_past, 0) // N * N
    sum_MV = add_keys(
        sum_MV, q_MA, new_k, new_v, k_row, v_row,
        max(first - num_past, 0), min(new_far, last - num_past), num_past,
        row_M, history, query_time_M, position, far_bias, time, times, scale,
        A, V, P, Q, A_BLOCK, V_BLOCK, N, False, False,
    )  # fmt: skip
    sum_MV = add_keys(
        sum_MV, q_MA, new_k, new_v, k_row, v_row,
        max(new_far, first - num_past), last - num_past, num_past,
        row_M, history, query_time_M, position, far_bias, time, times, scale,
        A, V, P, Q, A_BLOCK, V_BLOCK, N, True, False,
    )  # fmt: skip

    if num_targets_B is not None:
        sum_MV += from_itself(
            q_MA, new_k, new_v, k_row, v_row, row_M - num_past,
            (row_M >= history) & (row_M < stop) & (split == 0), position, time, scale,
            A, V, A_BLOCK, V_BLOCK,
        )  # fmt: skip
    column_V = tl.arange(0, V_BLOCK)
    out = out_THV + ((split * total + first_query + block * M) * heads + head) * V
    place_MV = out + tl.arange(0, M)[:, None] * (heads * V) + column_V[None, :]
    inside_MV = (row_M < stop)[:, None] & (column_V < V)[None, :]
    if not SPLIT:
        sum_MV = sum_MV / norm
    tl.store(place_MV, sum_MV.to(out_THV.dtype.element_ty), mask=inside_MV)


@triton.jit(do_not_specialize=["numbers", "splits"])
def _add_up(parts_SX, out_X, norm, numbers, splits, BLOCK: tl.constexpr):
    """The parts of every number, first to last, divided by `norm`."""
    x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sum_X = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        at = parts_SX + split * numbers.to(tl.int64) + x
        sum_X += tl.load(at, mask=x < numbers, other=0.0)
    tl.store(out_X + x, (sum_X / norm).to(out_X.dtype.element_ty), mask=x < numbers)


# What the kernel does with a block of queries.
#
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
