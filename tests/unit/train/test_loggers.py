"""Loggers: one protocol, and what each makes of it; and the record of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nestpipe.comm import LocalCommunicator
from nestpipe.config import build
from nestpipe.dashboard.record import RankRecord, file_of, read_record
from nestpipe.errors import CheckpointError, ConfigError, LossError
from nestpipe.schedule import Kind, Op, plan
from nestpipe.trace import ShortTraceError, Span, Trace
from nestpipe.train import JobConfig, make_job, train_job
from nestpipe.train.config import RunConfig
from nestpipe.train.loggers import (
    LINES,
    JsonLinesLogger,
    MetricLoggers,
    Traffic,
    TrainerProbe,
    peak_tflops,
    summarise,
    without_waiting,
)
from nestpipe.train.ops import StepReport

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
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")  # so that it is as it was afterwards
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    with MetricLoggers(["mlflow"], str(tmp_path), {"run.batch": 4}) as loggers:
        loggers.log(FIGURES, 7)
        loggers.log({"test/buy (7d)/auc": 0.5}, 8)
    assert os.environ["MLFLOW_ALLOW_FILE_STORE"] == "true", "MLflow 3 refuses folders without it"
    assert calls[0].startswith("file:")
    told = {"train/loss": 0.5, "validation/hr_at_10": 0.25}
    of_task = {"test/buy _7d_/auc": 0.5}
    assert calls[1:] == ["started", {"run.batch": "4"}, (told, 7), (of_task, 8), "ended"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_that_does_not_answer_is_told_before_training(tmp_path, monkeypatch, name):
    def refuse(**given: Any) -> None:
        raise RuntimeError("No API key configured. \nUse `wandb login` to log in.")

    fake = SimpleNamespace(init=refuse, start_run=refuse)
    monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    said = rf"'{name}', which does not start \(No API key configured\); set what it needs, or leave"
    with pytest.raises(ConfigError, match=said):
        MetricLoggers([name], str(tmp_path), {})


@pytest.mark.parametrize("fails_at", ["log", "finish"])
def test_a_service_that_fails_meanwhile_ends_its_own_log_alone(
    tmp_path, monkeypatch, caplog, fails_at
):
    def fail(*_: Any, **given: Any) -> None:
        raise ConnectionError("the service is gone")

    run = SimpleNamespace(
        **{"log": lambda *_, **given: None, "finish": lambda: None, fails_at: fail}
    )
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: run))
    with MetricLoggers(["wandb", "jsonl"], str(tmp_path), {}) as loggers:
        for step in (1, 2):
            loggers.log(FIGURES, step)
    assert [record.getMessage() for record in caplog.records] == [
        "the log of wandb ends here: the service is gone"
    ]
    assert len((tmp_path / LINES).read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["tensorboard", "jsonl"])
def test_a_disk_that_is_full_ends_the_log_alone_in_a_sentence(tmp_path, name):
    """In a process of its own, whose files may not grow from some moment on."""
    program = f"""
import logging, resource
from nestpipe.train.loggers import MetricLoggers
logging.basicConfig(format="%(message)s")
with MetricLoggers([{name!r}], {str(tmp_path)!r}, {{}}) as loggers:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    for step in range(100_000):
        loggers.log({{"train/loss": 0.5}}, step)
        if not loggers:
            break
print("trained on")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "trained on\n", done.stderr
    assert done.stderr == f"the log of {name} ends here: [Errno 27] File too large\n"


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"run.loggers has '{name}', .* nestpipe\[{name}\]"):
        MetricLoggers([name], str(tmp_path), {})


OWN = """
def folder(folder, config):
    return folder


class Lines:
    def __init__(self, folder, config):
        self.file = (folder / "own.txt").open("w")
        print("batch", config["run.batch"], file=self.file)

    def log(self, figures, step):
        print(step, sorted(figures), file=self.file)

    def close(self):
        self.file.close()
"""


