"""The compiled libraries, native and for GPUs: loaded once, with the types of their functions."""

from __future__ import annotations

import ctypes
import os
import warnings
from ctypes import POINTER, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from enum import IntEnum
from functools import cache

import torch

from nestpipe.errors import ConfigError
from nestpipe.kernels.build import CannotCompileError, build, build_cuda


class Status(IntEnum):
    """What a native call answers; `native/common/abi.h` says more."""

    OK = 0
    TOO_MANY_ROWS = 1
    NO_MEMORY = 2
    REPEATED_KEY = 3
    DEFECT = 4
    UNKNOWN_OPTIMIZER = 5


class StoreReport(ctypes.Structure):
    """The values that belong to a status other than OK."""

    _fields_ = (("table", c_int64), ("key", c_int64), ("asked", c_int64), ("limit", c_int64))
    table: int
    key: int
    asked: int
    limit: int


class StoreShape(ctypes.Structure):
    """What a store is opened with."""

    _fields_ = (
        ("num_tables", c_int64),
        ("dim", c_int64),
        ("state_dim", c_int64),
        ("bfloat16", c_int64),
        ("state_init", c_float),
        ("seeds", POINTER(c_uint64)),
        ("stds", POINTER(c_double)),
        ("max_rows", POINTER(c_int64)),
    )


# Addresses of tensors and of the store itself travel as void pointers.
_SIGNATURES = {
    "nestpipe_store_open": (c_void_p, [POINTER(StoreShape), c_int64]),
    "nestpipe_store_close": (None, [c_void_p]),
    "nestpipe_store_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_int64)]),
    "nestpipe_store_locate": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_int64)]),
    "nestpipe_store_scatter": (
        c_int,
        [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(StoreReport)],
    ),
    "nestpipe_store_num_rows": (c_int64, [c_void_p, c_int64]),
    "nestpipe_store_num_bytes": (c_int64, [c_void_p]),
    "nestpipe_store_chunks": (
        c_int64,
        [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64],
    ),
    "nestpipe_store_keys": (c_int64, [c_void_p, c_int64, c_void_p, c_int64]),
    "nestpipe_cluster": (c_int, [c_void_p, c_void_p]),
    "nestpipe_request": (c_int, [c_void_p, c_void_p]),
    "nestpipe_window": (c_int, [c_void_p, c_void_p]),
    "nestpipe_union": (c_int, [c_void_p, c_void_p]),
    "nestpipe_index_size": (c_int64, [c_int64, c_void_p]),
    "nestpipe_index": (None, [c_int64, *[c_void_p] * 3]),
    "nestpipe_neighbours": (c_int, [c_int64, *[c_void_p] * 5]),
    "nestpipe_others": (c_int64, [c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "nestpipe_copy_rows": (
        c_int,
        [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64],
    ),
    "nestpipe_segment_sum": (
        c_int,
        [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64],
    ),
    "nestpipe_update": (
        c_int,
        [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_float, c_int64],
    ),
}

FIRST_CAPABILITY = (9, 0)
"""Compute capability of the first GPUs with bulk copies."""
_CUDA_SIGNATURES = {
    "nestpipe_row_copy_begin": [],
    "nestpipe_row_copy": [*[c_void_p] * 3, *[c_int64] * 3, *[c_int] * 2, c_void_p],
    "nestpipe_segment_sum": [
        *[c_void_p, c_int64, c_void_p, c_int64],
        *[c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int, c_void_p],
    ],
    "nestpipe_update_rows": [
        *[c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64],
        c_void_p,
    ],
}


@cache
def library() -> ctypes.CDLL:
    """The library, built first where that is needed; its calls run without the GIL."""
    path = build()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(
            f"cannot load {str(path)!r} ({error}); remove it so that it is built again, "
            "or set NESTPIPE_NATIVE=0 to use the slow plain twin"
        ) from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def native_wanted() -> bool:
    """Whether the native code is to be used: unless NESTPIPE_NATIVE is 0."""
    value = os.environ.get("NESTPIPE_NATIVE", "1")
    if value not in ("0", "1"):
        raise ConfigError(f"NESTPIPE_NATIVE is {value!r}; set 0 (plain twin) or 1 (native)")
    return value == "1"


@cache
def cuda_library(device: int) -> ctypes.CDLL | None:
    """The library for a GPU, or None where the GPU is too old or nothing can be compiled.

    A warning says the latter.
    """
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
    for name, arguments in _CUDA_SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    with torch.cuda.device(device):
        status = library.nestpipe_row_copy_begin()
    if status != 0:
        raise CannotCompileError(f"the driver refuses what nvcc made: CUDA's error {status}")
    return library
