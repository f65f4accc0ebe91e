"""The tables that KuaiRand's log is joined with, held in memory: users, videos, histories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from nestpipe.data import arrow, parquet
from nestpipe.data.broken import Broken
from nestpipe.data.files import find_files
from nestpipe.data.source import MISSING, tensor
from nestpipe.data.text import Format, rows, table, with_header
from nestpipe.errors import DataError
from nestpipe.jagged import Jagged

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
        arrow.keys(found["user_id"]),
        {name: np.append(arrow.keys(found[name]), MISSING) for name in USER_KEYS},
        dense=np.vstack([np.stack(counts, axis=1), np.zeros((1, len(USER_COUNTS)))]),
        fields=tuple(f"log_{name}" for name in USER_COUNTS),
    )


def read_videos(folder: Path, broken: Broken) -> Side:
    """Video features that were known on upload; the dense one is the day of it, or nan."""
    wanted = (*VIDEO_KEYS, "upload_dt", "tag")
    found = _read(folder, "video_features_basic*", "video_id", wanted, broken)
    return Side(
        arrow.keys(found["video_id"]),
        {name: np.append(arrow.keys(found[name]), MISSING) for name in VIDEO_KEYS},
        {"tag": _tags(found["tag"])},
        dense=np.append(_days(found["upload_dt"]), np.nan)[:, None],
        fields=("log_age_days",),
    )


def read_history(folder: Path, longest: int) -> Side:
    """What each user watched before the log begins, the latest `longest` videos."""
    path = _one(folder, "user_history*", ".parquet")
    names = ("user_id", "watch_seq", "watch_long_view")
    found = _read_parquet(path, names).sort_by("user_id")
    lists = {"history": "watch_seq", "history_long_view": "watch_long_view"}
    return Side(
        arrow.keys(found["user_id"]),
        lists={name: _latest(arrow.lists(found[of]), longest) for name, of in lists.items()},
    )


def _latest(lists: Jagged, longest: int) -> Jagged:
    """The last `longest` values of each list, and an empty list at the end."""
    lengths = lists.lengths.numpy()
    from_end = np.repeat(np.cumsum(lengths), lengths) - np.arange(lengths.sum())
    kept = lists.values.numpy()[from_end <= longest]
    return Jagged(tensor(kept), tensor(np.append(np.minimum(lengths, longest), 0)))


def _tags(column: Any) -> Jagged:
    """`12,39` as [12, 39]; no tag is an empty list, as for the video that is not known."""
    coded = arrow.flat(column).dictionary_encode()
    texts = [*coded.dictionary.to_pylist(), ""]
    known = [[int(tag) for tag in text.split(",") if tag.strip().isdecimal()] for text in texts]
    codes = coded.indices.fill_null(len(texts) - 1).to_numpy(zero_copy_only=False)
    return Jagged.from_lists(known).select(
        tensor(np.append(codes.astype(np.int64), len(texts) - 1))
    )


def _days(column: Any) -> NDArray[np.float64]:
    """Days since 1970 of `2022-04-10`, in which the log's own days begin 8 hours earlier."""
    coded = arrow.flat(column).dictionary_encode()
    days = np.full(len(coded.dictionary) + 1, np.nan)
    for i, text in enumerate(coded.dictionary.to_pylist()):
        try:
            days[i] = np.datetime64(text, "D").astype(np.int64) - 8 / 24
        except ValueError:
            continue  # not known, as an empty one
    return days[coded.indices.fill_null(len(days) - 1).to_numpy(zero_copy_only=False)]


def _numbers(found: pa.Table, name: str) -> NDArray[np.float64]:
    return arrow.flat(found[name]).to_numpy(zero_copy_only=False).astype(np.float64)


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
    form = Format(names=(), types=types, required=frozenset({by}), quoted=True)
    form = with_header(path, form)
    pieces = list(rows(path, form, lambda block, _: table(block, form), broken))
    empty = pa.schema([pa.field(name, kind) for name, kind in types.items()]).empty_table()
    return pa.concat_tables([empty, *pieces])
