"""The library of kernels for GPUs, loaded once for each device, where there can be one."""

# pyright: strict
from __future__ import annotations

import ctypes
import warnings
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch

from nestpipe.kernels.build_cuda import CannotCompileError, build_cuda

FIRST_CAPABILITY = (9, 0)
"""Of GPUs with bulk copies."""
_SIGNATURES = {
    "nestpipe_carry_begin": [],
    "nestpipe_carry": [*[c_void_p] * 3, *[c_int64] * 3, *[c_int] * 2, c_void_p],
    "nestpipe_sum_bags": [
        *[c_void_p, c_int64, c_void_p, c_int64],
        *[c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int, c_void_p],
    ],
    "nestpipe_update_rows": [
        *[c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64],
        c_void_p,
    ],
}


@cache
def cuda_library(device: int) -> ctypes.CDLL | None:
    """None where the GPU is too old or nothing can be compiled; the latter is said."""
    if torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        return None
    try:
        return _begun(ctypes.CDLL(str(build_cuda())), device)
    except (CannotCompileError, OSError) as error:
        warnings.warn(
            f"rows are moved and updated by slower kernels of torch and triton: {error}",
            stacklevel=2,
        )
        return None


def _begun(library: ctypes.CDLL, device: int) -> ctypes.CDLL:
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    with torch.cuda.device(device):
        status = library.nestpipe_carry_begin()
    if status != 0:
        raise CannotCompileError(f"the driver refuses what nvcc made: CUDA's error {status}")
    return library
