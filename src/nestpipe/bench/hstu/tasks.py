"""A whole step of a ranker with several tasks, as NVIDIA's recsys-examples time theirs.

Items and users have tables of their own, narrower than the model. A user's row comes first, then
those of the history; at each item a head predicts all tasks. Histories are mostly short, keys are
Zipf, rows and weights are trained by Adam. Batches are made before the clock starts, and it starts
behind the steps that a run traces. Ranks run as `python -m nestpipe.bench.hstu.tasks FOLDER`.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.batch import Batch
from nestpipe.bench.dlrm import LAST_STEPS, StepClock, warm_steps
from nestpipe.bench.machines import Job, do_jobs, run_jobs, start_ranks
from nestpipe.bench.pipeline_rank import CHUNK, connect_ranks
from nestpipe.comm import Communicator
from nestpipe.config import Table, positive
from nestpipe.config.load import known_types
from nestpipe.data.order import draw, mix
from nestpipe.data.synthetic import zipf
from nestpipe.embedding.routing.lists import owner_of
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged, Join, longest_of
from nestpipe.models import Hstu, HstuConfig, Tokens
from nestpipe.models.protocol import Loss, full_precision
from nestpipe.train.config import DenseSettings, PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.loggers import peak_tflops
from nestpipe.train.trainer import Trainer, choose_device

# Shapes: B samples, T rows of all samples together, I items of all histories together, D width of a
# table's row, N tasks

MODULE = "nestpipe.bench.hstu.tasks"
MOST_TASKS = 62
"""Labels of an item are the bits of one number."""


@dataclass(frozen=True, kw_only=True)
class TasksCase:
    """One size of everything; the defaults are those of the published setting."""

    ranks: int = 1
    batch: int = 32
    """Samples per rank."""
    length: int = 4096
    """Items of the longest history."""
    length_exponent: float = 1.2
    """Of the Zipf lengths."""
    items: int = 50_000_000
    users: int = 50_000_000
    """Different keys."""
    key_exponent: float = 1.05
    stored: int = 0
    """Rows of each table in host memory before the first step; others are made at first use."""
    table_dim: int = 128
    tasks: int = 8
    head: int = 512
    """Width of the head's hidden layer."""
    blocks: int = 8
    dim: int = 1024
    heads: int = 4
    head_dim: int = 256
    position_buckets: int = 0
    """The published model has no bias."""
    attention: Literal["auto", "fused", "hopper", "plain"] = "auto"
    pointwise: Literal["auto", "fused", "plain"] = "auto"
    checkpoint_activations: bool = False
    precision: Literal["bf16", "fp32"] = "bf16"
    plan: str = "nested"
    retrieval: str = "pooled"
    micro_batches: int = 1
    balance: Literal["samples", "work"] = "samples"
    device_memory: str = "auto"
    """For the pool of rows, on each rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    peak_tflops: float = 0.0
    warm: int = 0
    """Steps before the clock starts; 0: 12 on a CPU, 72 on a GPU, where the first 64 are traced."""
    steps: int = 30
    """Steps of a round."""
    rounds: int = 3

    def __post_init__(self) -> None:
        known_types(self)
        for name in ("ranks", "batch", "items", "users", "table_dim", "head", "steps", "rounds"):
            positive(name, getattr(self, name))
        if not 1 <= self.tasks <= MOST_TASKS:
            raise ConfigError(f"tasks is {self.tasks}; give 1 to {MOST_TASKS}")
        if self.balance == "work" and self.ranks == 1 and self.micro_batches == 1:
            raise ConfigError(
                "balance is 'work' on one rank with one micro-batch, which has nothing to balance; "
                "use --ranks 2 or more, or 'samples'"
            )
        self.pipeline()  # refuses what cannot be, before anything runs

    @property
    def device_kind(self) -> str:
        return choose_device(self.device).type

    @property
    def warm_steps(self) -> int:
        return self.warm or warm_steps(self.device_kind)

    @property
    def all_steps(self) -> int:
        return self.warm_steps + self.rounds * self.steps + LAST_STEPS

    def pipeline(self) -> PipelineSettings:
        return PipelineSettings(
            plan=self.plan,
            retrieval=self.retrieval,  # pyright: ignore[reportArgumentType]
            micro_batches=self.micro_batches,
            balance=self.balance,
        )


class TasksRanker(nn.Module):
    """HSTU over a user and a history; at each item the log-odds of every task."""

    def __init__(self, case: TasksCase) -> None:
        super().__init__()
        self.case = case
        self.project = nn.Linear(case.table_dim, case.dim)
        self.encoder = Hstu(
            HstuConfig(
                blocks=case.blocks,
                heads=case.heads,
                dim=case.dim,
                attention_dim=case.head_dim,
                value_dim=case.head_dim,
                max_len=case.length + 1,
                position_buckets=case.position_buckets,
                attention=case.attention,
                pointwise=case.pointwise,
                checkpoint_activations=case.checkpoint_activations,
            )
        )
        self.head = nn.Sequential(
            nn.Linear(case.dim, case.head), nn.SiLU(), nn.Linear(case.head, case.tasks)
        )

    def tables(self) -> list[Table]:
        dim = self.case.table_dim
        return [
            Table(name="items", dim=dim, features=("history",)),
            Table(name="users", dim=dim, features=("user",)),
        ]

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return {name: batch.sparse[name] for name in ("history", "user")}

    def shard_units(self) -> list[nn.Module]:
        """The blocks."""
        return list(self.encoder.blocks)

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        history, user = batch.sparse["history"], batch.sparse["user"]
        join = Join.of(user.lengths, batch.size, history.lengths, len(history.values))
        joined_TD = self.project(join.rows(rows["user"], rows["history"]))
        tokens = Tokens(join.lengths_B, longest=longest_of(user, history))
        encoded_TD = self.encoder(full_precision(joined_TD), tokens)
        logits_IN = self.head(encoded_TD.index_select(0, join.second_places))
        bits_N = torch.arange(self.case.tasks, device=logits_IN.device)
        labels_IN = (batch.sparse["labels"].values[:, None] >> bits_N) & 1
        total = functional.binary_cross_entropy_with_logits(
            full_precision(logits_IN), labels_IN.float(), reduction="sum"
        )
        return Loss(total, float(len(history.values)))

    def step_flops(self, batch: Batch) -> Tensor:
        """(B,) of a training step on each sample: products alone, three times those forward."""
        items_B = batch.sparse["history"].lengths
        case = self.case
        input_B = (items_B + 1) * (6.0 * case.table_dim * case.dim)
        head_B = items_B * (6.0 * case.head * (case.dim + case.tasks))
        return self.encoder.flops(items_B + 1, torch.zeros_like(items_B)) + input_B + head_B


class GlobalBatches:
    """A source of batches that are there: each rank gets its samples of them, or all."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = batches

    def batches(self, *, rank: int, ranks: int, **_: int) -> Iterator[Batch]:
        for batch in self._batches:
            own = batch.size // ranks
            yield batch.slice(rank * own, (rank + 1) * own)

    def empty(self) -> Batch:
        return self._batches[0].empty()


