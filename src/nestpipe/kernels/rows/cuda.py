"""Segment sums, row updates and bulk copies of rows on a GPU, where nvcc compiled the kernels.

torch's operations are the twin of the first two. Bulk copies move rows between the GPU and pinned
host memory by the GPU's engine for them (TMA); `row_copy_triton` does the same with ordinary loads
and stores, on any GPU, and asks here first.
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


WHOLE = 16
"""Bulk copies move multiples of so many bytes, from and to multiples of as many."""
MOST_BYTES = 16 * 1024
"""Of a row: several must fit into shared memory."""
BLOCKS, BLOCKS_ALONE = 2, 16
"""Of one warp each, beside dense compute and where nothing else runs."""


def aligned_rows(count: int, width: int, device: torch.device) -> Tensor:
    """(count, width) float32 numbers to be written; every row starts where a bulk copy can."""
    numbers = WHOLE // 4
    return torch.empty(count, -(-width // numbers) * numbers, device=device)[:, :width]


def in_order_of_addresses(addresses_K: Tensor, positions_n: Tensor | None) -> Tensor:
    """(n,) the same positions; rows that share a page of host memory come one after the other.

    That doubles the speed and more (docs/experiments), likely as the GPU remembers few pages.
    """
    if positions_n is None:
        return addresses_K.argsort()
    return positions_n[addresses_K[positions_n].argsort()]


def can_copy_in_bulk(rows_KW: Tensor) -> bool:
    """Whether bulk copies can move rows of this buffer: see `aligned_rows`."""
    stride = rows_KW.stride(0) * 4
    whole = rows_KW.stride(1) == 1 and stride % WHOLE == 0 and rows_KW.data_ptr() % WHOLE == 0
    fits = stride >= _bytes_of(rows_KW) and _bytes_of(rows_KW) <= MOST_BYTES
    return whole and fits and cuda_library(rows_KW.get_device()) is not None


def copy_rows_in_bulk(
    addresses_K: Tensor, positions_n: Tensor, rows_KW: Tensor, *, to_store: bool, alone: bool
) -> None:
    """What `copy_rows_by_gpu` does; up to 12 bytes after a row come along."""
    library = cuda_library(rows_KW.get_device())
    assert library is not None
    assert addresses_K.dtype == positions_n.dtype == torch.int64
    with torch.cuda.device(rows_KW.device):
        status = library.nestpipe_row_copy(
            addresses_K.data_ptr(),
            positions_n.data_ptr(),
            rows_KW.data_ptr(),
            len(positions_n),
            rows_KW.stride(0) * 4,
            _bytes_of(rows_KW),
            to_store,
            BLOCKS_ALONE if alone else BLOCKS,
            torch.cuda.current_stream(rows_KW.device).cuda_stream,
        )
    if status != 0:
        raise RunError(f"the GPU cannot copy rows: CUDA's error {status}; set pin_rows = false")


def _bytes_of(rows_KW: Tensor) -> int:
    """Of a row as it travels."""
    return -(-rows_KW.shape[1] * 4 // WHOLE) * WHOLE
