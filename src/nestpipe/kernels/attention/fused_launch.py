"""Starts the attention kernels: shapes, descriptors, tiles and the order of programs."""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from nestpipe.kernels.attention.fused_bias_gradient import sum_bias_gradients
from nestpipe.kernels.attention.fused_kernels import (
    attend_backward_keys,
    attend_backward_queries,
    attend_forward,
)
from nestpipe.kernels.attention.fused_pairs import RANGE_ROWS, find_time_spans
from nestpipe.kernels.attention.reference import RelativeBias

# Shapes: B samples, T rows of all samples together, H heads, A width of queries and keys, V width
# of values, P and Q buckets of the biases, X parts of a sum

_CACHE_BYTES = 24 << 20
"""Keys and values that are in use at a time, so that they stay in the L2 cache."""
_PARTS = 512
"""Programs that share the sum of the bias gradients. A constant, so that the order is one too."""
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True)
class TileShape:
    """What a program holds at a time, and how many warps and copies ahead it has."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None
    """Most registers of a thread; with fewer, more programs share a processor. None: no limit."""

    def options(self) -> dict[str, Any]:
        """As the kernels and the compiler name them."""
        return {
            "M": self.queries,
            "N": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
        }


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of each pass. They depend on width and dtype, never on the batch: nor do results."""

    forward: TileShape
    backward_queries: TileShape
    backward_keys: TileShape
    backward_values: TileShape | None = None
    """Of a pass for values alone; None: keys and values in one. Wide heads need registers more."""

    @classmethod
    def of(cls, dtype: torch.dtype, width: int) -> Tiles:
        """For heads of `width`. Products of float32 have no tensor cores, so tiles are small."""
        if dtype == torch.float32:
            small = TileShape(32, 16, 8, 2) if width <= 64 else TileShape(16, 16, 8, 2)
            return cls(small, small, small)
        if width <= 64:
            tile = TileShape(128, 64, 4, 3)
            return cls(tile, TileShape(128, 64, 8, 3), TileShape(64, 128, 8, 3))
        if width <= 128:
            tile = TileShape(64, 64, 4, 3, 168)
            return cls(tile, TileShape(128, 64, 8, 3), TileShape(32, 64, 4, 3))
        tile = TileShape(128, 64, 8, 2)
        keys, values = TileShape(32, 128, 8, 2), TileShape(64, 128, 8, 2)
        return cls(tile, TileShape(128, 32, 8, 2), keys, values)


