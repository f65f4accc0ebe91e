"""Parquet files: one, or a folder of them, with the columns a config names or the schema suggests.

Row groups come in an order that the seed decides. Only the columns that are used are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.batch import Batch
from nestpipe.data.config import DataConfig, ParquetConfig, Split
from nestpipe.data.readers import inputs
from nestpipe.data.readers.inputs import find_files, keeps, num_kept, split_path
from nestpipe.data.readers.sequences import (
    SequenceLayout,
    broken_rows,
    check_types,
    find_layout,
)
from nestpipe.data.readers.sequences import to_batch as sequence_batch
from nestpipe.data.readers.text import Broken
from nestpipe.data.source import (
    DENSE,
    LABEL,
    Chunk,
    Column,
    Stream,
    features_column,
    keys_column,
    label_column,
    tensor,
)
from nestpipe.errors import DataError
from nestpipe.jagged import Jagged

PIECE = 65_536
PATTERNS = ("*.parquet", "*.pq")


def open_parquet(config: DataConfig, split: Split) -> Stream:
    """The rows of a Parquet file or folder."""
    path, every, layout, files = find_split(config, split)
    chunks = [
        chunk
        for number, file in enumerate(files)
        for chunk in _chunks(file, layout, split, every, number)
    ]
    return Stream(
        layout.columns,
        chunks,
        window=config.shuffle_window,
        shuffle=config.shuffle and split == "train",
        broken=Broken(config.max_broken),
        name=f"the {split} split of {path}",
    )


def find_split(
    config: DataConfig, split: Split
) -> tuple[str, int, ColumnLayout | SequenceLayout, list[Path]]:
    """The path of a split, which rows of its files are wanted, what is in them, and the files."""
    files = find_files(config.path, PATTERNS, "Parquet files")
    schema = open_file(files[0]).schema_arrow
    layout = find_layout(schema, config, split)
    if layout is not None and not _has_own_rows(config):
        check(schema, layout, files[0])
        return config.path, 0, layout, files
    path, every = split_path(config, split)
    files = find_files(path, PATTERNS, "Parquet files")
    schema = open_file(files[0]).schema_arrow
    layout = find_layout(schema, config, split) or choose(schema, config.parquet, files[0])
    check(schema, layout, files[0])
    return path, every, layout, files


def _has_own_rows(config: DataConfig) -> bool:
    return bool(config.test_every or config.test_path or config.validation_path)


def open_file(path: Path) -> pq.ParquetFile:
    """A Parquet file, or a sentence that says what is wrong with it.

    Pages that carry a checksum are compared with it when they are read.
    """
    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> DataError:
    """The sentence for a file that Arrow cannot read."""
    reason = error.strerror if isinstance(error, OSError) else None
    if reason:
        return DataError(f"cannot read {path}: {reason}; check the file")
    return DataError(f"{path} is truncated or no Parquet file; write it again")


def row_group(path: Path, group: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Pieces of one row group with these columns; a damaged file is refused by name."""
    file = open_file(path)
    pieces = file.iter_batches(
        batch_size=PIECE, row_groups=[group], columns=list(columns), use_threads=False
    )
    while True:
        try:
            piece = next(pieces, None)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(path, error) from None
        if piece is None:
            return
        yield piece


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Which column of the file is what."""

    sparse: tuple[str, ...]
    single: frozenset[str]
    """Those of `sparse` with one key per row."""
    dense: tuple[str, ...]
    labels: tuple[str, ...]

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


def choose(schema: pa.Schema, config: ParquetConfig, where: Path) -> ColumnLayout:
    """The columns that the config names; without any, what the types of the schema suggest."""
    labels = tuple(config.labels) if config.labels else (LABEL,) if LABEL in schema.names else ()
    taken = set(labels) | set(config.ignore)
    sparse, dense = tuple(config.sparse), tuple(config.dense)
    if not sparse and not dense:
        left = [field for field in schema if field.name not in taken]
        sparse = tuple(field.name for field in left if inputs.is_keys(field.type))
        dense = tuple(field.name for field in left if pa.types.is_floating(field.type))
    layout = ColumnLayout(sparse, frozenset(_single(schema, sparse)), dense, labels)
    if not layout.names:
        raise DataError(f"{where} has no column of keys or numbers; name some in data.parquet")
    return layout


def check(schema: pa.Schema, layout: ColumnLayout | SequenceLayout, where: Path) -> None:
    """Refuse a file that lacks a column, or has it in a type that does not fit."""
    for name in layout.names:
        if name not in schema.names:
            shown = ", ".join(schema.names[:8])
            raise DataError(f"{where} has no column {name}, it has {shown}; check data.parquet")
    if isinstance(layout, SequenceLayout):
        check_types(schema, layout, where)
        return
    for name in layout.sparse:
        kind = schema.field(name).type
        fits = inputs.is_key(kind) if name in layout.single else inputs.is_list(kind)
        inputs.need(kind, fits and inputs.is_keys(kind), name, "keys", where)
    for name in layout.dense + layout.labels:
        kind = schema.field(name).type
        inputs.need(kind, inputs.is_number(kind), name, "a number per row", where)


def _single(schema: pa.Schema, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        if name in schema.names and not inputs.is_list(schema.field(name).type):
            yield name


def _chunks(
    path: Path, layout: ColumnLayout | SequenceLayout, split: Split, every: int, number: int
) -> Iterator[Chunk]:
    file = open_file(path)
    check(file.schema_arrow, layout, path)
    begin = 0
    for group in range(file.metadata.num_row_groups):
        size = file.metadata.row_group(group).num_rows

        def read(broken: Broken, group: int = group, begin: int = begin) -> Iterator[Batch]:
            row = begin
            for piece in row_group(path, group, layout.names):
                numbers = np.arange(row, row + piece.num_rows)
                row += piece.num_rows
                kept = keeps(numbers, split, every)
                if not kept.all():
                    piece, numbers = piece.filter(pa.array(kept)), numbers[kept]
                if isinstance(layout, SequenceLayout):
                    yield _sequences(piece, layout, numbers, number, path, broken)
                else:
                    yield to_batch(piece, layout, numbers, path, broken)

        kept_rows = num_kept(begin, begin + size, split, every)
        # Sequences that are too short are no samples: only reading tells how many there are.
        known = None if isinstance(layout, SequenceLayout) else kept_rows
        yield Chunk(read, lambda known=known: known)
        begin += size


def _sequences(
    piece: Any,
    layout: SequenceLayout,
    rows: np.ndarray,
    file: int,
    path: Path,
    broken: Broken,
) -> Batch:
    """Rows as users' sequences, without those that are broken or too short."""
    good = without(broken_rows(piece, layout), rows, path, broken)
    if not good.all():
        piece, rows = piece.filter(pa.array(good)), rows[good]
    return sequence_batch(piece, layout, (file << FILE_BITS) + rows)[0]


