"""`nestpipe simulate`: groups of workers, and the exchange of a window."""

import json

import pytest

from nestpipe.cli.app import main


@pytest.fixture
def run(capsys):
    """Run the program as its console script does; returns exit status, stdout and stderr."""

    def go(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return go


def words(text: str) -> str:
    return " ".join(text.split())


def test_auto_names_the_best_number_of_groups(run):
    status, out, _ = run("simulate", "--groups", "auto", "--workers", "64,1536", "--batches", 16)
    assert status == 0
    assert "1,536 workers in groups: nested, 8 micro-batches, rows averaged every batch" in words(
        out
    )
    assert "Best for 64 workers: " in out
    assert "% faster than one group" in words(out)
    assert "8 x 192" in out


def test_numbers_of_groups_can_be_listed(run):
    status, out, _ = run(
        *("simulate", "--groups", "1,2,4", "--workers", 64, "--merge", "exact"),
        *("--json", "-", "--batches", 16),
    )
    assert status == 0
    (choice,) = json.loads(out)["choices"]
    assert [row["groups"] for row in choice["rows"]] == [1, 2, 4]
    assert choice["best_groups"] in (1, 2, 4)
    assert [row["merged_bytes"] > 0 for row in choice["rows"]] == [False, True, True]


def test_a_longer_interval_merges_less_per_batch(run):
    def merged(every: int) -> float:
        out = run(
            *("simulate", "--groups", "8,16", "--workers", 1536, "--merge-every", every),
            *("--json", "-", "--batches", 16),
        )[1]
        return json.loads(out)["choices"][0]["rows"][0]["merged_bytes"]

    assert merged(16) < merged(4) < merged(1)
    assert merged(0) == 0


def test_one_number_of_groups_is_a_curve_over_workers(run):
    def step(*more: object) -> float:
        out = run("simulate", "--groups", 8, "--workers", 1536, "--json", "-", *more)[1]
        (point,) = json.loads(out)["points"]
        return point["step_ms"]

    assert step("--merge-every", 0) < step("--merge-every", 4) < step()


def test_a_window_exchanges_less(run):
    def exchanged(form: str) -> float:
        out = run(
            *("simulate", "--workers", 1536, "--exchange", form, "--json", "-"),
            *("--set", "workload.split_growth=0.2"),
        )[1]
        return json.loads(out)["points"][0]["busy_ms"]["net"]

    assert exchanged("window") < exchanged("micro")


def test_the_paper_ends_with_2d_and_with_4096_workers(run, tmp_path):
    out = words(run("simulate", "paper", "--json", tmp_path / "paper.json")[1])
    assert len(json.loads((tmp_path / "paper.json").read_text())["rows"]) == 49
    assert "NestPipe + 2D-SP at 1,536 workers: " in out
    assert "All2All 452.3 ms (452.34 ms)" in out
    assert "At 4,096 workers, extrapolated: NestPipe" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--groups", "some"], "groups cannot be 'some'; give whole numbers"),
        (["--groups", "1,5", "--workers", "64"], "64 workers cannot form 5 equal groups"),
        (["--groups", "0"], "groups cannot be '0'"),
        (["--merge", "exact", "--merge-every", "4"], "merge_every is 4 and merge 'exact'"),
        (["--merge-every", "-1"], "merge_every is -1; use 0 or more"),
        (["--groups", "auto", "--svg", "a.svg"], "give one number of groups"),
    ],
)
def test_wrong_input_is_one_sentence(run, arguments, sentence):
    status, out, err = run("simulate", *arguments)
    assert status == 2
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1
