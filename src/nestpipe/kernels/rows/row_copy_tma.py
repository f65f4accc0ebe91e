"""Rows copied by the GPU's engine for bulk copies (TMA), where it has one and nvcc compiled it.

`row_copy_triton` does the same with ordinary loads and stores, on any GPU; it asks here first.
"""

# pyright: strict
from __future__ import annotations

import torch
from torch import Tensor

from nestpipe.errors import RunError
from nestpipe.kernels.library import cuda_library

# Shapes: K rows of a buffer, n some of them, W numbers of a row

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
