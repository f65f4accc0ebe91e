"""Criteo click logs: label, 13 counts and 26 hexadecimal categories between tabs; gz allowed.

A category's key is its hexadecimal number; an empty one is `MISSING`, an empty count is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestpipe.batch import Batch
from nestpipe.data.config import DataConfig, Split
from nestpipe.data.readers.inputs import find_files, flat, keeps, split_path
from nestpipe.data.readers.text import Broken, RowError, TextFormat, rows, table
from nestpipe.data.source import (
    DENSE,
    LABEL,
    MISSING,
    Chunk,
    Stream,
    features_column,
    keys_column,
    label_column,
    tensor,
)
from nestpipe.jagged import Jagged

PATTERNS = ("*.tsv", "*.txt", "*.tsv.gz", "*.txt.gz", "day_*")
COUNTS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
FORMAT = TextFormat(
    names=(LABEL, *COUNTS, *CATEGORIES),
    types={
        LABEL: pa.int64(),
        **dict.fromkeys(COUNTS, pa.int64()),
        **dict.fromkeys(CATEGORIES, pa.string()),
    },
    required=frozenset({LABEL}),
    delimiter=b"\t",
)
COLUMNS = (
    *(keys_column(name, single=True) for name in CATEGORIES),
    features_column(COUNTS),
    label_column(),
)


def open_criteo(config: DataConfig, split: Split) -> Stream:
    """The rows of a file, or of all files of a folder. A file is one chunk."""
    path, every = split_path(config, split)
    files = find_files(path, PATTERNS, "Criteo files (.tsv, .txt, day_*)")
    return Stream(
        COLUMNS,
        [_chunk(file, split, every, config.criteo.log_dense) for file in files],
        window=config.shuffle_window,
        shuffle=config.shuffle and split == "train",
        broken=Broken(config.max_broken),
        name=f"the {split} split of {path}",
    )


def _chunk(file: Path, split: Split, every: int, log_dense: bool) -> Chunk:
    def parse(block: bytes, line: int) -> Batch:
        found = table(block, FORMAT)
        numbers = np.arange(line - 1, line - 1 + found.num_rows)
        checked = to_batch(found, log_dense)
        kept = keeps(numbers, split, every)
        return checked if kept.all() else checked.select(tensor(np.flatnonzero(kept)))

    def read(broken: Broken) -> Iterator[Batch]:
        return rows(file, FORMAT, parse, broken)

    return Chunk(read)


def to_batch(found: pa.Table, log_dense: bool = True) -> Batch:
    """Parsed columns as a batch; raises `RowError` where a label or a category makes no sense."""
    label = found[LABEL].to_numpy()
    if not np.isin(label, (0, 1)).all():
        raise RowError(f"label is {label[~np.isin(label, (0, 1))][0]}, not 0 or 1")
    counts = np.stack([flat(found[name]).fill_null(0).to_numpy() for name in COUNTS], axis=1)
    dense = np.log1p(np.maximum(counts, 0)) if log_dense else counts
    return Batch(
        found.num_rows,
        {LABEL: tensor(label.astype(np.float32)), DENSE: tensor(dense.astype(np.float32))},
        {name: Jagged.one_each(tensor(hex_keys(flat(found[name]), name))) for name in CATEGORIES},
    )


def hex_keys(array: Any, name: str) -> NDArray[np.int64]:
    """Hexadecimal numbers of up to 16 digits; `MISSING` where empty."""
    coded = array.dictionary_encode()
    known = [_from_hex(text, name) for text in coded.dictionary.to_pylist()]
    keys = np.array([*known, MISSING & (1 << 64) - 1], dtype=np.uint64).view(np.int64)
    return keys[coded.indices.fill_null(len(known)).to_numpy(zero_copy_only=False)]


def _from_hex(text: str, name: str) -> int:
    try:
        if text.isalnum() and len(text) <= 16:
            return int(text, 16)
    except ValueError:
        pass
    raise RowError(f"{name} is {text[:40]!r}, no hexadecimal number")
