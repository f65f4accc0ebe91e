"""Broken rows are named by file and line; damaged files by name; neither ever passes silently."""

import gzip
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.data import DataConfig, MovieLensConfig, ParquetConfig, open_source, text
from nestpipe.errors import ConfigError, DataError


def count(config):
    """How many samples can be read, and what was said of the others."""
    source = open_source(config)
    options = {"global_batch": 4, "rank": 0, "ranks": 1, "seed": 0}
    return sum(batch.size for batch in source.batches(**options)), source.broken


def ratings(folder, *lines, **settings):
    (folder / "ratings.dat").write_text("\n".join(lines) + "\n")
    use = MovieLensConfig(use="ratings", test_fraction=0.01)
    return DataConfig(kind="movielens", path=str(folder), movielens=use, **settings)


GOOD = "1::2::3::4"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1::two::3::4", "movieId is 'two', no whole number"),
        ("1::2::3", "it has 3 columns, not 4"),
        ("1::2::3::4::5", "it has 5 columns, not 4"),
        ("", "it is blank"),
        ("1::::3::4", "movieId is empty"),
        ("1::2::nan::4", "rating is not finite"),
        ("1::2::x::4", "rating is 'x', no number"),
        ("1::99999999999999999999::3::4", "movieId is '99999999999999999999', no whole number"),
    ],
)
def test_a_broken_line_is_named_with_its_reason(tmp_path, line, reason):
    lines = [GOOD] * 17 + [line] + [GOOD] * 30
    with pytest.raises(DataError) as refused:
        count(ratings(tmp_path, *lines))
    assert str(refused.value) == (
        f"{tmp_path / 'ratings.dat'}:18 is broken: {reason}; "
        "correct it, or let broken rows be skipped with data.max_broken"
    )
    samples, broken = count(ratings(tmp_path, *lines, max_broken=1))
    assert samples == 47
    assert broken.count == 1
    assert broken.first == [f"{tmp_path / 'ratings.dat'}:18 ({reason})"]


def test_more_broken_lines_than_allowed_are_refused_with_the_first_of_them(tmp_path):
    lines = [GOOD, "x", GOOD, "y", GOOD, "z"]
    samples, broken = count(ratings(tmp_path, *lines, max_broken=3))
    assert (samples, broken.count) == (3, 3)
    with pytest.raises(DataError, match=r"more broken rows than data.max_broken = 2.*:2 .*:4 .*:6"):
        count(ratings(tmp_path, *lines, max_broken=2))


def test_blank_lines_at_the_end_and_a_missing_last_line_end_are_fine(tmp_path):
    assert count(ratings(tmp_path, GOOD, GOOD, "", "  ", ""))[0] == 2
    (tmp_path / "ratings.dat").write_text(f"{GOOD}\n{GOOD}")
    use = MovieLensConfig(use="ratings", test_fraction=0.01)
    assert count(DataConfig(kind="movielens", path=str(tmp_path), movielens=use))[0] == 2


def test_lines_are_counted_over_many_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("nestpipe.data.text.BLOCK", 64)
    lines = [GOOD] * 40 + ["1::2::3"] + [GOOD] * 40
    samples, broken = count(ratings(tmp_path, *lines, max_broken=5))
    assert samples == 78  # and one each to validate and to test
    assert broken.first == [f"{tmp_path / 'ratings.dat'}:41 (it has 3 columns, not 4)"]


@given(
    lines=st.lists(st.sampled_from(["a", "bb\t", "", " "]), max_size=12),
    block=st.integers(1, 9),
    ended=st.booleans(),
    first=st.integers(1, 3),
)
def test_blocks_of_any_size_have_the_same_lines(tmp_path_factory, lines, block, ended, first):
    file = tmp_path_factory.mktemp("blocks") / "a.txt"
    file.write_text("\n".join(lines) + ("\n" if ended else ""))
    expected = list(enumerate(file.read_text().rstrip("\n ").split("\n"), start=1))
    expected = [] if expected == [(1, "")] else expected[first - 1 :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "BLOCK", block)
        found = [
            (line + i, row)
            for line, rows in text._blocks(file, first, None)
            for i, row in enumerate(rows.decode().removesuffix("\n").split("\n"))
        ]
    assert found == expected


