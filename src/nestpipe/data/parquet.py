"""Parquet files: one, or a folder of them, with the columns a config names or the schema suggests.

Row groups come in an order that the seed decides. Only the columns that are used are decoded. Rows
of Arrow columns become samples of keys, numbers and labels: which column is what, which rows are
broken, and the samples as a batch or column by column.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from nestpipe.batch import Batch
from nestpipe.data import inputs
from nestpipe.data.config import DataConfig, ParquetConfig, Split
from nestpipe.data.inputs import (
    DataFile,
    PageReader,
    RemoteFile,
    find_files,
    find_remote_files,
    is_uri,
    keeps,
    modified_ns,
    num_kept,
    split_path,
)
from nestpipe.data.sequences import (
    SequenceLayout,
    broken_rows,
    check_types,
    find_layout,
    with_target,
)
from nestpipe.data.sequences import to_batch as sequence_batch
from nestpipe.data.shards import Fill, PieceForm
from nestpipe.data.source import (
    DENSE,
    LABEL,
    MISSING,
    WEIGHT,
    Chunk,
    Column,
    Stream,
    as_words,
    features_column,
    keys_column,
    label_column,
    tensor,
    weight_column,
    weights_column,
)
from nestpipe.data.text import Broken
from nestpipe.errors import DataError
from nestpipe.jagged import Jagged
from nestpipe.kernels.library import native_wanted
from nestpipe.kernels.take import Filling, PieceColumns, RowForm

log = logging.getLogger("nestpipe.data")

AnyFile = TypeVar("AnyFile", bound=DataFile)


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Which column of the file is what."""

    sparse: tuple[str, ...]
    single: frozenset[str]
    """Those of `sparse` with one key per row."""
    dense: tuple[str, ...]
    labels: tuple[str, ...]
    texts: frozenset[str] = frozenset()
    """Those of `sparse` whose keys are strings."""
    any_labels: bool = False
    """Whether labels may be outside 0 to 1."""
    positive_from: float = 0.0
    """From where on a label is 1, and below 0; 0: labels are as they are."""
    sample_weight: str = ""
    weights: tuple[tuple[str, str], ...] = ()
    """Columns of lists of keys, each with the column of its weights."""

    def label(self, column: Any) -> NDArray[np.float32]:
        """A label per row; nan where there is none."""
        found = inputs.numbers(column)
        if not self.positive_from:
            return found
        return np.where(np.isnan(found), found, found >= self.positive_from).astype(np.float32)

    @property
    def names(self) -> tuple[str, ...]:
        weights = [column for _, column in self.weights]
        more = [*weights, *([self.sample_weight] if self.sample_weight else [])]
        return (*self.sparse, *self.dense, *self.labels, *more)

    @property
    def columns(self) -> tuple[Column, ...]:
        keys = [keys_column(name, name in self.single) for name in self.sparse]
        dense = [features_column(self.dense)] if self.dense else []
        weights = [weights_column(column, of) for of, column in self.weights]
        labels = [label_column(self.label_name(name)) for name in self.labels]
        weight = [weight_column()] if self.sample_weight else []
        return (*keys, *weights, *dense, *labels, *weight)

    def label_name(self, name: str) -> str:
        """One label is called `label`; several keep their names."""
        return LABEL if len(self.labels) == 1 else name


def choose(schema: pa.Schema, config: ParquetConfig, where: DataFile) -> ColumnLayout:
    """The columns that the config names; without any, what the types of the schema suggest."""
    usual = (LABEL,) if LABEL in schema.names and LABEL not in config.ignore else ()
    labels = tuple(config.labels) or usual
    weights = tuple((of, str(column)) for of, column in config.weights.items())
    taken = {*labels, *config.ignore, config.sample_weight, *config.weights.values()}
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
        frozenset(name for name in sparse if _is_text(schema, name)),
        config.any_labels,
        config.positive_from,
        config.sample_weight,
        weights,
    )
    if not layout.sparse and not layout.dense and not layout.labels:
        raise DataError(f"{where} has no column of keys or numbers; name some in data.parquet")
    if given := [name for name in layout.labels if name in {*layout.sparse, *layout.dense}]:
        raise DataError(
            f"{given[0]} of {where} is a label and named as a feature too, which would give the "
            "answer away; name it once in data.parquet"
        )
    _refuse_weights(layout, where)
    return layout