def make_batches(case: TasksCase) -> list[Batch]:
    """The global batches of all steps, the same on every rank and for every plan."""
    samples = case.batch * case.ranks
    return [_make_batch(case, np.arange(samples) + n * samples) for n in range(case.all_steps)]


def _make_batch(case: TasksCase, numbers_B: np.ndarray[Any, np.dtype[np.int64]]) -> Batch:
    """A sample is a function of its number."""
    lengths_B = zipf(draw(mix(1), numbers_B), case.length, case.length_exponent) + 1
    starts_B = np.repeat(numbers_B * (case.length + 1), lengths_B)
    ends_B = np.cumsum(lengths_B)
    places_I = starts_B + np.arange(ends_B[-1]) - np.repeat(ends_B - lengths_B, lengths_B)
    lengths = torch.from_numpy(lengths_B)
    items_I = torch.from_numpy(zipf(draw(mix(2), places_I), case.items, case.key_exponent))
    users_B = torch.from_numpy(zipf(draw(mix(3), numbers_B), case.users, case.key_exponent))
    labels_I = torch.from_numpy((draw(mix(4), places_I) >> np.uint64(1)).astype(np.int64))
    sparse = {"history": Jagged(items_I, lengths), "labels": Jagged(labels_I, lengths)}
    return Batch(len(numbers_B), {}, {**sparse, "user": Jagged.one_each(users_B)})


def make_trainer(case: TasksCase, comm: Communicator) -> Trainer:
    """Adam for rows and weights, as published."""
    settings = TrainSettings(
        batch=case.batch * comm.size,
        device=case.device,
        precision=case.precision,
        device_memory=case.device_memory,
        rows=RowSettings(optimizer="adam", lr=1e-3),
        dense=DenseSettings(optimizer="adam"),
        pipeline=case.pipeline(),
    )
    torch.manual_seed(0)
    model = TasksRanker(case)
    return Trainer(model, model.tables(), settings, comm)


