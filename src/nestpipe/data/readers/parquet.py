"""Parquet files: one, or a folder of them, with the columns a config names or the schema suggests.

Row groups come in an order that the seed decides. Only the columns that are used are decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from nestpipe.batch import Batch
from nestpipe.data.config import DataConfig, Split
from nestpipe.data.readers import inputs
from nestpipe.data.readers.columns import (
    LABEL_RANGE,
    ColumnLayout,
    ColumnRows,
    choose,
    to_batch,
    without,
)
from nestpipe.data.readers.inputs import find_files, keeps, num_kept, split_path
from nestpipe.data.readers.remote import (
    DataFile,
    RemoteFile,
    find_remote_files,
    is_uri,
    modified_ns,
)
from nestpipe.data.readers.sequences import (
    SequenceLayout,
    broken_rows,
    check_types,
    find_layout,
)
from nestpipe.data.readers.sequences import to_batch as sequence_batch
from nestpipe.data.readers.text import Broken
from nestpipe.data.source import Chunk, Stream
from nestpipe.errors import DataError

PIECE = 65_536
MOST_IN_TURN = 131_072
"""Rows of a row group whose columns are decoded one after the other; larger ones come in pieces."""
PATTERNS = ("*.parquet", "*.pq")


def open_parquet(config: DataConfig, split: Split) -> Stream:
    """The rows of a Parquet file or folder."""
    path, every, layout, files = find_split(config, split)
    chunks = [
        chunk
        for number, file in enumerate(files)
        for chunk in _chunks(file, layout, split, every, number)
    ]
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
    config: DataConfig, split: Split
) -> tuple[str, int, ColumnLayout | SequenceLayout, Sequence[DataFile]]:
    """The path of a split, which rows of its files are wanted, what is in them, and the files."""
    files = find_data(config.path)
    schema = open_file(files[0]).schema_arrow
    read_items = partial(_all_items, config)
    layout = find_layout(schema, config, split, read_items)
    if layout is not None and not _has_own_rows(config):
        check(schema, layout, files[0])
        return config.path, 0, layout, files
    path, every = split_path(config, split)
    files = find_data(path)
    schema = open_file(files[0]).schema_arrow
    layout = find_layout(schema, config, split, read_items)
    layout = layout or choose(schema, config.parquet, files[0])
    check(schema, layout, files[0])
    return path, every, layout, files


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
            raise DataError(f"{files[0].parent}: {LABEL_RANGE.format(name, f'{wrong:g}')}")
        made = layout.label(pa.array([least, most]))
        if made[0] == made[1]:
            raise DataError(
                f"every {name} of {files[0].parent} is {made[0]:g}, so there is nothing to learn; "
                "add rows of the other kind, or check data.parquet.labels"
            )


def _bounds(files: Sequence[DataFile], name: str) -> tuple[float, float] | None:
    """The least and the greatest value of a column of numbers; None where it is not known."""
    found: list[float] = []
    for file in files:
        opened = open_file(file)
        paths = [opened.schema.column(i).path for i in range(opened.metadata.num_columns)]
        if name not in paths:
            return None
        for group in range(opened.metadata.num_row_groups):
            _try_column(file, opened, group, name)
            statistics = opened.metadata.row_group(group).column(paths.index(name)).statistics
            if statistics is None or not statistics.has_min_max:
                return None
            found += [float(statistics.min), float(statistics.max)]
    return (min(found), max(found)) if found else None


def _try_column(path: DataFile, opened: pq.ParquetFile, group: int, name: str) -> None:
    """Read one value: of a damaged column Arrow says so then, and asked for statistics aborts."""
    try:
        next(opened.iter_batches(1, row_groups=[group], columns=[name], use_threads=False), None)
    except (pa.ArrowException, OSError) as error:
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


def find_data(path: str) -> Sequence[DataFile]:
    """The Parquet files of a path or URI."""
    if is_uri(path):
        return find_remote_files(path, PATTERNS, "Parquet files")
    return find_files(path, PATTERNS, "Parquet files")


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
    except (pa.ArrowException, OSError, ValueError) as error:  # also names that are no text
        raise unreadable(path, error) from None
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path} has the column {twice!r} twice; rename one of them")
    return file


def unreadable(path: DataFile, error: Exception) -> DataError:
    """The sentence for a file that Arrow cannot read."""
    reason = error.strerror if isinstance(error, OSError) else None
    if reason:
        return DataError(f"cannot read {path}: {reason}; check the file")
    return DataError(f"{path} is truncated or no Parquet file; write it again")


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
        except (pa.ArrowException, OSError) as error:
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
    for name in layout.dense + layout.labels:
        kind = schema.field(name).type
        inputs.need(kind, inputs.is_number(kind), name, "a number per row", where)


def _chunks(
    path: DataFile, layout: ColumnLayout | SequenceLayout, split: Split, every: int, number: int
) -> Iterator[Chunk]:
    file = open_file(path)
    check(file.schema_arrow, layout, path)
    begin, footer = 0, file.metadata
    for group in range(footer.num_row_groups):
        size = footer.row_group(group).num_rows

        def read(broken: Broken, group: int = group, begin: int = begin) -> Iterator[Batch]:
            row = begin
            for piece in row_group(path, group, layout.names, footer):
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
        # Sequences too short to hold an item out are no samples: only reading tells how many.
        drops = isinstance(layout, SequenceLayout) and layout.held.least > 0
        known = None if drops else kept_rows
        by_column = None
        if isinstance(layout, ColumnLayout) and _can_be_decoded_in_turn(path, size):
            rows = range(begin, begin + size)
            in_turn = _ColumnsInTurn(path, group, layout, footer, read, rows, split, every)
            by_column = in_turn.read
        yield Chunk(read, lambda known=known: known, by_column)
        begin += size


def _can_be_decoded_in_turn(path: DataFile, size: int) -> bool:
    """Single columns of a whole row group: of another machine that would be many requests."""
    return not isinstance(path, RemoteFile) and size <= MOST_IN_TURN


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
        opened: list[pq.ParquetFile] = []

        def decode(name: str) -> Any:
            if not opened:
                opened.append(open_file(self.path, self.footer))
            column = column_of(self.path, opened[0], self.group, name)
            return column.filter(pa.array(kept)) if self.every else column

        def refuse() -> NoReturn:
            for _ in self.whole(broken):
                pass
            raise AssertionError(f"a row of {self.path} is broken, and nothing says which")

        yield ColumnRows(int(kept.sum()), self.layout, self.path, decode, refuse)


def column_of(path: DataFile, file: pq.ParquetFile, group: int, name: str) -> Any:
    """One column of a row group; a damaged file is refused by name."""
    try:
        return file.read_row_group(group, columns=[name], use_threads=False)[name]
    except (pa.ArrowException, OSError) as error:
        raise unreadable(path, error) from None


def _sequences(
    piece: Any,
    layout: SequenceLayout,
    rows: np.ndarray,
    file: int,
    path: DataFile,
    broken: Broken,
) -> Batch:
    """Rows as users' sequences, without those that are broken or too short."""
    good = without(broken_rows(piece, layout), rows, path, broken)
    if not good.all():
        piece, rows = piece.filter(pa.array(good)), rows[good]
    return sequence_batch(piece, layout, (file << FILE_BITS) + rows)[0]


FILE_BITS = 40
"""A sequence's id is its file's number, shifted by so many bits, and its row in the file."""
