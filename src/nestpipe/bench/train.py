# pyright: reportMissingImports=false, reportArgumentType=false
"""`nestpipe bench train`: our trainer and TorchRec take turns in the same CPU rank processes.

Both systems share the data and the dense half. TorchRec is an optional peer (`make bench-deps`).
`time_job` times a job of the user's own, with the model that its config names, without a peer.
Run as `python -m nestpipe.bench.train CASE ...` under torchrun; rank 0 writes JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.bench.pipeline_rank import Repeated
from nestpipe.comm import Communicator, connect
from nestpipe.config import Table
from nestpipe.errors import ConfigError, NestpipeError
from nestpipe.jagged import Jagged
from nestpipe.models.protocol import Loss
from nestpipe.train.config import DenseSettings, PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.job import Job, JobConfig, make_job
from nestpipe.train.trainer import Trainer

LR = 0.05
TORCHREC, TORCHREC_DEDUP = "torchrec", "torchrec_dedup"
"""The peer as its CPU build is, and with `torch.unique` before the lookup."""
# Shapes: B samples, L keys of a sample, C features, D width of a row


@dataclass(frozen=True, slots=True)
class TrainCase:
    """One benchmark: how large everything is."""

    name: str
    features: tuple[str, ...]
    rows: int
    """Rows of each table."""
    keys: int
    """Keys of each feature and sample."""
    batch: int
    """Samples per rank."""
    pooled: bool
    dim: int = 64
    dense_features: int = 0

    def tables(self) -> list[Table]:
        pooling = "sum" if self.pooled else "none"
        placement = "table" if self.pooled else "rows"
        return [
            Table(name=name, dim=self.dim, pooling=pooling, placement=placement)
            for name in self.features
        ]

    def make_batch(self, generator: torch.Generator) -> Batch:
        """Log-uniform keys, random features and labels."""
        lengths_B = torch.full((self.batch,), self.keys)
        return Batch(
            self.batch,
            {
                "label": torch.randint(0, 2, (self.batch,), generator=generator).float(),
                "features": torch.rand(self.batch, self.dense_features, generator=generator),
            },
            {
                name: Jagged(log_uniform(self.batch * self.keys, self.rows, generator), lengths_B)
                for name in self.features
            },
        )

    def make_head(self) -> nn.Module:
        """The dense half; the same seed gives both systems the same weights."""
        torch.manual_seed(0)
        return DlrmHead(self) if self.pooled else SequenceHead(self)


def _dlrm(name: str, keys: int) -> TrainCase:
    features = tuple(f"c{i}" for i in range(26))
    return TrainCase(name, features, 200_000, keys, batch=2048, pooled=True, dense_features=13)


CASES = {
    case.name: case
    for case in (
        TrainCase("sequence", ("item",), 2_000_000, keys=50, batch=1024, pooled=False),
        _dlrm("dlrm1", keys=1),
        _dlrm("dlrm10", keys=10),
    )
}


def log_uniform(count: int, rows: int, generator: torch.Generator) -> Tensor:
    """Keys from 0 to rows - 1 whose logarithm is uniform: a few hot ones, a long tail."""
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    top = torch.log(torch.tensor(float(rows), dtype=torch.float64))
    return torch.exp(uniform * top).long().sub_(1).clamp_(0, rows - 1)


class SequenceHead(nn.Module):
    """Every position through a dense layer, then the mean, then 64-256-256-1."""

    def __init__(self, case: TrainCase) -> None:
        super().__init__()
        self.keys = case.keys
        self.position = nn.Linear(case.dim, case.dim)
        self.top = nn.Sequential(
            nn.Linear(case.dim, 256),
            nn.ReLU(),
            nn.Linear(256, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )

    def forward(self, rows: Sequence[Tensor], features_BF: Tensor) -> Tensor:
        (rows_TD,) = rows
        rows_BLD = rows_TD.view(len(features_BF), self.keys, -1)
        return self.top(torch.relu(self.position(rows_BLD)).mean(1)).squeeze(1)


class DlrmHead(nn.Module):
    """Dense features through a small MLP, dot products of all pairs, a top MLP."""

    def __init__(self, case: TrainCase) -> None:
        super().__init__()
        self.bottom = nn.Sequential(
            nn.Linear(case.dense_features, 256), nn.ReLU(), nn.Linear(256, case.dim), nn.ReLU()
        )
        self.vectors = vectors = len(case.features) + 1
        first, second = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", first * vectors + second, persistent=False)
        self.top = nn.Sequential(
            nn.Linear(case.dim + len(first), 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, rows: Sequence[Tensor], features_BF: Tensor) -> Tensor:
        dense_BD = self.bottom(features_BF)
        vectors = torch.cat([dense_BD, *rows], 1).view(len(dense_BD), self.vectors, -1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        picked = products.index_select(1, self.get_buffer("pairs"))
        return self.top(torch.cat([dense_BD, picked], 1)).squeeze(1)


class BenchModel(nn.Module):
    """The case as a model of ours."""

    def __init__(self, case: TrainCase) -> None:
        super().__init__()
        self.case = case
        self.head = case.make_head()

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return batch.sparse

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        given = [rows[name] for name in self.case.features]
        logits = self.head(given, batch.dense["features"])
        total = nn.functional.binary_cross_entropy_with_logits(
            logits, batch.dense["label"], reduction="sum"
        )
        return Loss(total, batch.size)


def make_peer_steps(case: TrainCase, batches: Sequence[Batch]) -> dict[str, Callable[[int], None]]:
    """Functions that train TorchRec on batch i; need a Gloo process group.

    FBGEMM has no dedup for a CPU, so a sequence is also looked up by its distinct keys, as a user
    would do with `torch.unique`.
    """
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    try:
        import torchrec  # noqa: F401
    except ImportError:
        raise ConfigError(
            "TorchRec is not installed; run `make bench-deps`, or leave it out with --no-peer"
        ) from None
    steps = {TORCHREC: make_step(case, batches, look_up_all)}
    if not case.pooled:
        steps[TORCHREC_DEDUP] = make_step(case, batches, look_up_distinct)
    return steps


def make_step(
    case: TrainCase, batches: Sequence[Batch], look_up: Callable[..., Any]
) -> Callable[[int], None]:
    """A function that trains a TorchRec model of its own on batch i."""
    model = _sharded(case, look_up)
    dense = [p for name, p in model.named_parameters() if "head" in name]
    optimizer = torch.optim.SGD(dense, lr=1e-3)
    inputs = [(jagged_keys(case, batch), batch) for batch in batches]  # off the clock

    def step(i: int) -> None:
        keys, batch = inputs[i % len(inputs)]
        optimizer.zero_grad()
        logits = model(keys, batch.dense["features"])
        nn.functional.binary_cross_entropy_with_logits(logits, batch.dense["label"]).backward()
        optimizer.step()

    return step


def jagged_keys(case: TrainCase, batch: Batch) -> Any:
    """The keys of a batch as TorchRec takes them."""
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(
        keys=list(case.features),
        values=torch.cat([batch.sparse[name].values for name in case.features]),
        lengths=torch.cat([batch.sparse[name].lengths for name in case.features]).int(),
    )


def look_up_all(case: TrainCase, embeddings: nn.Module, keys: Any) -> Tensor:
    """The rows of a batch, every duplicate looked up."""
    found = embeddings(keys)
    return found.values() if case.pooled else found[case.features[0]].values()


def look_up_distinct(case: TrainCase, embeddings: nn.Module, keys: Any) -> Tensor:
    """The same rows, each looked up once; gradients of duplicates are summed on the way back."""
    from torchrec import KeyedJaggedTensor

    (feature,) = case.features
    keys_K, position_T = torch.unique(keys.values(), return_inverse=True)
    lengths = torch.tensor([len(keys_K)], dtype=torch.int32)
    found = embeddings(KeyedJaggedTensor(keys=[feature], values=keys_K, lengths=lengths))
    return found[feature].values().index_select(0, position_T)


class _PeerModel(nn.Module):
    """The case as a TorchRec model."""

    def __init__(
        self, case: TrainCase, embeddings: nn.Module, look_up: Callable[..., Tensor]
    ) -> None:
        super().__init__()
        self.case = case
        self.embeddings = embeddings
        self.look_up = look_up
        self.head = case.make_head()

    def forward(self, keys: Any, features_BF: Tensor) -> Tensor:
        rows = self.look_up(self.case, self.embeddings, keys)
        return self.head([rows], features_BF)


def _sharded(case: TrainCase, look_up: Callable[..., Tensor]) -> nn.Module:
    import torch.distributed as dist
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
    )
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints

    kinds = (
        (EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingBagCollectionSharder, "table_wise")
        if case.pooled
        else (EmbeddingCollection, EmbeddingConfig, EmbeddingCollectionSharder, "row_wise")
    )
    collection, config, sharder, sharding = kinds
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": 1e-8}
    declared = [
        config(name=name, embedding_dim=case.dim, num_embeddings=case.rows, feature_names=[name])
        for name in case.features
    ]
    model = _PeerModel(case, collection(device=torch.device("meta"), tables=declared), look_up)
    world = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, compute_device="cpu", local_world_size=world),
        constraints={
            name: ParameterConstraints(sharding_types=[sharding], compute_kernels=["fused"])
            for name in case.features
        },
    )
    sharders = [sharder(fused_params=fused)]
    group = dist.group.WORLD
    assert group is not None
    plan = planner.collective_plan(model, sharders, group)  # type: ignore[arg-type]
    return DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=plan,
        sharders=sharders,  # type: ignore[arg-type]
    )


def make_own_rounds(
    case: TrainCase, batches: Sequence[Batch], comm: Communicator, steps: int, plan: str
) -> Callable[[], None]:
    """A function that trains ours for one round of steps."""
    settings = TrainSettings(
        batch=case.batch * comm.size,
        device="cpu",
        pipeline=PipelineSettings(plan=plan),
        rows=RowSettings(optimizer="rowwise_adagrad", lr=LR),
        dense=DenseSettings(optimizer="sgd", lr=1e-3),
    )
    trainer = Trainer(BenchModel(case), case.tables(), settings, comm)
    source = Repeated(batches, steps)
    epochs = 0

    def go() -> None:
        nonlocal epochs
        epochs += 1
        trainer.fit(source, epochs=epochs)  # type: ignore[arg-type]

    return go


def compare(case: TrainCase, comm: Communicator, *, rounds: int, steps: int, peer: bool, plan: str):
    """Alternate rounds of all systems; their speeds are in `train_result`."""
    generator = torch.Generator().manual_seed(comm.rank)
    batches = [case.make_batch(generator) for _ in range(8)]
    own = make_own_rounds(case, batches, comm, steps, plan)
    systems: dict[str, Callable[[], None]] = {"nestpipe": own}
    if peer:
        for name, step in make_peer_steps(case, batches).items():
            systems[name] = partial(_repeat, step, steps)
    times: dict[str, list[float]] = {name: [] for name in systems}
    for round_number in range(rounds + 1):
        for name, go in systems.items():
            comm.barrier()
            start = time.perf_counter()
            go()
            comm.barrier()
            if round_number > 0:
                times[name].append(time.perf_counter() - start)
    what = {"config": case.name, "ranks": comm.size, "plan": plan, "rounds": rounds, "steps": steps}
    return {**what, **train_result(times, case.batch * comm.size * steps)}


def time_job(
    config: JobConfig,
    comm: Communicator,
    plans: Sequence[str],
    *,
    rounds: int,
    steps: int,
    progress: Callable[[], object] = lambda: None,
) -> list[dict[str, object]]:
    """Train a job with each of these plans, in turns; nothing is evaluated or saved.

    The first round of a plan does not count. Each goes on where its last round ended.
    """
    with ExitStack() as closing_all:
        jobs = [make_job(_with_plan(config, plan), comm) for plan in plans]
        for job in jobs:
            closing_all.callback(job.trainer.close)
        times: list[list[float]] = [[] for _ in jobs]
        for round_number in range(rounds + 1):
            for of_job, job in zip(times, jobs, strict=True):
                seconds = _seconds_of_a_sample(job, comm, steps)
                if round_number > 0:
                    of_job.append(seconds)
                progress()
        about = {"ranks": comm.size, "rounds": rounds, "steps": steps}
        return [
            {"config": config.model.kind, "plan": job.trainer.plan.name, **about}
            | train_result({"nestpipe": of_job}, samples=1)
            for of_job, job in zip(times, jobs, strict=True)
        ]


def _with_plan(config: JobConfig, plan: str) -> JobConfig:
    return replace(config, pipeline=replace(config.pipeline, plan=plan))


def _seconds_of_a_sample(job: Job, comm: Communicator, steps: int) -> float:
    """Of all ranks together: the last batch of an epoch may have fewer samples than others."""
    samples: list[int] = []
    comm.barrier()
    start = time.perf_counter()
    job.trainer.fit(
        job.train,
        steps=steps,
        epochs=sys.maxsize,
        on_step=lambda report: samples.append(report.samples),
    )
    comm.barrier()
    return (time.perf_counter() - start) / sum(samples)


def train_result(times: Mapping[str, Sequence[float]], samples: int) -> dict[str, object]:
    """Samples per second of each system by the median round, their range, and both ratios."""
    speed = {name: samples / median(values) for name, values in times.items()}
    ranges = {
        name: [samples / max(values), samples / min(values)] for name, values in times.items()
    }
    found: dict[str, object] = {}
    for name in ("nestpipe", TORCHREC, TORCHREC_DEDUP):
        found[f"{name}_samples_per_s"] = speed.get(name)
        found[f"{name}_samples_per_s_range"] = ranges.get(name)
    for key, name in (("ratio", TORCHREC), ("ratio_dedup", TORCHREC_DEDUP)):
        found[key] = speed["nestpipe"] / speed[name] if name in speed else None
    return found


def _repeat(step: Callable[[int], None], steps: int) -> None:
    for i in range(steps):
        step(i)


def main() -> None:
    """One rank of the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plan", default="serial")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with closing(connect("gloo")) as comm:
        try:
            result = compare(
                CASES[given.case],
                comm,
                rounds=given.rounds,
                steps=given.steps,
                peer=not given.no_peer,
                plan=given.plan,
            )
        except NestpipeError as error:
            if comm.rank == 0:
                sys.stderr.write(f"error: {error}\n")
            sys.exit(error.exit_status)
        if comm.rank == 0:
            given.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
