"""Rows on a GPU updated in one pass, where nvcc compiled the kernel; torch's form is the twin."""

# pyright: strict
from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nestpipe.errors import RunError
from nestpipe.kernels.cuda_library import cuda_library
from nestpipe.kernels.native_rows import OptimizerStruct

# Shapes: K rows, D weights of a row, W weights and state

MOST_DIM = 1536
"""Squares of so many weights fit into shared memory, for each warp of a block."""


def can_update(rows_KW: Tensor, gradients_KD: Tensor, times: Tensor) -> bool:
    """Whether these can be updated so."""
    tensors = (rows_KW, gradients_KD, times)
    return (
        all(tensor.is_cuda and tensor.dtype == torch.float32 for tensor in tensors)
        and rows_KW.stride(1) == gradients_KD.stride(1) == times.numel() == 1
        and gradients_KD.shape[1] <= MOST_DIM
        and cuda_library(rows_KW.get_device()) is not None
    )


def update_rows(
    optimizer: OptimizerStruct, rows_KW: Tensor, gradients_KD: Tensor, times: Tensor
) -> None:
    """One application per row, in place, on its gradient times a number on the device."""
    library = cuda_library(rows_KW.get_device())
    assert library is not None
    if not len(rows_KW):
        return
    with torch.cuda.device(rows_KW.device):
        status = library.nestpipe_update_rows(
            ctypes.byref(optimizer),
            rows_KW.data_ptr(),
            rows_KW.stride(0),
            gradients_KD.data_ptr(),
            gradients_KD.stride(0),
            times.data_ptr(),
            len(rows_KW),
            gradients_KD.shape[1],
            torch.cuda.current_stream(rows_KW.device).cuda_stream,
        )
    if status != 0:
        raise RunError(f"the GPU cannot update rows: CUDA's error {status}")