@dataclass(frozen=True, slots=True)
class Problem:
    """One call: rows, samples, and how scores become weights."""

    q_THA: Tensor
    k_THA: Tensor
    v_THV: Tensor
    offsets_B: Tensor
    num_targets_B: Tensor | None
    bias: RelativeBias
    """Tables are float32 and halved, as the kernels add them to half of a score."""
    spans: Tensor | None
    """Earliest and latest time of every few rows."""
    norm: float
    scale: float
    window: int | None
    longest: int
    width: int
    value_width: int
    tiles: Tiles

    @property
    def num_samples(self) -> int:
        return len(self.offsets_B) - 1

    @property
    def heads(self) -> int:
        return self.q_THA.shape[1]

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return len(self.q_THA), self.heads, self.value_width

    @property
    def block(self) -> int:
        """Columns of a tile, for queries, keys and values alike.

        With blocks of 16 and 32 in one kernel, the assembler of Triton 3.6 takes an operand of the
        keys' gradient from a wrong address. Tiles of one width share theirs, and come out right.
        """
        return max(16, triton.next_power_of_2(max(self.width, self.value_width)))

    def rows_of(self, x_THA: Tensor, rows: int, width: int) -> TensorDescriptor:
        """A descriptor of blocks of rows of one head; columns past `width` read as zeros."""
        total, heads, _ = x_THA.shape
        row, head, _ = x_THA.stride()
        shape, strides = [heads, total, width], [head, row, 1]
        return TensorDescriptor(x_THA, shape, strides, [1, rows, self.block])

    def with_tiles(self, **tiles: TileShape | None) -> Problem:
        return replace(self, tiles=replace(self.tiles, **tiles))

    def order(self, rows: int) -> tuple[int, dict[str, int]]:
        """Number of programs with a block of `rows` each, and what tells them their place."""
        blocks = triton.cdiv(self.longest, rows)
        units = self.num_samples * self.heads
        unit_bytes = self.longest * (self.width + self.value_width) * self.q_THA.element_size()
        group = min(max(1, _CACHE_BYTES // max(1, unit_bytes)), units)
        place = {"units": units, "heads": self.heads, "blocks": blocks, "group": group}
        return units * blocks, place

    def shared(self) -> dict[str, Any]:
        """Arguments that all passes have."""
        position_HP, time_HQ = self.bias.position_HP, self.bias.time_HQ
        return {
            "offsets_B": self.offsets_B,
            "num_targets_B": self.num_targets_B,
            "position_HP": position_HP,
            "time_HQ": time_HQ,
            "times_T": self.bias.times_T,
            "half_scale": 0.5 * self.scale,
            "window": self.window,
            "A_BLOCK": self.block,
            "V_BLOCK": self.block,
            "P": 1 if position_HP is None else position_HP.shape[1],
            "Q": 1 if time_HQ is None else time_HQ.shape[1],
            "FAST": self.q_THA.dtype != torch.float32 and not _INTERPRETED,
        }


def make_problem(
    q_THA: Tensor,
    k_THA: Tensor,
    v_THV: Tensor,
    offsets_B: Tensor,
    num_targets_B: Tensor | None,
    bias: RelativeBias,
    norm: float,
    scale: float,
    max_attention: int | None,
    longest: int,
) -> Problem:
    """Rows as the copy engine can read them, and tables as the kernels add them."""
    assert bias.time_HQ is None or bias.times_T is not None, "a bias by time needs the rows' times"
    times_T = None if bias.time_HQ is None else bias.times_T
    halved = RelativeBias(_halved(bias.position_HP), _halved(bias.time_HQ), times_T)
    width, value_width = q_THA.shape[2], v_THV.shape[2]
    q_THA, k_THA, v_THV = (_copyable(x) for x in (q_THA, k_THA, v_THV))
    problem = Problem(
        q_THA, k_THA, v_THV, offsets_B, num_targets_B, halved, None, norm, scale, max_attention,
        longest, width, value_width, Tiles.of(q_THA.dtype, max(width, value_width)),
    )  # fmt: skip
    return replace(problem, spans=_time_spans(problem))


def run_forward(problem: Problem) -> Tensor:
    """(T, H, V) the weighted sums of values."""
    out_THV = problem.v_THV.new_empty(problem.out_shape)
    tile = problem.tiles.forward
    programs, place = problem.order(tile.queries)
    if not programs or not len(out_THV):
        return out_THV
    with _device_of(out_THV):
        attend_forward[(programs,)](
            problem.rows_of(problem.q_THA, tile.queries, problem.width),
            problem.rows_of(problem.k_THA, tile.keys, problem.width),
            problem.rows_of(problem.v_THV, tile.keys, problem.value_width),
            out_THV,
            spans=problem.spans,
            inverse_norm=1 / problem.norm,
            V=problem.value_width,
            **tile.options(),
            **place,
            **problem.shared(),
        )
    return out_THV


def run_backward_queries(
    problem: Problem, grad_THV: Tensor, *, sum_scores: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(T, H, A) the gradient of the queries, and (H, X, Q) sums for `run_bias_gradients`.

    `sum_scores`: whether to sum the gradients of scores by bucket of time where that is easy.
    """
    grad_q_THA = problem.q_THA.new_empty(len(problem.q_THA), problem.heads, problem.width)
    tile = problem.tiles.backward_queries
    programs, place = problem.order(tile.queries)
    shared = problem.shared()
    buckets = triton.next_power_of_2(shared["Q"])
    sums_HXQ = None
    if sum_scores:
        parts = programs // problem.heads
        sums_HXQ = problem.q_THA.new_zeros(problem.heads, parts, buckets, dtype=torch.float32)
    if not programs or not len(grad_q_THA):
        return grad_q_THA, sums_HXQ
    with _device_of(grad_q_THA):
        attend_backward_queries[(programs,)](
            problem.rows_of(problem.q_THA, tile.queries, problem.width),
            problem.rows_of(problem.k_THA, tile.keys, problem.width),
            problem.rows_of(problem.v_THV, tile.keys, problem.value_width),
            problem.rows_of(_copyable(grad_THV), tile.queries, problem.value_width),
            grad_q_THA,
            sums_HXQ,
            spans=problem.spans,
            inverse_norm=1 / problem.norm,
            A=problem.width,
            Q_BLOCK=buckets,
            **tile.options(),
            **place,
            **shared,
        )
    return grad_q_THA, sums_HXQ


def run_backward_keys(problem: Problem, grad_THV: Tensor) -> tuple[Tensor, Tensor]:
    """(T, H, A) and (T, H, V) the gradients of keys and values."""
    total, tiles = len(problem.q_THA), problem.tiles
    grad_k_THA = problem.k_THA.new_empty(total, problem.heads, problem.width)
    grad_v_THV = problem.v_THV.new_empty(total, problem.heads, problem.value_width)
    if tiles.backward_values is None:
        run_backward_part(problem, grad_THV, tiles.backward_keys, grad_k_THA, grad_v_THV)
    else:
        run_backward_part(problem, grad_THV, tiles.backward_keys, grad_k_THA, None)
        run_backward_part(problem, grad_THV, tiles.backward_values, None, grad_v_THV)
    return grad_k_THA, grad_v_THV


def run_backward_part(
    problem: Problem,
    grad_THV: Tensor,
    tile: TileShape,
    grad_k_THA: Tensor | None,
    grad_v_THV: Tensor | None,
) -> None:
    """Fills the gradients of keys, of values, or of both; None: that one is not wanted."""
    programs, place = problem.order(tile.keys)
    if not programs or not len(problem.q_THA):
        return
    with _device_of(problem.q_THA):
        attend_backward_keys[(programs,)](
            problem.rows_of(problem.q_THA, tile.queries, problem.width),
            problem.rows_of(problem.k_THA, tile.keys, problem.width),
            problem.rows_of(problem.v_THV, tile.keys, problem.value_width),
            problem.rows_of(_copyable(grad_THV), tile.queries, problem.value_width),
            grad_k_THA,
            grad_v_THV,
            spans=problem.spans,
            inverse_norm=1 / problem.norm,
            A=problem.width,
            V=problem.value_width,
            **tile.options(),
            **place,
            **problem.shared(),
        )


def run_bias_gradients(
    problem: Problem, grad_THV: Tensor, sums_HXQ: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """(H, P) and (H, Q) float32 gradients of the tables, where there are tables.

    `sums_HXQ` is what the pass of the queries has summed.
    """
    # The same tiles as there, so that every one is in one of the two sums.
    tile, heads = replace(problem.tiles.backward_queries, stages=1), problem.heads
    shared = problem.shared()
    parts = max(1, _PARTS // heads)
    zeros = problem.q_THA.new_zeros
    position_XP = time_XQ = scratch_XMN = None
    if problem.bias.position_HP is not None:
        position_XP = zeros(heads * parts, shared["P"], dtype=torch.float32)
        scratch_XMN = position_XP.new_empty(heads * parts, tile.queries * tile.keys)
    if problem.bias.time_HQ is not None:
        time_XQ = zeros(heads * parts, shared["Q"], dtype=torch.float32)
    if problem.num_samples and len(problem.q_THA):
        with _device_of(problem.q_THA):
            sum_bias_gradients[(parts, heads)](
                problem.rows_of(problem.q_THA, tile.queries, problem.width),
                problem.rows_of(problem.k_THA, tile.keys, problem.width),
                problem.rows_of(problem.v_THV, tile.keys, problem.value_width),
                problem.rows_of(_copyable(grad_THV), tile.queries, problem.value_width),
                position_XP,
                time_XQ,
                scratch_XMN,
                spans=problem.spans,
                samples=problem.num_samples,
                blocks=triton.cdiv(problem.longest, tile.queries),
                Q_BLOCK=triton.next_power_of_2(shared["Q"]),
                **tile.options(),
                **shared,
            )
    # 1/2 belongs to the slope of SiLU, which the kernels give twice.
    factor = 0.5 / problem.norm
    easy_HQ = sums_HXQ.sum(1)
    grad_position_HP = grad_time_HQ = None
    if position_XP is not None:
        grad_position_HP = position_XP.view(heads, parts, -1).sum(1)
        grad_position_HP[:, -1] += easy_HQ.sum(1)  # easy tiles are far away
        grad_position_HP *= factor
    if time_XQ is not None:
        grad_time_HQ = (time_XQ.view(heads, parts, -1).sum(1) + easy_HQ[:, : shared["Q"]]) * factor
    return grad_position_HP, grad_time_HQ


def _time_spans(problem: Problem) -> Tensor | None:
    times_T, samples = problem.bias.times_T, problem.num_samples
    if times_T is None:
        return None
    rows = RANGE_ROWS.value
    # Each sample starts at its first row // rows plus its number: room enough for its last block.
    spans = times_T.new_empty(len(times_T) // rows + samples + 1, 2)
    blocks = triton.cdiv(problem.longest, rows)
    if samples and blocks:
        with _device_of(times_T):
            find_time_spans[(samples * blocks,)](times_T, problem.offsets_B, spans, blocks)
    return spans


def _halved(table_HP: Tensor | None) -> Tensor | None:
    return None if table_HP is None else (table_HP.detach().float() * 0.5).contiguous()


def _copyable(x_THA: Tensor) -> Tensor:
    """Rows and heads that start at 16 bytes, as the copy engine wants; a copy if they do not."""
    size = x_THA.element_size()
    aligned = all(stride * size % 16 == 0 for stride in x_THA.stride()[:2])
    if x_THA.stride(2) == 1 and aligned and x_THA.data_ptr() % 16 == 0:
        return x_THA
    padding = -x_THA.shape[2] % (16 // size)
    return functional.pad(x_THA, (0, padding)).contiguous()


def _device_of(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
