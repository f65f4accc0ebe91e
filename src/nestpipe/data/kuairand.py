"""KuaiRand: watch events joined with what is known of the user and the video beforehand.

Reads the published CSV files (log_standard_*, user_features_*, video_features_basic_*) and the same
tables as Parquet. The video statistics are never read: they are averages over the whole period, the
test days included. Nor is anything of the log that is only known after the video was shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestpipe.batch import Batch
from nestpipe.data import arrow, parquet
from nestpipe.data.broken import Broken, RowError
from nestpipe.data.config import DataConfig, KuaiRandConfig, Split
from nestpipe.data.files import find_files
from nestpipe.data.kuairand_tables import (
    DAY_S,
    USER_KEYS,
    VIDEO_KEYS,
    Side,
    read_history,
    read_users,
    read_videos,
)
from nestpipe.data.source import (
    DENSE,
    HISTORY,
    LABEL,
    Column,
    features_column,
    keys_column,
    label_column,
    tensor,
)
from nestpipe.data.stream import Chunk, Stream
from nestpipe.data.text import Format, rows, table, with_header
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged

LOGS = ("log_standard_*.csv", "log_standard_*.csv.gz", "log_standard_*.parquet")
LOG = ("user_id", "video_id", "date", "hourmin", "time_ms", "duration_ms", "tab")
"""What is read of a log row besides its label."""
LOG_KEYS = ("tab", "hour")
HISTORY_LABEL = "history_long_view"
"""Aligned with the history: 1 where that video was watched for long."""


def open_kuairand(config: DataConfig, split: Split) -> Stream:
    """The events of a split's days, in windows; a CSV file or a row group is a chunk."""
    chosen = config.kuairand
    days = {
        "train": chosen.train_days,
        "validation": chosen.validation_days,
        "test": chosen.test_days,
    }[split]
    if not days:
        raise ConfigError(f"there is no {split} split; set data.kuairand.{split}_days")
    files = find_files(config.path, LOGS, "KuaiRand logs (log_standard_*)")
    folder = Path(config.path) if Path(config.path).is_dir() else Path(config.path).parent
    broken = Broken(config.max_broken)
    join = Join(
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
        broken=broken,
        name=f"the {split} split of {config.path}",
    )


@dataclass(frozen=True, slots=True)
class Join:
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
        return (
            *(keys_column(name, single=True) for name in names),
            *(keys_column(name) for name in lists),
            features_column(("log_duration", *self.users.fields, *self.videos.fields)),
            label_column(),
        )

    def batch(self, log: Any) -> Batch:
        """The rows of the split's days, with everything known about them."""
        found = {name: arrow.keys(log[name]) for name in (*LOG, self.config.label)}
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


def _chunks(file: Path, join: Join) -> Iterator[Chunk]:
    names = (*LOG, join.config.label)
    if file.suffix == ".parquet":
        yield from _parquet_chunks(file, join, names)
        return
    types: dict[str, pa.DataType] = dict.fromkeys(names, pa.int64())
    form = with_header(file, Format(names=(), types=types, required=frozenset(names), quoted=True))

    def parse(block: bytes, _: int) -> Batch:
        return join.batch(_checked(table(block, form), join.config.label))

    yield Chunk(lambda broken: rows(file, form, parse, broken))


def _parquet_chunks(file: Path, join: Join, names: tuple[str, ...]) -> Iterator[Chunk]:
    opened = parquet.open_file(file)
    parquet.check(opened.schema_arrow, parquet.Layout(names, frozenset(names), (), ()), file)
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
                arrow.keys(piece["date"]) for piece in parquet.row_group(file, group, ["date"])
            ]
            return sum(int(((days >= first) & (days <= last)).sum()) for days in dates)

        yield Chunk(read, count)
        begin += opened.metadata.row_group(group).num_rows


def _checked(log: pa.Table, label: str) -> pa.Table:
    values = arrow.keys(log[label])
    if not np.isin(values, (0, 1)).all():
        raise RowError(f"{label} is {values[~np.isin(values, (0, 1))][0]}, not 0 or 1")
    return log


def _without_broken(
    piece: Any, names: tuple[str, ...], file: Path, begin: int, broken: Broken
) -> Any:
    """The rows of a Parquet piece that have all columns and a label of 0 or 1."""
    good = np.isin(arrow.keys(piece[names[-1]]), (0, 1))
    for name in names:
        good &= ~arrow.flat(piece[name]).is_null().to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(~good).tolist():
        broken.add(
            f"row {begin + row + 1} of {file}", f"a column is empty or {names[-1]} not 0 or 1"
        )
    return piece if good.all() else piece.filter(pa.array(good))
