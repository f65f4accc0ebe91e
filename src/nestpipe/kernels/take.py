"""Samples picked from pieces of a data set by native code: neighbours of all columns in one call,
or any of them in any order, column by column while each is still in the cache.

The plain twin joins the pieces and selects from them; `data/shards.py` has it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.kernels.host_memory import empty
from nestpipe.kernels.library import library

# Shapes: B samples, S spans, L columns of lists, R columns of rows, T targets

I64 = NDArray[np.int64]
SLACK = 4
"""Values that the native code may write behind the last list."""
SOURCE_WORDS = 5
"""Fields of `Source` in `native/data/take.h`: offsets, values, their number, samples, stride."""
WORD = 8
"""Bytes of a key, an offset and an address."""
SLAB = 7 << 20
"""Bytes that windows take at a time: all of one size, so that they are used again."""
_CPU = torch.device("cpu")


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

    _fields_ = tuple((name, c_void_p) for name in ("values", "lengths", "rows"))


@dataclass(frozen=True, slots=True)
class RowForm:
    """What a column of rows has for each sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_values * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PieceColumns:
    """Where the columns of one piece are in memory."""

    size: int
    offsets_L: I64
    """Addresses of where each sample's values begin, and the end; 0: one value per sample."""
    values_L: I64
    """Addresses of the values of lists ..."""
    num_values_L: I64
    """... and how many there are."""
    rows_R: I64
    """Addresses of columns of rows."""
    forms: tuple[RowForm, ...]
    """Of columns of rows."""
    owners: tuple[object, ...] = field(repr=False)
    """What keeps the memory."""

    @classmethod
    def of(
        cls, size: int, lists: Sequence[tuple[Tensor, Tensor | None]], rows: Sequence[Tensor]
    ) -> PieceColumns:
        """From values and offsets (None: one each) of lists, and from columns of rows."""
        offsets = tuple(None if at is None else at.contiguous() for _, at in lists)
        values = tuple(values.contiguous() for values, _ in lists)
        kept = tuple(column.contiguous() for column in rows)
        assert all(value.dtype == torch.int64 for value in values), "lists are of 64-bit numbers"
        return cls(
            size,
            _pointers(offsets),
            _pointers(values),
            np.array([len(one) for one in values], dtype=np.int64),
            _pointers(kept),
            tuple(RowForm(tuple(column.shape[1:]), column.dtype) for column in kept),
            (offsets, values, kept),
        )


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Samples [first, end) of a piece, by its number."""

    piece: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class TakenColumns:
    """Samples with all columns of a type behind each other: rows, then keys, then lengths."""

    size: int
    parts: dict[torch.dtype, Tensor]
    num_keys_L: list[int]
    """Of each column of lists."""


def take(
    pieces: Sequence[PieceColumns], spans: Sequence[RowSpan], *, pinned: bool = False
) -> TakenColumns:
    """The samples of these spans behind each other; `pinned`: in memory that a GPU copies from."""
    given = _Given(pieces, spans)
    like, size, num_keys_L = pieces[0], given.num_samples, given.sizes()
    counts: dict[torch.dtype, list[int]] = {}
    for form in like.forms:
        counts.setdefault(form.dtype, []).append(form.num_values * size)
    if num_keys_L:
        counts.setdefault(torch.int64, []).extend([*num_keys_L, *[size] * len(num_keys_L)])
    parts = {
        dtype: empty((sum(sizes),), dtype, _CPU, pinned=pinned) for dtype, sizes in counts.items()
    }
    places = {dtype: _places(parts[dtype], sizes) for dtype, sizes in counts.items()}
    rows = np.array([next(places[form.dtype]) for form in like.forms], dtype=np.int64)
    lists = np.array(list(places.get(torch.int64, ())), dtype=np.int64).reshape(2, -1)
    taken = _TakenStruct(*map(_address, (*lists, rows)))
    library().nestpipe_take_spans(*given.addresses, ctypes.addressof(taken))
    return TakenColumns(size, parts, num_keys_L)


def _places(part: Tensor, sizes: Sequence[int]) -> Any:
    """The address of each column of a type."""
    begins = np.cumsum([0, *sizes[:-1]]) * part.element_size() + part.data_ptr()
    return iter(begins.tolist())


def permutation(size: int, salts: NDArray[np.uint64]) -> I64:
    """`Permutation.whole` of `data/order.py`, with a salt for each round."""
    found = np.empty(size, dtype=np.int64)
    library().nestpipe_permutation(size, len(salts), salts.ctypes.data, found.ctypes.data)
    return found


def rows_of(spans: Sequence[RowSpan]) -> tuple[I64, I64]:
    """Piece and row of each sample."""
    pieces = [np.full(span.end - span.first, span.piece, dtype=np.int64) for span in spans]
    rows = [np.arange(span.first, span.end, dtype=np.int64) for span in spans]
    return np.concatenate(pieces), np.concatenate(rows)


class _Given:
    """What samples are taken from, as the native code sees it."""

    def __init__(self, pieces: Sequence[PieceColumns], spans: Sequence[RowSpan]) -> None:
        self._like = pieces[0]
        self.num_samples = sum(span.end - span.first for span in spans)
        self._tables = [
            np.stack(column, axis=1)
            for column in (
                [piece.offsets_L for piece in pieces],
                [piece.values_L for piece in pieces],
                [piece.rows_R for piece in pieces],
            )
        ]
        self._tables.append(np.array([form.num_bytes for form in self._like.forms], np.int64))
        self._pieces = _PiecesStruct(
            len(pieces),
            len(self._like.values_L),
            len(self._like.rows_R),
            *map(_address, self._tables),
        )
        self._spans_3S = np.array([(s.piece, s.first, s.end) for s in spans], np.int64).T.copy()
        self._spans = _SpansStruct(len(spans), *map(_address, self._spans_3S))

    @property
    def addresses(self) -> tuple[int, int]:
        """Of pieces and spans, for as long as this lives."""
        return ctypes.addressof(self._pieces), ctypes.addressof(self._spans)

    def sizes(self) -> list[int]:
        """How many values each column of lists has."""
        sizes_L = np.empty(len(self._like.values_L), dtype=np.int64)
        library().nestpipe_take_sizes(*self.addresses, sizes_L.ctypes.data)
        return sizes_L.tolist()


# Windows, filled column by column.


@dataclass(frozen=True, slots=True)
class Target:
    """The samples of one window: those kept from pieces before, and [first, end) of this one."""

    first: int
    end: int
    kept: tuple[PieceColumns, ...] = ()
    """All of their samples."""
    order_B: I64 | None = None
    """How samples are picked from kept ones and new ones behind each other; None: as they are."""

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.kept) + self.end - self.first


class _Picking:
    """A target as the native code sees it: its sources, and which sample comes from where."""

    def __init__(self, target: Target, num_lists: int, num_rows: int) -> None:
        kept = target.kept
        self._first = 0
        """From where on samples of the new piece are taken as they are, or counted."""
        if target.order_B is None:
            assert not kept, "samples that are kept are put in an order"
            self._first, self._samples = target.first, (target.size, 0, 0)
        else:
            spans = [RowSpan(n, 0, piece.size) for n, piece in enumerate(kept)]
            source_B, row_B = rows_of([*spans, RowSpan(len(kept), target.first, target.end)])
            self._owners = (source_B[target.order_B], row_B[target.order_B])
            self._samples = (target.size, *map(_address, self._owners))
        self.num_kept_L = np.zeros(num_lists, np.int64)
        self._lists = np.zeros((num_lists, len(kept) + 1, SOURCE_WORDS), np.int64)
        self._kept_rows = np.zeros((num_rows, len(kept)), np.int64)
        for n, piece in enumerate(kept):
            self.num_kept_L += piece.num_values_L
            of_lists = (piece.offsets_L, piece.values_L, piece.num_values_L)
            self._lists[:, n, :3] = np.stack(of_lists, axis=1)
            self._lists[:, n, 3:] = piece.size, WORD
            self._kept_rows[:, n] = piece.rows_R

    def gather_lists(self, column: int, new: Sequence[int], to: int, ends: int) -> None:
        table = self._lists[column]
        table[-1] = new
        table[-1, 0] += self._first * WORD
        library().nestpipe_gather_lists(len(table), _address(table), *self._samples, to, ends)

    def gather_single(self, column: int, new: Sequence[int], to: int) -> None:
        table = self._lists[column]
        table[-1] = new
        self._gather_rows(table, WORD, WORD, to)

    def gather_rows(self, column: int, at: int, new: Sequence[int], stride: int, to: int) -> None:
        kept = self._kept_rows[column]
        table = np.zeros((len(kept) + 1, SOURCE_WORDS), np.int64)
        table[:-1, 1], table[:, -1] = kept + at, stride
        table[-1] = new
        self._gather_rows(table, new[-1], stride, to)

    def _gather_rows(self, table: I64, bytes_: int, stride: int, to: int) -> None:
        table[-1, 1] += self._first * bytes_
        library().nestpipe_gather_rows(
            len(table), _address(table), bytes_, stride, *self._samples, to
        )


class Filling:
    """Windows of one piece, whose columns come one after the other; each is picked at once."""

    def __init__(self, targets: Sequence[Target], num_lists: int, forms: Sequence[RowForm]) -> None:
        self._forms = tuple(forms)
        self._targets = [_Picking(target, num_lists, len(self._forms)) for target in targets]
        self._size_T = np.array([target.size for target in targets], dtype=np.int64)
        self._first_T = np.array([target.first for target in targets], dtype=np.int64)
        self._end_T = np.array([target.end for target in targets], dtype=np.int64)
        self._owners: list[Tensor] = []
        self._next = self._free = 0
        """The address behind what is used of the last slab, and how many bytes are left of it."""
        shape = (len(targets), num_lists)
        self._offsets_TL, self._values_TL, self._num_values_TL = np.zeros((3, *shape), np.int64)
        places = [self._room(form.num_bytes * self._size_T) for form in forms]
        self._rows_TR = np.array(places, dtype=np.int64).reshape(len(forms), len(targets)).T.copy()
        self._num_kept_TL = np.stack([target.num_kept_L for target in self._targets])

    def add_lists(self, column: int, offsets: I64, values: I64) -> None:
        """A column of lists: where each sample's values begin, and the end, and the values."""
        sizes_T = offsets[self._end_T] - offsets[self._first_T] + self._num_kept_TL[:, column]
        to_T = self._room((sizes_T + SLACK) * WORD)
        ends_T = self._room((self._size_T + 1) * WORD)
        self._values_TL[:, column], self._offsets_TL[:, column] = to_T, ends_T
        self._num_values_TL[:, column] = sizes_T
        new = (_address(offsets), _address(values), len(values), 0, 0)
        places = zip(self._targets, to_T.tolist(), ends_T.tolist(), strict=True)
        for target, to, ends in places:
            target.gather_lists(column, new, to, ends)

    def add_single(self, column: int, values: I64) -> None:
        """A column of lists that have one value each."""
        to_T = self._room(self._size_T * WORD)
        self._values_TL[:, column], self._num_values_TL[:, column] = to_T, self._size_T
        new = (0, _address(values), len(values), 0, WORD)
        for target, to in zip(self._targets, to_T.tolist(), strict=True):
            target.gather_single(column, new, to)

    def add_rows(self, column: int, values: NDArray[Any], at: int = 0) -> None:
        """A column of rows, or those values of it that begin at a byte of each row."""
        values = np.ascontiguousarray(values)
        stride = self._forms[column].num_bytes
        bytes_ = values.dtype.itemsize * math.prod(values.shape[1:])
        new = (0, _address(values), 0, 0, bytes_)
        for target, to in zip(self._targets, self._rows_TR[:, column].tolist(), strict=True):
            target.gather_rows(column, at, new, stride, to + at)

    def add_piece(self, piece: PieceColumns) -> None:
        """All columns of a piece that is in memory already."""
        for column, form in enumerate(piece.forms):
            shape = (piece.size, form.num_bytes)
            self.add_rows(column, _view(int(piece.rows_R[column]), np.uint8, shape))
        for column, at in enumerate(piece.offsets_L.tolist()):
            shape = (int(piece.num_values_L[column]),)
            values = _view(int(piece.values_L[column]), np.int64, shape)
            if at:
                self.add_lists(column, _view(at, np.int64, (piece.size + 1,)), values)
            else:
                self.add_single(column, values)

    def _room(self, bytes_T: I64) -> I64:
        """An address for each target, in memory that is used again."""
        total = -(-int(bytes_T.sum()) // WORD) * WORD
        if total > self._free:
            self._free = max(total, SLAB)
            slab = empty((self._free,), torch.uint8, _CPU)
            self._owners.append(slab)
            self._next = slab.data_ptr()
        begin = self._next
        self._next += total
        self._free -= total
        return begin + np.cumsum(bytes_T) - bytes_T

    def pieces(self) -> list[PieceColumns]:
        """The targets, once all columns have come."""
        owners = tuple(self._owners)
        return [
            PieceColumns(
                int(self._size_T[target]),
                self._offsets_TL[target],
                self._values_TL[target],
                self._num_values_TL[target],
                self._rows_TR[target],
                self._forms,
                owners,
            )
            for target in range(len(self._targets))
        ]


def _view(address: int, dtype: type[np.generic], shape: tuple[int, ...]) -> NDArray[Any]:
    """Memory as an array, which does not keep it."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)


def _address(array: I64) -> int:
    return array.ctypes.data


def _pointers(tensors: Sequence[Tensor | None]) -> I64:
    return np.array([0 if one is None else one.data_ptr() for one in tensors], dtype=np.int64)
