"""Terms between rows and outputs, both ways: rows pooled into outputs, gradients summed by row.

The terms of a row are cut into pieces and added in the order of all segment sums, which
`kernels/rows/segments.py` states. The result depends on the order of terms alone. Each way has
its plain twin.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.kernels.index.library import (
    NO_SORT,
    CutStruct,
    LookupStruct,
    UpdateStruct,
    ask,
    call,
    check_list,
    pointer,
    rows_struct,
)
from nestpipe.kernels.rows.native import OptimizerStruct
from nestpipe.kernels.rows.segments import PIECE, Segments, ends_of, plain_sums

# Shapes: T terms, O outputs that the model sees, N rows by slot or id, S segments, D weights of a
# row, W weights and state


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


@dataclass(frozen=True, slots=True)
class TermSegments:
    """Terms sorted by the row that they belong to, and the pieces that they are cut into."""

    ids_T: Tensor
    """int32: sorted; negative ids, which count for nothing, come last."""
    values_T: Tensor
    """int32: beside the ids, those of one id in the order in which they came."""
    pieces_T4: Tensor
    longs_L4: Tensor
    counts: Tensor
    """(2,) pieces and long segments, in device memory"""


@dataclass(frozen=True, slots=True)
class TermGradients:
    """What each term adds to its row: the gradient of its output, divided and multiplied."""

    rows_OD: Tensor
    outputs_T: Tensor | None = None
    """int32: the output of each term; None: the values of the segments are outputs already"""
    divisors_O: Tensor | None = None
    """The number of terms of an output that is a mean, 1 for a sum; None: all are sums"""
    weights_T: Tensor | None = None


def sort_segments(ids_T: Tensor, num_ids: int, values_T: Tensor | None = None) -> TermSegments:
    """Sort terms by id, below `num_ids` each, and cut the segments; waits for nothing.

    Values are the numbers of the terms, or what is given, such as the output of each.
    """
    count, device = len(ids_T), ids_T.device
    if values_T is None:
        values_T = torch.arange(count, dtype=torch.int32, device=device)
    check_list(ids_T, torch.int32, count, "ids")
    check_list(values_T, torch.int32, count, "values")
    # One bit more than ids need: the bits of a negative id are then above those of all others.
    sorted_ids, values = _sorted(ids_T, values_T, num_ids.bit_length())
    pieces = torch.empty(count, 4, dtype=torch.int32, device=device)
    longs = torch.empty(count // PIECE + 1, 4, dtype=torch.int32, device=device)
    counts = torch.empty(2, dtype=torch.int32, device=device)
    cut = CutStruct(
        *(sorted_ids.data_ptr(), count),
        *(pieces.data_ptr(), longs.data_ptr(), counts.data_ptr()),
    )
    call(device, "nestpipe_cut_segments", ctypes.byref(cut))
    return TermSegments(sorted_ids, values, pieces, longs, counts)


def _sorted(ids_T: Tensor, values_T: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    room = ask(ids_T.device, "nestpipe_sort_bytes", len(ids_T), bits)
    if room < 0:
        assert room == NO_SORT, f"cub answers {room}"
        # Negative ids come last, as they do where bits are sorted.
        order_T = torch.sort(ids_T.long() & (2**32 - 1), stable=True).indices
        return ids_T[order_T], values_T[order_T]
    memory = torch.empty(max(1, room), dtype=torch.uint8, device=ids_T.device)
    made = torch.empty(2, len(ids_T), dtype=torch.int32, device=ids_T.device)
    call(
        *(ids_T.device, "nestpipe_sort", memory.data_ptr(), room),
        *(ids_T.data_ptr(), made[0].data_ptr(), values_T.data_ptr(), made[1].data_ptr()),
        *(len(ids_T), bits),
    )
    return made[0], made[1]


def update_segments(
    segments: TermSegments,
    gradients: TermGradients,
    rows_NW: Tensor,
    optimizer: OptimizerStruct | None,
    times: Tensor | None = None,
    *,
    add: bool = False,
    faults: Tensor | None = None,
    clip: bool = False,
) -> None:
    """Sum the gradients of every row that has terms, times a number, and update the row in place.

    Without an optimizer the weights of the row become the sum; with `add` it is added to them, as
    for the second of several micro-batches. `faults`: int32, where sums that are not finite are
    counted; such a sum is zero, with `clip` only those of its numbers.
    """
    check_list(faults, torch.int32, 1, "faults")
    assert optimizer is None or not add, "sums are added to weights or applied, not both"
    terms, dim, device = len(segments.ids_T), gradients.rows_OD.shape[1], rows_NW.device
    check_list(gradients.divisors_O, torch.float32, len(gradients.rows_OD), "divisors")
    check_list(times, torch.float32, 1, "factors")
    partials = torch.empty(2 * (terms // PIECE + 1), dim, device=device)
    group_partials = torch.empty(2 * (terms // PIECE**2 + 1), dim, device=device)
    task = UpdateStruct(
        rows_struct(gradients.rows_OD),
        *(segments.values_T.data_ptr(), pointer(gradients.outputs_T)),
        *(pointer(gradients.weights_T), pointer(gradients.divisors_O), pointer(times)),
        *(segments.pieces_T4.data_ptr(), segments.longs_L4.data_ptr()),
        *(segments.counts.data_ptr(), partials.data_ptr(), group_partials.data_ptr()),
        *(rows_struct(rows_NW), terms, dim, add, clip, pointer(faults), 1.0),
    )
    given = None if optimizer is None else ctypes.byref(optimizer)
    call(device, "nestpipe_update_segments", given, ctypes.byref(task))


LARGEST = 1e18
"""A larger gradient counts as inf: its square, which optimizers keep, would be."""


def plain_drop_faults(sums_SD: Tensor, *, clip: bool) -> Tensor:
    """The twin: zero every sum that is not finite, or only its numbers; how many sums those are."""
    fine_SD = sums_SD.abs() <= LARGEST
    bad_S = ~fine_SD.all(1)
    sums_SD.masked_fill_(~fine_SD if clip else bad_S[:, None], 0.0)
    return bad_S.sum()


def plain_segment_sums(ids_T: Tensor, gradients: TermGradients) -> tuple[Tensor, Tensor]:
    """The twin: the ids that have terms, ascending, and the (S, D) sums of their gradients."""
    order_T = torch.argsort(ids_T, stable=True)
    order_T = order_T[ids_T[order_T] >= 0]
    ids_S, counts_S = torch.unique_consecutive(ids_T[order_T], return_counts=True)
    outputs_T = order_T if gradients.outputs_T is None else gradients.outputs_T[order_T].long()
    terms_TD = gradients.rows_OD[outputs_T]
    if gradients.divisors_O is not None:
        terms_TD = terms_TD / gradients.divisors_O[outputs_T, None]
    if gradients.weights_T is not None:
        terms_TD = terms_TD * gradients.weights_T[order_T, None]
    in_order = Segments(torch.arange(len(order_T), device=ids_T.device), ends_of(counts_S))
    return ids_S, plain_sums(in_order, terms_TD)
