"""HSTU's attention for training: kernels that keep no score in memory, or the plain form.

`train_attention` chooses; `attention_by_kernels` is the kernels alone.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nestpipe.errors import ConfigError
from nestpipe.kernels.attention.inference import kernel_serves
from nestpipe.kernels.attention.reference import (
    CAUSAL,
    NO_BIAS,
    Mask,
    RelativeBias,
    hstu_attention,
)

# Shapes: B samples, T rows of all samples together, H heads, A width of queries and keys, V width
# of values, P and Q buckets of the biases

MAX_WIDTH = 256
"""The widest head that fits a program's registers."""
PROVEN_CAPABILITY = 9
"""Kernels were run on Hopper; older GPUs copy tiles another way."""
AttentionForm = Literal["auto", "fused", "plain"]


def train_attention(
    q_THA: Tensor,
    k_THA: Tensor,
    v_THV: Tensor,
    offsets_B: Tensor,
    *,
    form: AttentionForm = "auto",
    norm: float,
    scale: float = 1.0,
    mask: Mask = CAUSAL,
    bias: RelativeBias = NO_BIAS,
    max_attention: int | None = None,
    longest: int | None = None,
) -> Tensor:
    """(T, H, V) the weighted sum of values that each query sees; differentiable.

    `auto` takes the kernels where they are proven, else `hstu_attention`, which they compute.
    `longest` is the length of the longest sample, or more; without it the host waits for the device
    to say. By the kernels a sample's result has the same bits in any batch, and the same input
    gives the same bits, gradients included.
    """
    rule: dict[str, Any] = {
        "norm": norm,
        "scale": scale,
        "mask": mask,
        "bias": bias,
        "max_attention": max_attention,
        "longest": longest,
    }
    widest = max(q_THA.shape[2], v_THV.shape[2])
    reason = None if form == "plain" else _why_not_fused(q_THA, widest, bias)
    if form == "fused" and reason is not None:
        raise ConfigError(f"attention is 'fused', but {reason}; use 'auto' or 'plain'")
    if form == "plain" or reason is not None:
        return hstu_attention(q_THA, k_THA, v_THV, offsets_B, **rule)
    # Columns of zeros add nothing to a product, and their own results are cut off.
    q_THA, k_THA, wide_v_THV = (_widened(x, widest) for x in (q_THA, k_THA, v_THV))
    out_THV = attention_by_kernels(q_THA, k_THA, wide_v_THV, offsets_B, **rule)
    return out_THV[:, :, : v_THV.shape[2]]


def _why_not_fused(q_THA: Tensor, width: int, bias: RelativeBias) -> str | None:
    """Why no kernel is proven for such rows; None: one is."""
    if not q_THA.is_cuda:
        return "the rows are not on a GPU"
    if not kernel_serves(q_THA):
        return f"no kernel has {q_THA.dtype}, or triton is missing"
    if torch.cuda.get_device_capability(q_THA.device)[0] < PROVEN_CAPABILITY:
        return f"{torch.cuda.get_device_name(q_THA.device)} is older than Hopper"
    if width > MAX_WIDTH:
        return f"a head is {width} wide, more than {MAX_WIDTH}"
    if bias.query_times_T is not None:
        return "time is 'next', which no kernel has"
    return None


def _widened(x_THA: Tensor, width: int) -> Tensor:
    missing = width - x_THA.shape[2]
    return functional.pad(x_THA, (0, missing)) if missing else x_THA


def attention_by_kernels(
    q_THA: Tensor,
    k_THA: Tensor,
    v_THV: Tensor,
    offsets_B: Tensor,
    *,
    norm: float,
    scale: float = 1.0,
    mask: Mask = CAUSAL,
    bias: RelativeBias = NO_BIAS,
    max_attention: int | None = None,
    longest: int | None = None,
) -> Tensor:
    """`train_attention` by the kernels, wherever the tensors are."""
    if longest is None:
        longest = int(offsets_B.diff().max()) if len(offsets_B) > 1 else 0
    rule = (offsets_B, mask.num_targets_B, bias.times_T, norm, scale, max_attention, longest)
    return _FusedAttention.apply(q_THA, k_THA, v_THV, bias.position_HP, bias.time_HQ, rule)


class _FusedAttention(torch.autograd.Function):
    """Keeps its inputs alone: the backward passes compute scores again."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THA: Tensor,
        k_THA: Tensor,
        v_THV: Tensor,
        position_HP: Tensor | None,
        time_HQ: Tensor | None,
        rule: tuple[Any, ...],
    ) -> Tensor:
        from nestpipe.kernels.attention import fused_launch as launch  # needs triton

        offsets_B, _, times_T, *_, longest = rule
        prepared = launch.prepare_bias(
            RelativeBias(position_HP, time_HQ, times_T), offsets_B, longest
        )
        ctx.save_for_backward(q_THA, k_THA, v_THV, position_HP, time_HQ, *rule[:2])
        ctx.prepared, ctx.rule = prepared, rule[3:]
        rows, samples = (q_THA, k_THA, v_THV), rule[:2]
        return launch.run_forward(launch.make_problem(rows, samples, prepared, rule[3:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THV: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from nestpipe.kernels.attention import fused_launch as launch  # needs triton

        q_THA, k_THA, v_THV, position_HP, time_HQ, *samples = ctx.saved_tensors
        rows, samples = (q_THA, k_THA, v_THV), tuple(samples)
        problem = launch.make_problem(rows, samples, ctx.prepared, ctx.rule)
        grad_THV = launch.copyable(grad_THV)
        wants_q, wants_k, wants_v, wants_position, wants_time, _ = ctx.needs_input_grad
        grads: list[Tensor | None] = [None] * 6
        wants_tables = wants_position or wants_time
        sums_HXQ = None
        if wants_q or wants_tables:
            grads[0], sums_HXQ = launch.run_backward_queries(
                problem, grad_THV, sum_scores=wants_tables
            )
        if wants_k or wants_v:
            grads[1], grads[2] = launch.run_backward_keys(problem, grad_THV)
        if sums_HXQ is not None:
            grads[3], grads[4] = launch.run_bias_gradients(
                problem, grad_THV, sums_HXQ, (position_HP, time_HQ)
            )
        return tuple(grads)
