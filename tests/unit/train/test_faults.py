"""Gradients that are NaN or inf are seen before they are applied; the policy says what follows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nestpipe.checkpoint.folder import newest, paths_in, verified
from nestpipe.comm import Communicator, LocalCommunicator
from nestpipe.config import build
from nestpipe.embedding.sharded import ShardedTables
from nestpipe.errors import ConfigError, RunError
from nestpipe.kernels.rows.native import Gradients
from nestpipe.models import LogisticRegression
from nestpipe.runtime import inject_delays
from nestpipe.runtime.lanes import Work
from nestpipe.schedule.plans import with_separate_dense_group
from nestpipe.schedule.schedule import Kind, Op
from nestpipe.train import ops, train_job
from nestpipe.train import trainer as trainer_module
from nestpipe.train.config import PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.gradients import drop_dense_faults, drop_row_faults
from nestpipe.train.job import prepare
from nestpipe.train.ops import TrainingWork
from nestpipe.train.trainer import Trainer
from support.examples import num_examples
from support.thread_ranks import run_ranks
from unit.embedding.test_device_tables import SAMPLES, Batches
from unit.train.test_resume import assert_same, job_of, trained

VALUES = (math.nan, math.inf, -math.inf, 1e30)
PLACES = ("dense", "rows", "data")


def inject(monkeypatch: pytest.MonkeyPatch, seed: int) -> tuple[int, str]:
    """Make one number of one batch bad, after the backward pass or in the data itself."""
    rng = random.Random(seed)
    batch, place, value = rng.randrange(20), rng.choice(PLACES), rng.choice(VALUES)
    dense, prefetch = TrainingWork.dense, TrainingWork.prefetch

    def with_bad_gradient(self: TrainingWork, op: Op) -> None:
        dense(self, op)
        if op.batch + self.first_step != batch or op.micro not in (None, 0):
            return
        found: list[torch.Tensor] = []
        if place == "dense":
            found = [p.grad for p in self.half.model.parameters() if p.grad is not None]
        elif place == "rows":
            assert isinstance(self.tables, ShardedTables)
            made = self.tables.in_flight[op.batch].gradients[op.micro or 0]
            found = [part for sent, own in made.values() for part in (sent, *own) if part.numel()]
        if found:
            flat = rng.choice(found).view(-1)
            flat[rng.randrange(len(flat))] = value

    def with_bad_data(self: TrainingWork, op: Op) -> None:
        prefetch(self, op)
        if place == "data" and op.batch + self.first_step == batch:
            micros = self.in_flight[op.batch].on_host
            if micros[0].size:
                micros[0].dense["features"][0, 0] = value

    monkeypatch.setattr(TrainingWork, "dense", with_bad_gradient)
    monkeypatch.setattr(TrainingWork, "prefetch", with_bad_data)
    return batch, place


@pytest.mark.parametrize("seed", range(num_examples("faults")))
@pytest.mark.parametrize("policy", ["stop", "skip", "clip"])
def test_a_bad_number_is_never_in_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, seed: int
):
    batch, _ = inject(monkeypatch, seed)
    plan = random.Random(-seed).choice(["serial", "nested", "dual_buffer"])
    config = job_of(
        tmp_path,
        run={"non_finite": policy, "checkpoint_every": 5, "epochs": 2},
        pipeline={"plan": plan, "micro_batches": 1 + seed % 2 if plan != "dual_buffer" else 1},
    )
    faults: list[int] = []
    job = prepare(config, LocalCommunicator())
    if policy == "stop":
        with pytest.raises(RunError, match=rf"of step {batch + 1} (is|are)"):
            train_job(job, lambda report: faults.append(report.faults))
        (kept,) = (tmp_path / "faults").iterdir()
        assert "0.dense.label" in load_file(kept)
        assert len(paths_in(tmp_path)) == batch // 5
    else:
        outcome = train_job(job, lambda report: faults.append(report.faults))
        assert outcome.steps == 26
        assert [step for step, count in enumerate(faults) if count] == [batch]
    for path in paths_in(tmp_path):
        verified(path)


@pytest.mark.parametrize("seed", range(num_examples("bad rows")))
def test_a_row_that_is_bad_itself_is_never_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
):
    """Memory that was damaged, say: no policy mends it, so the run ends and says where it is."""
    rng = random.Random(f"row {seed}")
    policy, step = rng.choice(["stop", "skip", "clip"]), rng.randrange(1, 24)
    run = {"non_finite": policy, "checkpoint_every": 4, "incremental": rng.random() < 0.5}
    job = prepare(job_of(tmp_path, run=run), LocalCommunicator())
    seen: list[int] = []

    def damage(report: Any) -> None:
        seen.append(report.step)
        if len(seen) == step:
            store = rng.choice(job.trainer.stores)
            table, keys, rows = rng.choice(list(store.export()))
            rows[0, rng.randrange(rows.shape[1])] = rng.choice(VALUES[:3])
            counts = [0] * store.layout.num_tables
            counts[table] = 1
            store.scatter(keys[:1].clone(), counts, rows[:1].clone())

    with pytest.raises(RunError, match=r"NaN or inf|is not finite|are not finite|nan|inf"):
        train_job(job, damage)
    for path in paths_in(tmp_path):
        found = verified(path)
        assert found.manifest.step <= step
        for table in found.manifest.tables:
            assert all(bool(rows.isfinite().all()) for _, rows in found.rows(str(table["name"])))


def test_no_policy_changes_a_run_without_faults(tmp_path: Path):
    for policy in ("stop", "skip", "clip"):
        trained(job_of(tmp_path / policy, run={"non_finite": policy}))
    assert_same(tmp_path / "stop", tmp_path / "skip")
    assert_same(tmp_path / "stop", tmp_path / "clip")


@pytest.mark.parametrize("place", PLACES)
def test_a_skipped_batch_is_the_same_under_every_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    seed = next(n for n in range(100) if random_place(n) == place)
    for plan in ("serial", "nested"):
        with monkeypatch.context() as patched:
            inject(patched, seed)
            run = {"non_finite": "skip", "in_place": plan == "serial"}
            trained(job_of(tmp_path / plan, run=run, pipeline={"plan": plan}))
    assert_same(tmp_path / "serial", tmp_path / "nested")
    assert newest(tmp_path / "serial") is not None


def random_place(seed: int) -> str:
    rng = random.Random(seed)
    rng.randrange(20)
    return rng.choice(PLACES)


@pytest.mark.parametrize("value", VALUES)
def test_a_row_with_a_bad_gradient_is_left_alone_and_the_others_are_not(value: float):
    def sums() -> dict[int, Gradients]:
        rows = torch.tensor([[1.0, 2.0], [3.0, value], [5.0, 6.0]])
        return {0: Gradients([rows], None, None)}

    skipped, clipped = sums(), sums()
    assert [int(count) for count in drop_row_faults(skipped, 0, clip=False)] == [1]
    assert skipped[0].rows[0].tolist() == [[1, 2], [0, 0], [5, 6]]
    assert [int(count) for count in drop_row_faults(clipped, 0, clip=True)] == [1]
    assert clipped[0].rows[0].tolist() == [[1, 2], [3, 0], [5, 6]]
    assert drop_row_faults(skipped, 0, clip=False) == []


def test_dense_gradients_are_left_out_together():
    def gradients() -> list[Any]:
        return [torch.tensor([1.0, math.nan]), torch.ones(2), torch.zeros(0)]

    skipped, clipped = gradients(), gradients()
    assert len(drop_dense_faults(skipped, clip=False)) == 1
    assert [g.tolist() for g in skipped] == [[0, 0], [0, 0], []]
    drop_dense_faults(clipped, clip=True)
    assert [g.tolist() for g in clipped] == [[1, 0], [1, 1], []]
    assert drop_dense_faults([], clip=False) == []


def test_dense_faults_count_when_apply_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`writeback` of a batch does not wait for its `apply`: the next one tells."""
    batches = iter(range(100))

    def fourth_is_bad(gradients: Sequence[torch.Tensor], **_: object) -> list[torch.Tensor]:
        return [torch.tensor(True)] if gradients and next(batches) == 3 else []

    monkeypatch.setattr(ops, "drop_dense_faults", fourth_is_bad)
    monkeypatch.setattr(Trainer, "placed", lambda self, plan: with_separate_dense_group(plan))
    config = job_of(tmp_path, run={"non_finite": "skip"}, pipeline={"plan": "nested"})
    job, faults = prepare(config, LocalCommunicator()), list[int]()

    def with_late_apply(work: Work) -> Work:
        late = inject_delays({Kind.APPLY: work[Kind.APPLY]}, seed=1, max_ms=100)
        return {**work, **late}

    job.trainer.around = with_late_apply
    train_job(job, lambda report: faults.append(report.faults))
    assert [step for step, count in enumerate(faults) if count] == [4]


