"""Numbers of rows and gradients on their way between ranks: float32, or bfloat16, half the bytes.

What a rank hands to itself is rounded too: what a model sees does not depend on who owns a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nestpipe.kernels import host_memory

WIRES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The types in which rows may travel, by the name of the setting."""


def lowered(rows: Tensor, wire: torch.dtype) -> Tensor:
    """The rows as they travel."""
    if rows.dtype == wire:
        return rows
    return host_memory.empty(rows.shape, wire, rows.device).copy_(rows)


def rounded(rows: Tensor, wire: torch.dtype) -> Tensor:
    """What arrives of the rows, in their own type; the rows given stay as they are."""
    if rows.dtype == wire:
        return rows
    return host_memory.empty(rows.shape, rows.dtype, rows.device).copy_(lowered(rows, wire))


def round_in_place(rows: Tensor, wire: torch.dtype) -> None:
    """The same where the rows are."""
    if rows.dtype != wire:
        rows.copy_(lowered(rows, wire))
