"""`nestpipe bench store` on a store so small that only the shape of the answer counts."""

import json

import pytest

from nestpipe.cli.app import main

SMALL = ["bench", "store", "--gb", "0.002", "--dim", "16", "--keys", "500", "--seconds", "0.01"]


def run(capsys, *arguments: str):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code, capsys.readouterr()


def test_the_figures_are_json_on_standard_output(capsys):
    status, said = run(capsys, *SMALL, "--threads", "1", "--json", "-")
    assert status == 0
    figures = json.loads(said.out)
    assert figures["rows"] == 31_250
    assert figures["threads"] == 1
    assert figures["bytes"] > 2_000_000
    for rate in ("gather_rows_per_s", "gather_gb_per_s", "insert_rows_per_s", "scatter_gb_per_s"):
        assert figures[rate] > 0
    assert figures["ratio"] == pytest.approx(
        figures["gather_gb_per_s"] / figures["index_select_gb_per_s"]
    )


def test_a_table_is_printed_for_people(capsys):
    status, said = run(capsys, *SMALL, "--threads", "1")
    assert status == 0
    assert "gather by key" in said.out
    assert "31,250 rows" in said.out


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["--keys", "500000"], "31,250 rows are too few for batches of 500,000 keys"),
        (["--dim", "0"], "dim is 0; give a number above 0"),
        (["--gb", "nan"], "gb is nan; give a number above 0"),
        (["--gb", "inf"], "give less than half of that"),
        (["--threads", "65"], "threads is 65; give at most 64"),
        (["--threads", "0"], "threads is 0; give a number above 0"),
        (["--threads", "-2"], "threads is -2; give a number above 0"),
    ],
)
def test_sizes_that_cannot_be_measured_are_one_sentence(capsys, wrong, sentence):
    status, said = run(capsys, *SMALL, *wrong)
    assert status == 2
    assert sentence in said.err
    assert "Traceback" not in said.err


SSD = [*SMALL[:-2], "--where", "ssd", "--rounds", "2", "--threads", "1", "--depth", "2"]


def test_rows_on_an_ssd_are_measured_beside_the_disk(capsys, tmp_path):
    status, said = run(capsys, *SSD, "--path", str(tmp_path), "--json", "-")
    assert status == 0, said.err
    figures = json.loads(said.out)
    assert figures["rows"] == 31_250
    assert figures["rounds"] == 2
    assert 0 < figures["hit_share"] < 0.5
    assert figures["file_bytes"] > 0.9 * 31_250 * 64
    assert figures["read_block"] >= 80
    for name in ("gather_rows_per_s", "scatter_rows_per_s", "disk_reads_per_s", "gather_ratio"):
        assert figures[name] > 0
    assert list(tmp_path.iterdir()) == []


def test_figures_of_an_ssd_are_printed_with_their_ratio(capsys, tmp_path):
    status, said = run(capsys, *SSD, "--path", str(tmp_path))
    assert status == 0, said.err
    for words in ("of the disk's speed", "disk: reads of", "written per round"):
        assert words in said.out


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ([], "there is no --path"),
        (["--path", "/proc/none"], "cannot keep rows in '/proc/none'"),
        (["--path", "/tmp", "--cache", "2"], "cache is 2.0; give a number from 0 to 1"),
        (["--path", "/tmp", "--depth", "65"], "depth is 65; give at most 64"),
        (["--path", "/tmp", "--where", "tape"], "where is 'tape'; use host or ssd"),
        (["--path", "/tmp", "--keys", "500000"], "31,250 rows are too few"),
    ],
)
def test_an_ssd_that_cannot_be_measured_is_one_sentence(capsys, wrong, sentence):
    status, said = run(capsys, *SSD, *wrong)
    assert status == 2
    assert sentence in said.err
    assert "Traceback" not in said.err


def test_bench_alone_says_what_can_be_measured(capsys):
    status, said = run(capsys, "bench")
    assert status == 0
    assert "store" in said.out