def _refuse_weights(layout: ColumnLayout, where: DataFile) -> None:
    """Weights of what is no list of keys, and a name that both a label and weights would have."""
    for of, column in layout.weights:
        if of not in layout.sparse or of in layout.single:
            raise DataError(
                f"data.parquet.weights gives {column} to {of}, which is no column of lists of keys "
                f"of {where}; name one"
            )
    if layout.sample_weight and len(layout.labels) > 1 and WEIGHT in layout.labels:
        raise DataError(
            f"the label {WEIGHT} of {where} has the name of samples' weights; rename the column"
        )


def _refuse_second_label(
    left: Sequence[pa.Field], labels: tuple[str, ...], where: DataFile
) -> None:
    """Refuse a second column called a label: taken for a feature, it would leak the answer."""
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


def _is_text(schema: pa.Schema, name: str) -> bool:
    return name in schema.names and inputs.is_text_key(schema.field(name).type)


def to_batch(
    piece: Any, layout: ColumnLayout, rows: np.ndarray, path: DataFile, broken: Broken
) -> Batch:
    """Arrow columns as a batch, without the rows that are broken."""
    good = _good(piece, layout, rows, path, broken)
    if not good.all():
        piece = piece.filter(pa.array(good))
    dense = {layout.label_name(name): tensor(layout.label(piece[name])) for name in layout.labels}
    if layout.sample_weight:
        dense[WEIGHT] = tensor(inputs.numbers(piece[layout.sample_weight]))
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
    for of, column in layout.weights:
        numbers, _ = inputs.list_numbers(piece[column])
        sparse[column] = Jagged(tensor(as_words(numbers)), *_lengths(sparse[of]))
    return Batch(piece.num_rows, dense, sparse)


def _lengths(keys: Jagged) -> tuple[torch.Tensor, torch.Tensor | None]:
    return keys.lengths, keys.known_offsets


def _single_keys(column: Any, name: str, path: DataFile) -> NDArray[np.int64]:
    """A key per row; warns once if a row has the key reserved for missing values."""
    keys = inputs.keys(column)
    if name not in _warned and (keys == MISSING).sum() > column.null_count:
        _warned.add(name)
        log.warning(
            "column %s of %s has the key %d, which stands for a missing one; both share a row, "
            "so use another key if that is not meant",
            name,
            path,
            MISSING,
        )
    return keys


_warned: set[str] = set()
"""Columns that were warned of."""


def _good(
    piece: Any, layout: ColumnLayout, rows: np.ndarray, path: DataFile, broken: Broken
) -> np.ndarray:
    """Which rows can be used; the others are reported with their number in the file, from 1."""
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
    if layout.sample_weight:
        found += _bad_weights(inputs.numbers(piece[layout.sample_weight]), layout.sample_weight)
    for of, column in layout.weights:
        found += _weight_mismatches(piece, of, column)
    return without(found, rows, path, broken)


def _bad_weights(weight: np.ndarray, name: str) -> list[tuple[np.ndarray, str]]:
    good = np.isfinite(weight) & (weight >= 0)
    return [] if good.all() else [(~good, f"{name} is no number from 0")]


def _weight_mismatches(piece: Any, of: str, column: str) -> list[tuple[np.ndarray, str]]:
    """Rows whose weights are no numbers, or more or fewer than their keys."""
    weights, lengths = inputs.list_numbers(piece[column])
    differ = lengths != inputs.list_lengths(inputs.flat(piece[of]))
    found = [(differ, f"{column} has more or fewer entries than {of}")]
    if not (good := np.isfinite(weights)).all():
        bad = inputs.lists_with(lengths, ~good)
        found.append((bad, f"{column} has an entry that is no finite number"))
    return found


