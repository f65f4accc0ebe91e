"""Rows between GPU memory and pinned host memory, moved by the GPU itself, row by row.

The host has only to know where rows live. Its cores neither gather rows nor wait for a copy, and no
row passes through staging memory.
"""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Shapes: K rows of a buffer, n some of them, W numbers of a row

ROWS_AT_ONCE, WARPS = 64, 16
"""Rows that a program has under way at a time, and its warps."""
PROGRAMS = 4
"""Each takes a multiprocessor away from dense compute, so a few with much under way are better than
many: with 96 of them a step of dense compute took 3 to 8 % longer."""


@triton.jit(do_not_specialize=["count"])
def _copy(
    addresses_K,
    positions_n,
    rows_KW,
    count,
    stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    SOME: tl.constexpr,
    TO_PLACES: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)[None, :]
    for first in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        number = first + tl.arange(0, ROWS)
        there = number < count
        at = tl.load(positions_n + number, mask=there, other=0) if SOME else number.to(tl.int64)
        place = tl.load(addresses_K + at, mask=there, other=0).to(tl.pointer_type(tl.float32))
        on_host = place[:, None] + column
        on_device = rows_KW + at[:, None] * stride + column
        inside = there[:, None] & (column < WIDTH)
        if TO_PLACES:
            tl.store(on_host, tl.load(on_device, mask=inside), mask=inside)
        else:
            tl.store(on_device, tl.load(on_host, mask=inside), mask=inside)


def copy_rows_by_gpu(
    addresses_K: Tensor, positions_n: Tensor | None, rows_KW: Tensor, *, to_places: bool
) -> None:
    """Copy rows from where they live into a buffer on the device, or back.

    `addresses_K` and `positions_n` are on the device; None: all rows. The host does not wait.
    """
    count, width = len(rows_KW) if positions_n is None else len(positions_n), rows_KW.shape[1]
    if not count:
        return
    programs = min(PROGRAMS, -(-count // ROWS_AT_ONCE))
    with torch.cuda.device(rows_KW.device):
        _copy[(programs,)](
            addresses_K,
            addresses_K if positions_n is None else positions_n,
            rows_KW,
            count,
            rows_KW.stride(0),
            WIDTH=width,
            COLUMNS=triton.next_power_of_2(width),
            ROWS=ROWS_AT_ONCE,
            SOME=positions_n is not None,
            TO_PLACES=to_places,
            num_warps=WARPS,
        )
