"""Public data sets as they are published: Criteo click logs, MovieLens, KuaiRand.

Criteo: label, 13 counts and 26 hexadecimal categories between tabs; gz allowed. A category's key is
its hexadecimal number; an empty one is `MISSING`, an empty count is 0.

MovieLens: `ratings.dat` (user::item::rating::time) and `ratings.csv`, held in memory. The parser
streams, but both uses need all ratings at once: a split by time, a list per user. That takes 28
bytes per rating.

KuaiRand: watch events joined with what is known of the user and the video beforehand. Reads the
published CSV files (log_standard_*, user_features_*, video_features_basic_*) and the same tables as
Parquet. The video statistics are never read: they are averages over the whole period, the test days
included. Nor is anything of the log that is only known after the video was shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from nestpipe.batch import Batch
from nestpipe.data import inputs, parquet
from nestpipe.data.config import DataConfig, KuaiRandConfig, MovieLensConfig, Split
from nestpipe.data.inputs import find_files, flat, keeps, split_path
from nestpipe.data.parquet import ColumnLayout
from nestpipe.data.source import (
    DENSE,
    HISTORY,
    LABEL,
    MISSING,
    TARGET,
    TIME,
    TIMESTAMPS,
    Chunk,
    Column,
    Indexed,
    Stream,
    features_column,
    from_memory,
    history_column,
    keys_column,
    label_column,
    tensor,
    time_column,
    times_column,
)
from nestpipe.data.text import Broken, RowError, TextFormat, rows, table, with_header
from nestpipe.errors import DataError, MissingSplitError
from nestpipe.jagged import Jagged

CRITEO_PATTERNS = ("*.tsv", "*.txt", "*.tsv.gz", "*.txt.gz", "day_*")
COUNTS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
CRITEO_FORMAT = TextFormat(
    names=(LABEL, *COUNTS, *CATEGORIES),
    types={
        LABEL: pa.int64(),
        **dict.fromkeys(COUNTS, pa.int64()),
        **dict.fromkeys(CATEGORIES, pa.string()),
    },
    required=frozenset({LABEL}),
    delimiter=b"\t",
)
CRITEO_COLUMNS = (
    *(keys_column(name, single=True) for name in CATEGORIES),
    features_column(COUNTS),
    label_column(),
)


def open_criteo(config: DataConfig, split: Split) -> Stream:
    """The rows of a file, or of all files of a folder. A file is one chunk."""
    path, every = split_path(config, split)
    files = find_files(path, CRITEO_PATTERNS, "Criteo files (.tsv, .txt, day_*)")
    return Stream(
        CRITEO_COLUMNS,
        [_criteo_chunk(file, split, every, config.criteo.log_dense) for file in files],
        window=config.shuffle_window,
        shuffle=config.shuffle and split == "train",
        broken=Broken(config.max_broken),
        name=f"the {split} split of {path}",
    )


def _criteo_chunk(file: Path, split: Split, every: int, log_dense: bool) -> Chunk:
    def parse(block: bytes, line: int) -> Batch:
        found = table(block, CRITEO_FORMAT)
        numbers = np.arange(line - 1, line - 1 + found.num_rows)
        checked = criteo_batch(found, log_dense)
        kept = keeps(numbers, split, every)
        return checked if kept.all() else checked.select(tensor(np.flatnonzero(kept)))

    def read(broken: Broken) -> Iterator[Batch]:
        return rows(file, CRITEO_FORMAT, parse, broken)

    return Chunk(read)


def criteo_batch(found: pa.Table, log_dense: bool = True) -> Batch:
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


RATINGS_PATTERNS = ("ratings.dat", "ratings.csv", "ratings.dat.gz", "ratings.csv.gz")
RATINGS_NAMES = ("userId", "movieId", "rating", "timestamp")
RATINGS_TYPES: dict[str, pa.DataType] = {
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
    form = TextFormat(names=RATINGS_NAMES, types=RATINGS_TYPES, required=frozenset(RATINGS_NAMES))
    if ".csv" in file.suffixes:
        return with_header(file, form)
    return TextFormat(
        names=RATINGS_NAMES, types=RATINGS_TYPES, required=frozenset(RATINGS_NAMES), delimiter=b"::"
    )


def read_ratings(path: Path, broken: Broken) -> Ratings:
    """The ratings of a file, or of the one in a folder, ordered by time."""
    file = find_files(path, RATINGS_PATTERNS, "ratings.dat or ratings.csv")[0]
    form = ratings_format(file)

    def parse(block: bytes, _: int) -> pa.Table:
        found = table(block, form)
        if not np.isfinite(found["rating"].to_numpy()).all():
            raise RowError("rating is not finite")
        return found

    pieces = list(rows(file, form, parse, broken))
    found = pa.concat_tables(pieces) if pieces else pa.table({name: [] for name in RATINGS_NAMES})
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
        raise MissingSplitError(
            "held_out is 1, so there is no validation split; use the test split"
        )
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


LOGS = ("log_standard_*.csv", "log_standard_*.csv.gz", "log_standard_*.parquet")
LOG = ("user_id", "video_id", "date", "hourmin", "time_ms", "duration_ms", "tab")
"""What is read of a log row besides its label."""
LOG_KEYS = ("tab", "hour")
WATCH_TIME = "watch_time_ms"
"""Of the table of histories, where it has it: when each video was watched."""
HISTORY_LABEL = "history_long_view"
"""Aligned with the history: 1 where that video was watched for long."""


FILES = {
    "criteo": CRITEO_PATTERNS,
    "kuairand": (*LOGS, "user_*", "video_*"),
    "movielens": RATINGS_PATTERNS,
}
"""What each data set is read from."""


def open_kuairand(config: DataConfig, split: Split) -> Stream:
    """The events of a split's days, in windows; a CSV file or a row group is a chunk."""
    chosen = config.kuairand
    days = {
        "train": chosen.train_days,
        "validation": chosen.validation_days,
        "test": chosen.test_days,
    }[split]
    if not days:
        raise MissingSplitError(f"there is no {split} split; set data.kuairand.{split}_days")
    files = find_files(config.path, LOGS, "KuaiRand logs (log_standard_*)")
    folder = Path(config.path) if Path(config.path).is_dir() else Path(config.path).parent
    broken = Broken(config.max_broken)
    join = FeatureJoin(
        read_users(folder, broken),
        read_videos(folder, broken),
        read_history(folder, chosen.history_len) if chosen.history_len else None,
        chosen,
        (days[0], days[1]),
    )
    return Stream(
        join.columns,
        [chunk for file in files for chunk in _chunks(file, join)],
        window=config.shuffle_window,
        shuffle=config.shuffle and split == "train",
        **config.reading,
        broken=broken,
        name=f"the {split} split of {config.path}",
    )


