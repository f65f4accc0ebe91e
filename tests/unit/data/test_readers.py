"""Each format: what becomes of its columns, its splits and its gaps."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from nestpipe.data import (
    DENSE,
    MISSING,
    CriteoConfig,
    DataConfig,
    KuaiRandConfig,
    MovieLensConfig,
    ParquetConfig,
    Split,
    inputs,
    open_source,
)
from nestpipe.data.inputs import keeps, num_kept
from nestpipe.data.order import text_key
from nestpipe.errors import ConfigError, DataError

KUAIRAND = Path(__file__).resolve().parents[4] / "shared" / "data" / "kuairand-pure"


def everything(config, split: Split = "train"):
    """All samples of a split in the order of the files, as one batch."""
    options = {"rank": 0, "ranks": 1, "seed": 0}
    source = open_source(config, split)
    (batch,) = source.batches(global_batch=10**6, **options)
    return batch


def test_a_string_has_the_same_key_for_good():
    assert text_key("full_active") == -5135212668805310137
    assert text_key("") == text_key("")
    assert text_key("ä") != text_key("a")


def test_parquet_columns_by_config(make):
    batch = everything(make("parquet", shuffle=False))
    assert batch.dense[DENSE].shape == (48, 2)
    assert batch.dense[DENSE][0, 1] == 0  # a null
    assert batch.sparse["word"].to_lists()[:4] == [
        [text_key("w0")],
        [text_key("w1")],
        [MISSING],
        [text_key("w3")],
    ]
    assert batch.sparse["tags"].to_lists()[:4] == [[], [0], [0, 1], []]
    assert batch.dense["label"][:4].tolist() == [0, 1, 0, 1]


def test_parquet_columns_by_type(tmp_path):
    rows = pa.table(
        {
            "a": pa.array([1, 2], type=pa.uint64()),
            "b": pa.array([[1], None]),
            "c": pa.array(["x", "x"]).dictionary_encode(),
            "d": pa.array([0.5, 1.5]),
            "when": pa.array([1, 2], type=pa.timestamp("s")),
            "noise": pa.array([1, 2]),
            "fixed": pa.array([[1, 2], [3, 4]], type=pa.list_(pa.int32(), 2)),
        }
    )
    pq.write_table(rows, tmp_path / "a.parquet")
    config = DataConfig(
        kind="parquet", path=str(tmp_path), shuffle=False, parquet=ParquetConfig(ignore=("noise",))
    )
    batch = everything(config)
    assert {name: keys.to_lists() for name, keys in batch.sparse.items()} == {
        "a": [[1], [2]],
        "b": [[1], []],
        "c": [[text_key("x")]] * 2,
        "fixed": [[1, 2], [3, 4]],
    }
    assert batch.dense[DENSE].tolist() == [[0.5], [1.5]]
    assert "label" not in batch.dense


def test_several_labels_keep_their_names(make):
    config = make("parquet")
    two = ParquetConfig(sparse=("user",), labels=("label", "n"), any_labels=True)
    config = DataConfig(kind="parquet", path=config.path, parquet=two, max_broken=9)
    assert {"label", "n"} <= everything(config).dense.keys()


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_files_of_another_file_system_are_read_by_uri(tmp_path, lists, make, scheme):
    config = make("parquet", shards=2)
    if scheme == "memory":
        memory = fsspec.filesystem("memory")
        uri = f"memory://{tmp_path.name}"
        for file in tmp_path.glob("*.parquet"):
            memory.pipe(f"/{tmp_path.name}/{file.name}", file.read_bytes())
        memory.pipe(f"/{tmp_path.name}/_temporary/0.parquet", b"half written")
    else:
        uri = f"file://{tmp_path}"
    remote = replace(config, path=uri)
    options = {"global_batch": 7, "rank": 1, "ranks": 2, "seed": 3}
    found, expected = (open_source(one).batches(**options) for one in (remote, config))
    assert [lists(batch) for batch in found] == [lists(batch) for batch in expected]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("memory://nothing", "there is no file or folder 'memory://nothing'; check data.path"),
        ("nosuch://bucket/clicks", "cannot open 'nosuch://bucket/clicks'"),
    ],
)
def test_a_uri_that_leads_nowhere_is_refused(path, sentence):
    with pytest.raises((ConfigError, DataError), match=sentence):
        open_source(DataConfig(kind="parquet", path=path))


class StoreError(Exception):
    """What clients of object stores raise is often no OSError."""


class Sulking(MemoryFileSystem):
    """Lists its files, and reads none of them."""

    protocol = "sulking"
    store: ClassVar[dict[str, Any]] = {}
    error: ClassVar[Exception] = StoreError("no token for this bucket")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("sulking:/"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "sulks" in path and mode == "rb":
            raise self.error
        return super()._open(path, mode, **options)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        if "locked" in path:
            raise self.error
        return super().info(path, **options)


@pytest.mark.parametrize("error", [StoreError("no token for this bucket"), OSError("timed out")])
def test_a_store_that_answers_with_an_error_is_not_taken_for_a_damaged_file(monkeypatch, error):
    fsspec.register_implementation("sulking", Sulking, clobber=True)
    monkeypatch.setattr(Sulking, "error", error)
    Sulking().pipe_file("/clicks/sulks.parquet", b"anything")
    with pytest.raises(DataError, match=rf"cannot read sulking://clicks/sulks.parquet: {error}; "):
        open_source(DataConfig(kind="parquet", path="sulking://clicks"))
    with pytest.raises(DataError, match=rf"cannot read 'sulking://locked' \({error}\); check data"):
        open_source(DataConfig(kind="parquet", path="sulking://locked"))


def test_a_bucket_whose_region_nobody_tells_is_refused(monkeypatch):
    def from_uri(uri: str) -> None:
        raise OSError("When resolving region for bucket 'b': Could not resolve host. Details: ...")

    monkeypatch.setattr(inputs.arrow_fs, "FileSystem", SimpleNamespace(from_uri=from_uri))
    with pytest.raises(DataError, match=r"'s3://b/clicks' \(When .*\); check data.path, the con"):
        open_source(DataConfig(kind="parquet", path="s3://b/clicks"))


def write_labels(folder, labels, statistics=True, **columns):
    rows = {"item": pa.array(range(len(labels))), "label": pa.array(labels), **columns}
    pq.write_table(pa.table(rows), folder / "clicks.parquet", write_statistics=statistics)
    return DataConfig(kind="parquet", path=str(folder), shuffle=False)


@pytest.mark.parametrize("statistics", [True, False])
def test_labels_outside_0_to_1_are_refused_unless_they_are_wanted(tmp_path, statistics):
    config = write_labels(tmp_path, [1, 7, 0, 10], statistics)
    with pytest.raises(DataError, match=r"label is (10|7), not from 0 to 1, so make it"):
        everything(config)
    free = replace(config, parquet=ParquetConfig(any_labels=True))
    assert everything(free).dense["label"].tolist() == [1, 7, 0, 10]
    ratings = replace(config, parquet=ParquetConfig(positive_from=7))
    assert everything(ratings).dense["label"].tolist() == [0, 1, 0, 1]
    skipped = replace(config, max_broken=2)
    assert everything(skipped).dense["label"].tolist() == [1, 0]


def test_labels_that_are_all_alike_are_refused_for_training(tmp_path):
    config = write_labels(tmp_path, [1, 1, 1])
    with pytest.raises(DataError, match=r"every label of .* is 1, so there is nothing to learn"):
        open_source(config)
    assert everything(replace(config, test_path=str(tmp_path)), "test").size == 3


def test_labels_that_turn_out_to_be_alike_are_told(tmp_path, caplog):
    assert everything(write_labels(tmp_path, [0, 0, 0], statistics=False)).size == 3
    assert "every label of the pass was 0" in caplog.text


def test_a_second_label_is_no_feature(tmp_path):
    config = write_labels(tmp_path, [1, 0], label_like=pa.array([0.0, 1.0]))
    with pytest.raises(DataError, match="has label_like beside the label label; name all labels"):
        open_source(config)
    ignored = replace(config, parquet=ParquetConfig(ignore=("label_like",)))
    assert everything(ignored).dense.keys() == {"label"}


def test_labels_of_16_bits_are_labels(tmp_path):
    config = write_labels(tmp_path, np.array([1, 0], np.float16))
    assert everything(config).dense["label"].tolist() == [1, 0]


def write_files(folder, **files):
    """Each file with its columns."""
    folder.mkdir(exist_ok=True)
    for name, columns in files.items():
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return str(folder)


def test_held_out_files_have_the_columns_of_training_in_its_order(tmp_path):
    """Chosen by their own types, features would be in the places of others."""
    train = {"user": [1, 2], "a": [0.1, 0.2], "b": [1.0, 2.0], "label": [0.0, 1.0]}
    path = write_files(tmp_path / "train", rows=train)
    other = {"more": [9], "label": [1.0], "b": [3.0], "a": [0.3], "user": [3]}
    test_path = write_files(tmp_path / "test", rows=other)
    config = DataConfig(kind="parquet", path=path, test_path=test_path)
    assert open_source(config, "test").columns == open_source(config).columns
    assert everything(config, "test").dense[DENSE].tolist() == [[pytest.approx(0.3), 3.0]]
    write_files(tmp_path / "test", rows={"user": [3], "b": [3.0], "label": [1.0]})
    with pytest.raises(DataError, match=r"test/rows.parquet has no column a, it has user, b"):
        open_source(config, "test")


def test_keys_that_are_text_in_one_file_and_numbers_in_another_are_refused(tmp_path):
    one, two = {"user": [1], "label": [0.0]}, {"user": ["1"], "label": [1.0]}
    path = write_files(tmp_path / "files", one=one, two=two)
    sentence = "column user of .*two.parquet is string, and elsewhere its keys are whole numbers"
    with pytest.raises(DataError, match=sentence):
        open_source(DataConfig(kind="parquet", path=path))
    users = write_files(tmp_path / "users", one={"history": [[1, 2]], "target": ["2"]})
    with pytest.raises(DataError, match=r"column target of .* is string, and elsewhere its keys"):
        open_source(DataConfig(kind="parquet", path=users))


@pytest.mark.parametrize("options", [{}, {"max_broken": 1}])
def test_a_file_without_rows_may_have_any_types(tmp_path, options):
    """Programs that write no rows often do not know of what."""
    empty = {"user": pa.array([], pa.null()), "label": pa.array([], pa.string())}
    full = {"user": [5, 6], "label": [0.0, 1.0]}
    path = write_files(tmp_path / "files", a=empty, b=full, c={"other": pa.array([], pa.int8())})
    config = DataConfig(kind="parquet", path=path, shuffle=False, **options)
    assert everything(config).sparse["user"].values.tolist() == [5, 6]


def test_a_string_that_is_not_utf_8_has_a_key(tmp_path):
    words = pa.array([b"\xff", "é".encode()]).view(pa.string())
    path = write_files(tmp_path / "files", rows={"word": words, "label": [0.0, 1.0]})
    found = everything(DataConfig(kind="parquet", path=path, shuffle=False))
    assert found.sparse["word"].values.tolist() == [text_key(b"\xff"), text_key("é")]


def test_the_key_that_stands_for_none_is_told_once(tmp_path, caplog):
    config = write_labels(tmp_path, [1, 0, 1], user=pa.array([-1, 2, None]))
    assert everything(config).sparse["user"].values.tolist() == [-1, 2, -1]
    everything(config)
    assert caplog.text.count("column user of") == 1
    assert "has the key -1, which stands for a missing one" in caplog.text


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"sparse": ("usr",)}, "0.parquet has no column usr"),
        ({"sparse": ("x",)}, "column x of .* is double, which cannot be keys"),
        ({"dense": ("word",)}, "column word of .* is string, which cannot be a number per row"),
    ],
)
def test_a_column_that_does_not_fit_is_named(make, columns, sentence):
    path = make("parquet").path
    with pytest.raises(DataError, match=sentence):
        open_source(DataConfig(kind="parquet", path=path, parquet=ParquetConfig(**columns)))


def test_rows_held_out_are_in_one_split_each(make, lists):
    parts = [everything(make("parquet held out"), split) for split in _SPLITS]
    assert [part.size for part in parts] == [30, 9, 9]
    rows = [str(row) for part in parts for row in lists(part)]
    assert len(set(rows)) == 48


_SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@pytest.mark.parametrize("every", [0, 3, 7])
def test_held_out_rows_are_counted_without_reading(every):
    for split in _SPLITS:
        for begin in range(10):
            for end in range(begin, 25):
                kept = keeps(np.arange(begin, end), split, every).sum()
                assert num_kept(begin, end, split, every) == kept


def test_other_paths_can_be_the_test_split(make, tmp_path):
    config = make("criteo")
    day = str(tmp_path / "day_1.tsv")
    assert everything(DataConfig(kind="criteo", path=config.path, test_path=day), "test").size == 25
    with pytest.raises(ConfigError, match=r"there is no validation split; set data\.validation_"):
        open_source(config, "validation")


def test_ratings_are_split_by_time(make, tmp_path):
    config = make("movielens ratings", shuffle=False)
    lines = (tmp_path / "ratings.dat").read_text().splitlines()
    rows = [tuple(map(int, line.split("::"))) for line in lines]
    rows.sort(key=lambda row: row[3])
    parts = [everything(config, split) for split in _SPLITS]
    users = [user for part in parts for user in part.sparse["user"].values.tolist()]
    labels = [label for part in parts for label in part.dense["label"].tolist()]
    assert users == [row[0] for row in rows]
    assert labels == [float(row[2] >= 4) for row in rows]
    assert parts[1].size == parts[2].size == round(len(rows) * 0.1)


def test_the_last_item_is_for_test_and_the_one_before_to_validate(tmp_path):
    (tmp_path / "ratings.dat").write_text(
        "1::50::5::9\n1::10::5::1\n1::30::1::3\n1::20::5::2\n1::40::5::3\n"
        "2::10::5::1\n2::20::5::2\n3::30::5::1\n3::20::5::3\n3::10::5::2\n"
    )
    config = DataConfig(kind="movielens", path=str(tmp_path), movielens=MovieLensConfig(max_len=3))
    train, validation, test = (everything(config, split) for split in _SPLITS)
    assert train.sparse["history"].to_lists() == [[10, 20, 30]]
    assert validation.sparse["history"].to_lists() == [[10, 20, 30], [30]]
    assert validation.dense["target"].tolist() == [40, 10]
    assert train.sparse["timestamps"].to_lists() == [[1, 2, 3]]
    assert validation.sparse["timestamps"].to_lists() == [[1, 2, 3], [1]]
    assert validation.dense["time"].tolist() == [3, 2]  # items 30 and 40 came at the same time
    assert test.sparse["history"].to_lists() == [[20, 30, 40], [30, 10]]
    assert test.dense["target"].tolist() == [50, 20]


def test_one_held_out_item_leaves_the_one_before_to_training(tmp_path):
    (tmp_path / "ratings.dat").write_text("1::10::5::1\n1::20::5::2\n1::30::5::3\n1::40::5::4\n")
    options = MovieLensConfig(held_out=1)
    config = DataConfig(kind="movielens", path=str(tmp_path), movielens=options)
    assert everything(config, "train").sparse["history"].to_lists() == [[10, 20, 30]]
    test = everything(config, "test")
    assert test.sparse["history"].to_lists() == [[10, 20, 30]]
    assert test.dense["target"].tolist() == [40]
    with pytest.raises(ConfigError, match="held_out is 1, so there is no validation split"):
        everything(config, "validation")
    with pytest.raises(ConfigError, match="held_out is 3; give 2"):
        MovieLensConfig(held_out=3)


def test_both_forms_of_movielens_read_the_same(tmp_path, make, lists):
    dat = everything(make("movielens ratings"))
    text = (tmp_path / "ratings.dat").read_text().replace("::", ",")
    file = tmp_path / "ratings.csv"
    file.write_text("userId,movieId,rating,timestamp\r\n" + text.replace("\n", "\r\n"))
    csv_config = DataConfig(
        kind="movielens", path=str(file), movielens=MovieLensConfig(use="ratings")
    )
    assert lists(everything(csv_config)) == lists(dat)


def test_both_forms_of_kuairand_read_the_same(tmp_path, lists, write_kuairand):
    found = []
    for form in ("csv", "parquet"):
        (tmp_path / form).mkdir()
        write_kuairand(tmp_path / form, form)
        found.append(everything(DataConfig(kind="kuairand", path=str(tmp_path / form)), "test"))
    assert lists(found[0]) == lists(found[1])


def test_a_kuairand_sample_has_what_was_known_beforehand(make):
    batch = everything(make("kuairand parquet", shuffle=False))
    user, video = (batch.sparse[name].values for name in ("user_id", "video_id"))
    known = {name: keys.to_lists() for name, keys in batch.sparse.items()}
    for i in range(batch.size):
        who, what = int(user[i]), int(video[i])
        assert known["author_id"][i] == [100 + what]
        assert known["tag"][i] == [[12, 39], [2], [], [7], [8]][what]
        assert known["onehot_feat4"][i] == [MISSING if who in (1, 5) else 1]
        assert known["history"][i] == (list(range(who))[-3:] if who < 4 else [])
        assert batch.dense[DENSE][i, 0] == pytest.approx(math.log1p(i))
        assert batch.dense[DENSE][i, 1] == pytest.approx(math.log1p(10 * who if who < 5 else 0))


def test_kuairand_events_have_their_time_and_histories_where_the_table_has_it(make, tmp_path):
    plain = everything(make("kuairand parquet", shuffle=False))
    assert plain.dense["time"].tolist() == [1_650_900_000 + i for i in range(plain.size)]
    assert "timestamps" not in plain.sparse
    users = pq.read_table(tmp_path / "user_history.parquet")
    times = [[1000 * (10 + i) for i in range(user)] for user in range(4)]
    pq.write_table(
        users.append_column("watch_time_ms", pa.array(times, pa.list_(pa.int64()))),
        tmp_path / "user_history.parquet",
    )
    config = DataConfig(
        kind="kuairand", path=str(tmp_path), kuairand=KuaiRandConfig(history_len=3), shuffle=False
    )
    batch = everything(config)
    assert "timestamps" not in [c.name for c in open_source(config).columns if c.kind == "keys"]
    for history, seen in zip(
        batch.sparse["history"].to_lists(), batch.sparse["timestamps"].to_lists(), strict=True
    ):
        assert seen == [10 + video for video in history]


USERS = {
    "history": [[5, 3, 9, 7], [1, 2], [4, 4, 8], None],
    "timestamps": [[10, 10, 5, 20], [1, 2], [3, 2, 1], []],
}


def write_users(folder, **columns):
    table = {name: pa.array(values) for name, values in (USERS | columns).items()}
    pq.write_table(pa.table(table), folder / "users.parquet", row_group_size=3)
    return DataConfig(kind="parquet", path=str(folder), shuffle=False)


def test_a_parquet_sequence_is_in_the_order_of_its_times_and_ends_held_out(tmp_path):
    config = write_users(tmp_path)
    train, validation, test = (everything(config, split) for split in _SPLITS)
    assert train.sparse["history"].to_lists() == [
        [9, 5],
        [],
        [8],
        [],
    ]  # 5 and 3 came at the same time
    assert validation.sparse["history"].to_lists() == [[9, 5], [8]]
    assert validation.dense["target"].tolist() == [3, 4]
    assert validation.dense["time"].tolist() == [10, 2]
    assert test.sparse["history"].to_lists() == [[9, 5, 3], [8, 4]]
    assert test.sparse["timestamps"].to_lists() == [[5, 10, 10], [1, 2]]
    assert test.dense["target"].tolist() == [7, 4]
    assert test.dense["sample_id"].tolist() == [0, 2]


def test_parquet_sequences_with_rows_of_their_own_to_test_are_trained_whole(tmp_path):
    config = replace(write_users(tmp_path), test_path=str(tmp_path))
    train = everything(config)
    assert train.sparse["history"].to_lists() == [[9, 5, 3, 7], [1, 2], [8, 4, 4], []]
    test = everything(config, "test")
    assert test.sparse["history"].to_lists() == [[9, 5, 3], [1], [8, 4]]
    assert test.dense["target"].tolist() == [7, 2, 4]


def test_a_column_of_targets_follows_the_history(tmp_path):
    config = write_users(tmp_path, target=[1, 2, 3, 4], timestamps=[[1] * 4, [2] * 2, [3] * 3, []])
    test = everything(replace(config, test_path=str(tmp_path)), "test")
    assert test.sparse["history"].to_lists() == [[5, 3, 9, 7], [1, 2], [4, 4, 8]]
    assert test.dense["target"].tolist() == [1, 2, 3]
    train = everything(replace(config, test_path=str(tmp_path)))
    assert train.sparse["history"].to_lists()[0] == [5, 3, 9, 7, 1]
    assert train.sparse["timestamps"].to_lists()[0] == [1] * 5


@pytest.mark.parametrize("own", [{}, {"time": [0, 0, 0, 9]}])
def test_a_target_comes_after_items_in_any_order_of_time(tmp_path, own):
    config = write_users(tmp_path, target=[1, 2, 3, 4], **own)
    test = everything(replace(config, test_path=str(tmp_path)), "test")
    assert test.sparse["history"].to_lists() == [[9, 5, 3, 7], [1, 2], [8, 4, 4]]
    assert test.dense["target"].tolist() == [1, 2, 3]
    assert test.dense["time"].tolist() == ([0, 0, 0] if own else [20, 2, 3])


def test_times_of_other_types_are_whole_seconds(tmp_path):
    days = pa.array([[86_400_000] * 4, [1] * 2, [999] * 3, []], pa.list_(pa.timestamp("ms")))
    config = write_users(tmp_path, timestamps=days)
    assert everything(config).sparse["timestamps"].to_lists() == [[86_400] * 2, [], [0], []]


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"timestamps": [[1], [1, 2], [1, 2, 3], []]}, "row 1 of .* timestamps has more or fewer"),
        ({"history": [[5, None, 9, 7], [1, 2], [4, 4, 8], []]}, "row 1 .* history has an empty"),
        ({"timestamps": [["a"], ["b"], ["c"], []]}, "timestamps of .* cannot be a list of times"),
        (
            {"timestamps": [[1.0] * 4, [2.0, math.nan], [3.0] * 3, []]},
            "row 2 of .* timestamps has an entry that is no time",
        ),
        ({"target": [1] * 4, "time": [0.5, 1.0, math.inf, 2.0]}, "row 3 of .* time is no time"),
    ],
)
def test_sequences_that_make_no_sense_are_refused(tmp_path, columns, sentence):
    with pytest.raises(DataError, match=sentence):
        everything(write_users(tmp_path, **columns))


def test_kuairand_history_needs_its_file(make):
    path = make("kuairand csv").path
    with pytest.raises(DataError, match=r"there are no files user_history\*"):
        open_source(DataConfig(kind="kuairand", path=path, kuairand=KuaiRandConfig(history_len=5)))


@pytest.mark.skipif(not KUAIRAND.exists(), reason="no KuaiRand data beside this repository")
def test_the_real_kuairand_has_the_published_rows():
    published: list[tuple[Split, int, float]] = [
        ("train", 94_784, 0.307),
        ("test", 133_545, 0.313),
    ]
    for split, size, rate in published:
        config = DataConfig(kind="kuairand", path=str(KUAIRAND))
        source = open_source(config, split)
        assert source.num_samples == size
        assert "show_cnt" not in str(source.columns)
        parts = list(source.batches(global_batch=100_000, rank=1, ranks=2, seed=0))
        assert [part.size for part in parts] == ([47_392] if split == "train" else [50_000, 16_772])
        assert float(parts[0].dense["label"].mean()) == pytest.approx(rate, abs=0.01)
        assert parts[0].dense[DENSE].isfinite().all()


def test_criteo_categories_are_their_numbers_and_gaps_have_a_key(make, tmp_path):
    config = make("criteo", shuffle=False)
    batch = everything(config)
    raw = DataConfig(
        kind="criteo", path=config.path, shuffle=False, criteo=CriteoConfig(log_dense=False)
    )
    counts = everything(raw).dense[DENSE]
    with (tmp_path / "day_0.tsv").open() as file:
        rows = list(csv.reader(file, delimiter="\t"))
    for i, row in enumerate(rows):
        assert counts[i].tolist() == [int(cell or 0) for cell in row[1:14]]
        for j, cell in enumerate(row[14:]):
            key = int(cell, 16) if cell else MISSING
            assert batch.sparse[f"C{j + 1}"].values[i] == key
    assert batch.dense[DENSE].allclose(counts.clamp(min=0).log1p())
