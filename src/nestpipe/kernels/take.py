"""Samples picked from several pieces of a data set, all columns in one native call.

The plain twin joins the pieces and selects from them; `data/sharded.py` has it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.kernels.library import library

# Shapes: B samples, S spans, P pieces, L columns of lists, R columns of rows

I64 = NDArray[np.int64]
SLACK = 4
"""Values that the native code may write behind the last list."""


class _PiecesStruct(ctypes.Structure):
    """`Pieces` of `native/data/take.h`."""

    _fields_ = (
        *((name, c_int64) for name in ("num_pieces", "num_lists", "num_rows")),
        *((name, c_void_p) for name in ("offsets", "values", "rows", "row_bytes")),
    )


class _TakenStruct(ctypes.Structure):
    """`Taken` of `native/data/take.h`."""

    _fields_ = tuple((name, c_void_p) for name in ("values", "lengths", "offsets", "rows"))


@dataclass(frozen=True, slots=True)
class PieceColumns:
    """The columns of one piece and where they are in memory."""

    offsets: tuple[I64 | None, ...]
    """Where a sample's values begin, and the end; None for columns of one value per sample."""
    values: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    pointers: tuple[I64, I64, I64]

    @classmethod
    def of(
        cls, lists: Sequence[tuple[Tensor, Tensor | None]], rows: Sequence[Tensor]
    ) -> PieceColumns:
        """From values and offsets (None: one each) of lists, and from columns of rows."""
        offsets = tuple(None if at is None else at.contiguous().numpy() for _, at in lists)
        values = tuple(values.contiguous() for values, _ in lists)
        kept = tuple(column.contiguous() for column in rows)
        assert all(value.dtype == torch.int64 for value in values), "lists are of 64-bit numbers"
        pointers = (
            np.array([0 if one is None else one.ctypes.data for one in offsets], dtype=np.int64),
            np.array([value.data_ptr() for value in values], dtype=np.int64),
            np.array([column.data_ptr() for column in kept], dtype=np.int64),
        )
        return cls(offsets, values, kept, pointers)

    def num_values(self, first: int, end: int) -> list[int]:
        """Values of samples [first, end), of each column of lists."""
        return [end - first if at is None else int(at[end]) - int(at[first]) for at in self.offsets]


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Samples [first, end) of a piece, by its number."""

    piece: int
    first: int
    end: int


Columns = tuple[list[tuple[Tensor, Tensor, Tensor | None]], list[Tensor]]
"""Values, lengths and, where known, offsets of each column of lists; each column of rows."""


def take(
    pieces: Sequence[PieceColumns], spans: Sequence[RowSpan], order_B: I64 | None = None
) -> Columns:
    """The samples of these spans behind each other, then in this order."""
    size = sum(span.end - span.first for span in spans)
    given, held = _tables(pieces)
    totals_L = np.zeros(len(pieces[0].values), dtype=np.int64)
    for span in spans:
        totals_L += np.array(pieces[span.piece].num_values(span.first, span.end), dtype=np.int64)
    values = torch.empty(int(totals_L.sum()) + SLACK, dtype=torch.int64)
    values = values[:-SLACK].split(totals_L.tolist()) if len(totals_L) else ()
    lengths = torch.empty((len(totals_L), size), dtype=torch.int64).unbind()
    ends = torch.empty((len(totals_L), 0 if order_B is None else size + 1), dtype=torch.int64)
    rows = [torch.empty((size, *one.shape[1:]), dtype=one.dtype) for one in pieces[0].rows]
    made = [_pointers(column) for column in (values, lengths, ends, rows)]
    taken = _TakenStruct(*(one.ctypes.data for one in made))
    places = (ctypes.addressof(given), ctypes.addressof(taken))
    spans_S = np.array([(s.piece, s.first, s.end) for s in spans], dtype=np.int64).T.copy()
    if order_B is None:
        tables = (row.ctypes.data for row in spans_S)
        library().nestpipe_take_spans(places[0], len(spans), *tables, places[1])
    else:
        piece_B, row_B = rows_of(spans)
        piece_B, row_B = piece_B[order_B], row_B[order_B]
        limits = np.array([len(one) for one in held], dtype=np.int64)
        library().nestpipe_take_samples(
            places[0], size, piece_B.ctypes.data, row_B.ctypes.data, limits.ctypes.data, places[1]
        )
    known = [None] * len(ends) if order_B is None else list(ends)
    return list(zip(values, lengths, known, strict=True)), rows


def rows_of(spans: Sequence[RowSpan]) -> tuple[I64, I64]:
    """Piece and row of each sample."""
    pieces = [np.full(span.end - span.first, span.piece, dtype=np.int64) for span in spans]
    rows = [np.arange(span.first, span.end, dtype=np.int64) for span in spans]
    return np.concatenate(pieces), np.concatenate(rows)


class _Tables(_PiecesStruct):
    """The struct with the arrays that it points to."""

    held: tuple[I64, ...]


def _tables(pieces: Sequence[PieceColumns]) -> tuple[_Tables, list[Tensor]]:
    """Pointers of all columns and pieces, and the values of each, column by column."""
    stacked = [
        np.stack([piece.pointers[kind] for piece in pieces], axis=1).copy() for kind in range(3)
    ]
    widths = [one[:1].numel() * one.element_size() if len(one) else 0 for one in pieces[0].rows]
    row_bytes = np.array(widths, dtype=np.int64)
    given = _Tables(
        len(pieces),
        len(pieces[0].values),
        len(pieces[0].rows),
        *(table.ctypes.data for table in stacked),
        row_bytes.ctypes.data,
    )
    given.held = (*stacked, row_bytes)
    columns = range(len(pieces[0].values))
    return given, [piece.values[column] for column in columns for piece in pieces]


def _pointers(tensors: Iterable[Tensor]) -> I64:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
