"""Replicas of rows, or of their gradients, brought together over all groups of ranks.

One message for all stores. Sums over groups are made by the communicator's `all_reduce`: the same
bits on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nestpipe.comm.communicator import Communicator
from nestpipe.kernels.native_rows import Places, copy_rows
from nestpipe.kernels.rows import empty_rows

# Shapes: U rows that are merged, K rows of a working set, W numbers of a row


def sum_over_groups(comm: Communicator, parts: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors, each summed over all groups."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    if len(flat):
        comm.all_reduce(flat)
    sums = torch.split(flat, [part.numel() for part in parts])
    return [total.view_as(part) for total, part in zip(sums, parts, strict=True)]


def average_over_groups(comm: Communicator, parts: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors, each the mean of all groups."""
    return [total.mul_(1 / comm.size) for total in sum_over_groups(comm, parts)]


def read_rows(rows: Tensor | Places, at_U: Tensor) -> Tensor:
    """(U, W) some rows, wherever they are."""
    if isinstance(rows, Tensor):
        return rows.index_select(0, at_U)
    out_UW = empty_rows(len(at_U), rows.width, torch.device("cpu"))
    copy_rows(rows.at(at_U), out_UW, to_places=False, threads=torch.get_num_threads())
    return out_UW


def write_rows(rows: Tensor | Places, at_U: Tensor, values_UW: Tensor) -> None:
    """Put rows back to where they were read."""
    if isinstance(rows, Tensor):
        rows.index_copy_(0, at_U, values_UW)
        return
    copy_rows(
        rows.at(at_U), values_UW.contiguous(), to_places=True, threads=torch.get_num_threads()
    )
