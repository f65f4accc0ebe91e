"""Rows looked up by slot, one for each output or pooled; and the plain twin."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.kernels.index.library import LookupStruct, call, check_list, pointer, rows_struct
from nestpipe.kernels.rows.segments import Segments, plain_sums

# Shapes: T terms, O outputs, N rows by slot, D weights of a row, W weights and state


@dataclass(frozen=True, slots=True)
class Pooling:
    """How terms make outputs: the sum of weight x row over an output's terms, over its divisor."""

    ends_O1: Tensor
    """int32: where the terms of each output begin, and where the last ones end."""
    divisors_O: Tensor | None = None
    """The number of terms of an output that is a mean, 1 for a sum; None: all are sums."""
    weights_T: Tensor | None = None


def look_up(
    rows_NW: Tensor, slots_T: Tensor, out_OD: Tensor, pooling: Pooling | None = None
) -> None:
    """Write the rows of slots, or pooled rows; a negative slot is a row of zeros."""
    outputs, dim = out_OD.shape
    check_list(slots_T, torch.int32, outputs if pooling is None else 0, "slots")
    if pooling is not None:
        check_list(pooling.ends_O1, torch.int32, outputs + 1, "ends of outputs")
        check_list(pooling.divisors_O, torch.float32, outputs, "divisors")
        check_list(pooling.weights_T, torch.float32, len(slots_T), "weights")
    task = LookupStruct(
        *(rows_struct(rows_NW), rows_struct(out_OD), slots_T.data_ptr()),
        *(None if pooling is None else pooling.ends_O1.data_ptr(),),
        *(None if pooling is None else pointer(pooling.weights_T),),
        *(None if pooling is None else pointer(pooling.divisors_O),),
        *(outputs, dim),
    )
    call(rows_NW.device, "nestpipe_look_up", ctypes.byref(task))


def plain_look_up(
    rows_NW: Tensor, slots_T: Tensor, dim: int, pooling: Pooling | None = None
) -> Tensor:
    """The twin: (O, D) outputs."""
    there_T1 = (slots_T >= 0)[:, None]
    terms_TD = rows_NW[slots_T.clamp(min=0).long(), :dim]
    if pooling is None:
        return torch.where(there_T1, terms_TD, 0.0)
    if pooling.weights_T is not None:
        terms_TD = terms_TD * pooling.weights_T[:, None]
    terms = Segments(torch.arange(len(slots_T), device=slots_T.device), pooling.ends_O1.long())
    sums_OD = plain_sums(terms, torch.where(there_T1, terms_TD, 0.0))
    return sums_OD if pooling.divisors_O is None else sums_OD / pooling.divisors_O[:, None]
