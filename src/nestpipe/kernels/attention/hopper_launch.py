"""Starts the attention kernel of Hopper's warp groups: tiles, descriptors and who may ask for it.

It takes the place of Triton's kernels pass by pass.
"""

# triton comes with torch's builds for GPUs, and with no other
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nestpipe.kernels.attention.fused_launch import Problem

# Shapes: B samples, T rows of all samples together, H heads, A width of a head

WIDTHS = (64, 128, 256)
ROWS = 128
"""Own rows of a program."""
_GROUP_ROWS = 64
Part = Literal["forward", "queries", "keys", "only-keys", "values"]
_PARTS: dict[Part, tuple[bool, bool, bool]] = {
    "forward": (False, False, True),
    "queries": (False, True, False),
    "keys": (True, True, True),
    "only-keys": (True, True, False),
    "values": (True, False, True),
}
"""Whether own rows are keys, and what is summed: gradients of scores, values."""


def why_not_hopper(q_THA: Tensor, width: int) -> str | None:
    """Why this kernel cannot attend such rows on a GPU that Triton's kernels serve; None: it can.

    `width` is that of the widest of queries, keys and values, to which all are padded.
    """
    if torch.cuda.get_device_capability(q_THA.device)[0] != 9:
        return f"{torch.cuda.get_device_name(q_THA.device)} is no Hopper GPU"
    if find_spec("triton.experimental.gluon") is None:
        return "this version of triton has no gluon"
    if q_THA.dtype not in (torch.bfloat16, torch.float16):
        return f"rows are {q_THA.dtype}, neither bfloat16 nor float16"
    if width not in WIDTHS:
        return f"a head is {width} wide, not 64, 128 or 256"
    return None


@dataclass(frozen=True, slots=True)
class GroupTile:
    """What one pass holds: rows of a tile, and how many tiles of each ring."""

    rows: int
    b_stages: int
    c_stages: int
    held: bool = False
    """Own rows in registers, not in shared memory: sums of values alone."""
    persistent: bool = False
    """One program for each multiprocessor, with every so many pieces of work; else one piece."""

    def shared_bytes(self, width: int, *, gradients: bool) -> int:
        """Of shared memory, without barriers."""
        own = (2 if gradients else 1) * ROWS
        return 2 * width * (own + self.rows * (self.b_stages + self.c_stages))


@dataclass(frozen=True, slots=True)
class GroupTiles:
    """Tiles of each pass. They depend on the width alone; rings and order change no bit."""

    forward: GroupTile
    queries: GroupTile
    keys: GroupTile
    values: GroupTile | None = None
    """Of a pass for values alone; None: keys and values in one."""

    @classmethod
    @cache
    def of(cls, width: int, *, timed: bool = False) -> GroupTiles:
        """For heads of `width`. A bias by time takes registers, so its tiles are smaller."""
        if width == 64:
            wide = GroupTile(64 if timed else 128, 3, 3)
            return cls(wide, wide, GroupTile(64, 4, 4))
        if width == 128:
            wide = GroupTile(64, 4, 4) if timed else GroupTile(128, 2, 2)
            return cls(wide, wide, GroupTile(64, 4, 4))
        if timed:
            sums, gradients = GroupTile(32, 4, 4), GroupTile(32, 3, 3)
            return cls(sums, gradients, gradients, sums)
        narrow = GroupTile(64, 2, 2)
        return cls(narrow, GroupTile(64, 2, 1), GroupTile(64, 2, 1), narrow)


@cache
def _starter() -> Any:
    from nestpipe.kernels.attention.hopper_kernel import attend_by_groups
    from nestpipe.kernels.triton_launch import Starter

    return Starter(attend_by_groups)


@cache
def _layout(rows: int, width: int, dtype: torch.dtype) -> Any:
    """How a block of rows lies in shared memory."""
    from triton.experimental.gluon import language as gl

    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, width], kind)


def _plane(x_THA: Tensor, width: int) -> Tensor:
    """Rows in which all heads lie one behind the other, with gaps or without; else a copy."""
    row, head, _ = x_THA.stride()
    inside = (x_THA.shape[1] - 1) * head + width
    fits = head >= 0 and inside <= row and inside < 1 << 31
    return x_THA if fits else x_THA[:, :, :width].contiguous()


