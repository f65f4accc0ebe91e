"""Pairs of a query and a key inside the attention kernels: who sees whom, biases, SiLU.

Functions here run on the GPU. Tiles are (queries, keys) in one pass and (keys, queries) in the
other, so rows arrive as columns or as lines, (X, 1) or (1, X), and broadcast to the tile.
"""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

# Shapes: M queries and N keys of a tile, P and Q buckets of the biases

RANGE_ROWS = tl.constexpr(64)
"""Rows of a sample that share one entry of the table of earliest and latest times."""


@triton.jit
def locate(units, heads, blocks, group):
    """Sample, head and rank of this program; `group` units share the L2 cache at a time.

    A unit is one head of one sample. Within a group, rank 0 of all units comes first: the caller
    gives it the longest piece of work, so that short pieces fill the end.
    """
    program = tl.program_id(0)
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


@triton.jit
def even_biases(
    first_query,
    first_key,
    query_span,
    key_span,
    history,
    head,
    position_HP,
    time_HQ,
    P: tl.constexpr,
    Q: tl.constexpr,
    KEYS: tl.constexpr,
):
    """What all pairs of a tile have in common, before any of them is looked at.

    Gives the sum of the biases that are the same for the whole tile, whether distances are not,
    and the lowest and the highest bucket of time. Even the nearest pair may be in the last bucket
    of distance; far apart rows have mostly one bucket of time, which grow as powers of two.
    """
    even = tl.zeros([], tl.float32)
    near = False
    lowest = 0
    highest = 0
    if position_HP is not None:
        near = min(first_query, history) - min(first_key + KEYS - 1, history) < P - 1
        if not near:
            even += tl.load(position_HP + head * P + P - 1)
    if time_HQ is not None:
        lowest, highest = bucket_span(query_span, key_span, Q)
        if lowest == highest:
            even += tl.load(time_HQ + head * Q + lowest)
    return even, near, lowest, highest


@triton.jit
def add_biases(
    half,
    query,
    key,
    near,
    lowest,
    highest,
    query_span,
    key_span,
    start,
    length,
    history,
    head,
    position_HP,
    time_HQ,
    times_T,
    P: tl.constexpr,
    Q: tl.constexpr,
    FAST: tl.constexpr,
):
    """`half` plus the biases that differ inside the tile; tables have halved values.

    `query` and `key` are rows of the sample, shaped to broadcast. A tile with two buckets of time
    needs one comparison for a pair.
    """
    if position_HP is not None:  # noqa: SIM102  the compiler decides this one, the GPU the other
        if near:
            bucket = position_bucket(query, key, history, P)
            half += look_up(position_HP + head * P, bucket, FAST)
    if time_HQ is not None:
        table = time_HQ + head * Q
        if one_step(lowest, highest, query_span, key_span):
            late = is_late(times_T + start, query, key, length, lowest, query_span, key_span)
            half += tl.where(late, tl.load(table + highest), tl.load(table + lowest))
        elif lowest != highest:
            passed = time_passed(times_T + start, query, key, length)
            half += look_up(table, time_bucket(passed, Q), FAST)
    return half


@triton.jit
def one_step(lowest, highest, query_span, key_span):
    """Whether a tile has two buckets of time, and times close enough for 32 bits."""
    spread = query_span[1] - query_span[0] + (key_span[1] - key_span[0])
    return (highest - lowest == 1) & (spread < 2147483647)


@triton.jit
def is_late(times, query, key, length, lowest, query_span, key_span):
    """Whether each pair of such a tile is in the higher bucket; from 2**lowest on it is."""
    query_time = tl.load(times + tl.minimum(query, length - 1)) - query_span[0]
    key_time = key_span[1] - tl.load(times + tl.minimum(key, length - 1))
    one = tl.full([], 1, tl.int64)
    edge = (one << lowest.to(tl.int64)) - (query_span[0] - key_span[1])
    return query_time.to(tl.int32) >= (edge - key_time).to(tl.int32)


@triton.jit
def is_easy(near, lowest, highest, query_span, key_span):
    """Whether the pass of the queries sums a tile's gradients by bucket, as `add_by_time` does."""
    few = (lowest == highest) | one_step(lowest, highest, query_span, key_span)
    return few & (not near)


