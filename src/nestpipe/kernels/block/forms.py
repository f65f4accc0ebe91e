"""What the forms of a block's steps agree on: which norm, which dropout, and who computes them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from nestpipe.errors import ConfigError

# Shapes: T rows of all samples together, D columns of a row

MAX_WIDTH = 8192
"""The widest row that a program holds in registers."""
PROVEN_CAPABILITY = 9
"""Kernels were run on Hopper."""
PointwiseForm = Literal["auto", "fused", "plain"]
_HAS_TRITON = find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class Norm:
    """How rows are normalised: to mean 0 where `centred`, and to mean square 1."""

    eps: float
    centred: bool = True


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
    if form == "fused" and reason is not None:
        raise ConfigError(f"pointwise is 'fused', but {reason}; use 'auto' or 'plain'")
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
