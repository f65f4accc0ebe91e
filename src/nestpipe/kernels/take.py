"""Samples picked from several pieces of a data set, all columns in one native call.

The plain twin joins the pieces and selects from them; `data/sharded.py` has it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.kernels.library import library

# Shapes: B samples, S spans, L columns of lists

I64 = NDArray[np.int64]
SLACK = 4
"""Values that the native code may write behind the last list."""


class _PiecesStruct(ctypes.Structure):
    """`Pieces` of `native/data/take.h`."""

    _fields_ = (
        *((name, c_int64) for name in ("num_pieces", "num_lists", "num_rows")),
        *((name, c_void_p) for name in ("offsets", "values", "rows", "row_bytes")),
    )


class _SpansStruct(ctypes.Structure):
    """`Spans` of `native/data/take.h`."""

    _fields_ = (("num_spans", c_int64), *((name, c_void_p) for name in ("piece", "first", "end")))


class _TakenStruct(ctypes.Structure):
    """`Taken` of `native/data/take.h`."""

    _fields_ = tuple((name, c_void_p) for name in ("values", "ends", "rows"))


@dataclass(frozen=True, slots=True)
class PieceColumns:
    """The columns of one piece and where they are in memory."""

    offsets: tuple[Tensor | None, ...]
    """Where a sample's values begin, and the end; None for columns of one value per sample."""
    values: tuple[Tensor, ...]
    rows: tuple[Tensor, ...]
    pointers: tuple[I64, I64, I64]

    @classmethod
    def of(
        cls, lists: Sequence[tuple[Tensor, Tensor | None]], rows: Sequence[Tensor]
    ) -> PieceColumns:
        """From values and offsets (None: one each) of lists, and from columns of rows."""
        offsets = tuple(None if at is None else at.contiguous() for _, at in lists)
        values = tuple(values.contiguous() for values, _ in lists)
        kept = tuple(column.contiguous() for column in rows)
        assert all(value.dtype == torch.int64 for value in values), "lists are of 64-bit numbers"
        return cls(offsets, values, kept, (_pointers(offsets), _pointers(values), _pointers(kept)))


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Samples [first, end) of a piece, by its number."""

    piece: int
    first: int
    end: int


Columns = tuple[list[tuple[Tensor, Tensor]], list[Tensor]]
"""Values and lengths of each column of lists; each column of rows."""


def take(pieces: Sequence[PieceColumns], spans: Sequence[RowSpan]) -> Columns:
    """The samples of these spans behind each other."""
    given = _Given(pieces, spans)
    sizes = given.sizes()
    values = torch.empty(sum(sizes), dtype=torch.int64).split(sizes)
    lengths = torch.empty((len(sizes), given.num_samples), dtype=torch.int64).unbind()
    rows = [torch.empty(shape, dtype=dtype) for shape, dtype in given.row_shapes()]
    tables = [_pointers(column) for column in (values, lengths, rows)]
    taken = _TakenStruct(*map(_address, tables))
    library().nestpipe_take_spans(*given.addresses, ctypes.addressof(taken))
    return list(zip(values, lengths, strict=True)), rows


def take_permuted(
    pieces: Sequence[PieceColumns], spans: Sequence[RowSpan], order_B: I64
) -> PieceColumns:
    """The samples of these spans behind each other and then in this order, as one piece."""
    given = _Given(pieces, spans)
    sizes = given.sizes()
    values = torch.empty(sum(sizes) + SLACK, dtype=torch.int64).split([*sizes, SLACK])[:-1]
    room = torch.empty((len(sizes), given.num_samples + 1), dtype=torch.int64).unbind()
    of_piece = zip(pieces[0].offsets, room, strict=True)
    ends = tuple(None if at is None else made for at, made in of_piece)
    rows = tuple(torch.empty(shape, dtype=dtype) for shape, dtype in given.row_shapes())
    tables = [_pointers(column) for column in (values, ends, rows)]
    taken = _TakenStruct(*map(_address, tables))
    piece_B, row_B = (column[order_B] for column in rows_of(spans))
    limits = [len(piece.values[column]) for column in range(len(values)) for piece in pieces]
    of_samples = (piece_B, row_B, np.array(limits, dtype=np.int64))
    library().nestpipe_take_samples(
        *given.addresses,
        given.num_samples,
        *map(_address, of_samples),
        ctypes.addressof(taken),
    )
    pointers = (tables[1], tables[0], tables[2])
    return PieceColumns(ends, values, rows, pointers)


def rows_of(spans: Sequence[RowSpan]) -> tuple[I64, I64]:
    """Piece and row of each sample."""
    pieces = [np.full(span.end - span.first, span.piece, dtype=np.int64) for span in spans]
    rows = [np.arange(span.first, span.end, dtype=np.int64) for span in spans]
    return np.concatenate(pieces), np.concatenate(rows)


class _Given:
    """What samples are picked from, as the native code sees it."""

    def __init__(self, pieces: Sequence[PieceColumns], spans: Sequence[RowSpan]) -> None:
        self._like = pieces[0]
        self.num_samples = sum(span.end - span.first for span in spans)
        self._tables = [
            np.stack([piece.pointers[kind] for piece in pieces], axis=1) for kind in range(3)
        ]
        widths = [
            one[:1].numel() * one.element_size() if len(one) else 0 for one in self._like.rows
        ]
        self._tables.append(np.array(widths, dtype=np.int64))
        self._pieces = _PiecesStruct(
            len(pieces), len(self._like.values), len(self._like.rows), *map(_address, self._tables)
        )
        self._spans_S = [
            np.array([getattr(span, name) for span in spans], dtype=np.int64)
            for name in ("piece", "first", "end")
        ]
        self._spans = _SpansStruct(len(spans), *map(_address, self._spans_S))

    @property
    def addresses(self) -> tuple[int, int]:
        """Of pieces and spans, for as long as this lives."""
        return ctypes.addressof(self._pieces), ctypes.addressof(self._spans)

    def sizes(self) -> list[int]:
        """How many values each column of lists has."""
        sizes_L = np.empty(len(self._like.values), dtype=np.int64)
        library().nestpipe_take_sizes(*self.addresses, sizes_L.ctypes.data)
        return sizes_L.tolist()

    def row_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        return [((self.num_samples, *one.shape[1:]), one.dtype) for one in self._like.rows]


def _address(array: I64) -> int:
    return array.ctypes.data


def _pointers(tensors: Sequence[Tensor | None]) -> I64:
    return np.array([0 if one is None else one.data_ptr() for one in tensors], dtype=np.int64)
