"""Pairs of a query and a key inside the attention kernels: who sees whom, SiLU, and biases.

Functions here run on the GPU. Tiles are (queries, keys) in one pass and (keys, queries) in the
other, so rows arrive as columns or as lines, (X, 1) or (1, X), and broadcast to the tile.

Buckets of time grow as powers of two, so that most tiles hold one or two of them, and most tiles
are too far away for a distance of their own. `prepare_biases` finds this once for all heads and
passes: for every two blocks of rows the lowest and the highest bucket of time, as one number, a
kind. A tile then costs a load of its kind; pairs are looked at where they differ.
"""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import triton
import triton.language as tl

# Shapes: M queries and N keys of a tile, H heads, P and Q buckets of the biases, X blocks of
# queries, Y blocks of keys

BLOCK_ROWS = tl.constexpr(64)
"""Rows of a sample that share one row, or column, of the table of kinds."""
PAST_END = 128
"""Rows past the last sample that a tile may read: `short_T` has so many more."""
_WIDE = tl.constexpr(1 << 16)
"""Flag of a kind: its times differ by 2**30 or more, too much for whole numbers of 32 bits."""


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


@triton.jit(do_not_specialize=["side", "heads", "columns_p", "columns_q"])
def prepare_biases(
    times_T,
    offsets_B,
    position_HP,
    time_HQ,
    half_position_HP,
    half_time_HQ,
    short_T,
    kinds_BXY,
    side,
    heads,
    columns_p,
    columns_q,
    position_stride,
    position_step,
    time_stride,
    time_step,
    Q: tl.constexpr,
    Y: tl.constexpr,
):
    """Writes the kinds and the low halves of the times, and tables of half the values.

    One program for each block of queries; the last one has the tables.
    """
    program = tl.program_id(0)
    if program == tl.num_programs(0) - 1:
        if position_HP is not None:
            _halve(
                position_HP, half_position_HP, heads, columns_p, position_stride, position_step
            )  # fmt: skip
        if time_HQ is not None:
            _halve(time_HQ, half_time_HQ, heads, columns_q, time_stride, time_step)
    elif time_HQ is not None:
        sample, block = program // side, program % side
        start = tl.load(offsets_B + sample)
        length = (tl.load(offsets_B + sample + 1) - start).to(tl.int32)
        if block * BLOCK_ROWS < length:
            _find_kinds(
                times_T + start, short_T + start, kinds_BXY + program * side, block, length, Q, Y
            )  # fmt: skip


@triton.jit
def _halve(table_HP, half_HP, heads, columns, stride, step):
    """Half of every value, as float32, without gaps."""
    for first in range(0, heads * columns, 1024):
        number = first + tl.arange(0, 1024)
        there = number < heads * columns
        place = table_HP + number // columns * stride + number % columns * step
        value = tl.load(place, mask=there, other=0.0).to(tl.float32)
        tl.store(half_HP + number, value * 0.5, mask=there)