FILE_BITS = 40
"""A sequence's id is its file's number, shifted by so many bits, and its row in the file."""


def to_batch(
    piece: Any, layout: ColumnLayout, rows: np.ndarray, path: Path, broken: Broken
) -> Batch:
    """Arrow columns as a batch, without the rows that are broken."""
    good = _good(piece, layout, rows, path, broken)
    if not good.all():
        piece = piece.filter(pa.array(good))
    dense = {layout.label_name(name): tensor(inputs.numbers(piece[name])) for name in layout.labels}
    if layout.dense:
        stacked = np.stack([inputs.numbers(piece[name]) for name in layout.dense], axis=1)
        dense[DENSE] = tensor(np.nan_to_num(stacked, copy=False, nan=0.0))
    sparse = {
        name: Jagged.one_each(tensor(inputs.keys(piece[name])))
        if name in layout.single
        else inputs.lists(piece[name])
        for name in layout.sparse
    }
    return Batch(piece.num_rows, dense, sparse)


def _good(
    piece: Any, layout: ColumnLayout, rows: np.ndarray, path: Path, broken: Broken
) -> np.ndarray:
    """Which rows can be used; the others are told with their number in the file, from 1."""
    found: list[tuple[np.ndarray, str]] = []
    for name in layout.labels:
        found.append((~np.isfinite(inputs.numbers(piece[name])), f"{name} is no number"))
    for name in layout.dense:
        bad = ~np.isfinite(inputs.numbers(piece[name])) & ~inputs.is_null(piece[name])
        found.append((bad, f"{name} is not finite"))
    for name in layout.sparse:
        if name not in layout.single:
            found.append((inputs.holes(inputs.flat(piece[name])), f"{name} has an empty entry"))
    return without(found, rows, path, broken)


def without(
    found: Sequence[tuple[np.ndarray, str]], rows: np.ndarray, path: Path, broken: Broken
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