@dataclass(frozen=True, slots=True)
class FeatureJoin:
    """Log rows to samples, given the tables of users and videos."""

    users: Side
    videos: Side
    history: Side | None
    config: KuaiRandConfig
    days: tuple[int, int]

    @property
    def columns(self) -> tuple[Column, ...]:
        names = ("user_id", "video_id", *LOG_KEYS, *USER_KEYS, *VIDEO_KEYS)
        lists = ["tag", *([HISTORY, HISTORY_LABEL] if self.history is not None else [])]
        timed = self.history is not None and TIMESTAMPS in self.history.lists
        return (
            *(keys_column(name, single=True) for name in names),
            *(keys_column(name) for name in lists),
            *([times_column()] if timed else []),
            features_column(("log_duration", *self.users.fields, *self.videos.fields)),
            label_column(),
            time_column(),
        )

    def batch(self, log: Any) -> Batch:
        """The rows of the split's days, with everything known about them."""
        found = {name: inputs.keys(log[name]) for name in (*LOG, self.config.label)}
        kept = (found["date"] >= self.days[0]) & (found["date"] <= self.days[1])
        found = {name: values[kept] for name, values in found.items()}
        user, video = self.users.rows(found["user_id"]), self.videos.rows(found["video_id"])
        single = {
            "user_id": found["user_id"],
            "video_id": found["video_id"],
            "tab": found["tab"],
            "hour": found["hourmin"] // 100,
            **{name: keys[user] for name, keys in self.users.keys.items()},
            **{name: keys[video] for name, keys in self.videos.keys.items()},
        }
        sparse = {name: Jagged.one_each(tensor(values)) for name, values in single.items()}
        for name, lists in self.videos.lists.items():
            sparse[name] = lists.select(tensor(video))
        if self.history is not None:
            watched = tensor(self.history.rows(found["user_id"]))
            sparse |= {name: lists.select(watched) for name, lists in self.history.lists.items()}
        return Batch(
            len(user),
            {
                LABEL: tensor(found[self.config.label].astype(np.float32)),
                DENSE: tensor(self._dense(found, user, video)),
                TIME: tensor(found["time_ms"] // 1000),
            },
            sparse,
        )

    def _dense(
        self, log: dict[str, NDArray[np.int64]], user: NDArray[np.int64], video: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Logs of counts. A video's upload day becomes its age on the day of the event."""
        duration = np.log1p(np.maximum(log["duration_ms"], 0) / 1000)
        uploaded = self.videos.dense[video, 0]
        age = np.maximum(log["time_ms"] / (1000 * DAY_S) - uploaded, 0)
        of_video = np.log1p(np.nan_to_num(age, nan=0.0))
        stacked = [duration[:, None], self.users.dense[user], of_video[:, None]]
        return np.concatenate(stacked, axis=1).astype(np.float32)


def _chunks(file: Path, join: FeatureJoin) -> Iterator[Chunk]:
    names = (*LOG, join.config.label)
    if file.suffix == ".parquet":
        yield from _parquet_chunks(file, join, names)
        return
    types: dict[str, pa.DataType] = dict.fromkeys(names, pa.int64())
    form = with_header(
        file, TextFormat(names=(), types=types, required=frozenset(names), quoted=True)
    )

    def parse(block: bytes, _: int) -> Batch:
        return join.batch(_checked(table(block, form), join.config.label))

    yield Chunk(lambda broken: rows(file, form, parse, broken))


def _parquet_chunks(file: Path, join: FeatureJoin, names: tuple[str, ...]) -> Iterator[Chunk]:
    opened = parquet.open_file(file)
    parquet.check(opened.schema_arrow, ColumnLayout(names, frozenset(names), (), ()), file)
    first, last = join.days
    begin = 0
    for group in range(opened.metadata.num_row_groups):

        def read(broken: Broken, group: int = group, begin: int = begin) -> Iterator[Batch]:
            row = begin
            for piece in parquet.row_group(file, group, names):
                yield join.batch(_without_broken(piece, names, file, row, broken))
                row += piece.num_rows

        def count(group: int = group) -> int:
            dates = [
                inputs.keys(piece["date"]) for piece in parquet.row_group(file, group, ["date"])
            ]
            return sum(int(((days >= first) & (days <= last)).sum()) for days in dates)

        yield Chunk(read, count)
        begin += opened.metadata.row_group(group).num_rows


def _checked(log: pa.Table, label: str) -> pa.Table:
    values = inputs.keys(log[label])
    if not np.isin(values, (0, 1)).all():
        raise RowError(f"{label} is {values[~np.isin(values, (0, 1))][0]}, not 0 or 1")
    return log


def _without_broken(
    piece: Any, names: tuple[str, ...], file: Path, begin: int, broken: Broken
) -> Any:
    """The rows of a Parquet piece that have all columns and a label of 0 or 1."""
    good = np.isin(inputs.keys(piece[names[-1]]), (0, 1))
    for name in names:
        good &= ~inputs.flat(piece[name]).is_null().to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(~good).tolist():
        broken.add(
            f"row {begin + row + 1} of {file}", f"a column is empty or {names[-1]} not 0 or 1"
        )
    return piece if good.all() else piece.filter(pa.array(good))


# The tables that KuaiRand's log is joined with, held in memory: users, videos, histories.


DAY_S = 86_400

USER_KEYS = (
    "user_active_degree",
    "is_lowactive_period",
    "is_live_streamer",
    "is_video_author",
    "follow_user_num_range",
    "fans_user_num_range",
    "friend_user_num_range",
    "register_days_range",
    *(f"onehot_feat{i}" for i in range(18)),
)
USER_COUNTS = ("follow_user_num", "fans_user_num", "friend_user_num", "register_days")
VIDEO_KEYS = ("author_id", "video_type", "upload_type", "music_id", "music_type")
_TEXT = frozenset(
    {
        "user_active_degree",
        "follow_user_num_range",
        "fans_user_num_range",
        "friend_user_num_range",
        "register_days_range",
        "video_type",
        "upload_type",
        "upload_dt",
        "tag",
    }
)
_IDS = frozenset({"user_id", "video_id", "author_id", "music_id"})


@dataclass(frozen=True, slots=True)
class Side:
    """A table by id. Its last row stands for ids that it does not have."""

    ids: NDArray[np.int64]
    """Sorted; without the last row."""
    keys: Mapping[str, NDArray[np.int64]] = field(default_factory=dict[str, Any])
    lists: Mapping[str, Jagged] = field(default_factory=dict[str, Jagged])
    dense: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    fields: tuple[str, ...] = ()
    """Names of the columns of `dense`."""

    def rows(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where each id stands."""
        if not len(self.ids):
            return np.zeros(len(ids), dtype=np.int64)
        found = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[found] == ids, found, len(self.ids))


def read_users(folder: Path, broken: Broken) -> Side:
    """User features: categories, and logs of counts."""
    found = _read(folder, "user_features*", "user_id", (*USER_KEYS, *USER_COUNTS), broken)
    counts = [np.log1p(np.maximum(np.nan_to_num(_numbers(found, c)), 0)) for c in USER_COUNTS]
    return Side(
        inputs.keys(found["user_id"]),
        {name: np.append(inputs.keys(found[name]), MISSING) for name in USER_KEYS},
        dense=np.vstack([np.stack(counts, axis=1), np.zeros((1, len(USER_COUNTS)))]),
        fields=tuple(f"log_{name}" for name in USER_COUNTS),
    )


def read_videos(folder: Path, broken: Broken) -> Side:
    """Video features that were known on upload; the dense one is the day of it, or nan."""
    wanted = (*VIDEO_KEYS, "upload_dt", "tag")
    found = _read(folder, "video_features_basic*", "video_id", wanted, broken)
    return Side(
        inputs.keys(found["video_id"]),
        {name: np.append(inputs.keys(found[name]), MISSING) for name in VIDEO_KEYS},
        {"tag": _tags(found["tag"])},
        dense=np.append(_days(found["upload_dt"]), np.nan)[:, None],
        fields=("log_age_days",),
    )


def read_history(folder: Path, longest: int) -> Side:
    """What each user watched before the log begins, the latest `longest` videos."""
    path = _one(folder, "user_history*", ".parquet")
    columns = {HISTORY: "watch_seq", HISTORY_LABEL: "watch_long_view"}
    if WATCH_TIME in parquet.open_file(path).schema_arrow.names:
        columns[TIMESTAMPS] = WATCH_TIME
    found = _read_parquet(path, ("user_id", *columns.values())).sort_by("user_id")
    lists = {name: _latest(inputs.lists(found[of]), longest) for name, of in columns.items()}
    if TIMESTAMPS in lists:
        times = lists[TIMESTAMPS]
        if not torch.equal(times.lengths, lists[HISTORY].lengths):
            raise DataError(f"{WATCH_TIME} and watch_seq of {path} differ in length; write it anew")
        lists[TIMESTAMPS] = Jagged(times.values // 1000, times.lengths)
    return Side(inputs.keys(found["user_id"]), lists=lists)


def _latest(lists: Jagged, longest: int) -> Jagged:
    """The last `longest` values of each list, and an empty list at the end."""
    lengths = lists.lengths.numpy()
    from_end = np.repeat(np.cumsum(lengths), lengths) - np.arange(lengths.sum())
    kept = lists.values.numpy()[from_end <= longest]
    return Jagged(tensor(kept), tensor(np.append(np.minimum(lengths, longest), 0)))


def _tags(column: Any) -> Jagged:
    """`12,39` as [12, 39]; no tag is an empty list, as for the video that is not known."""
    coded = inputs.flat(column).dictionary_encode()
    texts = [*coded.dictionary.to_pylist(), ""]
    known = [[int(tag) for tag in text.split(",") if tag.strip().isdecimal()] for text in texts]
    codes = coded.indices.fill_null(len(texts) - 1).to_numpy(zero_copy_only=False)
    return Jagged.from_lists(known).select(
        tensor(np.append(codes.astype(np.int64), len(texts) - 1))
    )


def _days(column: Any) -> NDArray[np.float64]:
    """Days since 1970 of `2022-04-10`, in which the log's own days begin 8 hours earlier."""
    coded = inputs.flat(column).dictionary_encode()
    days = np.full(len(coded.dictionary) + 1, np.nan)
    for i, text in enumerate(coded.dictionary.to_pylist()):
        try:
            days[i] = np.datetime64(text, "D").astype(np.int64) - 8 / 24
        except ValueError:
            continue  # not known, as an empty one
    return days[coded.indices.fill_null(len(days) - 1).to_numpy(zero_copy_only=False)]


def _numbers(found: pa.Table, name: str) -> NDArray[np.float64]:
    return inputs.flat(found[name]).to_numpy(zero_copy_only=False).astype(np.float64)


def _read(folder: Path, pattern: str, by: str, names: tuple[str, ...], broken: Broken) -> pa.Table:
    """A CSV or Parquet table with these columns, sorted by id."""
    path = _one(folder, pattern, ".parquet", ".csv", ".csv.gz")
    if path.suffix == ".parquet":
        found = _read_parquet(path, (by, *names))
    else:
        found = _read_csv(path, by, names, broken)
    return found.sort_by(by)


def _one(folder: Path, pattern: str, *endings: str) -> Path:
    return find_files(folder, [f"{pattern}{end}" for end in endings], f"files {pattern}")[0]


def _read_parquet(path: Path, names: tuple[str, ...]) -> pa.Table:
    file = parquet.open_file(path)
    for name in names:
        if name not in file.schema_arrow.names:
            raise DataError(f"{path} has no column {name}; take the published table")
    try:
        return file.read(columns=list(names), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise parquet.unreadable(path, error) from None


def column_type(name: str) -> pa.DataType:
    """What a column of a CSV table is read as."""
    return pa.string() if name in _TEXT else pa.int64() if name in _IDS else pa.float64()


def _read_csv(path: Path, by: str, names: tuple[str, ...], broken: Broken) -> pa.Table:
    types = {name: column_type(name) for name in (by, *names)}
    form = TextFormat(names=(), types=types, required=frozenset({by}), quoted=True)
    form = with_header(path, form)
    pieces = list(rows(path, form, lambda block, _: table(block, form), broken))
    empty = pa.schema([pa.field(name, kind) for name, kind in types.items()]).empty_table()
    return pa.concat_tables([empty, *pieces])
