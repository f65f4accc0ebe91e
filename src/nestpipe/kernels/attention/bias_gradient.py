"""Gradients of the bias tables by the kernel in `cuda/bias_gradient.cu`, where nvcc compiled it."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nestpipe.errors import RunError
from nestpipe.kernels.library import cuda_library, launch

if TYPE_CHECKING:
    from nestpipe.kernels.attention.fused_launch import Problem

# Shapes: B samples, T rows of all samples together, H heads, V width of values, P and Q buckets of
# the biases, X parts of a sum, or blocks of queries and Y of keys

PARTS = 256
"""Blocks of threads that share a head's sum. A constant, so that the order is one too."""
QUERIES = 64
"""Of a block of threads."""
_KEYS = 32
"""A tile has a multiple of so many."""
_THREADS, _WARPS, _MOST_BYTES = 128, 4, 227 << 10


class _AttentionRowsStruct(ctypes.Structure):
    """Rows of all heads; strides count numbers."""

    _fields_ = (
        *(("base", c_void_p), ("row", c_int64), ("head", c_int64)),
        ("width", c_int32),
    )


class _BiasTaskStruct(ctypes.Structure):
    """What the kernel is told; `cuda/bias_gradient.cu` says more."""

    _fields_ = (
        *((name, _AttentionRowsStruct) for name in ("q", "k", "v", "grad")),
        *((name, c_void_p) for name in ("offsets", "targets", "hard", "position", "time", "times")),
        *((name, c_void_p) for name in ("position_parts", "time_parts")),
        *((name, c_int32) for name in ("samples", "parts", "positions", "buckets")),
        *((name, c_int32) for name in ("tile_queries", "tile_keys", "query_tiles", "key_tiles")),
        *(("window", c_int32), ("half_scale", c_float)),
    )


def can_sum(problem: Problem) -> bool:
    """Whether the kernel knows such rows and tables; else its twin sums them."""
    q_THA, tile = problem.q_THA, problem.tiles.backward_queries
    lists = (problem.offsets_B, problem.num_targets_B, problem.bias.times_T)
    return (
        q_THA.dtype in (torch.bfloat16, torch.float16)
        and tile.queries % QUERIES == 0
        and tile.keys % _KEYS == 0
        and all(x is None or (x.dtype == torch.int64 and x.is_contiguous()) for x in lists)
        and _bytes_of(problem) <= _MOST_BYTES
        and has_kernel(q_THA)
    )


def has_kernel(q_THA: Tensor) -> bool:
    """Whether there is a library for the device of these rows."""
    return q_THA.is_cuda and cuda_library(q_THA.get_device()) is not None


def _bytes_of(problem: Problem) -> int:
    """At least what the kernel needs of the memory that threads share."""
    columns = sum(-(-width // 16) * 16 + 8 for width in (problem.width, problem.value_width))
    tables = problem.bias.num_buckets * (_THREADS + 1) + problem.bias.num_positions * (_WARPS + 1)
    keys = 64 if max(problem.width, problem.value_width) <= 128 else _KEYS
    return 4 * (tables + 3) + (QUERIES + keys) * (8 + 2 * columns)


def sum_hard_tiles(
    problem: Problem, grad_THV: Tensor, hard_BXY: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """(H * X, P) and (H * X, Q) parts of the gradients of the tables, of the tiles marked hard."""
    bias, tile, heads = problem.bias, problem.tiles.backward_queries, problem.heads
    samples, query_tiles, key_tiles = hard_BXY.shape
    parts = min(PARTS, samples * query_tiles * (tile.queries // QUERIES))
    empty = problem.q_THA.new_empty
    position_XP = time_XQ = None
    if bias.half_position_HP is not None:
        position_XP = empty(heads * parts, bias.num_positions, dtype=torch.float32)
    if bias.half_time_HQ is not None:
        time_XQ = empty(heads * parts, bias.num_buckets, dtype=torch.float32)
    rows = (problem.q_THA, problem.k_THA, problem.v_THV, grad_THV)
    widths = (problem.width, problem.width, problem.value_width, problem.value_width)
    lists = (problem.offsets_B, problem.num_targets_B, hard_BXY, bias.half_position_HP)
    task = _BiasTaskStruct(
        *(_rows_of(x, width) for x, width in zip(rows, widths, strict=True)),
        *(_pointer(x) for x in (*lists, bias.half_time_HQ, bias.times_T, position_XP, time_XQ)),
        *(samples, parts, bias.num_positions, bias.num_buckets),
        *(tile.queries, tile.keys, query_tiles, key_tiles),
        -1 if problem.window is None else problem.window,
        0.5 * problem.scale,
    )
    half = problem.q_THA.dtype == torch.float16
    status = launch(problem.q_THA.device, "nestpipe_bias_gradient", ctypes.byref(task), heads, half)
    if status != 0:
        raise RunError(f"the GPU cannot sum the gradients of biases: CUDA's error {status}")
    return position_XP, time_XQ


def _rows_of(x_THA: Tensor, width: int) -> _AttentionRowsStruct:
    row, head, _ = x_THA.stride()
    return _AttentionRowsStruct(x_THA.data_ptr(), row, head, width)


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