def store_rows(trainer: Trainer, rows: int) -> None:
    """Store this rank's share of the first rows of every table in host memory."""
    (store,), (group,) = trainer.stores, trainer.groups
    values_KW = torch.full((CHUNK, store.layout.width), 0.01)
    for number, owner in enumerate(group.table_owners):
        for begin in range(0, rows, CHUNK):
            keys_K = torch.arange(begin, min(begin + CHUNK, rows))
            keys_K = keys_K[owner_of(keys_K, number, trainer.comm.size, owner) == trainer.comm.rank]
            counts = [len(keys_K) if n == number else 0 for n in range(len(group.tables))]
            store.scatter(keys_K, counts, values_KW[: len(keys_K)])


@dataclass(frozen=True, slots=True)
class TasksReading:
    """One plan: the rounds behind the warm-up, and what a rank's device computes in them."""

    rounds_ms: tuple[float, ...]
    """The mean step of each round."""
    rounds_tflops: tuple[float, ...]
    """Of a mean rank."""
    step_ms: float
    """Mean over all rounds, as work differs from batch to batch."""
    tflops: float
    mfu: float | None
    tokens: float
    """Rows of the encoder in a mean step and rank."""
    stored_gb: float
    """Memory of rank 0's host store at the end."""
    stored_rows: int
    """Rows of all tables in it."""
    pool_rows: int
    """Rows that rank 0's pool of device memory has room for."""
    memory_gb: float | None
    """Most device memory of rank 0 at a time; None on the host."""


def time_tasks(comm: Communicator, case: TasksCase) -> TasksReading:
    """Train on one plan; every rank calls it."""
    batches, clock = make_batches(case), StepClock()
    with closing(make_trainer(case, comm)) as trainer:
        store_rows(trainer, case.stored)
        source: Any = GlobalBatches(batches)
        trainer.fit(source, steps=case.all_steps, on_step=clock)
        rounds_ms = clock.rounds_ms(case.warm_steps, case.steps, case.rounds)
        return _reading(case, trainer, batches[case.warm_steps :], rounds_ms)


def _reading(
    case: TasksCase, trainer: Trainer, batches: Sequence[Batch], rounds_ms: Sequence[float]
) -> TasksReading:
    """From the batches of the rounds, one round after the other."""
    model, device = trainer.model, trainer.device
    assert isinstance(model, TasksRanker)
    ends = [number * case.steps for number in range(case.rounds + 1)]
    timed = batches[: ends[-1]]
    work = [float(model.step_flops(batch).sum()) / case.ranks for batch in timed]
    done = [sum(work[begin:end]) for begin, end in pairwise(ends)]
    tflops = sum(done) / (sum(rounds_ms) * case.steps) / 1e9
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else ""
    peak = peak_tflops(name, case.precision, case.peak_tflops)
    tokens = sum(len(batch.sparse["history"].values) + batch.size for batch in timed)
    rounds = zip(done, rounds_ms, strict=True)
    return TasksReading(
        rounds_ms=tuple(rounds_ms),
        rounds_tflops=tuple(flops / (ms * case.steps) / 1e9 for flops, ms in rounds),
        step_ms=sum(rounds_ms) / case.rounds,
        tflops=tflops,
        mfu=tflops / peak if peak else None,
        tokens=tokens / len(timed) / case.ranks,
        stored_gb=sum(store.num_bytes() for store in trainer.stores) / 1e9,
        stored_rows=sum(sum(store.num_rows()) for store in trainer.stores),
        pool_rows=trainer.pool_slots()[1],
        memory_gb=torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else None,
    )


def compare_plans(cases: Sequence[TasksCase], limit_s: float = 500.0) -> Generator[dict[str, Any]]:
    """Each case in turn, in processes of their own; what failed says why."""
    for case in cases:
        jobs = [{"case": asdict(case)}]
        (result,) = run_jobs(
            MODULE, jobs, ranks=case.ranks, device=case.device_kind, limit_s=limit_s
        )
        yield {
            "plan": case.plan,
            "balance": case.balance,
            "ranks": case.ranks,
            "failed": result["failed"],
            **(result["readings"][0] if result["readings"] else {}),
        }


def _do_job(comm: Communicator, job: Job) -> list[dict[str, Any]]:
    return [asdict(time_tasks(comm, TasksCase(**job["case"])))]


def main() -> None:
    """One rank, or the start of several."""
    folder = Path(sys.argv[1])
    task = start_ranks(folder, MODULE)
    with closing(connect_ranks(task["device"])) as comm:
        do_jobs(folder, partial(_do_job, comm))


if __name__ == "__main__":
    main()
