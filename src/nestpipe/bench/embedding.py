# pyright: reportMissingImports=false
"""`nestpipe bench embedding`: forward, backward and update of rows alone, beside FBGEMM's TBE.

Ours is the ordinary `Trainer` with a dense half that only hands fixed gradients back. The peer is
FBGEMM's table-batched embeddings, which TorchRec runs on: no other part of TorchRec takes part. Its
keys lie on the device before the clock starts, while ours come from pinned host memory every step.

Run as `python -m nestpipe.bench.embedding FOLDER`; with `peer` in its jobs it is FBGEMM that runs.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nestpipe.batch import Batch
from nestpipe.bench.dlrm import (
    LAST_STEPS,
    NESTPIPE,
    SideBySide,
    SideReading,
    StepClock,
    readings_of,
    warm_steps,
)
from nestpipe.bench.machines import Job, do_jobs, run_jobs
from nestpipe.bench.pipeline_cases import check_names
from nestpipe.bench.pipeline_rank import Repeated
from nestpipe.config import Table, fraction, positive
from nestpipe.embedding.optimizers import row_optimizer
from nestpipe.embedding.pool import INDEX_BYTES
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged
from nestpipe.models.protocol import Loss
from nestpipe.train.config import DenseSettings, PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.trainer import Trainer

# Shapes: B samples of a table, T lookups of all tables, D width of a row, K keys, W weights and
# state

MODULE = "nestpipe.bench.embedding"
FBGEMM = "FBGEMM"
PLACES = ("hbm", "cache", "host")
PEER_OPTIMIZERS = {
    "sgd": "EXACT_SGD",
    "adam": "ADAM",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
}
"""Row optimizers that both systems have, with FBGEMM's names."""
SWEPT = ("tables", "samples", "rows", "dim", "share", "exponent")
"""Sizes that a sweep may go through."""
GRADIENT_SCALE = 1e-3
CHUNK = 1 << 18
"""Rows stored at a time."""
POOL_SPARE = 1.05
"""Slots of a pool for all rows over their number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingCase:
    """One workload: one key per table and sample, keys by a power law."""

    device: Literal["cpu", "cuda"] = "cuda"
    where: Literal["hbm", "cache", "host"] = "hbm"
    """Rows all in device memory; on the host with a share of them on the device; or on the host."""
    optimizer: str = "sgd"
    tables: int = 10
    samples: int = 104_857
    rows: int = 0
    """Different keys of a table; 0: 1,677,721 in device memory, else 8,000,000."""
    dim: int = 128
    exponent: float = 1.05
    share: float = 0.1
    """cache: the part of all rows that the device holds."""
    plan: str = "nested"
    buffers: int = 0
    """Neighbouring batches whose rows the device holds; 0: 3 in a cache, else 2."""
    distinct: int = -1
    """Different batches, used in turns; 0: every step has its own; -1: 6 in device memory, else 0.
    """
    warm: int = 0
    """Steps before the clock starts; 0: 72 on a GPU, which traces the first 64. On a CPU 12 with
    rows in memory, else 48, so that the cache is full."""
    steps: int = 30
    """Steps of a round."""
    rounds: int = 3
    label: str = ""
    """What tells it from others in a sweep."""

    def __post_init__(self) -> None:
        for name in ("tables", "samples", "dim", "exponent", "steps", "rounds"):
            positive(name, getattr(self, name))
        fraction("share", self.share)
        if self.exponent == 1:
            raise ConfigError("exponent is 1, where the power law has another form; use 1.01")
        if self.where not in PLACES:
            raise ConfigError(f"where is {self.where!r}; use {', '.join(PLACES)}")
        if self.optimizer not in PEER_OPTIMIZERS:
            known = ", ".join(PEER_OPTIMIZERS)
            raise ConfigError(f"optimizer is {self.optimizer!r}; use one of {known}")
        in_memory = self.where == "hbm"
        defaults = {
            "buffers": (self.buffers > 0, 3 if self.where == "cache" else 2),
            "rows": (self.rows > 0, 1_677_721 if in_memory else 8_000_000),
            "distinct": (self.distinct >= 0, 6 if in_memory else 0),
            "warm": (self.warm > 0, max(warm_steps(self.device), 12 if in_memory else 48)),
        }
        for name, (given, default) in defaults.items():
            if not given:
                object.__setattr__(self, name, default)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"t{number}" for number in range(self.tables))

    @property
    def work(self) -> str:
        return ", ".join(filter(None, (self.where, self.optimizer, self.label)))

    @property
    def retrieval(self) -> str:
        return "new" if self.where == "host" else "pooled"

    @property
    def all_steps(self) -> int:
        return self.warm + self.rounds * self.steps + LAST_STEPS

    @property
    def row_width(self) -> int:
        """Numbers of a row with its state."""
        return self.dim + row_optimizer(self.optimizer, 0.1, 1e-8, 1.0).state_dim(self.dim)

    def with_tables(self, tables: int) -> EmbeddingCase:
        """As many lookups from more tables or fewer, which have as many keys together."""
        lookups, keys = self.tables * self.samples, self.tables * self.rows
        return replace(
            self, tables=tables, samples=max(1, lookups // tables), rows=max(1, keys // tables)
        )

    def draw_keys(self) -> list[Tensor]:
        """(T,) keys of every batch, table after table; the same for both systems."""
        generator = torch.Generator().manual_seed(0)
        count = self.tables * self.samples
        return [
            power_law(count, self.rows, self.exponent, generator)
            for _ in range(self.distinct or self.all_steps)
        ]

    def make_gradient(self) -> Tensor:
        """(T, D) the gradient of what is looked up, the same in every step."""
        generator = torch.Generator().manual_seed(1)
        shape = self.tables * self.samples, self.dim
        return torch.randn(shape, generator=generator).mul_(GRADIENT_SCALE)


def power_law(count: int, rows: int, exponent: float, generator: torch.Generator) -> Tensor:
    """Keys from 0 to rows - 1; how often one comes falls with that power of its number."""
    chance = torch.rand(count, generator=generator, dtype=torch.float64)
    rest = 1 - exponent
    drawn = chance.mul_(rows**rest - 1).add_(1).pow_(1 / rest)
    return drawn.long().sub_(1).clamp_(0, rows - 1)


# Ours.


class _GivenGradients(torch.autograd.Function):
    """A loss of zero whose gradients are given: no work but that of rows is on the clock."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *rows: Tensor) -> Tensor:
        ctx.gradients = gradients
        return rows[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients


class EmbeddingOnly(nn.Module):
    """A model without a dense half."""

    gradient_CBD: Tensor

    def __init__(self, case: EmbeddingCase) -> None:
        super().__init__()
        gradient = case.make_gradient().view(case.tables, case.samples, case.dim)
        self.register_buffer("gradient_CBD", gradient, persistent=False)

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return batch.sparse

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        # A weight of one leaves the gradients as they are.
        total = _GivenGradients.apply(tuple(self.gradient_CBD), *rows.values())
        assert isinstance(total, Tensor)
        return Loss(total, 1.0)


def make_batches(case: EmbeddingCase) -> list[Batch]:
    """Our batches, for a GPU in pinned memory."""
    ones_B = torch.ones(case.samples, dtype=torch.int64)

    def made(keys_T: Tensor) -> Batch:
        named = zip(case.names, keys_T.split(case.samples), strict=True)
        batch = Batch(case.samples, {}, {name: Jagged(keys_B, ones_B) for name, keys_B in named})
        return batch.pin_memory() if case.device == "cuda" else batch

    return [made(keys_T) for keys_T in case.draw_keys()]


def make_trainer(case: EmbeddingCase) -> Trainer:
    """Ours: one rank, the ordinary settings; the place of rows decides the retrieval."""
    check_names([case.plan], [case.retrieval])
    settings = TrainSettings(
        batch=case.samples,
        device=case.device,
        rows=RowSettings(optimizer=case.optimizer),  # pyright: ignore[reportArgumentType]
        dense=DenseSettings(optimizer="sgd"),
        pipeline=PipelineSettings(
            plan=case.plan,
            retrieval=case.retrieval,  # pyright: ignore[reportArgumentType]
            buffers=case.buffers,
        ),
        device_memory=pool_memory(case),
    )
    tables = [Table(name=name, dim=case.dim) for name in case.names]
    return Trainer(EmbeddingOnly(case), tables, settings)


def pool_memory(case: EmbeddingCase) -> str:
    """Device memory for all rows and some slots more, or for the share of a cache."""
    part = POOL_SPARE if case.where == "hbm" else case.share
    row_bytes = -(-case.row_width // 4) * 16 + INDEX_BYTES
    return f"{case.rows * case.tables * part * row_bytes / 1e9:.6f}GB"


def store_rows(trainer: Trainer, batches: Sequence[Batch]) -> int:
    """Store every row of the batches, as in a table that has been trained for long.

    Returns how many; a GPU may reach them afterwards.
    """
    (store,) = trainer.stores
    names = trainer.table_names
    rows_KW = torch.full((CHUNK, store.layout.width), 0.01)
    for number, name in enumerate(names):
        asked = torch.cat([batch.sparse[name].values for batch in batches])
        every_K = asked.to(trainer.device).unique().cpu()
        for keys_K in every_K.split(CHUNK):
            counts = [len(keys_K) if table == number else 0 for table in range(len(names))]
            store.scatter(keys_K, counts, rows_KW[: len(keys_K)])
    if trainer.device.type == "cuda" and store.abilities.pin is not None:
        store.abilities.pin.pin()  # else the first batches would wait for it
    return sum(store.num_rows())


class PhaseLines:
    """Lines on standard error that say what was done, and how long it took."""

    def __init__(self, case: EmbeddingCase, system: str) -> None:
        self._start, self._label = time.perf_counter(), f"{system}, {case.work}"

    def __call__(self, done: str) -> None:
        passed_s = time.perf_counter() - self._start
        sys.stderr.write(f"{self._label}: {passed_s:6.1f} s, {done}\n")
        sys.stderr.flush()


def time_own(case: EmbeddingCase) -> dict[str, Any]:
    """Our rounds."""
    tell = PhaseLines(case, NESTPIPE)
    clock, batches = StepClock(), make_batches(case)
    tell(f"{len(batches)} batches drawn")
    with closing(make_trainer(case)) as trainer:
        if case.where != "hbm":
            tell(f"{store_rows(trainer, batches):,} rows stored")
        source = Repeated(batches, case.all_steps)
        trainer.fit(source, steps=case.all_steps, on_step=clock)  # type: ignore[arg-type]
        tell(f"{case.all_steps} steps done")
    tell("closed")
    rounds_ms = clock.rounds_ms(case.warm, case.steps, case.rounds)
    return {"form": f"{case.plan} {case.retrieval}", "rounds_ms": rounds_ms}


# The peer.


def time_peer(case: EmbeddingCase) -> dict[str, Any]:
    """FBGEMM's rounds: each is forward and backward with a fused update, step after step."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    device = torch.device(case.device)
    tell = PhaseLines(case, FBGEMM)
    form, tables = make_peer(case, device)
    tell("tables made")
    keys = [keys_T.to(device) for keys_T in case.draw_keys()]
    tell(f"{len(keys)} batches drawn")
    offsets_T1 = torch.arange(case.tables * case.samples + 1, device=device)
    gradient_TD = case.make_gradient().to(device)
    done = 0

    def go(steps: int) -> float:
        nonlocal done
        begin = _now(device)
        for _ in range(steps):
            tables(keys[done % len(keys)], offsets_T1).backward(gradient_TD)
            done += 1
        return (_now(device) - begin) * 1e3 / steps

    go(case.warm)
    tell(f"{case.warm} steps to warm up done")
    rounds_ms = [go(case.steps) for _ in range(case.rounds)]
    tell("rounds done")
    return {"form": form, "rounds_ms": rounds_ms}


def make_peer(case: EmbeddingCase, device: torch.device) -> tuple[str, nn.Module]:
    """The tables of the case in FBGEMM, and how it keeps them."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    on_gpu = device.type == "cuda"
    places = {"hbm": "DEVICE", "cache": "MANAGED_CACHING", "host": "MANAGED"}
    place = places[case.where] if on_gpu else "HOST"
    spec = (
        case.rows,
        case.dim,
        EmbeddingLocation[place],
        ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU,
    )
    settings = RowSettings()
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [spec] * case.tables,
        optimizer=EmbOptimType[PEER_OPTIMIZERS[case.optimizer]],
        learning_rate=settings.lr,
        eps=settings.eps,
        pooling_mode=PoolingMode.NONE,
        cache_load_factor=case.share,
    )
    shares = f" {100 * case.share:g} %" if place == "MANAGED_CACHING" else ""
    return f"TBE {place.lower()}{shares}", tables


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# Both.


def sweep_cases(cases: Sequence[EmbeddingCase], sweep: str) -> list[EmbeddingCase]:
    """Each case with every value of `NAME=VALUE,VALUE,...`.

    More tables leave lookups and keys as they are; a size of another kind is simply that size.
    """
    name, _, text = sweep.partition("=")
    if name not in SWEPT or not text:
        raise ConfigError(f"sweep is {sweep!r}; name one of {', '.join(SWEPT)}, as in dim=64,128")
    number = float if name in ("share", "exponent") else int
    try:
        values = [number(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"sweep is {sweep!r}; separate numbers by commas") from None
    found: list[EmbeddingCase] = []
    for case in cases:
        for value in values:
            more = case.with_tables(int(value)) if name == "tables" else case
            found.append(replace(more, **{name: value}, label=f"{name}={value}"))
    return found


def compare_embedding(
    cases: Sequence[EmbeddingCase],
    packages: Path | None,
    *,
    limit_s: float,
    so_far: Callable[[SideBySide], None] = lambda found: None,
) -> SideBySide:
    """The peer on every case where its packages are installed, then ours; `so_far` is called after
    each."""
    for case in cases:
        check_names([case.plan], [case.retrieval])
    readings: list[SideReading] = []
    for system, path in ((FBGEMM, packages), (NESTPIPE, None)):
        if system == FBGEMM and packages is None:
            continue
        jobs = [{"case": asdict(case), "peer": system == FBGEMM} for case in cases]
        works = [
            SideReading(
                case.work,
                system,
                "TBE" if system == FBGEMM else f"{case.plan} {case.retrieval}",
                case.samples,
            )
            for case in cases
        ]
        readings += readings_of(run_jobs(MODULE, jobs, packages=path, limit_s=limit_s), works)
        so_far(SideBySide(tuple(readings)))
    return SideBySide(tuple(readings))


def run_job(job: Job) -> list[dict[str, Any]]:
    """One side of one case."""
    case = EmbeddingCase(**job["case"])
    return [time_peer(case) if job["peer"] else time_own(case)]


def main() -> None:
    """The process of one side."""
    do_jobs(Path(sys.argv[1]), run_job)


if __name__ == "__main__":
    main()