def _bad_labels(label: np.ndarray, name: str, layout: ColumnLayout) -> list[tuple[np.ndarray, str]]:
    found = [(~np.isfinite(label), f"{name} is no number, or empty")]
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
        names += [WEIGHT] if self.layout.sample_weight else []
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
        if self.layout.sample_weight:
            yield partial(Filling.add_rows, column=number, values=self._weight())
            number += 1
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

    def _weight(self) -> NDArray[np.float32]:
        weight = inputs.numbers(self.decode(self.layout.sample_weight))
        if _bad_weights(weight, self.layout.sample_weight):
            self.refuse()
        return weight

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


PIECE = 65_536
MOST_IN_TURN = 131_072
"""Rows of a row group whose columns are decoded one after the other; larger ones come in pieces."""
SUFFIXES = (".parquet", ".pq")
PATTERNS = tuple(f"*{suffix}" for suffix in SUFFIXES)


def open_parquet(config: DataConfig, split: Split, like: DataFile | None = None) -> Stream:
    """The rows of a Parquet file or folder; `like` has the columns that training has."""
    path, every, layout, files = find_split(config, split, like)
    chunks = [
        chunk
        for number, file in enumerate(files)
        for chunk in _chunks(file, layout, split, every, number)
    ]
    if all(chunk.count() == 0 for chunk in chunks):
        raise DataError(
            f"the {split} split of {path} has no samples; check the split and the files"
        )
    if split == "train" and isinstance(layout, ColumnLayout):
        refuse_labels(files, layout, skips=config.max_broken > 0)
    return Stream(
        layout.columns,
        chunks,
        window=config.shuffle_window,
        shuffle=config.shuffle and split == "train",
        **config.reading,
        broken=Broken(config.max_broken),
        name=f"the {split} split of {path}",
    )


def find_split(
    config: DataConfig, split: Split, like: DataFile | None = None
) -> tuple[str, int, ColumnLayout | SequenceLayout, Sequence[DataFile]]:
    """The path of a split, which rows of its files are wanted, what is in them, and the files.

    The columns are those of training, in its order: a model takes features by their place.
    """
    like = like or with_rows(find_data(config.path))
    schema = open_file(like).schema_arrow
    read_items = partial(_all_items, config)
    layout = find_layout(schema, config, split, read_items)
    if layout is not None and not _has_own_rows(config):
        path, every = config.path, 0
    else:
        path, every = split_path(config, split)
    files = find_data(path, _key_of(path, config, split))
    if layout is None:
        layout = choose(schema, config.parquet, like)
    else:
        layout = with_target(layout, open_file(with_rows(files)).schema_arrow, config.parquet)
    return path, every, layout, files


def with_rows(files: Sequence[AnyFile]) -> AnyFile:
    """The first file that has rows: what programs write without any may have other types."""
    found = (file for file in files if open_file(file).metadata.num_rows)
    return next(found, files[0])


def _key_of(path: str, config: DataConfig, split: Split) -> str:
    """Which key of the config names a split's path."""
    held_out = {"validation": config.validation_path, "test": config.test_path}
    return f"data.{split}_path" if held_out.get(split) == path else "data.path"


def refuse_labels(files: Sequence[DataFile], layout: ColumnLayout, *, skips: bool) -> None:
    """Refuse labels outside 0 to 1, or all alike, as far as the files' statistics tell.

    Where broken rows are skipped, some labels may be outside.
    """
    for name in layout.labels:
        bounds = _bounds(files, name)
        if bounds is None:
            continue
        least, most = bounds
        free = skips or layout.any_labels or layout.positive_from
        if not free and (least < 0 or most > 1):
            wrong = least if least < 0 else most
            raise DataError(f"{_place(files)}: {LABEL_RANGE.format(name, f'{wrong:g}')}")
        made = layout.label(pa.array([least, most]))
        if made[0] == made[1]:
            raise DataError(
                f"every {name} of {_place(files)} is {made[0] + 0:g}, so there is nothing to "
                "learn; add rows of the other kind, or check data.parquet.labels"
            )


