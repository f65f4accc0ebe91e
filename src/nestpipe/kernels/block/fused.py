"""The steps between a block's products by kernels, with gradients, and HSTU's block as one node.

Each keeps its inputs alone, most of which others keep anyway, and computes norms and activations
again in the backward pass. The same input gives the same bits, and a row's result is a function of
that row. `models/hstu.py` and `models/fuxi.py` have the plain form of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.errors import ConfigError
from nestpipe.kernels.attention.fused import BatchFacts
from nestpipe.kernels.attention.reference import RelativeBias

# Shapes: T rows of all samples together, D columns of a row, W columns of all projections, U those
# of the gate, C those of one projection, N positions

MAX_WIDTH = 8192
"""The widest row that a program holds in registers."""
PROVEN_CAPABILITY = 9
"""Kernels are written and compiled for Hopper, as those of attention are."""
PointwiseForm = Literal["auto", "fused", "steps", "plain"]
_HAS_TRITON = find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class Norm:
    """How rows are normalised: to mean 0 where `centred`, and to mean square 1."""

    eps: float
    centred: bool = True


@dataclass(frozen=True, slots=True)
class BlockRule:
    """What blocks of HSTU need to know of a batch besides rows and weights."""

    norm: Norm
    gate_norm: Norm
    heads: int
    width: int
    """Of a head's queries, keys, values and gate."""
    offsets_B: Tensor
    num_targets_B: Tensor | None
    times_T: Tensor | None
    facts: BatchFacts
    numbers: tuple[float, float, int | None, int]
    """Of attention: divisor, scale, how far a query sees, and the longest sample."""
    hopper: bool = False
    """Attention by Hopper's warp groups."""


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which numbers stay, as `models/draws.py` draws them."""

    draws_T: Tensor
    """64 bits of each row."""
    site_bits: int
    """What tells the places apart at which a row is drawn for."""
    limit: int
    """A number stays where its 16 bits, signed, are at most this."""
    factor: float
    """What numbers that stay are multiplied by."""


def chosen_kernels(x_TD: Tensor, form: PointwiseForm, widest: int) -> bool:
    """Whether kernels compute the steps between products, for rows such as `x_TD`.

    `auto` takes them where they are proven; torch's compiler makes kernels of its own.
    """
    if form == "plain" or torch.compiler.is_compiling():
        return False
    reason = _why_not_fused(x_TD, widest)
    if form in ("fused", "steps") and reason is not None:
        raise ConfigError(f"pointwise is {form!r}, but {reason}; use 'auto' or 'plain'")
    return reason is None


def _why_not_fused(x_TD: Tensor, widest: int) -> str | None:
    """Why no kernel is proven for such rows; None: one is."""
    if not x_TD.is_cuda:
        return "the rows are not on a GPU"
    if x_TD.dtype != torch.float32 or not _HAS_TRITON:
        return f"no kernel has {x_TD.dtype}, or triton is missing"
    if torch.cuda.get_device_capability(x_TD.device)[0] < PROVEN_CAPABILITY:
        return f"{torch.cuda.get_device_name(x_TD.device)} is older than Hopper"
    if widest > MAX_WIDTH:
        return f"a row is {widest} wide, more than {MAX_WIDTH}"
    return None


def add_norm(
    x_TD: Tensor,
    added_TD: Tensor | None,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    norm: Norm,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """x + added, and the norm of it in the type that products have here, after dropout."""
    return _AddNorm.apply(x_TD, added_TD, weight_D, bias_D, norm, dropout)


def norm_gate(
    x_TD: Tensor,
    gate_TD: Tensor,
    bias_D: Tensor | None,
    norm: Norm,
    dropout: Dropout | None = None,
) -> Tensor:
    """The norm of x times SiLU(gate + bias), after dropout.

    The bias gets no gradient here: `silu_parts`, which the gate comes from, has all of it.
    """
    return _NormGate.apply(x_TD, gate_TD, bias_D, norm, dropout)


def silu_parts(
    mixed_TW: Tensor, bias_W: Tensor | None, gate_width: int, value_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gate, values, queries and keys of packed projections; queries are as wide as keys.

    The gate is as it came, for `norm_gate`; the others are SiLU(mixed + bias).
    """
    return _SiluParts.apply(mixed_TW, bias_W, gate_width, value_width)


