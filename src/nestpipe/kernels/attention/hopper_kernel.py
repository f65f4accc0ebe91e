"""HSTU's attention by the warp groups of Hopper: one kernel for all passes.

A program owns two blocks of 64 rows of one head, and reads tiles of the rows that they see:

    pass                 own rows   x  y   tiles  b  c   sums
    forward              queries    Q  -   keys   K  V   silu(x b') c
    gradient of queries  queries    Q  dO  keys   K  V   (silu'(x b') * y c') b
    of keys              keys       K  V   queries Q dO  the same
    of values            keys       K  -   queries Q dO  silu(x b') c
    of keys and values   keys       K  V   queries Q dO  both

One warp starts copies into a ring of tiles; two groups of four warps, one for each block of rows,
issue products that run while they compute activations. Every sum has one owner and one order of
tiles, which depends on the sample alone. Barriers: `full` of a tile counts the bytes of its copy,
`empty` the two groups that are done with it. A counter of tiles tells place and phase of both.
"""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nestpipe.kernels.attention.fused_pairs import (
    add_biases,
    add_by_time,
    half_silu,
    half_silu_and_slope,
    is_near,
    keys_of_queries,
    kind_of,
    masked_keys,
    place_of,
    queries_of_keys,
    sample_rows,
    visible,
)

# Shapes: R rows of a group's block, N rows of a tile, A width of a head

GROUP_ROWS = gl.constexpr(64)
GROUPS = gl.constexpr(2)
ROWS = gl.constexpr(128)


@gluon.jit
def count_tiles(rank, length, history, window, N: gl.constexpr, KEYS: gl.constexpr):
    """First own row, tiles that all own rows see whole, and all tiles; the longest work first."""
    if KEYS:
        first = rank * ROWS
        _, full_start, full_stop, _, num_masked = queries_of_keys(
            first, length, history, window, N, ROWS
        )
        num_full = (full_stop - full_start) // N
        exists = first < length
    else:
        first = ((length + ROWS - 1) // ROWS - 1 - rank) * ROWS
        _, full_start, full_stop, _, _, _, num_masked = keys_of_queries(
            first, gl.minimum(first + ROWS, length), history, window, ROWS, N
        )
        num_full = (full_stop - full_start) // N
        exists = first >= 0
    num_all = gl.where(exists, num_full + num_masked, 0)
    return first, num_full, num_all


@gluon.jit
def tile_at(number, first, length, history, window, N: gl.constexpr, KEYS: gl.constexpr):
    """The first row of a tile: those without a mask come first."""
    if KEYS:
        begin, full_start, full_stop, num_early, _ = queries_of_keys(
            first, length, history, window, N, ROWS
        )
        masked = number - (full_stop - full_start) // N
        late = full_stop + (masked - num_early) * N
        at = gl.where(masked < num_early, begin + masked * N, late)
    else:
        left, full_start, full_stop, own, num_left, num_right, _ = keys_of_queries(
            first, gl.minimum(first + ROWS, length), history, window, ROWS, N
        )
        masked = number - (full_stop - full_start) // N
        at = masked_keys(masked, left, full_stop, own, num_left, num_right, N)
    return gl.where(masked < 0, full_start + number * N, at)


@gluon.jit
def await_tile(ring, count, STAGES: gl.constexpr):
    """Waits for the copy of a tile; gives it."""
    tiles, full, _ = ring
    mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)
    return tiles.index(count % STAGES)


@gluon.jit
def release_tile(ring, count, STAGES: gl.constexpr, pred=True):
    """This group reads a tile no more."""
    _, _, empty = ring
    mbarrier.arrive(empty.index(count % STAGES), count=1, pred=pred)