@triton.jit
def _find_kinds(times, short, kinds_Y, block, length, Q: tl.constexpr, Y: tl.constexpr):
    """The kinds of one block of queries with all blocks of keys that its tiles may hold."""
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    # A row past the end counts as the last one.
    query_times = tl.load(times + tl.minimum(row, length - 1))
    tl.store(short + row, query_times.to(tl.int32), mask=row < length)
    earliest, latest = tl.min(query_times, 0), tl.max(query_times, 0)
    # A tile has at most two blocks on a side, so it may hold the block after this one.
    last = min((block | 1) + 1, tl.cdiv(length, BLOCK_ROWS))
    for first in range(0, last, Y):
        block_Y = first + tl.arange(0, Y)
        row_YN = block_Y[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
        times_YN = tl.load(times + tl.minimum(row_YN, length - 1))
        earliest_Y, latest_Y = tl.min(times_YN, 1), tl.max(times_YN, 1)
        lowest_Y = time_bucket(earliest - latest_Y, Q)
        highest_Y = time_bucket(latest - earliest_Y, Q)
        most_Y = tl.maximum(latest - earliest_Y, latest_Y - earliest)
        wide_Y = tl.where(most_Y < 1 << 30, 0, _WIDE)
        kind_Y = lowest_Y | (highest_Y << 8) | wide_Y
        tl.store(kinds_Y + block_Y, kind_Y, mask=block_Y < last)


@triton.jit
def kind_of(
    kinds_BXY,
    sample,
    side,
    length,
    query,
    key,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """The kind of the tile of M queries and N keys from `query` and `key` on; 0 without times."""
    kind = key * 0
    if kinds_BXY is not None:
        last = max(length - 1, 0) // BLOCK_ROWS
        for x in tl.static_range((M + BLOCK_ROWS - 1) // BLOCK_ROWS):
            kinds_Y = kinds_BXY + (sample * side + min(query // BLOCK_ROWS + x, last)) * side
            for y in tl.static_range((N + BLOCK_ROWS - 1) // BLOCK_ROWS):
                one = tl.load(kinds_Y + tl.minimum(key // BLOCK_ROWS + y, last))
                if x + y == 0:
                    kind = one
                else:
                    low = tl.minimum(kind & 0xFF, one & 0xFF)
                    high = tl.maximum(kind & 0xFF00, one & 0xFF00)
                    kind = low | high | ((kind | one) & _WIDE)
    return kind


@triton.jit
def _is_one_step(kind):
    """Whether a tile has two buckets of time, next to each other, and times of 32 bits will do."""
    return ((kind >> 8) - (kind & 0xFF)) == 1  # a wide kind has its flag in the difference


@triton.jit
def _is_even(kind):
    """Whether a tile has one bucket of time."""
    return ((kind >> 8) & 0xFF) == (kind & 0xFF)


@triton.jit
def is_near(query, key, history, position_HP, P: tl.constexpr, N: tl.constexpr):
    """Whether some pair of the tile may be in another bucket of distance than the last."""
    near = key < 0
    if position_HP is not None:
        near = tl.minimum(query, history) - tl.minimum(key + N - 1, history) < P - 1
    return near


@triton.jit
def is_easy(near, kind):
    """Whether the pass of the queries sums a tile's gradients by bucket, as `add_by_time` does."""
    return (_is_even(kind) | _is_one_step(kind)) & (near == 0)


@triton.jit
def add_biases(
    score,
    half_scale,
    query,
    key,
    first_key,
    near,
    kind,
    start,
    length,
    history,
    head,
    half_position_HP,
    half_time_HQ,
    times_T,
    short_T,
    P: tl.constexpr,
    Q: tl.constexpr,
    FAST: tl.constexpr,
):
    """Half of the scaled scores plus half of their biases.

    `query` and `key` are rows of the sample, shaped to broadcast. What all pairs of the tile share
    goes into the product with the scale; a tile with two buckets of time needs one comparison for
    a pair.
    """
    even = 0.0
    if half_position_HP is not None:  # noqa: SIM102  the compiler decides this, the GPU the rest
        if near == 0:
            even += tl.load(half_position_HP + head * P + P - 1)
    if half_time_HQ is not None:  # noqa: SIM102
        if _is_even(kind) | _is_one_step(kind):
            even += tl.load(half_time_HQ + head * Q + (kind & 0xFF))
    half = score * half_scale + even
    if half_time_HQ is not None:
        table = half_time_HQ + head * Q
        if _is_one_step(kind):
            late = is_late(short_T + start, query, key, first_key, kind)
            step = tl.load(table + (kind & 0xFF) + 1) - tl.load(table + (kind & 0xFF))
            half += tl.where(late, step, 0.0)
        elif not _is_even(kind):
            half += _time_biases(table, times_T, short_T, query, key, kind, start, length, Q, FAST)
    if half_position_HP is not None:  # noqa: SIM102
        if near != 0:
            bucket = position_bucket(query, key, history, P)
            half += look_up(half_position_HP + head * P, bucket, FAST)
    return half


@triton.jit
def _time_biases(
    table,
    times_T,
    short_T,
    query,
    key,
    kind,
    start,
    length,
    Q: tl.constexpr,
    FAST: tl.constexpr,
):
    """Half of the bias by time of each pair, one by one."""
    if kind < _WIDE:
        short = tl.load(short_T + start + query) - tl.load(short_T + start + key)
        bias = _short_time_bias(table, short, Q, FAST)
    else:
        passed = time_passed(times_T + start, query, key, length)
        bias = look_up(table, time_bucket(passed, Q), FAST)
    return bias


@triton.jit
def is_late(short, query, key, first_key, kind):
    """Whether each pair of a tile with two buckets is in the higher one; from 2**lowest on it is.

    Low halves of times may wrap around; differences from the first key's do not.
    """
    origin = tl.load(short + first_key)
    edge = 1 << (kind & 0xFF)
    return tl.load(short + query) - origin - edge >= tl.load(short + key) - origin


@triton.jit
def add_by_time(
    grad_MN,
    bucket,
    run_M,
    sums_Q,
    inside_M,
    query_M1,
    key_1N,
    first_key,
    near,
    kind,
    start,
    short_T,
    bucket_Q,
):
    """Adds the gradients of an easy tile to their buckets.

    Tiles come by age, so that the same bucket comes many times in a row. Its sum stays with the
    queries, `run_M`, until another bucket comes. Queries not in `inside_M` are of the next sample.
    """
    if short_T is None:
        run_M += tl.where(near != 0, 0.0, _row_sums(grad_MN, inside_M))
    elif is_easy(near, kind):
        highest = (kind >> 8) & 0xFF
        if highest != bucket:
            sums_Q += tl.where(bucket_Q == bucket, tl.sum(run_M, 0), 0.0)
            run_M = tl.where(inside_M, 0.0, 0.0)
            bucket = highest
        all_M = _row_sums(grad_MN, inside_M)
        if _is_even(kind):
            run_M += all_M
        else:
            late_MN = is_late(short_T + start, query_M1, key_1N, first_key, kind)
            late_M = _row_sums(tl.where(late_MN, grad_MN, 0.0), inside_M)
            sums_Q += tl.where(bucket_Q == bucket, tl.sum(run_M + late_M, 0), 0.0)
            run_M = all_M - late_M
            bucket = highest - 1
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
def _short_time_bias(table, passed, Q: tl.constexpr, FAST: tl.constexpr):
    """Values of a table by the bits of times of 32 bits; `FAST` asks the GPU for the highest."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{ .reg .b64 place; .reg .s32 bits;
            max.s32 bits, $2, 0;
            bfind.u32 bits, bits;
            add.s32 bits, bits, 1;
            min.s32 bits, bits, $3;
            mad.wide.s32 place, bits, 4, $1;
            ld.global.nc.f32 $0, [place]; }""",
            "=f,l,r,r",
            [table.to(tl.int64), passed, Q - 1],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.load(table + time_bucket(passed, Q))


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