# Weights that float16 cannot hold.


def with_large_rows(
    ranks: int = 1, policy: str = "skip", dtype: str = "float16", **pipeline: Any
) -> list[tuple[list[int], list[torch.Tensor]]]:
    """For each rank the faults of every batch, and all keys and rows at the end."""
    memory = str(pipeline.pop("device_memory", "auto"))

    def one(comm: Communicator) -> tuple[list[int], list[torch.Tensor]]:
        model = LogisticRegression(("a", "b", "c"), 0)
        tables = [replace(table, dtype=dtype) for table in model.tables()]  # type: ignore[arg-type]
        settings = TrainSettings(
            batch=SAMPLES,
            device="cpu",
            non_finite=policy,  # type: ignore[arg-type]
            device_memory=memory,
            rows=RowSettings(optimizer="sgd", lr=1e7),
            pipeline=build(PipelineSettings, pipeline),
        )
        trainer, faults = Trainer(model, tables, settings, comm), list[int]()
        with closing(trainer):
            trainer.fit(Batches(), on_step=lambda report: faults.append(report.faults))  # type: ignore[arg-type]
            stored = [
                part for store in trainer.stores for piece in store.export() for part in piece[1:]
            ]
        return faults, stored

    return [one(LocalCommunicator())] if ranks == 1 else run_ranks(ranks, one)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_weight_that_float16_cannot_hold_is_kept_at_the_largest_under_every_plan(ranks: int):
    serial = with_large_rows(ranks, plan="serial")
    for faults, stored in serial:
        assert sum(faults) > 0
        rows = torch.cat([part for part in stored if part.is_floating_point()])
        assert rows.abs().max() == 65504
    assert sum(with_large_rows(dtype="bfloat16", plan="serial")[0][0]) == 0
    for plan in ("nested", "frozen_window"):
        for retrieval in ("new", "pooled"):
            more = {
                "plan": plan,
                "retrieval": retrieval,
                "policy": "clip",
                "device_memory": "11KB",
            }
            for one, other in zip(serial, with_large_rows(ranks, **more), strict=True):
                assert one[0] == other[0]
                assert all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_are_routed_on_the_device_see_it_as_well(
    ranks: int, monkeypatch: pytest.MonkeyPatch
):
    serial = with_large_rows(ranks, plan="serial", owner_sums="off")
    monkeypatch.setattr(trainer_module, "can_route_on_device", lambda *_: True)
    made = with_large_rows(ranks, plan="nested", retrieval="pooled", device_memory="11KB")
    for one, other in zip(serial, made, strict=True):
        assert one[0] == other[0]
        assert all(map(torch.equal, one[1], other[1]))
    with pytest.raises(RunError, match="weights of step 1 are beyond 65,504"):
        with_large_rows(policy="stop", plan="nested", retrieval="pooled")


@pytest.mark.parametrize("plan", ["serial", "nested"])
def test_a_run_stops_where_a_weight_goes_beyond_float16(plan: str):
    with pytest.raises(RunError) as stopped:
        with_large_rows(policy="stop", plan=plan)
    assert str(stopped.value) == (
        "weights of step 1 are beyond 65,504, where float16 ends; lower the learning rates, or "
        "keep tables as bfloat16"
    )


def test_rows_that_are_put_in_must_fit_their_type():
    model = LogisticRegression(("a",), 0)
    for dtype in ("bfloat16", "float16"):
        tables = [replace(table, dtype=dtype) for table in model.tables()]
        with closing(Trainer(model, tables, TrainSettings(device="cpu"))) as trainer:
            trainer.put_rows("a", torch.tensor([1]), torch.tensor([[65519.0]]))
            held = trainer.rows_of("a", torch.tensor([1]))
            assert held.tolist() == [[65504.0 if dtype == "float16" else 65536.0]]
            if dtype == "float16":
                with pytest.raises(ConfigError, match="'a' reach 65520, but its dtype, float16,"):
                    trainer.put_rows("a", torch.tensor([1]), torch.tensor([[-65520.0]]))
