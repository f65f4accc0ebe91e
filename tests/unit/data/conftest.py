"""Tiny data sets of every format, and batches as plain lists."""

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestpipe.data import (
    DataConfig,
    KuaiRandConfig,
    MovieLensConfig,
    ParquetConfig,
    SyntheticConfig,
)
from nestpipe.data.public_sets import USER_COUNTS, USER_KEYS
from nestpipe.data.source import PASS, SAMPLE_ID

KINDS = [
    "synthetic",
    "synthetic keys",
    "synthetic sequence",
    "parquet",
    "parquet held out",
    "parquet shards",
    "parquet sequences",
    "movielens ratings",
    "movielens sequences",
    "kuairand csv",
    "kuairand parquet",
    "criteo",
    "criteo gz",
]


def as_lists(batch) -> list[tuple]:
    """A batch as one tuple per sample, to compare and to sort; without the sample's name."""
    contents = sorted(set(batch.dense) - {SAMPLE_ID, PASS})
    columns = [batch.dense[name].tolist() for name in contents]
    columns += [batch.sparse[name].to_lists() for name in sorted(batch.sparse)]
    return list(zip(*columns, strict=True))


@pytest.fixture
def lists():
    return as_lists


@pytest.fixture(params=KINDS)
def config(request, tmp_path) -> DataConfig:
    """A config for every kind of data, over files of a few dozen rows."""
    return make_config(request.param, tmp_path)


@pytest.fixture
def make(tmp_path):
    """A config for one kind of data; settings of `[data]` may be given."""
    return lambda kind, **settings: make_config(kind, tmp_path, **settings)


def make_config(kind: str, folder: Path, **settings: Any) -> DataConfig:
    settings = {"shuffle_window": 16, **settings}
    name, _, more = kind.partition(" ")
    if name == "synthetic":
        world = {
            "": {},
            "keys": {"keys_per_sample": (0, 3)},
            "sequence": {"flavour": "sequence", "min_len": 2, "max_len": 5},
        }[more]
        small: dict[str, Any] = {
            "samples": 45,
            "test_samples": 9,
            "num_tables": 3,
            "num_dense": 2,
            "num_keys": 9,
        }
        return DataConfig(synthetic=SyntheticConfig(**small | world), **settings)
    if name == "parquet":
        write_parquet(folder)
        forms: dict[str, Any] = {"held out": {"test_every": 5}, "shards": {"shards": 4}}
        every: dict[str, Any] = forms.get(more, {})
        if more == "sequences":
            columns = ParquetConfig(history="tags", max_len=2)
            settings = {"shards": 2, "test_path": str(folder), **settings}
            return DataConfig(kind="parquet", path=str(folder), parquet=columns, **settings)
        columns = ParquetConfig(sparse=("user", "word", "tags"), dense=("x", "n"))
        return DataConfig(kind="parquet", path=str(folder), parquet=columns, **every | settings)
    if name == "movielens":
        write_ratings(folder)
        use = MovieLensConfig(use=more, max_len=4)  # pyright: ignore[reportArgumentType]
        return DataConfig(kind="movielens", path=str(folder), movielens=use, **settings)
    if name == "kuairand":
        write_kuairand(folder, more)
        chosen = KuaiRandConfig(history_len=3 if more == "parquet" else 0)
        return DataConfig(kind="kuairand", path=str(folder), kuairand=chosen, **settings)
    write_criteo(folder, more == "gz")
    return DataConfig(kind="criteo", path=str(folder), **settings)


def write_parquet(folder: Path) -> None:
    random = np.random.default_rng(0)
    for file in range(3):
        size = 15 + file
        rows = pa.table(
            {
                "user": pa.array(random.integers(0, 1 << 40, size)),
                "word": pa.array([None if i == 2 else f"w{i % 4}" for i in range(size)]),
                "tags": pa.array([list(range(i % 3)) for i in range(size)]),
                "x": pa.array(random.normal(size=size)),
                "n": pa.array([None, *range(1, size)], type=pa.int32()),
                "label": pa.array([i % 2 for i in range(size)], type=pa.int8()),
            }
        )
        pq.write_table(rows, folder / f"{file}.parquet", row_group_size=6)


