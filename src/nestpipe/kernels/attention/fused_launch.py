"""Starts the attention kernels: shapes, descriptors, tiles and the order of programs."""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from triton.tools.tensor_descriptor import TensorDescriptor

from nestpipe.kernels.attention import hopper_launch
from nestpipe.kernels.attention.bias_gradient import can_sum, sum_hard_tiles
from nestpipe.kernels.attention.fused import BatchFacts
from nestpipe.kernels.attention.fused_bias_gradient import (
    add_parts,
    find_hard_tiles,
    sum_bias_gradients,
)
from nestpipe.kernels.attention.fused_kernels import (
    attend_backward_keys,
    attend_backward_queries,
    attend_forward,
)
from nestpipe.kernels.attention.fused_pairs import BLOCK_ROWS, PAST_END, prepare_biases
from nestpipe.kernels.attention.hopper_launch import ROWS, GroupTiles
from nestpipe.kernels.attention.reference import RelativeBias
from nestpipe.kernels.triton_launch import Constants, Starter, constants

# Shapes: B samples, T rows of all samples together, H heads, A width of queries and keys, V width
# of values, P and Q buckets of the biases, X parts of a sum

_CACHE_BYTES = 24 << 20
"""Keys and values that are in use at a time, so that they stay in the L2 cache."""
_PARTS = 512
"""Programs that share the sum of the bias gradients. A constant, so that the order is one too."""
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_FORWARD = Starter(attend_forward)
_BACKWARD_QUERIES = Starter(attend_backward_queries)
_BACKWARD_KEYS = Starter(attend_backward_keys)
_PREPARE_BIASES = Starter(prepare_biases)
_FIND_HARD_TILES = Starter(find_hard_tiles)
_SUM_BIAS_GRADIENTS = Starter(sum_bias_gradients)
_ADD_PARTS = Starter(add_parts)