def _descriptor(x_THA: Tensor, rows: int, width: int) -> tuple[Any, int]:
    """Blocks of rows of one head, and columns from head to head."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    x_THA = _plane(x_THA, width)
    total, heads, _ = x_THA.shape
    row, head, _ = x_THA.stride()
    made = object.__new__(TensorDescriptor)  # without checks, as in `Problem.rows_of`
    made.base, made.padding, made.layout = x_THA, "zero", _layout(rows, width, x_THA.dtype)
    made.shape, made.strides = [total, (heads - 1) * head + width], [row, 1]
    made.block_shape = [rows, width]
    return made, head


def _tiles(problem: Problem) -> GroupTiles:
    assert problem.groups is not None, "asked for by name alone"
    return problem.groups


def run_forward(problem: Problem) -> Tensor:
    """(T, H, A) the weighted sums of values."""
    return run_part(problem, "forward", _tiles(problem).forward)[0]


def run_queries(
    problem: Problem, grad_THA: Tensor, *, sum_scores: bool
) -> tuple[Tensor, Tensor | None]:
    """(T, H, A) the gradient of the queries, and (H, X, Q) sums as `run_backward_queries` has."""
    tile, sums_HXQ = _tiles(problem).queries, None
    if sum_scores:
        sums_HXQ = bucket_sums(problem)
    (grad_q_THA,) = run_part(problem, "queries", tile, grad_THA, sums_HXQ)
    return grad_q_THA, sums_HXQ


def bucket_sums(problem: Problem) -> Tensor:
    """(H, X, Q) zeros: pieces of work past a sample's end write nothing."""
    programs, _ = problem.order(ROWS)
    parts = programs // max(1, problem.heads) * (ROWS // _GROUP_ROWS)
    buckets = 1 << max(0, problem.bias.num_buckets - 1).bit_length()
    return problem.q_THA.new_zeros(problem.heads, parts, buckets, dtype=torch.float32)


def run_keys(problem: Problem, grad_THA: Tensor) -> tuple[Tensor, Tensor]:
    """(T, H, A) twice: the gradients of keys and values."""
    tiles = _tiles(problem)
    if tiles.values is None:
        grad_k_THA, grad_v_THA = run_part(problem, "keys", tiles.keys, grad_THA)
    else:
        (grad_k_THA,) = run_part(problem, "only-keys", tiles.keys, grad_THA)
        (grad_v_THA,) = run_part(problem, "values", tiles.values, grad_THA)
    return grad_k_THA, grad_v_THA


def run_part(
    problem: Problem,
    part: Part,
    tile: GroupTile,
    grad_THA: Tensor | None = None,
    sums_HXQ: Tensor | None = None,
) -> list[Tensor]:
    """What one start of the kernel writes; `grad_THA` is that of the weighted sums of values.

    It fills `sums_HXQ`, too, where those are given.
    """
    by_keys, gradients, values = _PARTS[part]
    q_THA, k_THA, v_THA = problem.q_THA, problem.k_THA, problem.v_THV
    other_THA = q_THA if grad_THA is None else grad_THA  # the forward pass has no use for it
    rows = (k_THA, v_THA, q_THA, other_THA) if by_keys else (q_THA, other_THA, k_THA, v_THA)
    outs = [
        q_THA.new_empty(problem.out_shape) if wanted else None for wanted in (gradients, values)
    ]
    _start(problem, tile, rows, (outs[0], outs[1], sums_HXQ), by_keys=by_keys)
    return [out for out in outs if out is not None]


def _start(
    problem: Problem,
    tile: GroupTile,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    outs: tuple[Tensor | None, Tensor | None, Tensor | None],
    *,
    by_keys: bool,
) -> None:
    """One pass over own rows x and y and tiles b and c: sums over b, over c or both."""
    from nestpipe.kernels.triton_launch import constants

    programs, place = problem.order(ROWS)
    if not programs or not problem.q_THA.shape[0]:
        return
    if tile.persistent:
        device = torch.cuda.get_device_properties(problem.q_THA.device)
        programs = min(programs, device.multi_processor_count)
    width, bias = problem.width, problem.bias
    made = [
        _descriptor(x_THA, size, width)
        for x_THA, size in zip(rows, (_GROUP_ROWS, _GROUP_ROWS, tile.rows, tile.rows), strict=True)
    ]
    wanted = constants(
        A=width, N=tile.rows, P=bias.num_positions, Q=bias.num_buckets, KEYS=by_keys,
        GRAD=outs[0] is not None, VALUES=outs[1] is not None, HELD=tile.held,
        BUCKETS=0 if outs[2] is None else outs[2].shape[2],
        B_STAGES=tile.b_stages, C_STAGES=tile.c_stages, num_warps=4,
    )  # fmt: skip
    _starter()(
        (programs,),
        wanted,
        [descriptor for descriptor, _ in made],
        (*outs, *problem.shared()),
        (*problem.numbers(place), *(step for _, step in made)),
    )
