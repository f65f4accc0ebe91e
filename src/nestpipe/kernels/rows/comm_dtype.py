"""Rows and gradients between ranks: float32, or rounded to bfloat16, which is half the bytes.

What a rank hands to itself is rounded too: what a model sees does not depend on who owns a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nestpipe.kernels import host_memory

COMM_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The types in which rows may travel, by the name of the setting."""


def to_wire(rows: Tensor, comm_dtype: torch.dtype) -> Tensor:
    """The rows as they travel."""
    if rows.dtype == comm_dtype:
        return rows
    return host_memory.empty(rows.shape, comm_dtype, rows.device).copy_(rows)


def from_wire(rows: Tensor, comm_dtype: torch.dtype) -> Tensor:
    """What arrives of the rows, as float32; rows that did not travel are rounded like the others.

    The rows given stay as they are.
    """
    if comm_dtype == torch.float32:
        return rows
    there = to_wire(rows, comm_dtype)
    return host_memory.empty(rows.shape, torch.float32, rows.device).copy_(there)


def round_in_place(rows: Tensor, comm_dtype: torch.dtype) -> None:
    """The same where the rows are."""
    if rows.dtype != comm_dtype:
        rows.copy_(to_wire(rows, comm_dtype))
