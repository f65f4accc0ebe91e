"""Sums of rows in a fixed order: what exactness rests on.

From its first row on, a segment is cut into pieces of 32 rows. The rows of a piece are added from
zero, one after the other; so are the sums of 32 consecutive pieces; and so are those sums. A kernel
of ours does so on a GPU and native code on the host, into memory that is used again. torch's
`embedding_bag`, which adds in order and without atomics, is the twin of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.kernels import host_memory
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.rows import native as native_rows
from nestpipe.kernels.rows.cuda import can_sum, sum_on_gpu
from nestpipe.kernels.rows.native import RowPointers

# Shapes: N rows, S sums, T terms of all sums together, D width

F32 = torch.float32
PIECE = 32
"""Rows of a piece, and pieces that are summed at a time; `native/rows/sum_order.h` has it too."""
Rows = Sequence[Tensor] | RowPointers
"""Rows in one or several (n, D) tensors, numbered one after the other, or where they live."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Which rows each sum has, in order."""

    rows_T: Tensor
    """The rows of the first sum, then those of the second, ..."""
    ends_S1: Tensor | None = None
    """Where each sum starts in `rows_T`, and where the last one ends; None: one row each."""

    def __len__(self) -> int:
        return len(self.rows_T) if self.ends_S1 is None else len(self.ends_S1) - 1

    def lengths(self) -> Tensor:
        """(S,) how many rows each sum has."""
        return torch.ones_like(self.rows_T) if self.ends_S1 is None else self.ends_S1.diff()

    def part(self, start: int, stop: int) -> Segments:
        """Only the sums from `start` to `stop`; for native code, which takes ends as they are."""
        if self.ends_S1 is None:
            return Segments(self.rows_T[start:stop])
        return Segments(self.rows_T, self.ends_S1[start : stop + 1])


def segments_on(device: torch.device, segments: Sequence[Segments]) -> list[Segments]:
    """The same segments on a device, by a single copy for which the host does not wait."""
    parts = [part for b in segments for part in (b.rows_T, b.ends_S1) if part is not None]
    moved = iter(lists_on(device, parts))
    return [Segments(next(moved), None if b.ends_S1 is None else next(moved)) for b in segments]


def lists_on(device: torch.device, lists: Sequence[Tensor]) -> list[Tensor]:
    """The same lists of numbers, all of one type, on a device: again by a single copy."""
    if device.type == "cpu":
        return list(lists)
    # Not straight from ordinary memory: the host would wait for the copy.
    staging = torch.empty(sum(map(len, lists)), dtype=lists[0].dtype, pin_memory=True)
    torch.cat(list(lists), out=staging)
    moved = staging.to(device, non_blocking=True)
    return list(torch.split(moved, [len(numbers) for numbers in lists]))


def sum_segments(
    segments: Segments,
    rows: Rows,
    out: Sequence[Tensor],
    *,
    came: torch.dtype = F32,
    leaving: torch.dtype = F32,
) -> None:
    """Write every sum; `out` may be several (s, D) tensors, filled one after the other.

    Rows are rounded to the type in which they `came` from other ranks, if they did, and sums to the
    one in which they are `leaving`; what has that type already may be given, or asked for, as such.
    """
    if not isinstance(rows, RowPointers):
        if can_sum(segments.rows_T, segments.ends_S1, rows, out):
            sum_on_gpu(segments.rows_T, segments.ends_S1, rows, out, came=came, leaving=leaving)
            return
        rows = [from_wire(part, came) for part in rows]
    wide = [
        part if part.dtype == F32 else host_memory.empty(part.shape, F32, part.device)
        for part in out
    ]
    _sum_segments(segments, rows, wide)
    for out_SD, wide_SD in zip(out, wide, strict=True):
        if out_SD.dtype == F32:
            round_in_place(out_SD, leaving)
        else:
            out_SD.copy_(wide_SD)


def _sum_segments(segments: Segments, rows: Rows, out: Sequence[Tensor]) -> None:
    """The same in float32."""
    if isinstance(rows, RowPointers) or use_native(out[0].device):
        start = 0
        for out_SD in out:
            part = segments.part(start, start + len(out_SD))
            native_rows.sum_segments(part.rows_T, part.ends_S1, rows, out_SD, add=False)
            start += len(out_SD)
        return
    sizes = [len(o) for o in out]
    if segments.ends_S1 is None:
        for out_SD, picked in zip(out, torch.split(segments.rows_T, sizes), strict=True):
            torch.index_select(concat(rows), 0, picked, out=out_SD)
        return
    for out_SD, part in zip(
        out, torch.split(plain_sums(segments, concat(rows)), sizes), strict=True
    ):
        out_SD.copy_(part)


def add_segments(
    segments: Segments, rows: Sequence[Tensor], out_SD: Tensor, *, came: torch.dtype = F32
) -> None:
    """Add every sum to what is there, which was a sum too."""
    if can_sum(segments.rows_T, segments.ends_S1, rows, [out_SD]):
        sum_on_gpu(
            segments.rows_T, segments.ends_S1, rows, [out_SD], came=came, leaving=F32, add=True
        )
        return
    rows = [from_wire(part, came) for part in rows]
    if use_native(out_SD.device):
        native_rows.sum_segments(segments.rows_T, segments.ends_S1, rows, out_SD, add=True)
    else:
        out_SD.add_(plain_sums(segments, concat(rows)))


