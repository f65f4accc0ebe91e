"""One rank of runs whose dense half is sharded, beside the replicated form.

python shards_program.py SCENARIO [FOLDER]    (prints what it found, as JSON)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.comm import Communicator, connect
from nestpipe.config import build
from nestpipe.errors import NestpipeError
from nestpipe.models import Loss
from nestpipe.train.config import TrainSettings
from nestpipe.train.dense import local, whole
from nestpipe.train.evaluate import evaluate
from nestpipe.train.job import JobConfig, make_job
from nestpipe.train.ops import StepReport
from nestpipe.train.trainer import Trainer
from nestpipe.train.verify import bits, verify_job
from support.verify_world import BATCH, Model, Samples, tables_of

Options = dict[str, Any]
SHARDED = {"dense": "sharded"}
SEQUENCES = {
    "flavour": "sequence", "samples": 51, "test_samples": 17, "num_items": 60,
    "num_communities": 5, "min_len": 2, "max_len": 9,
}  # fmt: skip
"""In the last batch of the test one of two ranks has no sample."""


class LayersModel(Model):
    """Layers that are gathered one by one, a layer that not every rank uses, a frozen one."""

    broken: int | None = None
    """The call of `dense` whose loss is NaN, counted on this rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.rare = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(3, 1)
        self.frozen.requires_grad_(False)
        self.calls = 0

    def shard_units(self) -> list[nn.Module]:
        return [module for module in self.top if isinstance(module, nn.Linear)]

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        loss = super().dense(rows, batch)
        total = loss.total * self.scale.sum()
        features = batch.dense["features"]
        if batch.size and float(features[0, 0]) > 0:
            total = total + (self.rare(features) + self.frozen(features)).square().sum()
        if self.training:
            self.calls += 1
            if self.calls == self.broken:
                total = total * float("nan")
        return Loss(total, loss.weight)


def trainer_of(comm: Communicator, given: Options | None = None) -> Trainer:
    settings = {
        "batch": BATCH,
        "device": "cpu",
        "store_threads": 1,
        "rows": {"optimizer": "adam", "lr": 0.01},
        "pipeline": {"plan": "serial", "micro_batches": 2},
        **(given or {}),
    }
    tables = tables_of({"optimizer": "adam"})
    return Trainer(LayersModel(), tables, build(TrainSettings, settings), comm)


def everything(trainer: Trainer) -> dict[str, Tensor]:
    """Every weight and state, whole; of rows this rank's own."""
    found = {name: whole(tensor.detach()) for name, tensor in trainer.model.state_dict().items()}
    named = dict(trainer.model.named_parameters())
    for name, parameter in named.items():
        for state, value in sorted(trainer.dense_optimizer.state.get(parameter, {}).items()):
            found[f"{name} {state}"] = whole(torch.as_tensor(value))
    for g, store in enumerate(trainer.stores):
        for table, _, rows in store.export():
            found[f"rows {g} {table}"] = rows
    return {name: tensor.clone() for name, tensor in found.items()}


def fit(trainer: Trainer, steps: int | None = None) -> list[StepReport]:
    reports: list[StepReport] = []
    source: Any = Samples("empty on some ranks")
    trainer.fit(source, steps=steps, on_step=reports.append)
    return reports


def both(comm: Communicator, given: Options) -> Options:
    """How far the sharded form comes from the replicated one."""
    trainers = [trainer_of(comm, {**given, "parallel": form}) for form in ({}, SHARDED)]
    reports = [fit(trainer) for trainer in trainers]
    one, two = (everything(trainer) for trainer in trainers)
    assert one.keys() == two.keys()
    first = {name: p.detach().clone() for name, p in LayersModel().named_parameters()}
    return {
        "largest": max(float((one[n] - two[n]).abs().max()) for n in one if one[n].numel()),
        "moved": max(float((one[n] - first[n]).abs().max()) for n in first),
        "losses": [[report.loss for report in of] for of in reports],
        "norms": [[report.grad_norm for report in of] for of in reports],
        "bytes": [held(trainer) for trainer in trainers],
        "sent": [trainer.traffic.bytes_sent for trainer in trainers],
    }


def held(trainer: Trainer) -> int:
    """Bytes of parameters and of their optimizer's state on this rank."""
    tensors: list[Tensor] = list(trainer.model.parameters())
    for states in trainer.dense_optimizer.state.values():
        tensors += [value for value in states.values() if value.ndim]
    return sum(local(tensor).untyped_storage().nbytes() for tensor in tensors)


ADAMW = {"optimizer": "adamw", "weight_decay": 0.1, "no_decay": ("*.bias",)}
RECIPES: dict[str, Options] = {
    "sgd": {"dense": {"optimizer": "sgd", "lr": 0.1}},
    "adagrad": {"dense": {"optimizer": "adagrad", "lr": 0.01}},
    "adamw": {"dense": {**ADAMW, "lr": 0.01}},
    "clipped": {"clip_norm": 0.05},
    "clipped without rows": {"clip_norm": 0.05, "clip_rows": False},
    "bf16": {"precision": "bf16"},
    "rates": {"dense": {"rates": ["top.*=0.02"], "schedule": "cosine", "decay_steps": 6}},
}


