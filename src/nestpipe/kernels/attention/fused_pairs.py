"""Pairs of a query and a key inside the attention kernels: who sees whom, and SiLU.

Functions here run on the GPU. Tiles are (queries, keys) in one pass and (keys, queries) in the
other, so rows arrive as columns or as lines, (X, 1) or (1, X), and broadcast to the tile.
"""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

# Shapes: M queries and N keys of a tile


@triton.jit
def locate(units, heads, blocks, group):
    """Sample, head and rank of this program."""
    return place_of(tl.program_id(0), units, heads, blocks, group)


@triton.jit
def place_of(program, units, heads, blocks, group):
    """Sample, head and rank of a program; `group` units share the L2 cache at a time.

    A unit is one head of one sample. Within a group, rank 0 of all units comes first: the caller
    gives it the longest piece of work, so that short pieces fill the end.
    """
    first = program // (group * blocks) * group
    inside = program % (group * blocks)
    size = min(group, units - first)
    unit = first + inside % size
    return unit // heads, unit % heads, inside // size


@triton.jit
def sample_rows(offsets_B, num_targets_B, sample):
    """First row of the sample, its number of rows, and how many of those are history."""
    start = tl.load(offsets_B + sample)
    length = (tl.load(offsets_B + sample + 1) - start).to(tl.int32)
    history = length
    if num_targets_B is not None:
        history = length - tl.load(num_targets_B + sample).to(tl.int32)
    return start.to(tl.int32), length, history


@triton.jit
def keys_of_queries(first, stop, history, window, M: tl.constexpr, N: tl.constexpr):
    """Which blocks of N keys the queries from `first` to `stop` see.

    All of them see every key from `full_start` to `full_stop`. The other blocks need a mask:
    `num_left` from `left` on, `num_right` from `full_stop` on, and the rest from `own` on.
    """
    full_stop = min(first, history) // N * N
    left = 0
    full_start = 0
    if window is not None:
        left = max(min(first, history) - window, 0) // N * N
        full_start = min(tl.cdiv(max(min(first + M - 1, history) - window, 0), N) * N, full_stop)
    num_left = (full_start - left) // N
    num_right = tl.cdiv(max(min(stop, history) - full_stop, 0), N)
    own = max(full_stop + num_right * N, first // N * N)
    num_masked = num_left + num_right + tl.cdiv(max(stop - own, 0), N)
    return left, full_start, full_stop, own, num_left, num_right, num_masked


@triton.jit
def masked_keys(number, left, full_stop, own, num_left, num_right, N: tl.constexpr):
    """The first key of a block that needs a mask."""
    right = number - num_left
    place = tl.where(right < num_right, full_stop + right * N, own + (right - num_right) * N)
    return tl.where(right < 0, left + number * N, place)


@triton.jit
def queries_of_keys(first, length, history, window, M: tl.constexpr, N: tl.constexpr):
    """Which blocks of M queries see the N keys from `first` on.

    Those from `full_start` to `full_stop` see all of them. `num_early` blocks from the first
    query on and the rest from `full_stop` on need a mask.
    """
    last = first + N - 1
    stop = length
    full_stop = length // M * M
    if window is not None:
        if history - last > window:
            stop = min(length, last + window + 1)
        if history - first > window:
            full_stop = min(length, first + window + 1) // M * M
    if first >= history:
        stop = min(length, first + N)
    start = first // M * M
    full_start = tl.cdiv(first + N, M) * M
    if last >= history:
        full_stop = full_start
    full_stop = max(full_stop, full_start)
    num_early = tl.cdiv(max(min(full_start, stop) - start, 0), M)
    num_masked = num_early + tl.cdiv(max(stop - full_stop, 0), M)
    return start, full_start, full_stop, num_early, num_masked


@triton.jit
def visible(query, key, length, history, window):
    """Whether each query of the tile sees each key."""
    seen = ((key <= query) & (key < history)) | (key == query)
    if window is not None:
        seen = seen & (tl.minimum(query, history) - tl.minimum(key, history) <= window)
    return seen & (query < length)


@triton.jit
def zero_past_end(x_NA, first, length, N: tl.constexpr):
    """Zeros in place of rows after the sample: the next one's may hold NaN, and 0 * NaN is NaN."""
    row_N = first + tl.arange(0, N)
    return tl.where((row_N < length)[:, None], x_NA, 0.0).to(x_NA.dtype)


@triton.jit
def store_rows(out_THA, x_NA, start, first, length, head, heads, WIDTH: tl.constexpr):
    """Writes rows of one head from `first` on; those past the sample's end are left out."""
    N: tl.constexpr = x_NA.shape[0]
    row_N = first + tl.arange(0, N)
    column_A = tl.arange(0, x_NA.shape[1])
    line_N = ((start + row_N).to(tl.int64) * heads + head) * WIDTH
    inside_NA = (row_N < length)[:, None] & (column_A < WIDTH)[None, :]
    place_NA = out_THA + line_N[:, None] + column_A[None, :]
    tl.store(place_NA, x_NA.to(out_THA.dtype.element_ty), mask=inside_NA)


@triton.jit
def half_silu(half, FAST: tl.constexpr):
    """SiLU of twice `half`.

    `FAST` takes the GPU's own tanh, wrong by up to 2**-10.9: less than bfloat16 can tell.
    """
    if FAST:
        tanh = _tanh(half)
        return half * tanh + half
    return 2 * half / (1 + tl.exp(-2 * half))


@triton.jit
def half_silu_and_slope(half, FAST: tl.constexpr):
    """SiLU of twice `half`, and twice its derivative there."""
    if FAST:
        tanh = _tanh(half)
        return half * tanh + half, half * (1 - tanh * tanh) + (1 + tanh)
    sigmoid = 1 / (1 + tl.exp(-2 * half))
    return 2 * half * sigmoid, 2 * sigmoid * (1 + 2 * half * (1 - sigmoid))


@triton.jit
def _tanh(x):
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
