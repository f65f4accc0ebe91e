"""The native libraries: loaded once per process, with the types of their functions.

`kernels/build.py` says where they come from: the wheel, or a compiler on this machine.
`python -m nestpipe.kernels.library` gets both, for the host and for GPUs, ahead of the first use.
The one for GPUs is fast, not needed: without NVIDIA's compiler, torch and Triton do its work.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

from nestpipe.errors import ConfigError
from nestpipe.kernels.build import TWIN, CannotCompileError, build, build_cuda, shipped


class Status(IntEnum):
    """What a native call answers; `native/common/abi.h` says more."""

    OK = 0
    TOO_MANY_ROWS = 1
    NO_MEMORY = 2
    REPEATED_KEY = 3
    DEFECT = 4
    UNKNOWN_OPTIMIZER = 5
    FILE_FAILED = 6
    FILE_DAMAGED = 7


class RowType(IntEnum):
    """How native code keeps a row's weights; `native/common/abi.h` has the same."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2


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
        ("row_type", c_int64),
        ("state_init", c_float),
        ("seeds", POINTER(c_uint64)),
        ("stds", POINTER(c_double)),
        ("max_rows", POINTER(c_int64)),
    )


class SsdShape(ctypes.Structure):
    """What a store with a file is opened with, besides its shape."""

    _fields_ = tuple(
        (name, c_int64) for name in ("file", "align", "cache_bytes", "segment_bytes", "depth")
    )


class SsdCounters(ctypes.Structure):
    """What a store with a file has read and written so far, and how large it is."""

    _fields_ = tuple(
        (name, c_int64)
        for name in (
            *("rows_hit", "rows_read", "bytes_read", "rows_written", "bytes_written"),
            *("rows_moved", "file_bytes", "cached_rows", "cache_rows"),
        )
    )


# Addresses of tensors and of the store itself travel as void pointers.
_SIGNATURES = {
    "nestpipe_memory_left": (c_int64, [c_char_p, c_char_p]),
    "nestpipe_store_open": (c_void_p, [POINTER(StoreShape), c_int64]),
    "nestpipe_store_close": (None, [c_void_p]),
    "nestpipe_store_gather": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_int64)]),
    "nestpipe_store_locate": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_int64)]),
    "nestpipe_store_locate_each": (
        c_int,
        [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, POINTER(c_int64)],
    ),
    "nestpipe_store_scatter": (
        c_int,
        [c_void_p, c_void_p, c_void_p, c_void_p, POINTER(StoreReport)],
    ),
    "nestpipe_store_erase": (
        c_int,
        [c_void_p, c_void_p, c_void_p, POINTER(c_int64), POINTER(StoreReport)],
    ),
    "nestpipe_store_num_rows": (c_int64, [c_void_p, c_int64]),
    "nestpipe_store_num_bytes": (c_int64, [c_void_p]),
    "nestpipe_store_chunks": (
        c_int64,
        [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64],
    ),
    "nestpipe_store_keys": (c_int64, [c_void_p, c_int64, c_void_p, c_int64]),
    "nestpipe_ssd_open": (c_void_p, [POINTER(StoreShape), POINTER(SsdShape), c_int64]),
    "nestpipe_ssd_close": (None, [c_void_p]),
    "nestpipe_ssd_index": (c_void_p, [c_void_p]),
    "nestpipe_ssd_gather": (
        c_int,
        [*[c_void_p] * 4, c_int64, POINTER(c_int64), POINTER(StoreReport)],
    ),
    "nestpipe_ssd_scatter": (c_int, [*[c_void_p] * 4, POINTER(StoreReport)]),
    "nestpipe_ssd_erase": (
        c_int,
        [*[c_void_p] * 3, POINTER(c_int64), POINTER(StoreReport)],
    ),
    "nestpipe_ssd_num_bytes": (c_int64, [c_void_p]),
    "nestpipe_ssd_probe": (
        c_int,
        [c_int64, c_int64, c_void_p, *[c_int64] * 3, POINTER(c_double), POINTER(StoreReport)],
    ),
    "nestpipe_ssd_counters": (None, [c_void_p, POINTER(SsdCounters)]),
    "nestpipe_cluster": (c_int, [c_void_p, c_void_p]),
    "nestpipe_take_sizes": (None, [c_void_p] * 3),
    "nestpipe_take_spans": (None, [c_void_p] * 3),
    "nestpipe_page_header": (c_int, [c_void_p, c_int64, c_void_p]),
    "nestpipe_decode_lists": (c_int, [c_void_p, c_void_p, *[c_int64] * 3]),
    "nestpipe_permutation": (None, [c_int64, c_int64, c_void_p, c_void_p]),
    "nestpipe_gather_lists": (None, [c_int64, c_void_p, c_int64, *[c_void_p] * 4]),
    "nestpipe_gather_rows": (None, [c_int64, c_void_p, *[c_int64] * 3, *[c_void_p] * 3]),
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
    "nestpipe_within": (
        c_int,
        [c_void_p, c_int64, c_int64, c_float, c_int64, POINTER(c_int64)],
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
        *[c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64],
        c_void_p,
    ],
    "nestpipe_bias_gradient": [c_void_p, c_int64, c_int, c_void_p],
}


