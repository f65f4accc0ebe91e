"""Runs that end with the best: the same after a restart, and its checkpoint stays."""

from __future__ import annotations

from typing import Any

import pytest

from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.errors import ConfigError, MissingSplitError
from nestpipe.train import JobConfig, loop, make_job, train_job
from nestpipe.train.job import prepare
from nestpipe.train.loop import EarlyStopping, TrainResult

DATA = {"synthetic": {"samples": 64, "test_samples": 16, "num_tables": 1}}
NAN = float("nan")


def heard(values: list[float], metric: str = "auc", **given: Any) -> tuple[list[bool], int]:
    """Which evaluations are the best so far, and after which the run ends; 0: after none."""
    early = EarlyStopping(metric, given.get("patience", 2), given.get("min_delta", 0.0))
    best: list[bool] = []
    for step, value in enumerate(values, start=1):
        best.append(early.hear({metric: value}, step))
        if early.ended:
            return best, step
    return best, 0


@pytest.mark.parametrize(
    ("values", "best", "ended"),
    [
        ([0.5, 0.6, 0.7], [True, True, True], 0),
        ([0.5, 0.6, 0.6, 0.6], [True, True, False, False], 4),
        ([0.5, 0.4, 0.6, 0.5, 0.5], [True, False, True, False, False], 5),
        ([NAN, 0.4, NAN, NAN], [False, True, False, False], 4),
        ([NAN, NAN], [False, False], 2),
    ],
)
def test_a_run_ends_after_so_many_that_are_not_better(values, best, ended):
    assert heard(values) == (best, ended)


def test_less_is_better_for_losses_also_of_tasks():
    assert heard([0.5, 0.4, 0.6, 0.5], "click/log_loss") == ([True, True, False, False], 4)
    assert heard([0.5, 0.4], "normalised_entropy", patience=1) == ([True, True], 0)


def test_what_is_hardly_better_does_not_count():
    assert heard([0.5, 0.505, 0.509, 0.52], min_delta=0.01) == ([True, False, False], 3)


def test_a_metric_that_is_not_there_is_refused():
    with pytest.raises(
        ConfigError, match=r"run.early_stop is 'auk', which the evaluation does not"
    ):
        EarlyStopping("auk", 1, 0.0).hear({"auc": 0.5, "loss": 0.1}, 1)


def run(monkeypatch, folder, aucs: list[float], resume: str | None = None, **more) -> TrainResult:
    """A run of 8 batches with made-up evaluations after each, which a restart finds again."""

    def evaluate(trainer, source):
        return {"auc": aucs[trainer.progress.step - 1]}

    monkeypatch.setattr(loop, "evaluate", evaluate)
    given = {
        "batch": 8,
        "device": "cpu",
        "eval_every": 1,
        "checkpoint": str(folder),
        "early_stop": "auc",
        "patience": 2,
        **more,
    }
    config = build(JobConfig, {"data": DATA, "run": given})
    return train_job(prepare(config, LocalCommunicator(), resume), lambda report: None)


AUCS = [0.5, 0.7, 0.6, 0.65, 0.9, 0.9, 0.9, 0.9]


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step"))


def test_the_best_checkpoint_stays_and_is_told(monkeypatch, tmp_path):
    result = run(monkeypatch, tmp_path, AUCS, keep_last=1)
    assert result.steps == 4
    assert result.early is not None
    assert (result.early.best, result.early.best_step, result.early.since) == (0.7, 2, 2)
    assert result.best_checkpoint is not None
    best, last = names(tmp_path)
    assert result.best_checkpoint.endswith(best)
    assert str(result.checkpoint).endswith(last)


@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_a_restart_ends_where_the_run_would_have(monkeypatch, tmp_path, first):
    whole = run(monkeypatch, tmp_path / "whole", AUCS)
    run(monkeypatch, tmp_path / "parts", AUCS, steps=first, checkpoint_every=1)
    result = run(monkeypatch, tmp_path / "parts", AUCS, resume="auto", checkpoint_every=1)
    assert result.steps == whole.steps == 4
    assert result.early == whole.early


def test_a_run_of_data_without_held_out_samples_trains_and_says_so(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {"user": list(range(40)), "item": list(range(40)), "label": [n % 2 for n in range(40)]}
    )
    pq.write_table(table, tmp_path / "clicks.parquet")
    data = {"kind": "parquet", "path": str(tmp_path), "parquet": {"sparse": ["user", "item"]}}
    of_run: dict[str, Any] = {"batch": 8, "device": "cpu"}
    job = make_job(build(JobConfig, {"data": data, "run": of_run}), LocalCommunicator())
    result = train_job(job, lambda report: None)
    assert result.split is None
    assert result.steps == 5
    for wanted in ({"eval_split": "test"}, {"early_stop": "auc"}):
        config = build(JobConfig, {"data": data, "run": {**of_run, **wanted}})
        with pytest.raises(MissingSplitError, match=r"there is no .* split"):
            train_job(make_job(config, LocalCommunicator()), lambda report: None)


@pytest.mark.parametrize(("given", "split"), [({}, "validation"), ({"eval_split": "test"}, "test")])
def test_evaluation_is_on_validation_unless_told(given, split):
    config = build(JobConfig, {"data": DATA, "run": {"batch": 8, "device": "cpu", **given}})
    told: list[tuple[int, str]] = []
    result = train_job(
        make_job(config, LocalCommunicator()),
        lambda report: None,
        lambda step, split, metrics: told.append((step, split)),
    )
    assert result.split == split
    assert told == [(8, split)]