def _ceil(number: int, unit: int) -> int:
    """How many units hold so many."""
    return -(-number // unit)


def _power_of_two(number: int) -> int:
    """The smallest that is not smaller."""
    return 1 << max(0, number - 1).bit_length()


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
    @cache
    def of(cls, dtype: torch.dtype, width: int, *, biased: bool = False) -> Tiles:
        """For heads of `width`. Products of float32 have no tensor cores, so tiles are small.

        `biased` frees registers, which changes no bit.
        """
        if dtype == torch.float32:
            small = TileShape(32, 16, 8, 2) if width <= 64 else TileShape(16, 16, 8, 2)
            return cls(small, small, small)
        if width <= 64:
            tile = TileShape(128, 64, 4, 3)
            return cls(tile, TileShape(128, 64, 8, 3), TileShape(64, 128, 8, 3))
        if width <= 128:
            tile = TileShape(64, 64, 4, 3, None if biased else 168)
            return cls(tile, TileShape(128, 64, 8, 3), TileShape(32, 64, 4, 3))
        tile = TileShape(128, 64, 8, 2)
        keys, values = TileShape(32, 128, 8, 2), TileShape(64, 128, 8, 2)
        return cls(tile, TileShape(128, 32, 8, 2), keys, values)


@dataclass(frozen=True, slots=True)
class PreparedBias:
    """Tables and times as the kernels want them: small, made by forward and kept for backward."""

    half_position_HP: Tensor | None = None
    half_time_HQ: Tensor | None = None
    """float32 and halved: kernels add them to half of a score."""
    times_T: Tensor | None = None
    short_T: Tensor | None = None
    """The low half of each time."""
    kinds_BXY: Tensor | None = None
    """Lowest and highest bucket of time of every two blocks of rows."""
    side: int = 0
    """Blocks of the longest sample."""

    @property
    def num_positions(self) -> int:
        return 1 if self.half_position_HP is None else self.half_position_HP.shape[1]

    @property
    def num_buckets(self) -> int:
        return 1 if self.half_time_HQ is None else self.half_time_HQ.shape[1]


def prepare_bias(
    bias: RelativeBias, offsets_B: Tensor, longest: int, facts: BatchFacts | None = None
) -> PreparedBias:
    """One kernel for all of it; without tables, nothing.

    `facts` of the same samples and times save the larger part of it.
    """
    position_HP, time_HQ, times_T = bias.position_HP, bias.time_HQ, bias.times_T
    if position_HP is None and time_HQ is None:
        return PreparedBias()
    half_position_HP = half_time_HQ = short_T = kinds_BXY = None
    samples, side = offsets_B.shape[0] - 1, _ceil(longest, BLOCK_ROWS.value)
    programs = 1  # the last one has the tables
    if position_HP is not None:
        half_position_HP = position_HP.new_empty(position_HP.shape, dtype=torch.float32)
    if time_HQ is not None:
        assert times_T is not None, "a bias by time needs the rows' times"
        half_time_HQ = time_HQ.new_empty(time_HQ.shape, dtype=torch.float32)
        known = facts.times if facts is not None else {}
        if (buckets := time_HQ.shape[1]) not in known:
            programs += samples * side
            known[buckets] = (
                times_T.new_empty(len(times_T) + PAST_END, dtype=torch.int32),
                times_T.new_empty(samples, side, side, dtype=torch.int32),
            )
        short_T, kinds_BXY = known[buckets]
    else:
        times_T = None
    _halve_tables(
        programs, side, (times_T, offsets_B), (position_HP, time_HQ),
        (half_position_HP, half_time_HQ, short_T, kinds_BXY),
    )  # fmt: skip
    return PreparedBias(half_position_HP, half_time_HQ, times_T, short_T, kinds_BXY, side)


def _halve_tables(
    programs: int,
    side: int,
    samples: tuple[Tensor | None, Tensor],
    tables: tuple[Tensor | None, Tensor | None],
    made: tuple[Tensor | None, ...],
) -> None:
    """Fills what `prepare_bias` returns; one program leaves the times alone."""
    shapes = [(0, 0, 0, 0) if of is None else (*of.shape, *of.stride()) for of in tables]
    (heads, positions, *position_steps), (more_heads, buckets, *time_steps) = shapes
    _PREPARE_BIASES(
        (programs,),
        constants(Q=max(buckets, 1), Y=16),
        (),
        (*samples, *tables, *made),
        (side, max(heads, more_heads), positions, buckets, *position_steps, *time_steps),
    )


@dataclass(slots=True)
class Problem:
    """One call: rows, samples, and how scores become weights. A value: nothing changes it.

    It is not frozen because that triples the time to make one.
    """

    q_THA: Tensor
    k_THA: Tensor
    v_THV: Tensor
    offsets_B: Tensor
    num_targets_B: Tensor | None
    bias: PreparedBias
    norm: float
    scale: float
    window: int | None
    longest: int
    width: int
    value_width: int
    tiles: Tiles
    facts: BatchFacts
    block: int
    """Columns of a tile, for queries, keys and values alike.

    With blocks of 16 and 32 in one kernel, the assembler of Triton 3.6 takes an operand of the
    keys' gradient from a wrong address. Tiles of one width share theirs, and come out right.
    """
    descriptors: dict[tuple[int, int], TensorDescriptor] = field(default_factory=dict)
    """Made once: passes with the same number of rows share them."""
    groups: GroupTiles | None = None
    """Tiles of the kernel of Hopper's warp groups, where that was asked for."""

    @property
    def num_samples(self) -> int:
        return self.offsets_B.shape[0] - 1

    @property
    def heads(self) -> int:
        return self.q_THA.shape[1]

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return self.q_THA.shape[0], self.heads, self.value_width

    def rows_of(self, x_THA: Tensor, rows: int, width: int) -> TensorDescriptor:
        """A descriptor of blocks of rows of one head; columns past `width` read as zeros."""
        if found := self.descriptors.get((id(x_THA), rows)):
            return found
        total, heads, _ = x_THA.shape
        row, head, _ = x_THA.stride()
        # Without the class's own checks: `copyable` has made sure of what they ask.
        made = object.__new__(TensorDescriptor)
        made.base, made.padding = x_THA, "zero"
        made.shape, made.strides = [heads, total, width], [head, row, 1]
        made.block_shape = [1, rows, self.block]
        self.descriptors[id(x_THA), rows] = made  # which keeps the tensor, and so its id, alive
        return made

    def descriptors_of(
        self, tile: TileShape, grad_THV: Tensor | None = None
    ) -> list[TensorDescriptor]:
        """Of queries, keys and values, and of the gradient of the sums of values."""
        found = [
            self.rows_of(self.q_THA, tile.queries, self.width),
            self.rows_of(self.k_THA, tile.keys, self.width),
            self.rows_of(self.v_THV, tile.keys, self.value_width),
        ]
        if grad_THV is not None:
            found.append(self.rows_of(grad_THV, tile.queries, self.value_width))
        return found

    def with_tiles(self, **tiles: TileShape | None) -> Problem:
        return replace(self, tiles=replace(self.tiles, **tiles))

    def order(self, rows: int) -> tuple[int, tuple[int, ...]]:
        """Programs with a block of `rows` each; units, heads, blocks and group tell their place."""
        blocks = _ceil(self.longest, rows)
        units = self.num_samples * self.heads
        unit_bytes = self.longest * (self.width + self.value_width) * self.q_THA.element_size()
        group = min(max(1, _CACHE_BYTES // max(1, unit_bytes)), units)
        return units * blocks, (units, self.heads, blocks, group)

    def shared(self) -> tuple[Tensor | None, ...]:
        """Tensors that all passes read."""
        bias = self.bias
        return (
            self.offsets_B, self.num_targets_B, bias.half_position_HP, bias.half_time_HQ,
            bias.times_T, bias.short_T, bias.kinds_BXY,
        )  # fmt: skip

    def numbers(self, place: tuple[int, ...]) -> tuple[float | None, ...]:
        """Numbers of the three passes; `place` is what `order` says."""
        return (self.bias.side, 0.5 * self.scale, 1 / self.norm, self.window, *place)

    def constants(self, tile: TileShape, **own: int) -> Constants:
        """What a kernel is compiled for."""
        fast = self.q_THA.dtype != torch.float32 and not _INTERPRETED
        bias = self.bias
        return _compiled_for(tile, self.block, bias.num_positions, bias.num_buckets, fast, **own)


@cache
def _compiled_for(
    tile: TileShape, block: int, positions: int, buckets: int, fast: bool, **own: int
) -> Constants:
    shared = {"A_BLOCK": block, "V_BLOCK": block, "P": positions, "Q": buckets, "FAST": fast}
    return constants(**shared, **own, **tile.options())


def make_problem(
    rows: tuple[Tensor, Tensor, Tensor],
    samples: tuple[Any, ...],
    bias: PreparedBias,
    rule: tuple[Any, ...],
    facts: BatchFacts | None = None,
    *,
    hopper: bool = False,
) -> Problem:
    """Rows as the copy engine can read them; `hopper`: for its warp groups.

    `samples` are where they start and their candidates; `rule` is norm, scale, how far a query
    sees, and the longest sample.
    """
    q_THA, k_THA, v_THV = rows
    offsets_B, num_targets_B = samples
    norm, scale, window, longest = rule
    width, value_width = q_THA.shape[2], v_THV.shape[2]
    biased = bias.half_position_HP is not None or bias.half_time_HQ is not None
    widest = max(width, value_width)
    tiles = Tiles.of(q_THA.dtype, widest, biased=biased)
    groups = None
    if hopper:
        groups = GroupTiles.of(widest, timed=bias.half_time_HQ is not None)
        # Which tiles are hard is told by the tiles of the pass that sums the easy ones.
        own = replace(tiles.backward_queries, queries=ROWS, keys=groups.queries.rows)
        tiles = replace(tiles, backward_queries=own)
    return Problem(
        copyable(q_THA), copyable(k_THA), copyable(v_THV), offsets_B, num_targets_B, bias, norm,
        scale, window, longest, width, value_width, tiles,
        BatchFacts() if facts is None else facts, max(16, _power_of_two(widest)), groups=groups,
    )  # fmt: skip


def run_forward(problem: Problem) -> Tensor:
    """(T, H, V) the weighted sums of values."""
    if problem.groups is not None:
        return hopper_launch.run_forward(problem)
    out_THV = problem.v_THV.new_empty(problem.out_shape)
    tile = problem.tiles.forward
    programs, place = problem.order(tile.queries)
    if not programs or not out_THV.shape[0]:
        return out_THV
    _FORWARD(
        (programs,),
        problem.constants(tile, V=problem.value_width),
        problem.descriptors_of(tile),
        (out_THV, *problem.shared()),
        problem.numbers(place),
    )
    return out_THV


def run_backward(
    problem: Problem,
    grad_THV: Tensor,
    tables: tuple[Tensor | None, Tensor | None],
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of queries, keys, values and of both tables; None in place of those not wanted."""
    grad_THV = copyable(grad_THV)
    wants_q, wants_k, wants_v, wants_position, wants_time = wanted
    wants_tables = wants_position or wants_time
    grads: list[Tensor | None] = [None] * 5
    sums_HXQ = None
    if wants_q or wants_tables:
        grads[0], sums_HXQ = run_backward_queries(problem, grad_THV, sum_scores=wants_tables)
    if wants_k or wants_v:
        grads[1], grads[2] = run_backward_keys(problem, grad_THV)
    if sums_HXQ is not None:
        grads[3], grads[4] = run_bias_gradients(problem, grad_THV, sums_HXQ, tables)
    return tuple(grads)


def run_backward_queries(
    problem: Problem, grad_THV: Tensor, *, sum_scores: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(T, H, A) the gradient of the queries, and (H, X, Q) sums for `run_bias_gradients`.

    `sum_scores`: whether to sum the gradients of scores by bucket of time where that is easy.
    `grad_THV` is one that `copyable` has given.
    """
    if problem.groups is not None:
        return hopper_launch.run_queries(problem, grad_THV, sum_scores=sum_scores)
    grad_q_THA = problem.q_THA.new_empty(problem.q_THA.shape[0], problem.heads, problem.width)
    tile = problem.tiles.backward_queries
    programs, place = problem.order(tile.queries)
    buckets = _power_of_two(problem.bias.num_buckets)
    sums_HXQ = None
    if sum_scores:
        parts = programs // max(1, problem.heads)
        sums_HXQ = problem.q_THA.new_empty(problem.heads, parts, buckets, dtype=torch.float32)
    if not programs or not grad_q_THA.shape[0]:
        return grad_q_THA, None if sums_HXQ is None else sums_HXQ.zero_()
    _BACKWARD_QUERIES(
        (programs,),
        problem.constants(tile, A=problem.width, Q_BLOCK=buckets),
        problem.descriptors_of(tile, grad_THV),
        (grad_q_THA, sums_HXQ, *problem.shared()),
        problem.numbers(place),
    )
    return grad_q_THA, sums_HXQ


def run_backward_keys(problem: Problem, grad_THV: Tensor) -> tuple[Tensor, Tensor]:
    """(T, H, A) and (T, H, V) the gradients of keys and values."""
    if problem.groups is not None:
        return hopper_launch.run_keys(problem, grad_THV)
    total, tiles = problem.q_THA.shape[0], problem.tiles
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
    if not programs or not problem.q_THA.shape[0]:
        return
    _BACKWARD_KEYS(
        (programs,),
        problem.constants(tile, A=problem.width, V=problem.value_width),
        problem.descriptors_of(tile, grad_THV),
        (grad_k_THA, grad_v_THV, *problem.shared()),
        problem.numbers(place),
    )


def run_bias_gradients(
    problem: Problem,
    grad_THV: Tensor,
    sums_HXQ: Tensor,
    tables: tuple[Tensor | None, Tensor | None],
    *,
    twin: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """(H, P) and (H, Q) gradients of the tables, where there are tables.

    `sums_HXQ` is what the pass of the queries has summed. `twin` takes Triton's kernel also where
    the one in CUDA would do.
    """
    if not problem.num_samples or not problem.q_THA.shape[0]:
        parts = (None, None)
    elif not twin and can_sum(problem):
        parts = sum_hard_tiles(problem, grad_THV, hard_tiles(problem))
    else:
        parts = sum_by_twin(problem, grad_THV)
    position_HP, time_HQ = (None if t is None else t.new_empty(t.shape) for t in tables)
    given = [part for part in parts if part is not None]
    if not given:
        for grad in (position_HP, time_HQ):
            if grad is not None:
                grad.zero_()
        return position_HP, time_HQ
    num_parts = given[0].shape[0] // problem.heads
    positions, wide = problem.bias.num_positions, 64
    wanted = constants(
        P=positions, Q=problem.bias.num_buckets, Q_BLOCK=sums_HXQ.shape[2], X=16, W=wide
    )
    _ADD_PARTS(
        (problem.heads, _ceil(positions, wide) + 1),
        wanted,
        (),
        (*parts, sums_HXQ, position_HP, time_HQ),
        # 1/2 belongs to the slope of SiLU, which the kernels give twice
        (0.5 / problem.norm, num_parts, sums_HXQ.shape[1]),
    )
    return position_HP, time_HQ


def hard_tiles(problem: Problem) -> Tensor:
    """(B, X, Y) 1 for each tile of the pass over queries that it leaves to others to sum."""
    tile, bias, window = problem.tiles.backward_queries, problem.bias, problem.window
    tables = (bias.half_position_HP is None, bias.half_time_HQ is None)
    key = (tile.queries, tile.keys, bias.num_positions, bias.num_buckets, *tables, window)
    known = problem.facts.hard
    if key not in known:
        known[key] = _find_hard_tiles(problem)
    return known[key]


def _find_hard_tiles(problem: Problem) -> Tensor:
    tile, bias = problem.tiles.backward_queries, problem.bias
    blocks, columns = (_ceil(problem.longest, rows) for rows in (tile.queries, tile.keys))
    shape = (problem.num_samples, blocks, columns)
    hard_BXY = torch.empty(shape, dtype=torch.int8, device=problem.q_THA.device)
    if hard_BXY.numel():
        _FIND_HARD_TILES(
            (problem.num_samples * blocks,),
            constants(P=bias.num_positions, M=tile.queries, N=tile.keys, Y=64),
            (),
            (hard_BXY, problem.offsets_B, problem.num_targets_B, bias.half_position_HP,
             bias.kinds_BXY),
            (bias.side, problem.window, blocks, columns),
        )  # fmt: skip
    return hard_BXY


def sum_by_twin(problem: Problem, grad_THV: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(H * X, P) and (H * X, Q) parts of the gradients of the tables, of tiles that are hard."""
    # The same tiles as there, so that every one is in one of the two sums.
    tile, heads = replace(problem.tiles.backward_queries, stages=1), problem.heads
    bias, parts = problem.bias, max(1, _PARTS // heads)
    zeros = problem.q_THA.new_zeros
    position_XP = time_XQ = scratch_XMN = None
    if bias.half_position_HP is not None:
        position_XP = zeros(heads * parts, bias.num_positions, dtype=torch.float32)
        scratch_XMN = position_XP.new_empty(heads * parts, tile.queries * tile.keys)
    if bias.half_time_HQ is not None:
        time_XQ = zeros(heads * parts, bias.num_buckets, dtype=torch.float32)
    blocks = _ceil(problem.longest, tile.queries)
    _SUM_BIAS_GRADIENTS(
        (parts, heads),
        problem.constants(tile, Q_BLOCK=_power_of_two(bias.num_buckets)),
        problem.descriptors_of(tile, grad_THV),
        (position_XP, time_XQ, scratch_XMN, *problem.shared()),
        (bias.side, 0.5 * problem.scale, problem.window, problem.num_samples, blocks),
    )
    return position_XP, time_XQ


def copyable(x_THA: Tensor) -> Tensor:
    """Rows and heads that start at 16 bytes, as the copy engine wants; a copy if they do not."""
    size = x_THA.element_size()
    row, head, step = x_THA.stride()
    if step == 1 and not (row * size | head * size | x_THA.data_ptr()) % 16:
        return x_THA
    padding = -x_THA.shape[2] % (16 // size)
    return functional.pad(x_THA, (0, padding)).contiguous()