def find() -> Path:
    """Where the library is; compiled now where the wheel has none, or NESTPIPE_NATIVE is build."""
    came_along = None if _native_setting() == "build" else shipped()
    return came_along or build()


@cache
def library() -> ctypes.CDLL:
    """The wheel's library, or one built for this processor; its calls run without the GIL."""
    path = find()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(
            f"cannot load {str(path)!r} ({error}); remove it so that it is built again, {TWIN}"
        ) from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def free_memory() -> float:
    """Bytes that the machine has left, and the control groups of this process."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = next(1024.0 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        free = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    if not native_wanted():
        return free
    left = library().nestpipe_memory_left(b"/proc/self/cgroup", b"/sys/fs/cgroup")
    return free if left < 0 else min(free, float(left))


def native_wanted() -> bool:
    """Whether the native code is to be used: unless NESTPIPE_NATIVE is 0."""
    return _native_setting() != "0"


def _native_setting() -> str:
    value = os.environ.get("NESTPIPE_NATIVE", "1")
    if value not in ("0", "1", "build"):
        raise ConfigError(
            f"NESTPIPE_NATIVE is {value!r}; set 0 (plain twin), 1 (native), "
            "or build (native, compiled for this processor)"
        )
    return value


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
            f"slower kernels of torch and triton do the work of those for GPUs: {error}",
            stacklevel=2,
        )
        return None


def _begun(library: ctypes.CDLL, device: int) -> ctypes.CDLL:
    typed_cuda(library, _CUDA_SIGNATURES)
    with torch.cuda.device(device):
        status = library.nestpipe_row_copy_begin()
    if status != 0:
        raise CannotCompileError(f"the driver refuses what nvcc made: CUDA's error {status}")
    return library


def typed_cuda(library: ctypes.CDLL, names: Iterable[str]) -> None:
    """Give some functions of a library for GPUs their types."""
    for name in names:
        function = getattr(library, name)
        function.argtypes, function.restype = _CUDA_SIGNATURES[name], c_int


def launch(device: torch.device, name: str, *arguments: object) -> int:
    """Call a function of a GPU's library on the device's current stream; returns its status."""
    library = cuda_library(device.index)
    assert library is not None, f"there is no {name} for {device}"
    return call_on_stream(device, getattr(library, name), *arguments)


def call_on_stream(device: torch.device, function: Callable[..., int], *arguments: object) -> int:
    """Call a function with the device's current stream as its last argument.

    By torch's own short way: the usual one takes longer than a kernel.
    """
    current = torch.cuda.current_device()
    index = current if device.index is None else device.index
    if index != current:
        with torch.cuda.device(device):
            return call_on_stream(device, function, *arguments)
    stream = torch._C._cuda_getCurrentRawStream(index)  # pyright: ignore
    return function(*arguments, stream)


def main() -> None:
    """Build the libraries and say where they are."""
    _say(find)
    try:
        _say(build_cuda)
    except CannotCompileError as error:
        sys.stdout.write(f"nothing for a GPU: {error}\n")


def _say(make: Callable[[], Path]) -> None:
    began = time.monotonic()
    path = make()
    sys.stdout.write(f"{path} ({time.monotonic() - began:.1f} s)\n")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_status)