def test_a_header_without_a_column_is_refused(tmp_path):
    (tmp_path / "ratings.csv").write_text("userId,movie,rating,timestamp\n1,2,3,4\n")
    with pytest.raises(DataError, match=r"ratings.csv:1 has no column movieId, it has userId, mo"):
        open_source(DataConfig(kind="movielens", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        (0, "2", "label is 2, not 0 or 1"),
        (0, "", "label is empty"),
        (5, "1.5", "I5 is '1.5', no whole number"),
        (20, "xyz", "C7 is 'xyz', no hexadecimal number"),
        (20, "1_0", "C7 is '1_0', no hexadecimal number"),
    ],
)
def test_criteo_rows_that_make_no_sense(make, tmp_path, criteo_lines, column, value, reason):
    config = make("criteo")
    lines = criteo_lines(25, seed=1)
    cells = lines[9].rstrip("\n").split("\t")
    lines[9] = "\t".join([*cells[:column], value, *cells[column + 1 :]]) + "\n"
    (tmp_path / "day_1.tsv").write_text("".join(lines))
    with pytest.raises(DataError, match=f"day_1.tsv:10 is broken: {reason}"):
        count(config)
    samples, broken = count(replace(config, max_broken=1))
    assert (samples, broken.count) == (49, 1)


def test_every_pass_counts_for_itself_and_resumes_over_broken_rows(make, tmp_path, lists):
    config = replace(make("criteo"), max_broken=1)
    rows = (tmp_path / "day_0.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "day_0.tsv").write_text("".join([*rows[:3], "broken\n", *rows[4:]]))
    source = open_source(config)
    options = {"global_batch": 4, "rank": 0, "ranks": 1, "seed": 0}
    whole = [lists(batch) for batch in source.batches(**options)]
    for start in range(len(whole)):
        again = [lists(batch) for batch in source.batches(**options, start=start)]
        assert again == whole[start:]
        assert source.broken.count == 1
    assert source.num_samples is None


def test_a_gz_file_cut_short_is_named(make, tmp_path):
    config = make("criteo gz")
    file = tmp_path / "day_1.gz"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"day_1.gz is truncated or damaged after about line"):
        count(config)
    file.write_bytes(b"plain text")
    with pytest.raises(DataError, match=r"day_1.gz is truncated or damaged"):
        count(config)
    file.write_bytes(gzip.compress(b""))
    assert count(config)[0] == 25


def test_a_parquet_file_cut_short_is_named(make, tmp_path):
    config = make("parquet")
    file = tmp_path / "1.parquet"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"1.parquet is truncated or no Parquet file"):
        open_source(config)
    file.write_bytes(whole[:4] + b"\0" * 400 + whole[404:])
    with pytest.raises(DataError, match=r"1.parquet is truncated or no Parquet file"):
        count(config)


def test_parquet_rows_that_make_no_sense(tmp_path):
    rows = pa.table(
        {
            "keys": pa.array([[1], [2, None], [3], [4], [5]]),
            "x": pa.array([1.0, 2.0, float("inf"), None, 5.0]),
            "label": pa.array([0, 1, 0, 1, None]),
        }
    )
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=2)
    columns = ParquetConfig(sparse=("keys",), dense=("x",))
    config = DataConfig(kind="parquet", path=str(tmp_path), parquet=columns, shuffle=False)
    with pytest.raises(DataError, match=r"row 2 of .*a.parquet is broken: keys has an empty entry"):
        count(config)
    samples, broken = count(replace(config, max_broken=3))
    assert samples == 2
    assert [one.split(" of ")[0] for one in broken.first] == ["row 2", "row 3", "row 5"]


def test_kuairand_rows_of_every_table_count(make, tmp_path):
    config = make("kuairand csv")
    users, log = (
        tmp_path / "user_features_pure.csv",
        tmp_path / "log_standard_4_08_to_5_08_pure.csv",
    )
    for file, line in ((users, 3), (log, 5)):
        rows = file.read_text().splitlines(keepends=True)
        rows[line - 1] = "x" + rows[line - 1]
        file.write_text("".join(rows))
    with pytest.raises(DataError, match=r"user_features_pure.csv:3 is broken: user_id is 'x1'"):
        count(config)
    samples, broken = count(replace(config, max_broken=2))
    assert (samples, broken.count) == (29, 2)


