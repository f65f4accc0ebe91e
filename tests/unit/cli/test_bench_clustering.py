"""`nestpipe bench clustering` on batches so small that only the shape of the answer counts."""

import json

import numpy as np
import pytest

from nestpipe.cli.app import main

SMALL = ["bench", "clustering", "--samples", "48", "--items", "20", "--draws", "2"]


@pytest.fixture
def ratings(tmp_path):
    """A folder with ratings of 60 users."""
    random = np.random.default_rng(0)
    lines = [
        f"{user}::{item}::5::{time}"
        for user in range(1, 61)
        for time, item in enumerate(random.integers(1, 90, random.integers(5, 40)))
    ]
    (tmp_path / "ratings.dat").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(capsys, *arguments: str):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    return stop.value.code, capsys.readouterr()


def test_the_figures_are_json_on_standard_output(capsys, ratings):
    status, said = run(
        capsys, *SMALL, "--micro-batches", "2,6", "--data", str(ratings), "--json", "-"
    )
    assert status == 0
    results = json.loads(said.out)["results"]
    cuts = [(result["data"], result["parts"], result["how"]) for result in results]
    assert cuts == [
        (data, parts, how)
        for data in ("movielens", "communities")
        for parts in (2, 6)
        for how in ("random", "contiguous", "clustered", "clustered both")
    ]
    for result in results:
        assert result["ratio"] >= 1
        if result["how"].startswith("clustered"):
            assert result["fewer_percent"] > 0
            assert result["tokens_over"] <= 0.1
        if result["how"] == "clustered both":
            assert result["tokens_under"] <= 0.1


def test_without_movielens_it_says_how_to_get_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, said = run(capsys, *SMALL, "--micro-batches", "4")
    assert status == 0
    assert "communities" in said.out
    assert "grouplens.org" in said.out


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["--micro-batches", "64"], "48 samples cannot be cut into 64 micro-batches; give 1 to 48"),
        (["--micro-batches", "many"], "micro-batches is 'many'; give whole numbers, such as 8,32"),
        (["--draws", "0"], "draws is 0; give a number above 0"),
        (["--data", "no/such/folder"], "no/such/folder"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(capsys, wrong, sentence):
    status, said = run(capsys, *SMALL, *wrong)
    assert status == 2
    assert sentence in said.err
    assert "Traceback" not in said.err


def test_more_users_than_there_are_is_one_sentence(capsys, ratings):
    status, said = run(capsys, *SMALL, "--samples", "61", "--data", str(ratings))
    assert status == 2
    assert "has 60 users; ask for that many samples at most" in said.err
