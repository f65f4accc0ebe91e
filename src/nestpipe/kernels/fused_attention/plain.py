"""The plain form with a window: what the fused kernels must compute, and what the host runs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.kernels.attention.reference import (
    CAUSAL,
    NO_BIAS,
    Mask,
    Padding,
    RelativeBias,
    _Pairs,
)

# Shapes: B samples, T rows of all samples together, L rows of the longest, H heads,
# A width of queries and keys, V width of values


def plain_attention(
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
    """`hstu_attention`, where a row sees keys at most `max_attention` positions before its own."""
    rows = Padding.of(offsets_B, k_THA.shape[0], longest)
    pairs = _Pairs.of(rows, rows, mask)
    if max_attention is not None:
        near_BLL = pairs.distance_BLL <= max_attention
        pairs = replace(pairs, visible_BLL=pairs.visible_BLL & near_BLL)
    q_BHLA, k_BHLA, v_BHLV = (rows.pad(x).transpose(1, 2) for x in (q_THA, k_THA, v_THV))
    scores_BHLL = torch.matmul(q_BHLA, k_BHLA.transpose(2, 3)) * scale
    scores_BHLL = pairs.add_bias(scores_BHLL, bias)
    weights_BHLL = torch.where(pairs.visible_BLL[:, None], functional.silu(scores_BHLL), 0) / norm
    out_BLHV = torch.matmul(weights_BHLL.to(v_BHLV.dtype), v_BHLV).transpose(1, 2)
    return rows.unpad(out_BLHV)
