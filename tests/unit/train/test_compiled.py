"""A compiled dense half: the same bits for every plan, few forms, and the model's own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config

from nestpipe.batch import Batch
from nestpipe.comm import LocalCommunicator
from nestpipe.config import Table, build
from nestpipe.errors import ConfigError, ModelError
from nestpipe.jagged import Jagged
from nestpipe.models import Loss
from nestpipe.train import JobConfig, dense, train_job
from nestpipe.train.evaluate import evaluate
from nestpipe.train.job import Job, effect_of, prepare
from nestpipe.train.trainer import Trainer
from nestpipe.train.verify import Trained, compare
from support.examples import is_long

# torch's own, when its compiler is imported and looks at inputs that are no leaves.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:DeprecationWarning", "ignore:The .grad attribute:UserWarning"
)

BATCHES, BATCH = 7, 12
SEQUENCES = {
    "flavour": "sequence", "samples": 24, "num_items": 60, "num_communities": 5, "min_len": 2,
    "max_len": 9,
}  # fmt: skip


class HistoryModel(nn.Module):
    """Averages a list of rows; `branches`: also computes as many times as the batch has keys."""

    def __init__(self, *, branches: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.top = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.branches = branches

    def tables(self) -> list[Table]:
        return [Table(name="history", dim=4, init_std=0.3)]

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return batch.sparse

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        lengths = batch.sparse["history"].lengths
        sample = torch.repeat_interleave(lengths, output_size=len(rows["history"]))
        sums = rows["history"].new_zeros(batch.size, 4).index_add(0, sample, rows["history"])
        if self.branches:
            for _ in range(len(rows["history"])):
                sums = sums * 1.01
        logits = self.top(sums).squeeze(1).float()
        label = batch.dense["label"]
        entropy = nn.functional.binary_cross_entropy_with_logits(logits, label, reduction="sum")
        return Loss(entropy, batch.size, logits.detach().sigmoid(), label)


class HistorySource:
    """Batches of lists, of another number of keys each time; the last one is small."""

    def empty(self) -> Batch:
        return self._batch(0).empty()

    def batches(self, *, start: int = 0, **given: int) -> Iterator[Batch]:
        for number in range(start, BATCHES):
            yield self._batch(number)

    def _batch(self, number: int) -> Batch:
        rng = torch.Generator().manual_seed(number)
        size = BATCH if number < BATCHES - 1 else 5
        lengths = torch.randint(1, 4 + number, (size,), generator=rng)
        keys = torch.randint(0, 40, (int(lengths.sum()),), generator=rng)
        label = torch.rand(size, generator=rng).round()
        return Batch(size, {"label": label}, {"history": Jagged(keys, lengths)})


def job_of(**sections: dict[str, Any]) -> JobConfig:
    given = {
        "data": {"synthetic": {"samples": 80, "test_samples": 24, "num_tables": 2}},
        "model": {"dim": 4, "bottom": [8, 4], "top": [8], "compile": True},
        "run": {"batch": 16, "device": "cpu"},
    }
    names = {*given, *sections}
    return build(JobConfig, {n: {**given.get(n, {}), **sections.get(n, {})} for n in names})


def trainer_of(made: HistoryModel, **sections: dict[str, Any]) -> Trainer:
    config = job_of(**{**sections, "run": {"batch": BATCH, **sections.get("run", {})}})
    return Trainer(made, made.tables(), config.settings())


def fitted(trainer: Trainer, name: str = "run") -> Trained:
    losses: list[float] = []
    source: Any = HistorySource()
    trainer.fit(source, on_step=lambda report: losses.append(report.loss))
    return Trained(name, trainer, losses, [])


def forms() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plans_have_the_same_bits_and_jagged_batches_one_form(precision: str):
    run = {"precision": precision}
    found: list[Trained] = []
    for plan in ("serial", "nested"):
        before = forms()
        pipeline = {"plan": plan, "micro_batches": 2}
        trainer = trainer_of(HistoryModel(), run=run, pipeline=pipeline)
        found.append(fitted(trainer, plan))
        assert forms() - before == 1, "14 micro-batches of other sizes, one form for all"
    assert compare(*found).rows_different == 0
    assert compare(*found).tensors_different == 0
    plain = fitted(trainer_of(HistoryModel(), run=run, model={"compile": False}))
    close = 1e-5 if precision == "fp32" else 1e-2
    assert found[0].losses == pytest.approx(plain.losses, rel=close)
    assert all(name[:3] == "top" for name in found[0].trainer.model.state_dict())


# torch's own, where it traces an autograd function, and where a value goes to the host.
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning", "ignore:Graph break:UserWarning"
)
@pytest.mark.skipif(not is_long(), reason="40 pieces to compile; NESTPIPE_EXAMPLES=long does")
def test_a_retriever_is_compiled_with_the_draws_that_it_has_without():
    """Dropout of half of all numbers, and negatives by position: other bits are another loss."""
    losses: dict[bool, list[float]] = {True: [], False: []}
    for compiles, told in losses.items():
        config = build(
            JobConfig,
            {
                "data": {"synthetic": SEQUENCES},
                "model": {
                    "kind": "hstu", "dim": 8, "attention_dim": 4, "blocks": 1, "max_len": 9,
                    "negatives": 4, "negative_pool": 9, "compile": compiles,
                    "encoder": {"dropout": 0.5},
                },
                "run": {"batch": 8, "steps": 2, "device": "cpu"},
            },
        )  # fmt: skip
        job, before = prepare(config, LocalCommunicator()), forms()
        job.trainer.fit(
            job.train, steps=2, on_step=lambda report, told=told: told.append(report.loss)
        )
        assert (forms() > before) == compiles
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)


def test_checkpoints_and_evaluation_do_not_know_of_it(tmp_path: Path):
    """One that goes on has the bits of one that went through, where batches are of one size."""

    def job(folder: str, *, compiles: bool = True, steps: int = 0) -> Job:
        run = {"checkpoint": str(tmp_path / folder), "steps": steps}
        return prepare(job_of(run=run, model={"compile": compiles}), LocalCommunicator(), "auto")

    for folder, steps in (("straight", 0), ("run", 2), ("run", 0)):
        train_job(job(folder, steps=steps), lambda report: None)
    straight, resumed, eager = job("straight"), job("run"), job("run", compiles=False)
    assert straight.trainer.progress.step == eager.trainer.progress.step == 5
    one, two = (Trained("", each.trainer, [], []) for each in (straight, resumed))
    found = compare(one, two)
    assert (found.rows_different, found.tensors_different) == (0, 0)
    before = forms()
    told = evaluate(resumed.trainer, resumed.held_out())
    assert forms() - before == 1, "evaluation is compiled, too"
    assert told == pytest.approx(evaluate(eager.trainer, eager.held_out()), rel=1e-5)
    assert forms() - before == 1


def test_a_dense_half_that_never_stops_compiling_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dense, "MOST_FORMS", 2)
    trainer = trainer_of(HistoryModel(branches=True))
    with pytest.raises(ModelError, match=r"`dense` of HistoryModel was compiled 2 times"):
        fitted(trainer)


def test_a_fault_of_the_model_is_told_as_without_it():
    class Lost(HistoryModel):
        def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
            return Loss(rows["history"].sum() * batch.dense["weight"], batch.size)

    with pytest.raises(ModelError, match=r"`dense` of Lost failed \(KeyError: 'weight'"):
        fitted(trainer_of(Lost()))


def test_a_machine_without_a_compiler_is_told_before_training():
    with (
        config.patch({"cpp.cxx": ("/nowhere/g++",)}),
        pytest.raises(ConfigError, match=r"model.compile is true but there is no C\+\+ compiler"),
    ):
        trainer_of(HistoryModel())


def test_an_older_torch_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", lambda model, dynamic=None: model)
    with pytest.raises(ConfigError, match=r"use torch 2.13 or newer, or set model.compile = false"):
        trainer_of(HistoryModel())


def test_a_run_may_go_on_with_and_without_it():
    assert effect_of("model.compile") == "sums"
