"""HSTU's attention for training: kernels that keep no score in memory, or the plain form.

`train_attention` chooses; `attention_by_kernels` is the kernels alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nestpipe.errors import ConfigError
from nestpipe.kernels.attention.hopper_launch import why_not_hopper
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
AttentionForm = Literal["auto", "fused", "hopper", "plain"]


@dataclass(slots=True)
class BatchFacts:
    """What kernels find out about a batch's samples: once for all of its blocks and both passes."""

    times: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """`short_T` and `kinds_BXY` by the number of buckets."""
    hard: dict[Hashable, Tensor] = field(default_factory=dict)
    """`hard_tiles` by all that they depend on besides the samples."""


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
    facts: BatchFacts | None = None,
) -> Tensor:
    """(T, H, V) the weighted sum of values that each query sees; differentiable.

    `auto` takes the kernels where they are proven, else `hstu_attention`, which they compute.
    `hopper` takes the kernel of warp groups, and never anything else in silence.
    `longest` is the length of the longest sample, or more; without it the host waits for the device
    to say. `facts` are the same object for all calls with the same samples, candidates and times.
    By the kernels a sample's result has the same bits in any batch, and the same input gives the
    same bits, gradients included.
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
    if not kernels_attend(form, q_THA, widest, bias):
        return hstu_attention(q_THA, k_THA, v_THV, offsets_B, **rule)
    # Columns of zeros add nothing to a product, and their own results are cut off.
    q_THA, k_THA, wide_v_THV = (_widened(x, widest) for x in (q_THA, k_THA, v_THV))
    rule |= {"facts": facts, "hopper": form == "hopper"}
    out_THV = attention_by_kernels(q_THA, k_THA, wide_v_THV, offsets_B, **rule)
    return out_THV[:, :, : v_THV.shape[2]]


def kernels_attend(form: AttentionForm, q_THA: Tensor, widest: int, bias: RelativeBias) -> bool:
    """Whether kernels compute attention of queries such as these, in heads of such a width."""
    reason = None if form == "plain" else _why_not_fused(q_THA, widest, bias)
    if form == "hopper" and reason is None:
        reason = why_not_hopper(q_THA, widest)
    if form in ("fused", "hopper") and reason is not None:
        raise ConfigError(f"attention is {form!r}, but {reason}; use 'auto' or 'plain'")
    return form != "plain" and reason is None


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
    facts: BatchFacts | None = None,
    hopper: bool = False,
) -> Tensor:
    """`train_attention` by the kernels, wherever the tensors are; `hopper`: by its warp groups."""
    if longest is None:
        longest = int(offsets_B.diff().max()) if len(offsets_B) > 1 else 0
    numbers = (norm, scale, max_attention, longest)
    rule = (offsets_B, mask.num_targets_B, bias.times_T, facts or BatchFacts(), hopper, *numbers)
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

        offsets_B, _, times_T, facts, *_, longest = rule
        prepared = launch.prepare_bias(
            RelativeBias(position_HP, time_HQ, times_T), offsets_B, longest, facts
        )
        ctx.save_for_backward(q_THA, k_THA, v_THV, position_HP, time_HQ, *rule[:2])
        ctx.prepared, ctx.rule, ctx.facts, ctx.hopper = prepared, rule[5:], facts, rule[4]
        given = (q_THA, k_THA, v_THV), rule[:2], prepared, rule[5:], facts
        return launch.run_forward(launch.make_problem(*given, hopper=ctx.hopper))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THV: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from nestpipe.kernels.attention import fused_launch as launch  # needs triton

        q_THA, k_THA, v_THV, position_HP, time_HQ, *samples = ctx.saved_tensors
        rows, samples = (q_THA, k_THA, v_THV), tuple(samples)
        given = rows, samples, ctx.prepared, ctx.rule, ctx.facts
        problem = launch.make_problem(*given, hopper=ctx.hopper)
        wanted = ctx.needs_input_grad[:5]
        return *launch.run_backward(problem, grad_THV, (position_HP, time_HQ), wanted), None
