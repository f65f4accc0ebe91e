"""Loggers: one protocol, and what each makes of it; and the record of a run."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.dashboard.record import RankRecord, file_of, read_record
from nestpipe.errors import CheckpointError, ConfigError, LossError
from nestpipe.train import JobConfig, make_job, train_job
from nestpipe.train.job import RunConfig
from nestpipe.train.loggers import LINES, JsonLinesLogger, MetricLoggers

FIGURES = {"train/loss": 0.5, "validation/hr@10": 0.25}


def test_json_lines_are_added_to_and_have_no_nan(tmp_path):
    for step in (1, 2):
        logger = JsonLinesLogger(tmp_path / "log", {})
        logger.log({"train/loss": 0.5 * step, "train/auc": float("nan")}, step)
        logger.close()
    lines = (tmp_path / "log" / LINES).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "train/loss": 0.5, "train/auc": None},
        {"step": 2, "train/loss": 1.0, "train/auc": None},
    ]


def test_tensorboard_has_what_was_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricLoggers(["tensorboard"], str(tmp_path), {}) as loggers:
        loggers.log(FIGURES, 7)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("validation/hr@10")] == [(7, 0.25)]


def test_weights_and_biases_gets_figures_and_config(tmp_path, monkeypatch):
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda figures, step: calls.append((figures, step)),
        finish=lambda: calls.append("finished"),
    )
    fake = SimpleNamespace(init=lambda **given: (calls.append(given), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with MetricLoggers(["wandb"], str(tmp_path), {"run.batch": 4}) as loggers:
        loggers.log(FIGURES, 7)
    assert calls[0]["config"] == {"run.batch": 4}
    assert calls[1:] == [(FIGURES, 7), "finished"]


def test_mlflow_gets_figures_by_names_that_it_takes(tmp_path, monkeypatch):
    calls: list[Any] = []
    fake = SimpleNamespace(
        set_tracking_uri=lambda uri: calls.append(uri),
        start_run=lambda: calls.append("started"),
        log_params=lambda given: calls.append(given),
        log_metrics=lambda figures, step: calls.append((figures, step)),
        end_run=lambda: calls.append("ended"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with MetricLoggers(["mlflow"], str(tmp_path), {"run.batch": 4}) as loggers:
        loggers.log(FIGURES, 7)
    assert calls[0].startswith("file:")
    told = {"train/loss": 0.5, "validation/hr_at_10": 0.25}
    assert calls[1:] == ["started", {"run.batch": "4"}, (told, 7), "ended"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"run.loggers has '{name}', .* nestpipe\[{name}\]"):
        MetricLoggers([name], str(tmp_path), {})


def test_an_unknown_logger_is_refused():
    with pytest.raises(ConfigError, match=r"run.loggers\[0\] is 'tensorbord'; did you mean"):
        build(JobConfig, {"run": {"loggers": ["tensorbord"]}})


def test_a_run_logs_steps_rates_and_evaluations_with_their_split(tmp_path):
    given = {
        "data": {"synthetic": {"samples": 320, "test_samples": 64, "num_tables": 2}},
        "dense": {"schedule": "step", "decay_steps": 5, "decay": 0.5},
        "run": {
            "batch": 32,
            "device": "cpu",
            "eval_every": 4,
            "log": str(tmp_path),
            "loggers": ["jsonl"],
            "log_every": 3,
            "clip_norm": 1.0,
        },
    }
    train_job(make_job(build(JobConfig, given), LocalCommunicator()), lambda report: None)
    lines = [json.loads(line) for line in (tmp_path / LINES).read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert [line["train/lr_dense"] for line in steps] == [1e-3] * 5 + [5e-4] * 5
    assert all(line["train/grad_norm"] > 0 for line in steps)
    assert [line["step"] for line in steps if "train/auc" in line] == [3, 6, 9]
    evaluations = [line for line in lines if "validation/auc" in line]
    assert [line["step"] for line in evaluations] == [4, 8, 10]
    assert all(
        {"validation/loss", "train/normalised_entropy"} <= line.keys() for line in evaluations
    )


# The record that the dashboard reads.


def recorded_run(folder: Path, **pipeline: Any) -> RankRecord:
    """The record of ten steps."""
    given = {
        "data": {"synthetic": {"samples": 320, "test_samples": 64, "num_tables": 2}},
        "pipeline": pipeline,
        "run": {"batch": 32, "device": "cpu", "eval_every": 4, "record": str(folder)},
    }
    train_job(make_job(build(JobConfig, given), LocalCommunicator()), lambda report: None)
    return read_record(file_of(folder / "record", 0))


@pytest.mark.parametrize("plan", ["serial", "nested"])
def test_the_record_of_a_run_has_its_steps_tables_and_evaluations(tmp_path, plan):
    record = recorded_run(tmp_path, plan=plan)
    assert (record.about["plan"], record.about["steps"], record.about["ranks"]) == (plan, 10, 1)
    last = record.points[-1]
    assert (last["step"], last["steps"], last["samples"]) == (10, 10, 320)
    assert last["rows_read"] > 0
    assert set(last["tables"]) == {"c0", "c1"}
    assert last["compute_ms"] <= last["step_ms"]
    assert [line["step"] for line in record.evaluations] == [4, 8, 10]
    assert record.end is not None
    assert record.end["status"] == "finished"


def test_plans_that_compare_keys_and_those_that_do_not_tell_about_the_same_overlap(tmp_path):
    shares: dict[str, float] = {}
    for plan in ("serial", "nested"):
        last = recorded_run(tmp_path / plan, plan=plan).points[-1]
        counters = last["counters"]
        assert counters["keys_compared"] > 0
        shares[plan] = counters["keys_shared"] / counters["keys_compared"]
    assert shares["serial"] == pytest.approx(shares["nested"], abs=0.1)


def test_a_run_that_fails_says_so_in_its_record(tmp_path, monkeypatch):
    def broken(*_: object, **given: object) -> None:
        raise LossError(3, float("nan"))

    monkeypatch.setattr("nestpipe.train.trainer.Trainer.fit", broken)
    with pytest.raises(LossError):
        recorded_run(tmp_path)
    end = read_record(file_of(tmp_path / "record", 0)).end
    assert end is not None
    assert (end["status"], end["sentence"]) == (
        "failed",
        "the loss of step 3 is nan; lower the learning rates",
    )


def test_a_record_that_cannot_be_written_is_refused_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the record .*; check the disk"):
        recorded_run(tmp_path / "file")


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({}, None),
        ({"log": "a"}, Path("a/record")),
        ({"checkpoint": "b", "log": "a"}, Path("b/record")),
        ({"checkpoint": "b", "record": "off"}, None),
        ({"checkpoint": "b", "record": "c"}, Path("c/record")),
    ],
)
def test_the_record_is_beside_checkpoints_or_logs_unless_told(given, folder):
    assert RunConfig(**given).record_folder == folder