@triton.jit
def add_by_time(
    grad_MN,
    bucket,
    run_M,
    sums_Q,
    inside_M,
    query_M1,
    key_1N,
    near,
    lowest,
    highest,
    query_span,
    key_span,
    length,
    start,
    times_T,
    Q_BLOCK: tl.constexpr,
):
    """Adds the gradients of an easy tile to their buckets.

    Tiles come by age, so that the same bucket comes many times in a row. Its sum stays with the
    queries, `run_M`, until another bucket comes. Queries not in `inside_M` are of the next sample.
    """
    bucket_Q = tl.arange(0, Q_BLOCK)
    if times_T is None:
        run_M += tl.where(near, 0.0, _row_sums(grad_MN, inside_M))
    elif is_easy(near, lowest, highest, query_span, key_span):
        if highest != bucket:
            sums_Q += tl.where(bucket_Q == bucket, tl.sum(run_M, 0), 0.0)
            run_M = tl.zeros_like(run_M)
            bucket = highest
        if lowest == highest:
            run_M += _row_sums(grad_MN, inside_M)
        else:
            late_MN = is_late(
                times_T + start, query_M1, key_1N, length, lowest, query_span, key_span
            )
            run_M += _row_sums(tl.where(late_MN, grad_MN, 0.0), inside_M)
            sums_Q += tl.where(bucket_Q == bucket, tl.sum(run_M, 0), 0.0)
            run_M = _row_sums(tl.where(late_MN, 0.0, grad_MN), inside_M)
            bucket = lowest
    return bucket, run_M, sums_Q


@triton.jit
def _row_sums(x_MN, inside_M):
    return tl.where(inside_M, tl.sum(x_MN, 1), 0.0)


@triton.jit
def look_up(table, index, FAST: tl.constexpr):
    """Values of a table of float32 for a tile of indices.

    `FAST` loads where the indices are: a plain load has a layout of its own, and moving a tile
    from that to the products' costs more than the load.
    """
    if FAST:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 place; mad.wide.s32 place, $2, 4, $1; ld.global.nc.f32 $0, [place]; }",
            "=f,l,r",
            [table.to(tl.int64), index],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.load(table + index)


@triton.jit
def position_bucket(query, key, history, P: tl.constexpr):
    """Positions from key to query, P - 1 at most; candidates all stand after the history."""
    distance = tl.minimum(query, history) - tl.minimum(key, history)
    return tl.minimum(tl.maximum(distance, 0), P - 1)


@triton.jit
def time_passed(times, query, key, length):
    """From each key to each query; rows past the end count as the last one."""
    query_time = tl.load(times + tl.minimum(query, length - 1))
    return query_time - tl.load(times + tl.minimum(key, length - 1))


@triton.jit
def time_bucket(passed, Q: tl.constexpr):
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


@triton.jit
def bucket_span(query_span, key_span, Q: tl.constexpr):
    """The lowest and the highest time bucket that a tile can hold."""
    lowest = time_bucket(query_span[0] - key_span[1], Q)
    return lowest, time_bucket(query_span[1] - key_span[0], Q)


@triton.jit
def time_span(spans, sample, start, length, first, ROWS: tl.constexpr):
    """Earliest and latest time of the ROWS rows from `first` on, or of a few more; 0 without."""
    earliest = tl.zeros([], tl.int64)
    latest = tl.zeros([], tl.int64)
    if spans is not None:
        entry = spans + 2 * (start // RANGE_ROWS + sample)
        last = max(length - 1, 0) // RANGE_ROWS
        block = min(first // RANGE_ROWS, last)
        earliest = tl.load(entry + 2 * block)
        latest = tl.load(entry + 2 * block + 1)
        for more in tl.static_range(1, (ROWS + RANGE_ROWS - 1) // RANGE_ROWS):
            block = min(first // RANGE_ROWS + more, last)
            earliest = min(earliest, tl.load(entry + 2 * block))
            latest = max(latest, tl.load(entry + 2 * block + 1))
    return earliest, latest


@triton.jit(do_not_specialize=["blocks"])
def find_time_spans(times_T, offsets_B, spans, blocks):
    """Earliest and latest time of every RANGE_ROWS rows of a sample."""
    sample, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    start = tl.load(offsets_B + sample)
    length = tl.load(offsets_B + sample + 1) - start
    row = block * RANGE_ROWS + tl.arange(0, RANGE_ROWS)
    if block * RANGE_ROWS < length:
        # A row past the end counts as the last one.
        times = tl.load(times_T + start + tl.minimum(row, length - 1))
        entry = spans + 2 * (start // RANGE_ROWS + sample + block)
        tl.store(entry, tl.min(times, 0))
        tl.store(entry + 1, tl.max(times, 0))