def test_a_path_without_data_is_said_so(tmp_path):
    with pytest.raises(DataError, match="there is no file or folder"):
        open_source(DataConfig(kind="criteo", path=str(tmp_path / "none")))
    with pytest.raises(DataError, match="there are no Parquet files in"):
        open_source(DataConfig(kind="parquet", path=str(tmp_path)))
    (tmp_path / "ratings.dat").write_text("")
    with pytest.raises(DataError, match=r"the train split of .* has no samples"):
        open_source(DataConfig(kind="movielens", path=str(tmp_path)))
    (tmp_path / "day_0").write_text("")
    with pytest.raises(DataError, match="has no samples"):
        count(DataConfig(kind="criteo", path=str(tmp_path)))


def test_a_flipped_bit_in_a_parquet_page_is_noticed(tmp_path):
    """The file carries checksums of its pages; only the data of the column is damaged."""
    path = tmp_path / "clicks.parquet"
    table = pa.table({"a": list(range(1000)), "label": [0.0, 1.0] * 500})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    config = DataConfig(kind="parquet", path=str(path), parquet=ParquetConfig(sparse=("a",)))
    assert count(config)[0] == 1000
    contents = bytearray(path.read_bytes())
    at = bytes(contents).index((500).to_bytes(8, "little") + (501).to_bytes(8, "little"))
    contents[at] ^= 1
    path.write_bytes(contents)
    with pytest.raises(DataError, match=r"clicks\.parquet"):
        count(config)


# Weights that are none.


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("tf", [[0.5], [1.0, 2.0]], "row 2 of .* is broken: tf has more or fewer entries than ids"),
        ("tf", [[0.5], None], "row 2 of .* is broken: tf has more or fewer entries than ids"),
        ("tf", [[float("inf")], [1.0]], "row 1 .* tf has an entry that is no finite number"),
        ("tf", [[None], [1.0]], "row 1 .* tf has an entry that is no finite number"),
        ("w", [1.0, -1.0], "row 2 .* w is no number from 0"),
        ("w", [None, 1.0], "row 1 .* w is no number from 0"),
    ],
)
def test_a_weight_that_is_none_is_a_broken_row(tmp_path, column, values, reason):
    columns = {"label": [0.0, 1.0], "ids": [[1], [2]], "tf": [[1.0], [2.0]], "w": [1.0, 2.0]}
    pq.write_table(pa.table(columns | {column: values}), tmp_path / "a.parquet")
    both = ParquetConfig(sparse=("ids",), weights={"ids": "tf"}, sample_weight="w")
    # Without weights of keys, columns are decoded one by one.
    for chosen in (both, replace(both, weights={})) if column == "w" else (both,):
        config = DataConfig(kind="parquet", path=str(tmp_path), parquet=chosen)
        with pytest.raises(DataError, match=reason):
            count(config)
        assert count(replace(config, max_broken=1))[0] == 1


def test_columns_that_cannot_be_weights_are_refused(tmp_path):
    columns = {"label": [0.0, 1.0], "one": [1, 2], "ids": [[1], [2]], "text": [["a"], ["b"]]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")

    def refused(sentence, **parquet):
        with pytest.raises((DataError, ConfigError), match=sentence):
            open_source(
                DataConfig(kind="parquet", path=str(tmp_path), parquet=ParquetConfig(**parquet))
            )

    refused("has no column tf, it has label", weights={"ids": "tf"})
    refused(
        "gives ids to one, which is no column of lists", sparse=("one",), weights={"one": "ids"}
    )
    refused("gives ids to user, which is no column of lists", weights={"user": "ids"})
    refused("text of .* is list<.*>, which cannot be a list of weights", weights={"ids": "text"})
    refused("text of .* is list<.*>, which cannot be a number per row", sample_weight="text")
    refused("column ids is named twice; give it one use", sparse=("ids",), sample_weight="ids")
    refused("weights.ids is 3; name the column of its weights", weights={"ids": 3})
    refused("the label weight of .* has the name of", labels=("label", "weight"), sample_weight="w")