@gluon.jit
def copy_tile(descriptor, row, column, ring, count, STAGES: gl.constexpr):
    """Starts the copy of a tile once both groups are done with what was in its place."""
    tiles, full, empty = ring
    place = count % STAGES
    mbarrier.wait(empty.index(place), ((count // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(place), descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(
        descriptor, [row, column], full.index(place), tiles.index(place)
    )


@gluon.jit
def copy_all(descriptors, own, rings, samples, numbers, steps, N: gl.constexpr,
             KEYS: gl.constexpr, GRAD: gl.constexpr, B: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """The warp that copies: own rows, then tiles, of every piece of work of this program."""
    x_rows, y_rows, b_rows, c_rows = descriptors
    x_own, y_own, own_full, own_empty = own
    b_ring, c_ring = rings
    offsets_B, num_targets_B = samples
    window, units, heads, blocks, group = numbers
    x_step, y_step, b_step, c_step = steps
    count = 0
    pieces = 0
    for item in range(gl.program_id(0), units * blocks, gl.num_programs(0)):
        sample, head, rank = place_of(item, units, heads, blocks, group)
        start, length, history = sample_rows(offsets_B, num_targets_B, sample)
        first, _, num_all = count_tiles(rank, length, history, window, N, KEYS)
        if num_all > 0:
            mbarrier.wait(own_empty, (pieces & 1) ^ 1)
            if GRAD:
                mbarrier.expect(own_full, 4 * x_rows.block_type.nbytes)
            else:
                mbarrier.expect(own_full, 2 * x_rows.block_type.nbytes)
            for number in gl.static_range(2):
                row = start + first + number * GROUP_ROWS
                tma.async_copy_global_to_shared(
                    x_rows, [row, head * x_step], own_full, x_own.index(number)
                )
                if GRAD:
                    tma.async_copy_global_to_shared(
                        y_rows, [row, head * y_step], own_full, y_own.index(number)
                    )
            pieces += 1
            for number in range(num_all):
                row = start + tile_at(number, first, length, history, window, N, KEYS)
                copy_tile(b_rows, row, head * b_step, b_ring, count, B)
                copy_tile(c_rows, row, head * c_step, c_ring, count, C)
                count += 1


@gluon.jit
def zero_rows_past(tile, end, N: gl.constexpr, A: gl.constexpr):
    """Zeros in place of a tile's rows from `end` on: the next sample's may hold NaN.

    Both groups write the same zeros, each before its own products.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // A, A // 8], [4, 1], [1, 0])
    for first in gl.static_range(0, N, 16):
        if end < first + 16:
            part = tile.slice(first, 16)
            row_N = first + gl.arange(0, 16, gl.SliceLayout(1, layout))
            old_NA = part.load(layout)
            kept_NA = gl.where((row_N < end)[:, None], old_NA, gl.zeros_like(old_NA))
            part.store(kept_NA)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def activate(score_RN, own_R, at, about, tables, half_scale, window, N: gl.constexpr,
             KEYS: gl.constexpr, MASKED: gl.constexpr, SLOPE: gl.constexpr,
             P: gl.constexpr, Q: gl.constexpr):  # fmt: skip
    """Weights of a tile of scores, and twice SiLU's slope; zeros where a query sees no key."""
    sample, head, start, length, history, side = about
    half_position_HP, half_time_HQ, times_T, short_T, kinds_BXY = tables
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    row_N = at + gl.arange(0, N, gl.SliceLayout(0, layout))
    first = own_R
    own_R1 = own_R + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout))
    if KEYS:
        query, key = row_N[None, :], own_R1[:, None]
    else:
        query, key = own_R1[:, None], row_N[None, :]
    if half_position_HP is None and half_time_HQ is None:
        half_RN = score_RN * half_scale
    else:
        if KEYS:
            kind = kind_of(kinds_BXY, sample, side, length, at, first, N, GROUP_ROWS)
            near = is_near(at, first, history, half_position_HP, P, GROUP_ROWS)
            first_key = first
        else:
            kind = kind_of(kinds_BXY, sample, side, length, first, at, GROUP_ROWS, N)
            near = is_near(first, at, history, half_position_HP, P, N)
            first_key = at
        half_RN = add_biases(
            score_RN, half_scale, query, key, first_key, near, kind, start, length, history, head,
            half_position_HP, half_time_HQ, times_T, short_T, P, Q, True,
        )  # fmt: skip
    if SLOPE:
        weight_RN, slope_RN = half_silu_and_slope(half_RN, True)
    else:
        weight_RN = half_silu(half_RN, True)
        slope_RN = weight_RN
    if MASKED:
        seen_RN = visible(query, key, length, history, window)
        weight_RN = gl.where(seen_RN, weight_RN, 0.0)
        slope_RN = gl.where(seen_RN, slope_RN, 0.0)
    return weight_RN, slope_RN


@gluon.jit
def add_values(x_own, ring, count, at, weight_RN, sum_RA, piece, first_row, about, tables,
               half_scale, window, N: gl.constexpr, KEYS: gl.constexpr, MASKED: gl.constexpr,
               P: gl.constexpr, Q: gl.constexpr, B: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """One tile further: its scores and weights, while the last tile's values are added up."""
    first, length, history = piece
    b_ring, c_ring = ring
    A: gl.constexpr = x_own.shape[1]
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    before = at
    at = tile_at(count[1], first, length, history, window, N, KEYS)
    number = count[0] + count[1]
    b_tile = await_tile(b_ring, number, B)
    zero_RN = gl.zeros([GROUP_ROWS, N], gl.float32, score)
    token = warpgroup_mma(x_own, b_tile.permute((1, 0)), zero_RN, use_acc=False, is_async=True)
    c_tile = await_tile(c_ring, number - 1, C)
    if MASKED:  # noqa: SIM102  the compiler decides this, the GPU the rest
        if before + N > length:
            zero_rows_past(c_tile, length - before, N, A)
    sum_RA = warpgroup_mma(weight_RN, c_tile, sum_RA, is_async=True)
    score_RN = warpgroup_mma_wait(1, [token])
    release_tile(b_ring, number, B)
    later_RN, _ = activate(
        score_RN, first_row, at, about, tables, half_scale, window, N, KEYS, MASKED, False, P, Q
    )
    sum_RA, _ = warpgroup_mma_wait(0, [sum_RA, weight_RN])
    release_tile(c_ring, number - 1, C)
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    return gl.convert_layout(later_RN.to(c_tile.dtype), operand), sum_RA, at


@gluon.jit
def block_of(both, GROUP: gl.constexpr, number):
    """A group's own rows, looked up again for each tile.

    Else the compiler makes the addresses of all operands in them before the loop: at 256 columns
    these are 128 registers, which it then writes to memory and reads back for every tile.
    """
    zero = gl.inline_asm_elementwise(
        "and.b32 $0, $1, 0;", "=r,r", [number], dtype=gl.int32, is_pure=True, pack=1
    )
    return both.index(GROUP + zero)


@gluon.jit
def add_gradients(GROUP: gl.constexpr, x_both, y_both, ring, count, sum_b_RA, sum_c_RA, sums,
                  piece, first_row, about, tables, half_scale, window, N: gl.constexpr,
                  KEYS: gl.constexpr, VALUES: gl.constexpr, BUCKETS: gl.constexpr,
                  MASKED: gl.constexpr, P: gl.constexpr, Q: gl.constexpr, B: gl.constexpr,
                  C: gl.constexpr):  # fmt: skip
    """One tile: gradients of its scores, added up over b; with VALUES also weights over c.

    With BUCKETS, `sums` are those of gradients of scores by bucket of time.
    """
    first, length, history = piece
    b_ring, c_ring = ring
    A: gl.constexpr = x_both.shape[2]
    x_own = block_of(x_both, GROUP, count[1])
    y_own = block_of(y_both, GROUP, count[1])
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    at = tile_at(count[1], first, length, history, window, N, KEYS)
    number = count[0] + count[1]
    b_tile = await_tile(b_ring, number, B)
    c_tile = await_tile(c_ring, number, C)
    if MASKED:  # noqa: SIM102
        if at + N > length:
            zero_rows_past(b_tile, length - at, N, A)
            if VALUES:
                zero_rows_past(c_tile, length - at, N, A)
    zero_RN = gl.zeros([GROUP_ROWS, N], gl.float32, score)
    score_RN = warpgroup_mma(x_own, b_tile.permute((1, 0)), zero_RN, use_acc=False, is_async=True)
    grad_RN = warpgroup_mma(y_own, c_tile.permute((1, 0)), zero_RN, use_acc=False, is_async=True)
    score_RN = warpgroup_mma_wait(1, [score_RN])
    weight_RN, slope_RN = activate(
        score_RN, first_row, at, about, tables, half_scale, window, N, KEYS, MASKED, True, P, Q
    )
    if VALUES:
        values_RN = gl.convert_layout(weight_RN.to(b_tile.dtype), operand)
        sum_c_RA = warpgroup_mma(values_RN, c_tile, sum_c_RA, is_async=True)
        grad_RN = warpgroup_mma_wait(1, [grad_RN])
    else:
        grad_RN = warpgroup_mma_wait(0, [grad_RN])
        release_tile(c_ring, number, C)
    grad_RN = grad_RN * slope_RN
    if MASKED:  # a gradient of a row past the end may be NaN
        grad_RN = gl.where(slope_RN == 0.0, 0.0, grad_RN)
    elif BUCKETS:
        sums = add_easy(grad_RN, sums, first, first_row, at, about, tables, N, P)
    operand_RN = gl.convert_layout(grad_RN.to(b_tile.dtype), operand)
    sum_b_RA = warpgroup_mma(operand_RN, b_tile, sum_b_RA, is_async=True)
    # Not in the next round: with sums under way from round to round, ptxas lets every product wait
    # for the one before.
    if VALUES:
        sum_b_RA, sum_c_RA, _, _ = warpgroup_mma_wait(
            0, [sum_b_RA, sum_c_RA, operand_RN, values_RN]
        )
        release_tile(c_ring, number, C)
    else:
        sum_b_RA, _ = warpgroup_mma_wait(0, [sum_b_RA, operand_RN])
    release_tile(b_ring, number, B)
    return sum_b_RA, sum_c_RA, sums


@gluon.jit
def add_easy(grad_RN, sums, first, first_row, at, about, tables, N: gl.constexpr,
             P: gl.constexpr):  # fmt: skip
    """Sums by bucket with those of a tile, if it is easy for all own rows: not for a group's alone.

    So `find_hard_tiles` marks the others, as for Triton's kernel with as many queries.
    """
    sample, _, start, length, history, side = about
    half_position_HP, _, _, short_T, kinds_BXY = tables
    bucket, run_R, sums_Q, bucket_Q = sums
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    query_R = first_row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout))
    key_N = at + gl.arange(0, N, gl.SliceLayout(0, layout))
    kind = kind_of(kinds_BXY, sample, side, length, first, at, ROWS, N)
    near = is_near(first, at, history, half_position_HP, P, N)
    bucket, run_R, sums_Q = add_by_time(
        grad_RN, bucket, run_R, sums_Q, query_R < length, query_R[:, None], key_N[None, :], at,
        near, kind, start, short_T, bucket_Q,
    )  # fmt: skip
    return bucket, run_R, sums_Q, bucket_Q