def _place(files: Sequence[DataFile]) -> DataFile | str:
    """The file, or the folder of several."""
    return files[0] if len(files) == 1 else files[0].parent


def _bounds(files: Sequence[DataFile], name: str) -> tuple[float, float] | None:
    """The least and the greatest value of a column of numbers; None where it is not known."""
    found: list[float] = []
    for file in files:
        opened = open_file(file)
        if not opened.metadata.num_rows:
            continue
        paths = [opened.schema.column(i).path for i in range(opened.metadata.num_columns)]
        if name not in paths:
            return None
        for group in range(opened.metadata.num_row_groups):
            _try_column(file, opened, group, name)
            statistics = opened.metadata.row_group(group).column(paths.index(name)).statistics
            if statistics is None or not statistics.has_min_max:
                return None
            ends = (statistics.min, statistics.max)
            if not all(isinstance(end, int | float) for end in ends):
                return None  # of floats of 16 bits Arrow gives bytes
            found += [float(end) for end in ends]
    return (min(found), max(found)) if found else None


def _try_column(path: DataFile, opened: pq.ParquetFile, group: int, name: str) -> None:
    """Read one value: of a damaged column Arrow says so then, and asked for statistics aborts."""
    try:
        next(opened.iter_batches(1, row_groups=[group], columns=[name], use_threads=False), None)
    except inputs.failures(path) as error:
        raise unreadable(path, error) from None


def _all_items(config: DataConfig, columns: tuple[str, ...]) -> NDArray[np.int64]:
    paths = (config.path, config.validation_path, config.test_path)
    files = [file for path in paths if path for file in find_data(path)]
    known = tuple(dict.fromkeys((file, modified_ns(file)) for file in files))
    return _distinct(known, columns)


@lru_cache(maxsize=4)
def _distinct(
    files: tuple[tuple[DataFile, int], ...], columns: tuple[str, ...]
) -> NDArray[np.int64]:
    """The different keys of some columns, sorted: one pass over those columns of all files."""
    found = np.empty(0, dtype=np.int64)
    for file, _ in files:
        opened = open_file(file)
        there = [name for name in columns if name in opened.schema_arrow.names]
        for group in range(opened.metadata.num_row_groups):
            for piece in row_group(file, group, there):
                arrays = [inputs.flat(piece[name]) for name in there]
                values = [a.flatten() if inputs.is_list(a.type) else a for a in arrays]
                new = [inputs.keys(value.drop_null().unique()) for value in values]
                found = np.unique(np.concatenate([found, *new]))
    return found


def _has_own_rows(config: DataConfig) -> bool:
    return bool(config.test_every or config.test_path or config.validation_path)


def find_data(path: str, key: str = "data.path") -> Sequence[DataFile]:
    """The Parquet files of a path or URI, which that key of the config names."""
    if is_uri(path):
        return find_remote_files(path, PATTERNS, "Parquet files", key)
    return find_files(path, PATTERNS, "Parquet files", key)


def open_file(path: DataFile, footer: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """A Parquet file, or a sentence that says what is wrong with it.

    Pages that carry a checksum are compared with it when they are read. A footer that was read
    before is not read again.
    """
    try:
        if isinstance(path, RemoteFile):
            source, options = path.filesystem.open_input_file(path.path), {"pre_buffer": True}
        else:
            source, options = path, {}
        file = pq.ParquetFile(source, page_checksum_verification=True, metadata=footer, **options)
        names = file.schema_arrow.names
    except inputs.failures(path) as error:
        raise unreadable(path, error) from None
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path} has the column {twice!r} twice; rename one of them")
    return file