def close(comm: Communicator, folder: Path) -> Options:
    return {name: both(comm, given) for name, given in RECIPES.items()}


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(bits(one[n]), bits(two[n])) for n in one)


def resume(comm: Communicator, folder: Path) -> Options:
    """What comes back from checkpoints, written and read by both forms."""
    given = {"dense": {**ADAMW, "lr": 0.01}}
    found: Options = {}
    for form in ("sharded", "replicated"):
        settings = {**given, "parallel": {"dense": form}}
        straight, stopped = trainer_of(comm, settings), trainer_of(comm, settings)
        fit(straight)
        fit(stopped, steps=3)
        saved = stopped.save(folder / form)
        for reader in ("sharded", "replicated"):
            again = trainer_of(comm, {**given, "parallel": {"dense": reader}})
            again.load(saved)
            found[f"{form} to {reader}"] = same(everything(stopped), everything(again))
            if reader == form:
                fit(again)
                found[f"{form} goes on"] = same(everything(straight), everything(again))
    found["held out"] = [scores(comm, folder, form) for form in ("sharded", "replicated")]
    return found


def scores(comm: Communicator, folder: Path, form: str) -> dict[str, float]:
    """How a checkpoint is evaluated, before any training."""
    trainer = trainer_of(comm, {"dense": {**ADAMW, "lr": 0.01}, "parallel": {"dense": form}})
    trainer.load(folder / "sharded" / "step-00000003")
    source: Any = Samples("empty on some ranks")
    metrics = evaluate(trainer, source)
    fit(trainer, steps=1)  # and afterwards it trains
    return metrics


def load(comm: Communicator, folder: Path) -> Options:
    """A checkpoint of another number of ranks, read by both forms."""
    found: list[dict[str, Tensor]] = []
    for form in ("sharded", "replicated"):
        settings = {"dense": {**ADAMW, "lr": 0.01}, "parallel": {"dense": form}}
        trainer = trainer_of(comm, settings)
        trainer.load(folder / "sharded" / "step-00000003")
        found.append(everything(trainer))
    return {"same": same(*found), "step": int(found[0]["scale step"])}


def faults(comm: Communicator, folder: Path) -> Options:
    """The loss of one rank is NaN in its fifth call: the first micro-batch of the third batch."""
    found: Options = {}
    for form, policy in product(("sharded", "replicated"), ("skip", "clip", "stop")):
        trainer = trainer_of(comm, {"non_finite": policy, "parallel": {"dense": form}})
        assert isinstance(trainer.model, LayersModel)
        trainer.model.broken = 5 if comm.rank == 1 else None
        try:
            reports = fit(trainer)
        except NestpipeError as error:
            found[f"{form} {policy}"] = str(error)
        else:
            weights = [whole(p.detach()) for p in trainer.model.parameters()]
            counts = [report.faults for report in reports]
            finite = all(bool(torch.isfinite(w).all()) for w in weights)
            found[f"{form} {policy}"] = [counts, finite, [float(w.sum()) for w in weights]]
    return found


def sequences(comm: Communicator, folder: Path) -> Options:
    """A model of blocks, whose evaluation calls another method than `dense`."""
    found: Options = {}
    for again in (False, True):
        config = sequence_job(SHARDED, dropout=0.2, checkpoint_activations=again)
        found[f"verified {again}"] = verify_job(config, comm).figures()
    for form in ("replicated", "sharded"):
        job = make_job(sequence_job({"dense": form}), comm)
        before = evaluate(job.trainer, job.held_out())
        job.trainer.fit(job.train, steps=3)
        found[form] = [before, evaluate(job.trainer, job.held_out())]
    return found


def sequence_job(parallel: Options, **encoder: object) -> JobConfig:
    model = {"kind": "hstu", "dim": 8, "attention_dim": 4, "max_len": 9, "negatives": 4}
    return build(
        JobConfig,
        {
            "data": {"synthetic": SEQUENCES},
            "model": {**model, "encoder": encoder},
            "run": {"batch": 16, "device": "cpu"},
            "parallel": parallel,
            "pipeline": {"plan": "nested", "micro_batches": 2},
        },
    )


SCENARIOS: dict[str, Callable[[Communicator, Path], Options]] = {
    "close": close,
    "resume": resume,
    "load": load,
    "faults": faults,
    "sequences": sequences,
}


def main(scenario: str) -> None:
    name, _, folder = scenario.partition(" ")
    torch.set_num_threads(1)
    comm = connect("gloo", timeout_s=30)
    print(json.dumps(SCENARIOS[name](comm, Path(folder))))
    sys.stdout.flush()
    comm.barrier()
    comm.close()


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
