"""The kernels of keys and rows in the GPU library: structures, types, calls."""

# pyright: strict
from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from nestpipe.errors import ConfigError, RunError
from nestpipe.kernels.library import call_on_stream, cuda_library

UNKNOWN_OPTIMIZER, UNKNOWN_WIDTH, NO_SORT = -1, -2, -3
"""Answers beside CUDA's own errors; `cuda/device.h` has them too."""


class CellsStruct(ctypes.Structure):
    """Where the keys of each table lie."""

    _fields_ = (("ends", c_void_p), ("tables", c_void_p), ("count", c_int64))


class KeysStruct(ctypes.Structure):
    """Keys with their tables."""

    _fields_ = (("keys", c_void_p), ("count", c_int64), ("cells", CellsStruct))


class IndexStruct(ctypes.Structure):
    """An index; `cuda/index.cu` says more."""

    _fields_ = (
        *(("places", c_void_p), ("num_places", c_int64)),
        *((name, c_void_p) for name in ("slot_keys", "slot_tables", "stamps", "heats")),
        ("free_slots", c_void_p),
        *(("num_slots", c_int64), ("counters", c_void_p)),
    )


class FirstRowsStruct(ctypes.Structure):
    """Where first values go, and what they are made of."""

    _fields_ = (
        *(("rows", c_void_p), ("stride", c_int64), ("dim", c_int32), ("state_dim", c_int32)),
        *(("state_init", c_float), ("seeds", c_void_p), ("stds", c_void_p)),
        *(("keys", c_void_p), ("tables", c_void_p)),
    )


class WantedStruct(ctypes.Structure):
    """Keys that a requester needs, and who may own them."""

    _fields_ = (
        *(("keys", c_void_p), ("count", c_int64), ("tables", CellsStruct)),
        *(("table_owners", c_void_p), ("ranks", c_int32), ("rank", c_int32)),
    )


class DedupedStruct(ctypes.Structure):
    """Lists that dedup fills; `cuda/dedup.cu` says more."""

    _fields_ = (
        *(("places", c_void_p), ("num_places", c_int64)),
        *((name, c_void_p) for name in ("place_of", "starts", "keys", "inverse", "counts")),
    )


class CutStruct(ctypes.Structure):
    """Sorted ids, and the pieces that they are cut into."""

    _fields_ = (
        *(("ids", c_void_p), ("count", c_int64)),
        *((name, c_void_p) for name in ("pieces", "longs", "counts")),
    )


class RowsStruct(ctypes.Structure):
    """Rows at a stride, which counts numbers."""

    _fields_ = (("base", c_void_p), ("stride", c_int64))


class LookupStruct(ctypes.Structure):
    """A lookup of rows by slot; `cuda/row_sums.cu` says more."""

    _fields_ = (
        *(("rows", RowsStruct), ("out", RowsStruct)),
        *((name, c_void_p) for name in ("slots", "ends", "weights", "divisors")),
        *(("outputs", c_int64), ("dim", c_int32)),
    )


class UpdateStruct(ctypes.Structure):
    """Gradients of outputs, segments of terms, rows to update; `cuda/row_sums.cu` says more."""

    _fields_ = (
        ("gradients", RowsStruct),
        *((name, c_void_p) for name in ("terms", "outputs", "weights", "divisors", "times")),
        *((name, c_void_p) for name in ("pieces", "longs", "counts")),
        *((name, c_void_p) for name in ("partials", "group_partials")),
        *(("rows", RowsStruct), ("num_terms", c_int64), ("dim", c_int32), ("add", c_int32)),
        *(("clip", c_int32), ("faults", c_void_p), ("factor", c_float)),
    )


class AdmissionStruct(ctypes.Structure):
    """Terms of a batch on their way to slots and segments; `cuda/step.cu` says more."""

    _fields_ = (
        *((name, c_void_p) for name in ("index", "keys", "first", "cut")),
        *((name, c_void_p) for name in ("slots", "new_slots", "num_new", "values")),
        *((name, c_void_p) for name in ("sorted_slots", "sorted_values", "memory")),
        *(("bytes", c_int64), ("count", c_int64), ("bits", c_int32)),
    )


class OutputsStruct(ctypes.Structure):
    """How many terms each output has, and what is made of it."""

    _fields_ = (
        *(("lengths", c_void_p), ("outputs", c_int64), ("terms", c_int64)),
        *((name, c_void_p) for name in ("ends", "numbers", "sums")),
    )


class ToldStruct(ctypes.Structure):
    """What the host learns of a step."""

    _fields_ = (
        *((name, c_void_p) for name in ("loss", "dense_fault", "counts")),
        *(("num_counts", c_int64), ("out", c_void_p)),
    )