def add_segments_at(
    segments: Segments, rows: Sequence[Tensor], out_ND: Tensor, positions_S: Tensor
) -> None:
    """Add every sum to the row at its position; no position comes twice."""
    terms_T, ends_S1, out = segments.rows_T, segments.ends_S1, [out_ND]
    if can_sum(terms_T, ends_S1, rows, out) and positions_S.dtype == torch.int32:
        sum_on_gpu(
            terms_T, ends_S1, rows, out, came=F32, leaving=F32, add=True, positions_S=positions_S
        )
    elif use_native(out_ND.device):
        out = pointers_into(out_ND, positions_S)
        native_rows.sum_segments(segments.rows_T, segments.ends_S1, rows, out, add=True)
    else:
        added_SD = out_ND.index_select(0, positions_S) + plain_sums(segments, concat(rows))
        out_ND.index_copy_(0, positions_S.long(), added_SD)


def pointers_into(rows_ND: Tensor, positions_S: Tensor) -> RowPointers:
    """Where some rows of a tensor in host memory live; it must outlive them."""
    stride = rows_ND.stride(0) * rows_ND.element_size()
    return RowPointers(positions_S.long() * stride + rows_ND.data_ptr(), rows_ND.shape[1])


def plain_sums(segments: Segments, rows_ND: Tensor) -> Tensor:
    """(S, D) every sum, by torch."""
    rows_T, ends_S1 = segments.rows_T, segments.ends_S1
    if ends_S1 is None:
        return rows_ND.index_select(0, rows_T)
    if not len(rows_T):
        return rows_ND.new_zeros(len(segments), rows_ND.shape[1])
    if int(segments.lengths().max()) > PIECE:
        for _ in range(2):  # sums of pieces, then of 32 pieces each
            pieces_P1, ends_S1 = _cut_into_pieces(ends_S1)
            rows_ND = _sum_one_by_one(rows_T, pieces_P1, rows_ND)
            rows_T = torch.arange(len(rows_ND), dtype=rows_T.dtype, device=rows_T.device)
    return _sum_one_by_one(rows_T, ends_S1, rows_ND)


def _sum_one_by_one(rows_T: Tensor, ends_S1: Tensor, rows_ND: Tensor) -> Tensor:
    """(S, D) sums from zero, row after row."""
    return functional.embedding_bag(rows_T, rows_ND, ends_S1, mode="sum", include_last_offset=True)


def _cut_into_pieces(ends_S1: Tensor) -> tuple[Tensor, Tensor]:
    """(P + 1,) where pieces start, and where the last one ends; (S + 1,) the pieces of segments."""
    counts_S = (ends_S1.diff() + PIECE - 1) // PIECE
    pieces_S1 = ends_of(counts_S)
    segment_P = torch.repeat_interleave(counts_S)
    number_P = torch.arange(len(segment_P), device=ends_S1.device) - pieces_S1[segment_P]
    starts_P = ends_S1[segment_P] + number_P * PIECE
    return torch.cat([starts_P.to(ends_S1.dtype), ends_S1[-1:]]), pieces_S1


def concat(parts: Sequence[Tensor], like: Tensor | None = None) -> Tensor:
    """Several tensors in one; a single one is not copied. `like`: what none at all looks like."""
    if not parts:
        assert like is not None, "there is nothing to concatenate"
        return like[:0]
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def use_native(device: torch.device) -> bool:
    """Whether work on that device is done by native code."""
    return device.type == "cpu" and native_wanted()


def empty_rows(
    count: int, dim: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(count, dim) numbers to be written."""
    return host_memory.empty((count, dim), dtype, device)


def segments_of_targets(targets_T: Tensor, sums: int, rows_T: Tensor | None = None) -> Segments:
    """Term i goes to sum `targets_T[i]`; it is row i, or `rows_T[i]`. Order of terms is kept."""
    order_T = torch.argsort(targets_T, stable=True)
    counts_S = torch.bincount(targets_T, minlength=sums)
    return Segments(order_T if rows_T is None else rows_T[order_T], ends_of(counts_S))


def ends_of(counts_S: Tensor) -> Tensor:
    """(S + 1,) where each of so many starts, and where the last one ends."""
    ends_S1 = counts_S.new_zeros(len(counts_S) + 1)
    torch.cumsum(counts_S, 0, out=ends_S1[1:])
    return ends_S1


# Rows and gradients between ranks: float32, or rounded to bfloat16, which is half the bytes. What a
# rank hands to itself is rounded too: what a model sees does not depend on who owns a row.


COMM_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The types in which rows may travel, by the name of the setting."""


def to_wire(rows: Tensor, comm_dtype: torch.dtype) -> Tensor:
    """The rows as they travel."""
    if rows.dtype == comm_dtype:
        return rows
    return host_memory.empty(rows.shape, comm_dtype, rows.device).copy_(rows)


def from_wire(rows: Tensor, comm_dtype: torch.dtype) -> Tensor:
    """What arrives of the rows, as float32; rows that did not travel are rounded like the others.

    The rows given stay as they are.
    """
    if comm_dtype == torch.float32:
        return rows
    there = to_wire(rows, comm_dtype)
    return host_memory.empty(rows.shape, torch.float32, rows.device).copy_(there)


def round_in_place(rows: Tensor, comm_dtype: torch.dtype) -> None:
    """The same where the rows are."""
    if rows.dtype != comm_dtype:
        rows.copy_(to_wire(rows, comm_dtype))
