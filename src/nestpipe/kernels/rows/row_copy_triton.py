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

from nestpipe.kernels.rows.cuda import (
    can_copy_in_bulk,
    copy_rows_in_bulk,
    in_order_of_addresses,
)

# Shapes: K rows of a buffer, n some of them, W numbers of a row

NUMBERS_AT_ONCE, MOST_ROWS, WARPS = 8192, 64, 16
"""How much a program asks for while as much from before is still on its way, and its warps: a
thread has 16 numbers of each, which leaves registers for their addresses."""
PROGRAMS = 4
"""Each takes a multiprocessor away from dense compute, so a few with much under way are better than
many: with 96 of them a step of dense compute took 3 to 8 % longer."""


@triton.jit
def _whence(addresses_K, positions_n, number, count):
    """Where some rows stand in the buffer and where they live."""
    there = number < count
    at = tl.load(positions_n + number, mask=there, other=0)
    return at, tl.load(addresses_K + at, mask=there, other=0)


@triton.jit
def _pointers(rows_KW, stride, at, place, column):
    """Every number of some rows, on the device and on the host."""
    on_host = place.to(tl.pointer_type(tl.float32))[:, None] + column
    return rows_KW + at[:, None] * stride + column, on_host


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
    TO_STORE: tl.constexpr,
):
    """Each turn asks for rows, and for the addresses of those after, before it waits for any."""
    column = tl.arange(0, COLUMNS)[None, :]
    step = tl.num_programs(0) * ROWS
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at, place = _whence(addresses_K, positions_n, number, count)
    on_device, on_host = _pointers(rows_KW, stride, at, place, column)
    inside = (number < count)[:, None] & (column < WIDTH)
    rows = tl.load(on_device if TO_STORE else on_host, mask=inside)
    next_at, next_place = _whence(addresses_K, positions_n, number + step, count)
    for _ in range(tl.program_id(0) * ROWS, count, step):
        on_device, on_host = _pointers(rows_KW, stride, next_at, next_place, column)
        inside = (number + step < count)[:, None] & (column < WIDTH)
        next_rows = tl.load(on_device if TO_STORE else on_host, mask=inside)
        after_at, after_place = _whence(addresses_K, positions_n, number + 2 * step, count)
        on_device, on_host = _pointers(rows_KW, stride, at, place, column)
        inside = (number < count)[:, None] & (column < WIDTH)
        tl.store(on_host if TO_STORE else on_device, rows, mask=inside)
        at, place, rows = next_at, next_place, next_rows
        next_at, next_place = after_at, after_place
        number += step


def copy_rows_by_gpu(
    addresses_K: Tensor,
    positions_n: Tensor | None,
    rows_KW: Tensor,
    *,
    to_store: bool,
    alone: bool = False,
    in_order: bool = False,
) -> None:
    """Copy rows from where they live into a buffer on the device, or back.

    `addresses_K` and `positions_n` are on the device; None: all rows. `alone`: nothing else runs
    beside it. `in_order`: positions are in the order of addresses. The host does not wait.
    """
    if not (len(rows_KW) if positions_n is None else len(positions_n)):
        return
    if positions_n is None or not in_order:
        positions_n = in_order_of_addresses(addresses_K, positions_n)
    if can_copy_in_bulk(rows_KW):
        copy_rows_in_bulk(addresses_K, positions_n, rows_KW, to_store=to_store, alone=alone)
    else:
        _copy_rows(addresses_K, positions_n, rows_KW, to_store=to_store)


def _copy_rows(
    addresses_K: Tensor, positions_n: Tensor, rows_KW: Tensor, *, to_store: bool
) -> None:
    """By ordinary loads and stores."""
    count, width = len(positions_n), rows_KW.shape[1]
    columns = triton.next_power_of_2(width)
    rows_at_once = max(1, min(MOST_ROWS, NUMBERS_AT_ONCE // columns))
    programs = min(PROGRAMS, -(-count // rows_at_once))
    with torch.cuda.device(rows_KW.device):
        _copy[(programs,)](
            addresses_K,
            positions_n,
            rows_KW,
            count,
            rows_KW.stride(0),
            WIDTH=width,
            COLUMNS=columns,
            ROWS=rows_at_once,
            TO_STORE=to_store,
            num_warps=WARPS,
        )