def unreadable(path: DataFile, error: Exception) -> DataError:
    """The sentence for a file that Arrow cannot read."""
    if isinstance(path, RemoteFile) and not isinstance(error, pa.ArrowException):
        return DataError(
            f"cannot read {path}: {inputs.reason_of(error)}; check the file, and the connection to "
            "its store"
        )
    reason = error.strerror if isinstance(error, OSError) else None
    if reason:
        return DataError(f"cannot read {path}: {reason}; check the file")
    suffix = Path(str(path)).suffix.lower()
    if suffix and suffix not in SUFFIXES:
        return DataError(
            f"{path} is no Parquet file, by its name {suffix}; write it as Parquet, or name its "
            "format in data.kind"
        )
    return DataError(NO_PARQUET.format(path))


NO_PARQUET = "{} is truncated or no Parquet file; write it again"


def row_group(
    path: DataFile, group: int, columns: Sequence[str], footer: pq.FileMetaData | None = None
) -> Iterator[pa.RecordBatch]:
    """Pieces of one row group with these columns; a damaged file is refused by name."""
    file = open_file(path, footer)
    pieces = file.iter_batches(
        batch_size=PIECE, row_groups=[group], columns=list(columns), use_threads=False
    )
    while True:
        try:
            piece = next(pieces, None)
        except inputs.failures(path) as error:
            raise unreadable(path, error) from None
        if piece is None:
            return
        yield piece


def check(schema: pa.Schema, layout: ColumnLayout | SequenceLayout, where: DataFile) -> None:
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
        inputs.need_alike(kind, name in layout.texts, name, where)
    more = (layout.sample_weight,) if layout.sample_weight else ()
    for name in layout.dense + layout.labels + more:
        kind = schema.field(name).type
        inputs.need(kind, inputs.is_number(kind), name, "a number per row", where)
    for _, name in layout.weights:
        kind = schema.field(name).type
        fits = inputs.is_list(kind) and inputs.is_number(kind.value_type)
        inputs.need(kind, fits, name, "a list of weights per row", where)


def _chunks(
    path: DataFile, layout: ColumnLayout | SequenceLayout, split: Split, every: int, number: int
) -> Iterator[Chunk]:
    file = open_file(path)
    begin, footer = 0, file.metadata
    if footer.num_rows:
        check(file.schema_arrow, layout, path)
    for group in range(footer.num_row_groups):
        size = footer.row_group(group).num_rows

        def read(broken: Broken, group: int = group, begin: int = begin) -> Iterator[Batch]:
            row = begin
            for piece in row_group_at_once(path, group, layout.names, footer):
                numbers = np.arange(row, row + piece.num_rows)
                row += piece.num_rows
                kept = keeps(numbers, split, every)
                if not kept.all():
                    piece, numbers = piece.filter(pa.array(kept)), numbers[kept]
                if isinstance(layout, SequenceLayout):
                    ids = (number << FILE_BITS) + numbers
                    yield to_sequences(piece, layout, numbers, ids, path, broken)
                else:
                    yield to_batch(piece, layout, numbers, path, broken)

        kept_rows = num_kept(begin, begin + size, split, every)
        # Sequences too short to hold an item out are no samples: only reading tells how many.
        drops = isinstance(layout, SequenceLayout) and layout.held.least > 0
        known = None if drops else kept_rows
        by_column = None
        if isinstance(layout, ColumnLayout) and _can_be_decoded_in_turn(path, size, layout):
            rows = range(begin, begin + size)
            in_turn = _ColumnsInTurn(path, group, layout, footer, read, rows, split, every)
            by_column = in_turn.read
        yield Chunk(read if size else _read_nothing, lambda known=known: known, by_column)
        begin += size


def _read_nothing(_: Broken) -> Iterator[Batch]:
    return iter(())


def _can_be_decoded_in_turn(path: DataFile, size: int, layout: ColumnLayout) -> bool:
    """Single columns of a whole row group: of another machine that would be many requests.

    What is wrong with weights is seen beside their keys, so those are read together.
    """
    return not isinstance(path, RemoteFile) and size <= MOST_IN_TURN and not layout.weights


