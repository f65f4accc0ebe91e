"""Segment sums and row updates on a GPU, a kernel each, where nvcc compiled them.

torch's operations are the twin of both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from nestpipe.errors import RunError
from nestpipe.kernels.library import cuda_library, launch
from nestpipe.kernels.rows.native import OptimizerStruct, unknown_optimizer

# Shapes: S sums, T terms of all sums together, K rows that are updated, N rows of a pool or
# K rows, D weights of a row, W weights and state

MOST_PARTS = 6
MOST_DIM = 1536
"""The squares of so many weights fit into shared memory, for each warp of a block."""
FLOAT32, BFLOAT16, ROUNDED = range(3)
UNKNOWN_OPTIMIZER = -1
"""What `cuda/update.cu` answers; CUDA's own errors are positive."""


class _RowPartStruct(ctypes.Structure):
    """Rows in one piece of memory; `cuda/segment_sum.cu` says more."""

    _fields_ = (
        *(("base", c_void_p), ("stride", c_int64)),
        *(("count", c_int64), ("type", c_int32)),
    )


def can_sum(
    terms_T: Tensor, ends_S1: Tensor | None, rows: Sequence[Tensor], out: Sequence[Tensor]
) -> bool:
    """Whether these sums can be taken so."""
    if not terms_T.is_cuda:
        return False
    lists = [terms_T, *([] if ends_S1 is None else [ends_S1])]
    parts = [*rows, *out]
    return (
        all(numbers.dtype == torch.int32 and numbers.stride(0) == 1 for numbers in lists)
        and all(p.dtype in (torch.float32, torch.bfloat16) and p.stride(1) == 1 for p in parts)
        and max(len(rows), len(out)) <= MOST_PARTS
        and cuda_library(terms_T.get_device()) is not None
    )


def sum_on_gpu(
    terms_T: Tensor,
    ends_S1: Tensor | None,
    rows: Sequence[Tensor],
    out: Sequence[Tensor],
    *,
    came: torch.dtype,
    leaving: torch.dtype,
    add: bool = False,
    positions_S: Tensor | None = None,
) -> None:
    """Write the sums, or add them: to rows one after the other, or to those at `positions_S`."""
    segments = len(terms_T) if ends_S1 is None else len(ends_S1) - 1
    if not segments:
        return
    assert positions_S is None or positions_S.dtype == torch.int32
    status = launch(
        *(terms_T.device, "nestpipe_segment_sum"),
        *((_RowPartStruct * len(rows))(*(_part(part, came) for part in rows)), len(rows)),
        *((_RowPartStruct * len(out))(*(_part(part, leaving) for part in out)), len(out)),
        *(terms_T.data_ptr(), _pointer(ends_S1), _pointer(positions_S)),
        *(segments, out[0].shape[1], add),
    )
    if status != 0:
        raise RunError(f"the GPU cannot sum rows: CUDA's error {status}")


def _part(rows: Tensor, comm_dtype: torch.dtype) -> _RowPartStruct:
    kind = BFLOAT16 if rows.dtype == torch.bfloat16 else FLOAT32
    kind = ROUNDED if rows.dtype != comm_dtype and kind == FLOAT32 else kind
    return _RowPartStruct(rows.data_ptr(), rows.stride(0), len(rows), kind)


def _pointer(numbers: Tensor | None) -> int | None:
    return None if numbers is None else numbers.data_ptr()


def can_update(
    rows_NW: Tensor, gradients_KD: Tensor, times: Tensor, slots_K: Tensor | None = None
) -> bool:
    """Whether these can be updated so."""
    tensors = (rows_NW, gradients_KD, times)
    return (
        all(tensor.is_cuda and tensor.dtype == torch.float32 for tensor in tensors)
        and (slots_K is None or (slots_K.dtype == torch.int32 and slots_K.is_contiguous()))
        and rows_NW.stride(1) == gradients_KD.stride(1) == times.numel() == 1
        and gradients_KD.shape[1] <= MOST_DIM
        and cuda_library(rows_NW.get_device()) is not None
    )


def update_rows(
    optimizer: OptimizerStruct,
    rows_NW: Tensor,
    gradients_KD: Tensor,
    times: Tensor,
    slots_K: Tensor | None = None,
) -> None:
    """One application per row, in place, on its gradient times a number on the device.

    `slots_K`: the row that each gradient belongs to, none twice; None: gradient i to row i.
    """
    assert slots_K is None or slots_K.dtype == torch.int32, f"slots are {slots_K.dtype}"
    count = len(rows_NW if slots_K is None else slots_K)
    assert count == len(gradients_KD), f"{len(gradients_KD)} gradients for {count} rows"
    if not count:
        return
    status = launch(
        *(rows_NW.device, "nestpipe_update_rows", ctypes.byref(optimizer)),
        *(rows_NW.data_ptr(), rows_NW.stride(0), _pointer(slots_K)),
        *(gradients_KD.data_ptr(), gradients_KD.stride(0)),
        *(times.data_ptr(), count, gradients_KD.shape[1]),
    )
    if status == UNKNOWN_OPTIMIZER:
        raise unknown_optimizer(optimizer)
    if status != 0:
        raise RunError(f"the GPU cannot update rows: CUDA's error {status}")