def gated_silu(mixed_TW: Tensor) -> Tensor:
    """SiLU of the first half of the columns times the second half."""
    return _GatedSilu.apply(mixed_TW)


def add_positions(
    rows_TD: Tensor, position_DN: Tensor, positions_T: Tensor, scale: float
) -> Tensor:
    """`scale` times each row, plus the column of its position."""
    return _AddPositions.apply(rows_TD, position_DN, positions_T, scale)


def hstu_block(
    x_TD: Tensor,
    added_TD: Tensor | None,
    weights: Sequence[Tensor | None],
    rule: BlockRule,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """x + added, and what an HSTU block adds to that: one node of autograd.

    `weights`: of the norm and its bias, of the projections and their bias, of the last product and
    its bias, and the tables by position and by time, a line for each head. The functions above,
    `train_attention` and `linear` do the same in the same order, bit for bit.
    """
    return _HstuBlock.apply(x_TD, added_TD, *weights, rule, dropout)


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which products of x are computed: autocast's, where that is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _AddNorm(torch.autograd.Function):
    """Keeps the sum, which is the block's residual."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        added_TD: Tensor | None,
        weight_D: Tensor | None,
        bias_D: Tensor | None,
        norm: Norm,
        dropout: Dropout | None,
    ) -> tuple[Tensor, Tensor]:
        from nestpipe.kernels.block.launch import run_add_norm  # needs triton

        x_TD = x_TD.contiguous()
        added_TD = None if added_TD is None else added_TD.contiguous()
        dtype = product_dtype(x_TD)
        summed_TD, out_TD = run_add_norm(x_TD, added_TD, weight_D, bias_D, norm, dropout, dtype)
        ctx.save_for_backward(summed_TD, weight_D)
        ctx.norm, ctx.dropout = norm, dropout
        ctx.added_dtype = None if added_TD is None else added_TD.dtype
        ctx.set_materialize_grads(False)
        return summed_TD, out_TD

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, grad_summed_TD: Tensor | None, grad_out_TD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        from nestpipe.kernels.block.launch import run_add_norm_backward  # needs triton

        summed_TD, weight_D = ctx.saved_tensors
        if grad_out_TD is None:
            grad_out_TD = torch.zeros_like(summed_TD)
        if grad_summed_TD is not None:
            grad_summed_TD = grad_summed_TD.contiguous()
        grads = run_add_norm_backward(
            summed_TD,
            weight_D,
            ctx.norm,
            ctx.dropout,
            grad_summed_TD,
            grad_out_TD.contiguous(),
            ctx.added_dtype,
        )
        return *grads, None, None


class _NormGate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        gate_TD: Tensor,
        bias_D: Tensor | None,
        norm: Norm,
        dropout: Dropout | None,
    ) -> Tensor:
        from nestpipe.kernels.block.launch import run_norm_gate  # needs triton

        x_TD = x_TD.contiguous()
        assert gate_TD.stride(1) == 1, "columns of the gate are side by side"
        ctx.save_for_backward(x_TD, gate_TD, bias_D)
        ctx.norm, ctx.dropout = norm, dropout
        return run_norm_gate(x_TD, gate_TD, bias_D, norm, dropout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_TD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from nestpipe.kernels.block.launch import run_norm_gate_backward  # needs triton

        x_TD, gate_TD, bias_D = ctx.saved_tensors
        grad_out_TD = grad_out_TD.contiguous()
        grads = run_norm_gate_backward(x_TD, gate_TD, bias_D, ctx.norm, ctx.dropout, grad_out_TD)
        return *grads, None, None, None


class _SiluParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed_TW: Tensor, bias_W: Tensor | None, gate_width: int, value_width: int
    ) -> tuple[Tensor, ...]:
        from nestpipe.kernels.block.launch import run_silu  # needs triton

        mixed_TW = mixed_TW.contiguous()
        ctx.save_for_backward(mixed_TW, bias_W)
        width = (mixed_TW.shape[1] - gate_width - value_width) // 2
        parts = run_silu(mixed_TW, bias_W, gate_width).split([value_width, width, width], dim=1)
        return mixed_TW.detach()[:, :gate_width], *parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from nestpipe.kernels.block.launch import run_silu_backward  # needs triton

        mixed_TW, bias_W = ctx.saved_tensors
        whole = [grad.contiguous() for grad in grads]
        grad_TW, grad_bias_W = run_silu_backward(mixed_TW, bias_W, whole)
        return grad_TW, grad_bias_W, None, None


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mixed_TW: Tensor) -> Tensor:
        from nestpipe.kernels.block.launch import run_gated_silu  # needs triton

        mixed_TW = mixed_TW.contiguous()
        ctx.save_for_backward(mixed_TW)
        return run_gated_silu(mixed_TW)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> Tensor:  # type: ignore[override]
        from nestpipe.kernels.block.launch import run_gated_silu_backward  # needs triton

        (mixed_TW,) = ctx.saved_tensors
        return run_gated_silu_backward(mixed_TW, grad_TC.contiguous())


class _AddPositions(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_TD: Tensor, position_DN: Tensor, positions_T: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(positions_T)
        ctx.scale, ctx.num_positions = scale, position_DN.shape[1]
        # Rows of the table side by side, so that each is read in one piece.
        picked_TD = position_DN.T.contiguous().index_select(0, positions_T)
        return torch.add(picked_TD, rows_TD, alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from nestpipe.kernels.block.launch import sum_by_position  # needs triton

        (positions_T,) = ctx.saved_tensors
        wants_rows, wants_table, *_ = ctx.needs_input_grad
        grad_rows_TD = grad_TD * ctx.scale if wants_rows else None
        grad_DN = None
        if wants_table:
            grad_TD = grad_TD.contiguous()
            grad_DN = sum_by_position(grad_TD, positions_T, ctx.num_positions).T.contiguous()
        return grad_rows_TD, grad_DN, None, None


class _HstuBlock(torch.autograd.Function):
    """Keeps what its steps keep: inputs of kernels and of products."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        added_TD: Tensor | None,
        norm_D: Tensor | None,
        norm_bias_D: Tensor | None,
        mix_WD: Tensor,
        mix_bias_W: Tensor,
        out_DU: Tensor,
        out_bias_D: Tensor,
        position_HP: Tensor | None,
        time_HQ: Tensor | None,
        rule: BlockRule,
        dropout: Dropout | None,
    ) -> tuple[Tensor, Tensor]:
        from nestpipe.kernels.attention import fused_launch as attention  # needs triton
        from nestpipe.kernels.block import launch  # needs triton

        x_TD = x_TD.contiguous()
        added_TD = None if added_TD is None else added_TD.contiguous()
        dtype, values = product_dtype(x_TD), rule.heads * rule.width
        mix_WD, out_DU = mix_WD.to(dtype), out_DU.to(dtype)
        summed_TD, normed_TD = launch.run_add_norm(
            x_TD, added_TD, norm_D, norm_bias_D, rule.norm, None, dtype
        )
        mixed_TW = torch.mm(normed_TD, mix_WD.t())
        active_TC = launch.run_silu(mixed_TW, mix_bias_W, values)
        bias = RelativeBias(position_HP, time_HQ, rule.times_T)
        *_, longest = rule.numbers
        prepared = attention.prepare_bias(bias, rule.offsets_B, longest, rule.facts)
        attended_THV = attention.run_forward(_problem(active_TC, prepared, rule))
        gated_TU = launch.run_norm_gate(attended_THV, mixed_TW, mix_bias_W, rule.gate_norm, dropout)
        out_TD = torch.addmm(out_bias_D.to(dtype), gated_TU, out_DU.t())
        ctx.save_for_backward(
            summed_TD, normed_TD, mixed_TW, active_TC, attended_THV, gated_TU, norm_D, mix_WD,
            mix_bias_W, out_DU, position_HP, time_HQ,
        )  # fmt: skip
        ctx.rule, ctx.dropout, ctx.prepared = rule, dropout, prepared
        ctx.added_dtype = None if added_TD is None else added_TD.dtype
        ctx.set_materialize_grads(False)
        return summed_TD, out_TD

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, grad_summed_TD: Tensor | None, grad_out_TD: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        from nestpipe.kernels.attention import fused_launch as attention  # needs triton
        from nestpipe.kernels.block import launch  # needs triton

        (
            summed_TD, normed_TD, mixed_TW, active_TC, attended_THV, gated_TU, norm_D, mix_WD,
            mix_bias_W, out_DU, *tables,
        ) = ctx.saved_tensors  # fmt: skip
        rule, needs = ctx.rule, ctx.needs_input_grad
        if grad_out_TD is None:
            grad_out_TD = torch.zeros_like(summed_TD, dtype=gated_TU.dtype)
        grad_out_DU, grad_out_bias_D = _weight_grads(grad_out_TD, gated_TU, needs[6:8])
        grad_attended_THV, grad_gate_TU = launch.run_norm_gate_backward(
            attended_THV, mixed_TW, mix_bias_W, rule.gate_norm, ctx.dropout,
            torch.mm(grad_out_TD, out_DU),
        )  # fmt: skip
        problem = _problem(active_TC, ctx.prepared, rule)
        grad_q, grad_k, grad_v, *grad_tables = attention.run_backward(
            problem, grad_attended_THV, tuple(tables),
            (True, True, True, *needs[8:10]),
        )  # fmt: skip
        parts = [x for x in (grad_gate_TU, grad_v, grad_q, grad_k) if x is not None]
        grad_mixed_TW, grad_mix_bias_W = launch.run_silu_backward(mixed_TW, mix_bias_W, parts)
        grad_mix_WD, _ = _weight_grads(grad_mixed_TW, normed_TD, (needs[4], False))
        grads = launch.run_add_norm_backward(
            summed_TD,
            norm_D,
            rule.norm,
            None,
            None if grad_summed_TD is None else grad_summed_TD.contiguous(),
            torch.mm(grad_mixed_TW, mix_WD),
            ctx.added_dtype,
        )
        own = (grad_mix_WD, grad_mix_bias_W, grad_out_DU, grad_out_bias_D)
        return *grads, *own, *grad_tables, None, None


def _problem(active_TC: Tensor, prepared: Any, rule: BlockRule) -> Any:
    """Attention over values, queries and keys that lie side by side."""
    from nestpipe.kernels.attention import fused_launch as attention  # needs triton

    v_THV, q_THA, k_THA = active_TC.view(-1, 3, rule.heads, rule.width).unbind(1)
    samples = (rule.offsets_B, rule.num_targets_B)
    return attention.make_problem(
        (q_THA, k_THA, v_THV), samples, prepared, rule.numbers, rule.facts, hopper=rule.hopper
    )


def _weight_grads(
    grad_TW: Tensor, x_TD: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a product's weight and bias, as autograd computes them: cast at the end."""
    wants_weight, wants_bias = wanted
    grad_WD = torch.mm(grad_TW.t(), x_TD).float() if wants_weight else None
    return grad_WD, grad_TW.sum(0).float() if wants_bias else None