@gluon.jit
def no_sums(N: gl.constexpr, Q_BLOCK: gl.constexpr):
    """Sums by bucket before the first tile: the bucket at hand, its sums by row, all, and names."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    run_R = gl.zeros([GROUP_ROWS], gl.float32, gl.SliceLayout(1, layout))
    sums_Q = gl.zeros([Q_BLOCK], gl.float32, line)
    return gl.to_tensor(0), run_R, sums_Q, gl.arange(0, Q_BLOCK, line)


@gluon.jit
def store_buckets(sums_XQ, sums, part, Q_BLOCK: gl.constexpr):
    """Writes one part of the sums by bucket."""
    bucket, run_R, sums_Q, bucket_Q = sums
    sums_Q += gl.where(bucket_Q == bucket, gl.sum(run_R, 0), 0.0)
    gl.store(sums_XQ + part * Q_BLOCK + bucket_Q, sums_Q)


@gluon.jit
def store_sum(out_THA, sum_RA, own, start, first_row, length, head, heads):
    """Writes a block of sums by way of the shared memory of the rows that it belongs to."""
    A: gl.constexpr = own.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // A, A // 8], [4, 1], [1, 0])
    own.store(sum_RA.to(own.dtype))
    rows_RA = own.load(layout)
    row_R = first_row + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout))
    column_A = gl.arange(0, A, gl.SliceLayout(0, layout))
    line_R = ((start + row_R).to(gl.int64) * heads + head) * A
    place_RA = out_THA + line_R[:, None] + column_A[None, :]
    gl.store(place_RA, rows_RA, mask=(row_R < length)[:, None])


@gluon.jit
def add_up(GROUP: gl.constexpr, outs, own, rings, samples, tables, numbers, factors, side,
           N: gl.constexpr, KEYS: gl.constexpr, GRAD: gl.constexpr, VALUES: gl.constexpr,
           HELD: gl.constexpr, BUCKETS: gl.constexpr, P: gl.constexpr, Q: gl.constexpr,
           B: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """A group of warps: one block of own rows of every piece of work of this program."""
    x_both, y_both, own_full, own_empty = own
    out_b, out_c, sums_XQ = outs
    half_scale, inverse_norm = factors
    offsets_B, num_targets_B = samples
    window, units, heads, blocks, group = numbers
    A: gl.constexpr = x_both.shape[2]
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16])
    x_own = x_both.index(GROUP)
    y_own = y_both.index(GROUP)
    count = 0
    pieces = 0
    for item in range(gl.program_id(0), units * blocks, gl.num_programs(0)):
        sample, head, rank = place_of(item, units, heads, blocks, group)
        start, length, history = sample_rows(offsets_B, num_targets_B, sample)
        first, num_full, num_all = count_tiles(rank, length, history, window, N, KEYS)
        if num_all > 0:
            first_row = first + GROUP * GROUP_ROWS
            about = (sample, head, start, length, history, side)
            piece = (first, length, history)
            mbarrier.wait(own_full, pieces & 1)
            pieces += 1
            zero_RA = gl.zeros([GROUP_ROWS, A], gl.float32, wide)
            if GRAD:
                sum_b_RA = zero_RA
                sum_c_RA = 0
                if VALUES:
                    sum_c_RA = zero_RA
                sums = 0
                if BUCKETS:
                    sums = no_sums(N, BUCKETS)
                for number in range(num_full):
                    sum_b_RA, sum_c_RA, sums = add_gradients(
                        GROUP, x_both, y_both, rings, (count, number), sum_b_RA, sum_c_RA, sums,
                        piece, first_row, about, tables, half_scale, window, N, KEYS, VALUES,
                        BUCKETS, False, P, Q, B, C,
                    )  # fmt: skip
                for number in range(num_full, num_all):
                    sum_b_RA, sum_c_RA, sums = add_gradients(
                        GROUP, x_both, y_both, rings, (count, number), sum_b_RA, sum_c_RA, sums,
                        piece, first_row, about, tables, half_scale, window, N, KEYS, VALUES,
                        BUCKETS, True, P, Q, B, C,
                    )  # fmt: skip
                if BUCKETS:
                    part = (head * (units // heads) + sample) * blocks + rank
                    store_buckets(sums_XQ, sums, part * GROUPS + GROUP, BUCKETS)
                if VALUES:
                    store_sum(
                        out_c, sum_c_RA * inverse_norm, y_own, start, first_row, length, head, heads
                    )
                # half_scale is half of the scale: the other factor 1/2 is that of the slope.
                factor = half_scale * inverse_norm
                store_sum(out_b, sum_b_RA * factor, x_own, start, first_row, length, head, heads)
            else:
                sum_RA = sum_values(
                    x_own, rings, count, num_full, num_all, zero_RA, piece, first_row, about,
                    tables, half_scale, window, N, KEYS, HELD, P, Q, B, C,
                )  # fmt: skip
                store_sum(
                    out_c, sum_RA * inverse_norm, x_own, start, first_row, length, head, heads
                )
            fence_async_shared()
            mbarrier.arrive(own_empty, count=1)
            count += num_all


@gluon.jit
def sum_values(x_own, ring, count, num_full, num_all, sum_RA, piece, first_row, about, tables,
               half_scale, window, N: gl.constexpr, KEYS: gl.constexpr, HELD: gl.constexpr,
               P: gl.constexpr, Q: gl.constexpr, B: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """The sum of all tiles' values; scores are a tile ahead of it."""
    first, length, history = piece
    b_ring, c_ring = ring
    A: gl.constexpr = x_own.shape[1]
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    if HELD:
        x_own = x_own.load(gl.DotOperandLayout(0, score, 2))
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    at = tile_at(0, first, length, history, window, N, KEYS)
    b_tile = await_tile(b_ring, count, B)
    zero_RN = gl.zeros([GROUP_ROWS, N], gl.float32, score)
    token = warpgroup_mma(x_own, b_tile.permute((1, 0)), zero_RN, use_acc=False, is_async=True)
    score_RN = warpgroup_mma_wait(0, [token])
    release_tile(b_ring, count, B)
    # Whether the first tile needs a mask is not known when this is compiled.
    later_RN, _ = activate(
        score_RN, first_row, at, about, tables, half_scale, window, N, KEYS, True, False, P, Q
    )
    weight_RN = gl.convert_layout(later_RN.to(x_own.dtype), operand)
    for number in range(1, num_full):
        weight_RN, sum_RA, at = add_values(
            x_own, ring, (count, number), at, weight_RN, sum_RA, piece, first_row, about, tables,
            half_scale, window, N, KEYS, False, P, Q, B, C,
        )  # fmt: skip
    for number in range(gl.maximum(num_full, 1), num_all):
        weight_RN, sum_RA, at = add_values(
            x_own, ring, (count, number), at, weight_RN, sum_RA, piece, first_row, about, tables,
            half_scale, window, N, KEYS, True, P, Q, B, C,
        )  # fmt: skip
    last = count + num_all - 1
    c_tile = await_tile(c_ring, last, C)
    if at + N > length:
        zero_rows_past(c_tile, length - at, N, A)
    token = warpgroup_mma(weight_RN, c_tile, sum_RA, is_async=True)
    sum_RA, _ = warpgroup_mma_wait(0, [token, weight_RN])
    release_tile(c_ring, last, C)
    return sum_RA


