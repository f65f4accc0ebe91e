"""MovieLens: `ratings.dat` (user::item::rating::time) and `ratings.csv`, held in memory.

The parser streams, but both uses need all ratings at once: a split by time, a list per user.
That takes 28 bytes per rating.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestpipe.batch import Batch
from nestpipe.data.config import DataConfig, MovieLensConfig, Split
from nestpipe.data.readers.inputs import find_files
from nestpipe.data.readers.text import Broken, RowError, TextFormat, rows, table, with_header
from nestpipe.data.source import (
    HISTORY,
    LABEL,
    TARGET,
    TIME,
    TIMESTAMPS,
    Column,
    Indexed,
    from_memory,
    history_column,
    keys_column,
    label_column,
    tensor,
    time_column,
    times_column,
)
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged

PATTERNS = ("ratings.dat", "ratings.csv", "ratings.dat.gz", "ratings.csv.gz")
NAMES = ("userId", "movieId", "rating", "timestamp")
TYPES: dict[str, pa.DataType] = {
    "userId": pa.int64(),
    "movieId": pa.int64(),
    "rating": pa.float64(),
    "timestamp": pa.int64(),
}


@dataclass(frozen=True, slots=True)
class Ratings:
    """All ratings, by column, the earliest first; at equal times the file's order is kept."""

    user: NDArray[np.int64]
    item: NDArray[np.int64]
    rating: NDArray[np.float32]
    time: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.user)


def open_movielens(config: DataConfig, split: Split) -> Indexed:
    """One split of the ratings, or of the users' sequences."""
    broken = Broken(config.max_broken)
    ratings = read_ratings(Path(config.path), broken)
    make = rating_rows if config.movielens.use == "ratings" else sequences
    columns, samples = make(ratings, config.movielens, split)
    return Indexed(
        columns,
        samples.size,
        from_memory(samples),
        shuffle=config.shuffle and split == "train",
        broken=broken,
        name=f"the {split} split of {config.path}",
    )


def ratings_format(file: Path) -> TextFormat:
    """How a ratings file is written, by its name and its header."""
    form = TextFormat(names=NAMES, types=TYPES, required=frozenset(NAMES))
    if ".csv" in file.suffixes:
        return with_header(file, form)
    return TextFormat(names=NAMES, types=TYPES, required=frozenset(NAMES), delimiter=b"::")


def read_ratings(path: Path, broken: Broken) -> Ratings:
    """The ratings of a file, or of the one in a folder, ordered by time."""
    file = find_files(path, PATTERNS, "ratings.dat or ratings.csv")[0]
    form = ratings_format(file)

    def parse(block: bytes, _: int) -> pa.Table:
        found = table(block, form)
        if not np.isfinite(found["rating"].to_numpy()).all():
            raise RowError("rating is not finite")
        return found

    pieces = list(rows(file, form, parse, broken))
    found = pa.concat_tables(pieces) if pieces else pa.table({name: [] for name in NAMES})
    order = np.argsort(found["timestamp"].to_numpy(), kind="stable")
    return Ratings(
        found["userId"].to_numpy()[order].astype(np.int64),
        found["movieId"].to_numpy()[order].astype(np.int64),
        found["rating"].to_numpy()[order].astype(np.float32),
        found["timestamp"].to_numpy()[order].astype(np.int64),
    )


def rating_rows(
    ratings: Ratings, config: MovieLensConfig, split: Split
) -> tuple[list[Column], Batch]:
    """A sample per rating: user, item, and whether it is high. Split by time."""
    held = round(len(ratings) * config.test_fraction)
    ends = {"train": len(ratings) - 2 * held, "validation": len(ratings) - held}
    part = {
        "train": slice(0, ends["train"]),
        "validation": slice(ends["train"], ends["validation"]),
        "test": slice(ends["validation"], len(ratings)),
    }[split]
    label = (ratings.rating[part] >= config.liked_from).astype(np.float32)
    samples = Batch(
        len(label),
        {LABEL: tensor(label), TIME: tensor(ratings.time[part])},
        {
            "user": Jagged.one_each(tensor(ratings.user[part])),
            "item": Jagged.one_each(tensor(ratings.item[part])),
        },
    )
    keys = [keys_column(name, single=True) for name in ("user", "item")]
    return [*keys, label_column(), time_column()], samples


def sequences(
    ratings: Ratings, config: MovieLensConfig, split: Split
) -> tuple[list[Column], Batch]:
    """A sample per user: items in order of time, the last for test, the one before to validate.

    Training has users with two or more items left to learn from; the others, users with three.
    Where one item is held out, training has that to validate, too.
    """
    if split == "validation" and config.held_out == 1:
        raise ConfigError("held_out is 1, so there is no validation split; use the test split")
    order = np.argsort(ratings.user, kind="stable")
    items, times = ratings.item[order], ratings.time[order]
    _, begin, count = np.unique(ratings.user[order], return_index=True, return_counts=True)
    held = {"train": config.held_out, "validation": 2, "test": 1}[split]
    length = count - held
    enough = length >= 2 if split == "train" else count >= 3
    begin, length = begin[enough], length[enough]
    kept = np.minimum(length, config.max_len)
    lists = {
        HISTORY: _ranges(items, begin + length - kept, kept),
        TIMESTAMPS: _ranges(times, begin + length - kept, kept),
    }
    columns = [history_column(items=lambda: np.unique(items)), times_column()]
    if split == "train":
        return columns, Batch(len(kept), {}, lists)
    columns += [Column(TARGET, "target", "int64"), time_column()]
    held_out = {TARGET: tensor(items[begin + length]), TIME: tensor(times[begin + length])}
    return columns, Batch(len(kept), held_out, lists)


def _ranges(
    values: NDArray[np.int64], begin: NDArray[np.int64], length: NDArray[np.int64]
) -> Jagged:
    """The values [begin, begin + length) of each sample."""
    ends = np.cumsum(length)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - length, length)
    positions = np.repeat(begin, length) + within
    return Jagged(tensor(values[positions]), tensor(length.astype(np.int64)))
