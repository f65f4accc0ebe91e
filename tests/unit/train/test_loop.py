"""`nestpipe train` evaluates and saves when the config says so."""

from __future__ import annotations

import pytest

from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.train import JobConfig, loop, make_job, train_job

SAMPLES, BATCH = 96, 16
DATA = {"synthetic": {"samples": SAMPLES, "num_tables": 2, "test_samples": 64}}


def steps_of_evaluations(monkeypatch: pytest.MonkeyPatch, **run: object) -> list[int]:
    """After which steps a run evaluates."""
    seen: list[int] = []

    def evaluate(trainer, source):
        seen.append(trainer.progress.step)
        return {}

    monkeypatch.setattr(loop, "evaluate", evaluate)
    config = build(JobConfig, {"data": DATA, "run": {"batch": BATCH, "device": "cpu", **run}})
    train_job(make_job(config, LocalCommunicator()), lambda report: None)
    return seen


def test_it_evaluates_after_each_epoch_unless_told(monkeypatch):
    of_epoch = steps_of_evaluations(monkeypatch, epochs=1)
    assert len(of_epoch) == 1
    assert steps_of_evaluations(monkeypatch, epochs=3) == [n * of_epoch[0] for n in (1, 2, 3)]


def test_it_evaluates_every_so_many_batches_and_at_the_end(monkeypatch):
    assert steps_of_evaluations(monkeypatch, steps=5, epochs=9, eval_every=2) == [2, 4, 5]


def test_a_run_that_ends_inside_an_epoch_evaluates_once_there(monkeypatch):
    assert steps_of_evaluations(monkeypatch, steps=3, epochs=9) == [3]


def test_stopping_to_evaluate_changes_no_bit():
    def losses(eval_every: int) -> list[float]:
        run = {"batch": BATCH, "device": "cpu", "epochs": 2, "eval_every": eval_every}
        config = build(JobConfig, {"data": DATA, "run": run})
        seen: list[float] = []
        train_job(make_job(config, LocalCommunicator()), lambda report: seen.append(report.loss))
        return seen

    assert losses(0) == losses(2) == losses(1_000_000)