@dataclass(frozen=True, slots=True)
class _ColumnsInTurn:
    """A row group whose columns are decoded one after the other."""

    path: DataFile
    group: int
    layout: ColumnLayout
    footer: pq.FileMetaData
    whole: Callable[[Broken], Iterator[Batch]]
    """Reads all columns at once."""
    rows: range
    """Of the file."""
    split: Split
    every: int

    def read(self, broken: Broken) -> Iterator[ColumnRows]:
        kept = keeps(np.arange(self.rows.start, self.rows.stop), self.split, self.every)
        assert isinstance(self.path, Path), "columns in turn are those of local files"
        path, names = self.path, self.layout.names
        opened: list[ColumnDecoder] = []

        def decode(name: str) -> Any:
            if not opened:
                opened.append(ColumnDecoder(path, self.footer, self.group, names))
            column = opened[0].column(name)
            return column.filter(pa.array(kept)) if self.every else column

        def refuse() -> NoReturn:
            for _ in self.whole(broken):
                pass
            raise AssertionError(f"a row of {self.path} is broken, and nothing says which")

        yield ColumnRows(int(kept.sum()), self.layout, self.path, decode, refuse)


class ColumnDecoder:
    """Columns of a whole row group, one at a time: by native code where it can, else by Arrow."""

    def __init__(
        self, path: Path, footer: pq.FileMetaData, group: int, names: Sequence[str]
    ) -> None:
        """`names`: the columns that will be asked for."""
        self._path, self._group, self._footer = path, group, footer
        self._rows = footer.row_group(group).num_rows
        self._file = open_file(path, footer)
        self._pages = PageReader(path, footer, self._file.schema_arrow)
        self._ours = frozenset(name for name in names if self._pages.knows(name))
        if self._ours:
            self._try_chunks()

    def column(self, name: str) -> Any:
        """One column; a damaged file is refused by name."""
        found = self._pages.lists(self._group, name) if name in self._ours else None
        if found is not None:
            return found
        try:
            read = self._file.read_row_group(self._group, columns=[name], use_threads=False)[name]
        except (pa.ArrowException, OSError) as error:
            raise unreadable(self._path, error) from None
        if len(read) != self._rows:
            raise DataError(NO_PARQUET.format(self._path))
        return read

    def _try_chunks(self) -> None:
        """Have Arrow look at what the footer says of the columns here, and read nothing of them."""
        schema = self._file.schema_arrow
        places = [schema.get_field_index(name) for name in self._ours]
        # With a buffer, nothing is read before rows are wanted.
        trial: Any = pq.ParquetFile(self._path, metadata=self._footer, buffer_size=1 << 12)
        pieces = trial.reader.iter_batches(
            0, row_groups=[self._group], column_indices=places, use_threads=False
        )
        try:
            next(pieces, None)
        except (pa.ArrowException, OSError) as error:
            raise unreadable(self._path, error) from None

    def rows(self, names: Sequence[str]) -> pa.RecordBatch:
        """Several columns as one piece."""
        arrays = [inputs.flat(self.column(name)) for name in names]
        return pa.RecordBatch.from_arrays(arrays, names=list(names))


def row_group_at_once(
    path: DataFile, group: int, columns: Sequence[str], footer: pq.FileMetaData
) -> Iterator[pa.RecordBatch]:
    """As `row_group`, which it leaves long row groups and those of other machines to.

    What is decoded here has lists with offsets of 64 bits, whatever the file says.
    """
    rows = footer.row_group(group).num_rows
    if native_wanted() and isinstance(path, Path) and 0 < rows <= PIECE:
        yield ColumnDecoder(path, footer, group, columns).rows(columns)
    else:
        yield from row_group(path, group, columns, footer)


def to_sequences(
    piece: Any,
    layout: SequenceLayout,
    rows: np.ndarray,
    ids: np.ndarray,
    path: DataFile,
    broken: Broken,
) -> Batch:
    """Rows as users' sequences with these ids, without those that are broken or too short."""
    good = without(broken_rows(piece, layout), rows, path, broken)
    if not good.all():
        piece, ids = piece.filter(pa.array(good)), ids[good]
    return sequence_batch(piece, layout, ids)[0]


FILE_BITS = 40
"""Bits of the row in a sequence's id; the file's number is above them."""
