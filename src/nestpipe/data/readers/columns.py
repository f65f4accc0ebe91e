"""Rows of Arrow columns as samples of keys, numbers and labels: which column is what, which rows
are broken, and the samples as a batch or column by column.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from nestpipe.batch import Batch
from nestpipe.data.config import ParquetConfig
from nestpipe.data.readers import inputs
from nestpipe.data.readers.remote import DataFile
from nestpipe.data.readers.text import Broken
from nestpipe.data.source import (
    DENSE,
    LABEL,
    MISSING,
    Column,
    features_column,
    keys_column,
    label_column,
    tensor,
)
from nestpipe.data.windows import Fill, PieceForm
from nestpipe.errors import DataError
from nestpipe.jagged import Jagged
from nestpipe.kernels.take import Filling, PieceColumns, RowForm

log = logging.getLogger("nestpipe.data")


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Which column of the file is what."""

    sparse: tuple[str, ...]
    single: frozenset[str]
    """Those of `sparse` with one key per row."""
    dense: tuple[str, ...]
    labels: tuple[str, ...]
    any_labels: bool = False
    """Whether labels may be outside 0 to 1."""
    positive_from: float = 0.0
    """From where on a label is 1, and below 0; 0: labels are as they are."""

    def label(self, column: Any) -> NDArray[np.float32]:
        """A label per row; nan where there is none."""
        found = inputs.numbers(column)
        if not self.positive_from:
            return found
        return np.where(np.isnan(found), found, found >= self.positive_from).astype(np.float32)

    @property
    def names(self) -> tuple[str, ...]:
        return self.sparse + self.dense + self.labels

    @property
    def columns(self) -> tuple[Column, ...]:
        keys = [keys_column(name, name in self.single) for name in self.sparse]
        dense = [features_column(self.dense)] if self.dense else []
        return (*keys, *dense, *(label_column(self.label_name(name)) for name in self.labels))

    def label_name(self, name: str) -> str:
        """One label is called `label`; several keep their names."""
        return LABEL if len(self.labels) == 1 else name


def choose(schema: pa.Schema, config: ParquetConfig, where: DataFile) -> ColumnLayout:
    """The columns that the config names; without any, what the types of the schema suggest."""
    labels = tuple(config.labels) if config.labels else (LABEL,) if LABEL in schema.names else ()
    taken = set(labels) | set(config.ignore)
    sparse, dense = tuple(config.sparse), tuple(config.dense)
    if not sparse and not dense:
        left = [field for field in schema if field.name not in taken]
        sparse = tuple(field.name for field in left if inputs.is_keys(field.type))
        dense = tuple(field.name for field in left if pa.types.is_floating(field.type))
        _refuse_second_label(left, labels, where)
    layout = ColumnLayout(
        sparse,
        frozenset(_single(schema, sparse)),
        dense,
        labels,
        config.any_labels,
        config.positive_from,
    )
    if not layout.names:
        raise DataError(f"{where} has no column of keys or numbers; name some in data.parquet")
    return layout


def _refuse_second_label(
    left: Sequence[pa.Field], labels: tuple[str, ...], where: DataFile
) -> None:
    """A column that is called a label would be taken for a feature, and give the answer away."""
    for field in left:
        if labels and field.name.lower().startswith(LABEL) and inputs.is_number(field.type):
            raise DataError(
                f"{where} has {field.name} beside the label {labels[0]}; name all labels in "
                "data.parquet.labels, or leave it out with data.parquet.ignore"
            )


