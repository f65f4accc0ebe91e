"""`nestpipe train` and `nestpipe eval` from the outside."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestpipe.cli.app import main
from nestpipe.trace import read_chrome

SMALL = (
    *("--set", "data.synthetic.samples=2000"),
    *("--set", "data.synthetic.test_samples=500"),
    *("--set", "data.synthetic.num_tables=4"),
    *("--set", "data.synthetic.num_keys=500"),
    *("--set", "run.batch=128"),
    *("--set", "model.dim=8"),
)


@pytest.fixture
def run(capsys):
    """Exit status, standard output and standard error of a command, in this process."""

    def go(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        return stop.value.code, *capsys.readouterr()

    return go


def nestpipe(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    command = [sys.executable, "-m", "nestpipe", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=300
    )


def test_training_beats_the_mean_label_on_one_rank_and_on_two(run):
    arguments = ("train", *SMALL, "--set", "run.epochs=3", "--json", "-", "--ranks")
    status, out, said = run(*arguments, 1)
    assert status == 0, said
    done = nestpipe(*arguments, 2)
    assert done.returncode == 0, done.stderr
    one, two = json.loads(out), json.loads(done.stdout)
    assert one["steps"] == two["steps"] == 48
    assert one["metrics"]["auc"] > 0.6
    assert one["metrics"]["log_loss"] < one["metrics"]["baseline_log_loss"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert two["metrics"]["auc"] == pytest.approx(one["metrics"]["auc"], abs=1e-3)


def test_a_run_goes_on_from_its_checkpoint_and_can_be_evaluated(run, tmp_path):
    folder = tmp_path / "run"
    settings = [*SMALL, "--set", f"run.checkpoint={folder}", "--set", f"run.log={tmp_path / 'tb'}"]
    straight = nestpipe("train", *SMALL, "--json", "-")
    status, _, said = run("train", *settings, "--set", "run.steps=7", "--json", "-")
    assert status == 0, said
    assert (folder / "step-00000007" / "manifest.json").exists()
    assert list((tmp_path / "tb").iterdir())
    to_the_end = ("--set", "run.steps=0", "--resume", folder, "--json", "-")
    status, _, said = run("train", "--set", "rows.lr=0.1", *to_the_end)
    refused("rows.lr is 0.1 and was 0.05 in step-00000007", status, "", said)
    status, out, said = run("train", *to_the_end)  # the checkpoint has the rest of its config
    assert status == 0, said
    resumed = json.loads(out)
    assert resumed["steps"] == 16
    # Those of training are of the batches since the last evaluation, or since the restart.
    held_out = {k: v for k, v in resumed["metrics"].items() if not k.startswith("train_")}
    assert held_out.items() <= json.loads(straight.stdout)["metrics"].items()
    status, out, said = run("eval", folder, "--json", "-")
    assert status == 0, said
    assert json.loads(out) == held_out
    assert f"evaluation of {folder}/step-00000016 on the " in run("eval", folder)[1]


def test_the_pipeline_of_a_run_is_summed_up_and_can_be_looked_at(run, tmp_path):
    trace, figures = tmp_path / "trace.json", tmp_path / "figures.json"
    nested = ("--set", "pipeline.plan=nested", "--set", "pipeline.micro_batches=2")
    files = ("--trace", trace, "--json", figures)
    done = nestpipe("train", *SMALL, *nested, "--ranks", 2, *files)
    assert done.returncode == 0, done.stderr
    for words in ("An average step of nested", "hidden", "exposed", "pipeline efficiency"):
        assert words in done.stdout
    pipeline = json.loads(figures.read_text())["pipeline"]
    assert 0 < pipeline["efficiency"] <= 1
    assert 0 < pipeline["shared_keys"] < 1
    assert pipeline["rows_read"] == pipeline["rows_written"] > pipeline["rows_refreshed"] > 0
    assert pipeline["bytes_sent"] > 0
    exposed = sum(kind["exposed_ms"] for kind in pipeline["kinds"].values())
    assert exposed + pipeline["idle_ms"] == pytest.approx(pipeline["step_ms"])
    measured = read_chrome(trace)
    assert measured.ranks == (0, 1)
    assert {"prefetch", "rows", "dense", "sync", "writeback"} <= {s.kind for s in measured.spans}
    assert measured.facts["plan"] == "nested"
    assert run("draw", trace)[0] == 0


def test_sequences_train_a_retriever_that_beats_popularity(run):
    status, out, said = run(
        *(
            "train",
            "--set",
            "data.synthetic.flavour=sequence",
            "--set",
            "data.synthetic.samples=1500",
        ),
        *("--set", "data.synthetic.test_samples=300", "--set", "data.synthetic.num_items=300"),
        *("--set", "data.synthetic.num_communities=20", "--set", "model.max_len=50"),
        *("--set", "run.batch=64", "--set", "rows.optimizer=adam", "--set", "rows.lr=0.003"),
        *("--set", "run.epochs=2", "--json", "-"),
    )
    assert status == 0, said
    metrics = json.loads(out)["metrics"]
    assert metrics["hr@10"] > 2 * metrics["baseline_hr@10"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set", "pipeline.micro_batch=3"], "did you mean micro_batches?"),
        (["--set", "rows.optimizer=lion"], "lion"),
        (["--set", "run.batch=0"], "run.batch is 0"),
        (["--set", "data.kind=parquet"], "path is missing"),
        (["--set", "data.kind=parquet", "--set", "data.path=nowhere"], "nowhere"),
        (["--set", "model.kind=hstu"], "no histories"),
        (["--resume", "nowhere"], "nowhere"),
        (["--ranks", "0"], "cannot start 0 ranks"),
        (["--set", "run.timeout_s=0"], "run.timeout_s is 0"),
        (["--trace", "nowhere/trace.json"], "name a file in an existing folder"),
        (["--json", f"{__file__}/deeper/figures.json"], "test_train.py' is no folder"),
        (["--json", "/"], "it is a folder"),
        (["nowhere.toml"], "nowhere.toml"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_status_2(run, arguments, expected):
    refused(expected, *run("train", *SMALL, *arguments))


@pytest.mark.parametrize("option", ["--trace", "--report", "--json"])
def test_what_could_not_be_written_in_the_end_is_refused_before(run, tmp_path, monkeypatch, option):
    record = ["--set", f"run.record={tmp_path}"]
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may all
    expected = f"'{tmp_path}' cannot be written; choose another file"
    refused(expected, *run("train", *SMALL, *record, option, str(tmp_path / "out")))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("columns", "labels", "expected"),
    [
        ({"label": [1, 7, 10]}, "[]", "label is 10, not from 0 to 1"),
        ({"label": [1, 1, 1]}, "[]", "every label of"),
        ({"price": [1.0, 2.0, 3.0]}, "[]", "but the data has no label"),
        ({"a": [0, 1, 0], "b": [1, 0, 0]}, '["a", "b"]', "the labels a, b, and 'dlrm' learns one"),
        ({"label": [0, 1, 0], "label2": [1, 0, 0]}, "[]", "has label2 beside the label label"),
        ({"label": [0, 1, 0], "x": [1.0, math.nan, 2.0]}, "[]", "x is not finite"),
    ],
)
def test_own_clicks_that_make_no_sense_are_refused(run, tmp_path, columns, labels, expected):
    path = tmp_path / "clicks.parquet"
    pq.write_table(pa.table({"item": [1, 2, 3], **columns}), path)
    data = ["data.kind=parquet", f"data.path={path}", f"data.parquet.labels={labels}"]
    arguments = [argument for setting in data for argument in ("--set", setting)]
    status, _, said = run("train", *arguments, "--set", "run.batch=2")
    refused(expected, status, "", said)


def test_a_process_too_says_one_sentence_and_ends_with_status_2():
    done = nestpipe("train", *SMALL, "--set", "run.batch=0")
    refused("run.batch is 0", done.returncode, done.stdout, done.stderr)


def refused(expected: str, status: object, out: str, said: str) -> None:
    assert status == 2, said
    assert out == ""
    assert expected in said
    assert said.startswith("error: ")
    assert said.count("\n") == 1, said