def write_ratings(folder: Path, header: bool = False) -> None:
    random = np.random.default_rng(1)
    lines = [
        f"{user}::{item}::{random.integers(1, 6)}::{random.integers(0, 50)}\n"
        for user in range(20)
        for item in random.permutation(30)[: 1 + user % 7].tolist()
    ]
    random.shuffle(lines)
    if header:
        lines = ["userId,movieId,rating,timestamp\n", *(line.replace("::", ",") for line in lines)]
    (folder / ("ratings.csv" if header else "ratings.dat")).write_text("".join(lines))


def criteo_lines(size: int = 25, seed: int = 2) -> list[str]:
    random = np.random.default_rng(seed)
    lines = []
    for row in range(size):
        counts = ["" if count == 3 else str(count) for count in random.integers(-1, 9, 13)]
        words = ["" if word % 5 == 0 else f"{word:08x}" for word in random.integers(0, 1 << 32, 26)]
        lines.append("\t".join([str(row % 2), *counts, *words]) + "\n")
    return lines


def write_criteo(folder: Path, zipped: bool) -> None:
    for day in range(2):
        text = "".join(criteo_lines(seed=day))
        if zipped:
            (folder / f"day_{day}.gz").write_bytes(gzip.compress(text.encode()))
        else:
            (folder / f"day_{day}.tsv").write_text(text)


def write_kuairand(folder: Path, form: str) -> None:
    """Users 0 to 5, of whom the last is in no table, and videos 0 to 4."""
    random = np.random.default_rng(3)
    days = [20220425 + i % 6 if i < 30 else 20220501 + i % 8 for i in range(50)]
    log = [
        {
            "user_id": int(random.integers(0, 6)),
            "video_id": i % 5,
            "date": day,
            "hourmin": int(random.integers(0, 24)) * 100,
            "time_ms": 1_650_900_000_000 + i * 1000,
            "long_view": int(random.integers(0, 2)),
            "duration_ms": 1000 * i,
            "play_time_ms": 77,
            "tab": i % 3,
        }
        for i, day in enumerate(days)
    ]
    users = [
        {
            "user_id": user,
            **dict.fromkeys(USER_KEYS, user % 2),
            "user_active_degree": "full_active",
            "follow_user_num_range": "(0,10]",
            "fans_user_num_range": "0",
            "friend_user_num_range": "0",
            "register_days_range": "730+",
            "onehot_feat4": None if user == 1 else 1.0,
            **dict.fromkeys(USER_COUNTS, 10 * user),
        }
        for user in range(5)
    ]
    videos = [
        {
            "video_id": video,
            "author_id": 100 + video,
            "video_type": "NORMAL",
            "upload_dt": "2022-04-10",
            "upload_type": "Web",
            "music_id": 9_155_697_141,
            "music_type": 9.0,
            "tag": ["12,39", "2", None, "7", "8"][video],
        }
        for video in reversed(range(5))
    ]
    history = [
        {"user_id": user, "watch_seq": list(range(user)), "watch_long_view": [1] * user}
        for user in range(4)
    ]
    tables = {"log_standard_4_08_to_5_08": log, "user_features": users}
    tables |= {"video_features_basic": videos, "user_history": history}
    for name, rows in tables.items():
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet", row_group_size=9)
        elif name != "user_history":
            with (folder / f"{name}_pure.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
    # A trap: nothing may ever read this.
    (folder / f"video_features_statistic_pure.{form}").write_text("not to be opened")


@pytest.fixture(name="write_kuairand")
def _write_kuairand():
    return write_kuairand


@pytest.fixture(name="criteo_lines")
def _criteo_lines():
    return criteo_lines