_P, _I, _L = c_void_p, c_int32, c_int64
_SIGNATURES: dict[str, tuple[type[c_int] | type[c_int64], list[type]]] = {
    "nestpipe_index_find_or_insert": (c_int, [_P, _P, _I, _P, _P, _P]),
    "nestpipe_index_find": (c_int, [_P, _P, _P, _P]),
    "nestpipe_index_erase": (c_int, [_P, _P, _P, _L, _P]),
    "nestpipe_index_rebuild": (c_int, [_P, _L, _P]),
    "nestpipe_index_choose": (c_int, [_P, _I, _I, _L, _I, _P, _P, _P]),
    "nestpipe_index_insert_missing": (c_int, [_P, _P, _I, _P, _P, _P]),
    "nestpipe_index_list": (c_int, [_P, _P, _P, _L, _P, _P, _P]),
    "nestpipe_index_first_rows": (c_int, [_P, _P, _P, _P, _L, _P]),
    "nestpipe_dedup_starts": (c_int64, [_L, _L]),
    "nestpipe_dedup": (c_int, [_P, _P, _P]),
    "nestpipe_sort_bytes": (c_int64, [_L, c_int]),
    "nestpipe_sort": (c_int, [_P, _L, _P, _P, _P, _P, _L, c_int, _P]),
    "nestpipe_cut_segments": (c_int, [_P, _P]),
    "nestpipe_look_up": (c_int, [_P, _P]),
    "nestpipe_update_segments": (c_int, [_P, _P, _P]),
    "nestpipe_admit": (c_int, [_P, _I, _P]),
    "nestpipe_outputs_sums": (c_int64, [_L]),
    "nestpipe_outputs": (c_int, [_P, _P]),
    "nestpipe_update_terms": (c_int, [_P, _P, _P, _P]),
    "nestpipe_tell": (c_int, [_P, _P]),
}


def typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of these kernels."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


@cache
def _of_gpu(device: torch.device) -> ctypes.CDLL:
    library = cuda_library(torch.zeros(0, device=device).get_device())
    if library is None:
        raise ConfigError(
            "rows on the GPU need nvcc and compute capability 9.0; keep rows in host memory instead"
        )
    return typed(library)


def loaded(device: torch.device) -> ctypes.CDLL:
    """The library for tensors of a device."""
    if device.type != "cuda":
        raise ConfigError(f"an index in device memory cannot live on {str(device)!r}; use a GPU")
    return _of_gpu(device)


def has_kernels(device: torch.device) -> bool:
    """Whether keys and rows there are worked on by kernels; else by their plain twins."""
    return device.type == "cuda"


def ask(device: torch.device, name: str, *arguments: int) -> int:
    """A number that the library knows, such as the size of a list."""
    function: Callable[..., int] = getattr(loaded(device), name)
    return function(*arguments)


def call(device: torch.device, name: str, *arguments: object) -> None:
    """Launch kernels on the current stream of a device."""
    function: Callable[..., int] = getattr(loaded(device), name)
    if device.type != "cuda":
        check(name, function(*arguments, None))
        return
    check(name, call_on_stream(device, function, *arguments))


def check(name: str, status: int) -> None:
    """Raise what a status says."""
    if status == UNKNOWN_OPTIMIZER:
        raise ConfigError("the GPU kernels do not know this row optimizer; use one of the list")
    if status == UNKNOWN_WIDTH:
        raise ConfigError("the GPU kernels know rows of 1 to 512 weights; choose such a dimension")
    if status != 0:
        raise RunError(f"{name} fails on the GPU: CUDA's error {status}")


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor begins; None stays None."""
    return None if tensor is None else tensor.data_ptr()


def rows_struct(rows: Tensor) -> RowsStruct:
    """A (n, width) float32 tensor whose rows lie in one piece each."""
    assert rows.dtype == torch.float32, f"rows are {rows.dtype}"
    assert rows.stride(1) == 1 or rows.shape[1] == 1 or not len(rows), "a row has gaps"
    return RowsStruct(rows.data_ptr(), rows.stride(0))


def check_list(numbers: Tensor | None, dtype: torch.dtype, length: int, what: str) -> None:
    """Assert that a list of numbers is what a kernel takes it for."""
    if numbers is None:
        return
    assert numbers.dtype == dtype, f"{what} are {numbers.dtype}, not {dtype}"
    assert numbers.is_contiguous(), f"{what} do not lie in one piece"
    assert numbers.numel() >= length, f"{numbers.numel()} {what} where {length} are needed"