@gluon.jit(do_not_specialize=["side", "units", "heads", "blocks", "group", "window"])
def attend_by_groups(
    x_rows,
    y_rows,
    b_rows,
    c_rows,
    out_b,
    out_c,
    sums_XQ,
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
    x_step,
    y_step,
    b_step,
    c_step,
    A: gl.constexpr,
    N: gl.constexpr,
    P: gl.constexpr,
    Q: gl.constexpr,
    KEYS: gl.constexpr,
    GRAD: gl.constexpr,
    VALUES: gl.constexpr,
    HELD: gl.constexpr,
    BUCKETS: gl.constexpr,
    B_STAGES: gl.constexpr,
    C_STAGES: gl.constexpr,
):
    """One pass: which one, KEYS, GRAD and VALUES say.

    HELD keeps x in registers, without GRAD. BUCKETS, for the gradient of queries: how many sums of
    gradients of scores there are, a power of two; 0: none.
    """
    dtype: gl.constexpr = x_rows.dtype
    x_own = gl.allocate_shared_memory(dtype, [GROUPS, GROUP_ROWS, A], x_rows.layout)
    y_own = x_own
    if GRAD:
        y_own = gl.allocate_shared_memory(dtype, [GROUPS, GROUP_ROWS, A], y_rows.layout)
    b_tiles = gl.allocate_shared_memory(dtype, [B_STAGES, N, A], b_rows.layout)
    c_tiles = gl.allocate_shared_memory(dtype, [C_STAGES, N, A], c_rows.layout)
    own_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    own_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    b_full = gl.allocate_shared_memory(gl.int64, [B_STAGES, 1], mbarrier.MBarrierLayout())
    b_empty = gl.allocate_shared_memory(gl.int64, [B_STAGES, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [C_STAGES, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [C_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_full, count=1)
    mbarrier.init(own_empty, count=GROUPS)
    for place in gl.static_range(B_STAGES):
        mbarrier.init(b_full.index(place), count=1)
        mbarrier.init(b_empty.index(place), count=GROUPS)
    for place in gl.static_range(C_STAGES):
        mbarrier.init(c_full.index(place), count=1)
        mbarrier.init(c_empty.index(place), count=GROUPS)
    fence_async_shared()
    own = (x_own, y_own, own_full, own_empty)
    rings = ((b_tiles, b_full, b_empty), (c_tiles, c_full, c_empty))
    samples = (offsets_B, num_targets_B)
    numbers = (window, units, heads, blocks, group)
    tables = (half_position_HP, half_time_HQ, times_T, short_T, kinds_BXY)
    factors = (half_scale, inverse_norm)
    descriptors = (x_rows, y_rows, b_rows, c_rows)
    steps = (x_step, y_step, b_step, c_step)
    outs = (out_b, out_c, sums_XQ)
    gl.warp_specialize(
        [
            (add_up, (0, outs, own, rings, samples, tables, numbers, factors, side, N, KEYS, GRAD,
                      VALUES, HELD, BUCKETS, P, Q, B_STAGES, C_STAGES)),
            (add_up, (1, outs, own, rings, samples, tables, numbers, factors, side, N, KEYS, GRAD,
                      VALUES, HELD, BUCKETS, P, Q, B_STAGES, C_STAGES)),
            (copy_all, (descriptors, own, rings, samples, numbers, steps, N, KEYS, GRAD, B_STAGES,
                        C_STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