def _single(schema: pa.Schema, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if name in schema.names and not inputs.is_list(schema.field(name).type):
            yield name


def to_batch(
    piece: Any, layout: ColumnLayout, rows: np.ndarray, path: DataFile, broken: Broken
) -> Batch:
    """Arrow columns as a batch, without the rows that are broken."""
    good = _good(piece, layout, rows, path, broken)
    if not good.all():
        piece = piece.filter(pa.array(good))
    dense = {layout.label_name(name): tensor(layout.label(piece[name])) for name in layout.labels}
    if layout.dense:
        stacked = np.empty((piece.num_rows, len(layout.dense)), dtype=np.float32)
        for column, name in enumerate(layout.dense):
            stacked[:, column] = inputs.numbers(piece[name])
        empty = any(inputs.flat(piece[name]).null_count for name in layout.dense)
        dense[DENSE] = tensor(np.nan_to_num(stacked, copy=False, nan=0.0) if empty else stacked)
    sparse = {
        name: Jagged.one_each(tensor(_single_keys(piece[name], name, path)))
        if name in layout.single
        else inputs.lists(piece[name])
        for name in layout.sparse
    }
    return Batch(piece.num_rows, dense, sparse)


def _single_keys(column: Any, name: str, path: DataFile) -> NDArray[np.int64]:
    """A key per row; says once where a row has the key that stands for none."""
    keys = inputs.keys(column)
    if name not in _told and (keys == MISSING).sum() > column.null_count:
        _told.add(name)
        log.warning(
            "column %s of %s has the key %d, which stands for a missing one; both share a row, "
            "so use another key if that is not meant",
            name,
            path,
            MISSING,
        )
    return keys


_told: set[str] = set()
"""Columns that a user has been warned of."""


def _good(
    piece: Any, layout: ColumnLayout, rows: np.ndarray, path: DataFile, broken: Broken
) -> np.ndarray:
    """Which rows can be used; the others are told with their number in the file, from 1."""
    found: list[tuple[np.ndarray, str]] = []
    for name in layout.labels:
        found += _bad_labels(layout.label(piece[name]), name, layout)
    for name in layout.dense:
        good = np.isfinite(inputs.numbers(piece[name]))
        if not good.all():
            bad = ~good & ~inputs.is_null(piece[name])
            found.append((bad, f"{name} is not finite"))
    for name in layout.sparse:
        array = inputs.flat(piece[name])
        if name not in layout.single and inputs.values_of(array).null_count:
            found.append((inputs.holes(array), f"{name} has an empty entry"))
    return without(found, rows, path, broken)


def _bad_labels(label: np.ndarray, name: str, layout: ColumnLayout) -> list[tuple[np.ndarray, str]]:
    found = [(~np.isfinite(label), f"{name} is no number")]
    if not layout.any_labels and (outside := (label < 0) | (label > 1)).any():
        found.append((outside, LABEL_RANGE.format(name, f"{label[outside][0]:g}")))
    return found


LABEL_RANGE = (
    "{} is {}, not from 0 to 1, so make it 0 or 1 with data.parquet.positive_from, or set "
    "data.parquet.any_labels"
)


def without(
    found: Sequence[tuple[np.ndarray, str]], rows: np.ndarray, path: DataFile, broken: Broken
) -> np.ndarray:
    """Which rows are good, given those that are bad and why; tells each with its first reason."""
    good = np.ones(len(rows), dtype=bool)
    reasons: dict[int, str] = {}
    for bad, why in found:
        for row in np.flatnonzero(bad & good).tolist():
            reasons[row] = why
        good[bad] = False
    for row in sorted(reasons):
        broken.add(f"row {rows[row] + 1} of {path}", reasons[row])
    return good


# The same rows, decoded column by column.


@dataclass(frozen=True, slots=True)
class ColumnRows:
    """Rows none of which may be broken: a column is decoded when it is asked for."""

    size: int
    layout: ColumnLayout
    path: DataFile
    decode: Callable[[str], Any]
    """One column of these rows."""
    refuse: Callable[[], NoReturn]
    """Says which row is broken."""

    @property
    def form(self) -> PieceForm:
        names = [self.layout.label_name(name) for name in self.layout.labels]
        dense = [(name, RowForm((), torch.float32)) for name in names]
        if self.layout.dense:
            dense.append((DENSE, RowForm((len(self.layout.dense),), torch.float32)))
        return PieceForm(tuple(dense), self.layout.sparse)

    def kept(self, first: int, end: int) -> PieceColumns | None:
        """Nothing is there longer than until the next column."""

    def columns(self) -> Iterator[Fill]:
        for number, name in enumerate(self.layout.labels):
            yield partial(Filling.add_rows, column=number, values=self._labels(name))
        number = len(self.layout.labels)
        for place, name in enumerate(self.layout.dense):
            values = self._numbers(name)
            at = place * values.itemsize
            yield partial(Filling.add_rows, column=number, values=values, at=at)
        for number, name in enumerate(self.layout.sparse):
            if name in self.layout.single:
                keys = _single_keys(self.decode(name), name, self.path)
                yield partial(Filling.add_single, column=number, values=keys)
            else:
                keys, offsets = self._lists(name)
                yield partial(Filling.add_lists, column=number, offsets=offsets, values=keys)

    def _labels(self, name: str) -> NDArray[np.float32]:
        label = self.layout.label(self.decode(name))
        if any(bad.any() for bad, _ in _bad_labels(label, name, self.layout)):
            self.refuse()
        return label

    def _numbers(self, name: str) -> NDArray[np.float32]:
        column = inputs.flat(self.decode(name))
        values = inputs.numbers(column)
        good = np.isfinite(values)
        if good.all():
            return values
        if (~good & ~inputs.is_null(column)).any():
            self.refuse()
        return np.nan_to_num(values, nan=0.0)

    def _lists(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        column = inputs.flat(self.decode(name))
        if inputs.values_of(column).null_count:
            self.refuse()
        return inputs.list_arrays(column)