def test_a_logger_of_ones_own_is_named_like_a_model(tmp_path, monkeypatch):
    (tmp_path / "lines_of_mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = build(JobConfig, {"run": {"loggers": ["lines_of_mine:Lines"]}}).run
    with MetricLoggers(run.loggers, str(tmp_path), {"run.batch": 4}) as loggers:
        loggers.log({"train/loss": 0.5}, 7)
    assert (tmp_path / "own.txt").read_text() == "batch 4\n7 ['train/loss']\n"
    with pytest.raises(ConfigError, match=r"run.loggers is 'lines_of_mine:Line', but .*Lines"):
        MetricLoggers(["lines_of_mine:Line"], str(tmp_path), {})
    with pytest.raises(ConfigError, match=r"which makes a PosixPath; let it make an object with"):
        MetricLoggers(["lines_of_mine:folder"], str(tmp_path), {})
    sys.modules.pop("lines_of_mine")


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
    for name in ("serial", "nested"):
        last = recorded_run(tmp_path / name, plan=name).points[-1]
        counters = last["counters"]
        assert counters["keys_compared"] > 0
        shares[name] = counters["keys_shared"] / counters["keys_compared"]
    assert shares["serial"] == pytest.approx(shares["nested"], abs=0.1)


def test_ops_are_known_by_their_step_where_training_goes_on_after_a_stop():
    """An evaluation or a checkpoint ends a pass of the pipeline; the next counts from 0 again."""
    small = {"synthetic": {"samples": 320, "num_tables": 2}}
    config = build(JobConfig, {"data": small, "run": {"batch": 32, "device": "cpu"}})
    job = make_job(config, LocalCommunicator())
    probe = TrainerProbe(job.trainer)
    for steps, last in ((5, 5), (4, 9)):
        job.trainer.fit(job.train, steps=steps)
        updates = [span.batch for span in probe.spans(4) if span.kind == Kind.UPDATE]
        assert max(updates) == last
        assert max(span.batch for span in job.trainer.trace.spans) < 5
    # A run that adapts has choices, and tells what it does now.
    assert "micro_batches" not in probe.gauges()
    job.trainer.choices.append({"step": 0, "micro_batches": 1})
    assert probe.gauges()["micro_batches"] == 1
    job.trainer.close()


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


STEP_MS = 10.0
SHAPE = plan("nested").shape


def span(kind: Kind, batch: int, start: float, end: float, rank: int = 0) -> Span:
    op = Op(kind, batch, 0 if kind in (Kind.ROWS, Kind.DENSE, Kind.GRADS) else None)
    return Span(kind, SHAPE.lane(kind), batch, op.micro, rank, start, end)


def steps(rank: int = 0, late: float = 0.0) -> list[Span]:
    """Each step: 1 ms idle, rows 2 ms, dense 4 ms over 2 ms of retrieve, grads 2, update 1.

    A rank that is `late` comes so much later to `rows` and to the end of it.
    """
    spans: list[Span] = []
    for batch in range(12):
        t = batch * STEP_MS
        spans += [
            span(Kind.ROWS, batch, t + 1 + late, t + 3, rank),
            span(Kind.DENSE, batch, t + 3, t + 7, rank),
            span(Kind.RETRIEVE, batch, t + 4, t + 6, rank),
            span(Kind.GRADS, batch, t + 7, t + 9, rank),
            span(Kind.UPDATE, batch, t + 9, t + 10, rank),
        ]
    return spans


def test_what_is_exposed_adds_up_to_the_step():
    summary = summarise(Trace(tuple(steps())), Traffic())
    assert summary.step_ms == pytest.approx(STEP_MS)
    assert summary.idle_ms == pytest.approx(1)
    retrieve = summary.kinds["retrieve"]
    assert (retrieve.ms, retrieve.hidden_ms, retrieve.exposed_ms) == pytest.approx((2, 2, 0))
    exposed = {kind: time.exposed_ms for kind, time in summary.kinds.items()}
    assert exposed == pytest.approx({"retrieve": 0, "rows": 2, "dense": 4, "grads": 2, "update": 1})
    assert sum(exposed.values()) + summary.idle_ms == pytest.approx(summary.step_ms)
    assert list(summary.kinds) == ["retrieve", "rows", "dense", "grads", "update"]


def test_the_busiest_lane_bounds_the_step():
    summary = summarise(Trace(tuple(steps())), Traffic())
    assert summary.busiest_lane == "compute"
    assert summary.busiest_ms == pytest.approx(5)
    assert summary.efficiency == pytest.approx(0.5)


def test_waiting_for_a_late_peer_is_no_work_of_the_network():
    long_wait = [span(Kind.ROWS, b, 10 * b - 5, 10 * b + 3) for b in range(12)]
    alone = Trace((*long_wait, *(s for s in steps() if s.kind != "rows")))
    assert summarise(alone, Traffic()).busiest_lane == "net"
    both = Trace((*alone.spans, *steps(rank=1, late=1.5)))
    summary = summarise(both, Traffic())
    assert summary.busiest_lane == "compute"
    short = without_waiting(both)
    assert {s.duration for s in short.spans if s.kind == "rows"} == {0.5}
    assert summary.kinds["rows"].ms == pytest.approx((8 + 0.5) / 2), "the time stays as it was"


def test_traffic_is_per_batch_and_rank():
    mine, peer = Traffic(), Traffic()
    for traffic in (mine, peer):
        for step in (1, 2, 3):
            refreshed = 0 if step == 1 else 30
            report = StepReport(step, 0.5, 8, 100, refreshed, 70, 250)
            traffic.count(report, rows=100, compared=step > 1)
    peer.bytes_sent = 6000
    summary = summarise(Trace(tuple(steps())), Traffic.total([mine, peer]))
    assert (summary.rows_read, summary.rows_refreshed, summary.rows_written) == (100, 20, 70)
    assert summary.keys_asked == 250
    assert summary.bytes_sent == 1000
    assert summary.shared_keys == pytest.approx(0.3), "the first batch had none before it"


def test_a_plan_that_compares_nothing_says_so():
    assert summarise(Trace(tuple(steps())), Traffic(batches=3)).shared_keys is None


@pytest.mark.parametrize("spans", [[], steps()[:5]])
def test_a_run_of_one_batch_has_no_steady_step(spans: list[Span]):
    with pytest.raises(ShortTraceError):
        summarise(Trace(tuple(spans)), Traffic())


def test_mfu_is_the_models_own_work_over_the_peak():
    """Two ranks of 12 batches each; a step of 10 ms with 4 TFLOP is 400 TFLOP/s."""
    ranks = [Traffic(batches=12, flops=12 * 4e12), Traffic(batches=12, flops=12 * 4e12)]
    summary = summarise(Trace(tuple(steps())), Traffic.total(ranks), 989.0)
    assert summary.tflops == pytest.approx(400)
    assert summary.mfu == pytest.approx(400 / 989)
    assert summarise(Trace(tuple(steps())), Traffic.total(ranks)).mfu is None
    assert summarise(Trace(tuple(steps())), Traffic(batches=12), 989.0).tflops is None


@pytest.mark.parametrize(
    ("name", "precision", "given", "peak"),
    [
        ("NVIDIA H200", "bf16", 0.0, 989.0),
        ("NVIDIA H200", "fp32", 0.0, 67.0),
        ("NVIDIA H100 PCIe", "bf16", 0.0, 756.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 0.0, 312.0),
        ("NVIDIA A10", "bf16", 0.0, 125.0),
        ("", "bf16", 0.0, None),
        ("", "fp32", 0.5, 0.5),
    ],
)
def test_the_peak_is_the_devices_or_what_the_user_says(name, precision, given, peak):
    assert peak_tflops(name, precision, given) == peak
