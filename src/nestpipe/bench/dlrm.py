"""`nestpipe bench dlrm` and `bench dispatch`: a whole DLRM step, and the host's part of it.

Both systems train on the same batches, drawn before the clock starts and kept in pinned memory:
every step copies one to the device, and no loader decides. Each runs in processes of its own, ours
as `python -m nestpipe.bench.dlrm FOLDER`, the peer by `bench/torchrec_lab.py`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from nestpipe.batch import Batch
from nestpipe.bench.machines import Job, do_jobs, run_jobs, start_ranks
from nestpipe.bench.pipeline_cases import Variant, check_names
from nestpipe.bench.pipeline_rank import Repeated, connect_ranks, mixed_keys
from nestpipe.comm import Communicator, LocalCommunicator
from nestpipe.config import Table, positive
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged
from nestpipe.models.dlrm import Dlrm, DlrmConfig
from nestpipe.runtime import StopSignal, run, spans_for
from nestpipe.runtime.executor import KEEP_BATCHES, EndedRun, Spans
from nestpipe.runtime.lanes import Act
from nestpipe.schedule import Kind, Lane, Op
from nestpipe.trace import Span
from nestpipe.trace.span import Fact
from nestpipe.train.config import DenseSettings, PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.trainer import Trainer

# Shapes: B samples, T keys of a feature

NESTPIPE, TORCHREC = "NestPipe", "TorchRec"
MODULE, PEER_MODULE = "nestpipe.bench.dlrm", "nestpipe.bench.torchrec_lab"
PEER_PIPELINES = ("TrainPipelineBase", "TrainPipelineSparseDist")
"""Of TorchRec, for tables in device memory; the faster one counts."""
SITE = "site"
"""The folder of the peers' packages below NESTPIPE_LAB, as `tools/lab.py unpack` makes it."""
HOT = 0.5
"""Share of the keys that are log-uniform; the others are uniform over the table."""
LAST_STEPS = 4
"""Steps after the clock has stopped, so that it stops in the middle of a run."""


def warm_steps(device: str) -> int:
    """Steps before a clock starts: on a GPU behind those that a run traces."""
    return KEEP_BATCHES + 8 if device == "cuda" else 12


@dataclass(frozen=True, kw_only=True, slots=True)
class DlrmCase:
    """One workload: 26 pooled tables and a dense half of a few milliseconds."""

    device: Literal["cpu", "cuda"] = "cuda"
    ranks: int = 1
    batch: int = 16_384
    """Samples per rank."""
    keys: int = 1
    """Keys of each feature and sample."""
    features: int = 26
    """Categorical features; each has a table."""
    rows: int = 1_000_000
    """Different keys of a table."""
    dim: int = 64
    """Width of a row."""
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (1024, 512)
    """Hidden layers."""
    placement: Literal["table", "rows"] = "table"
    """A table on one rank, or its rows over all of them."""
    distinct: int = 6
    """Different batches, used in turns."""
    warm: int = 0
    """Steps before the clock starts; 0: 12 on a CPU, 72 on a GPU, where the first 64 are traced."""
    steps: int = 30
    """Steps of a round."""
    rounds: int = 3

    def __post_init__(self) -> None:
        for name in ("ranks", "batch", "keys", "features", "rows", "dim", "distinct", "steps"):
            positive(name, getattr(self, name))
        positive("rounds", self.rounds)
        if self.warm <= 0:
            object.__setattr__(self, "warm", warm_steps(self.device))
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device is {self.device!r}; use cpu or cuda")
        if self.placement not in ("table", "rows"):
            raise ConfigError(f"placement is {self.placement!r}; use table or rows")

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> DlrmCase:
        """Read what `asdict` made of it, through JSON."""
        layers = {name: tuple(given[name]) for name in ("bottom", "top")}
        return cls(**{**given, **layers})

    @property
    def names(self) -> tuple[str, ...]:
        """The features; each table is called like its own."""
        return tuple(f"c{number}" for number in range(self.features))

    @property
    def all_steps(self) -> int:
        return self.warm + self.rounds * self.steps + LAST_STEPS

    def tables(self) -> list[Table]:
        placement = self.placement
        return [
            Table(name=name, dim=self.dim, pooling="sum", placement=placement)
            for name in self.names
        ]


class BenchDlrm(Dlrm):
    """The shipped DLRM; on a GPU its layers compute in bfloat16."""

    def __init__(self, case: DlrmCase) -> None:
        torch.manual_seed(0)
        super().__init__(
            DlrmConfig(features=case.names, dim=case.dim, bottom=case.bottom, top=case.top)
        )

    def logits(self, rows: Mapping[str, Tensor], batch: Batch) -> Tensor:
        on_gpu = batch.dense["features"].is_cuda
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            logits_B = super().logits(rows, batch)
        return logits_B.float()


def make_batches(case: DlrmCase, rank: int) -> list[Batch]:
    """The batches of a rank, the same for both systems; for a GPU in pinned memory."""
    generator = torch.Generator().manual_seed(rank)
    made = [_make_batch(case, generator) for _ in range(case.distinct)]
    return [batch.pin_memory() for batch in made] if case.device == "cuda" else made


def _make_batch(case: DlrmCase, generator: torch.Generator) -> Batch:
    lengths_B = torch.full((case.batch,), case.keys)
    dense = {
        "features": torch.rand(case.batch, DlrmConfig().dense_features, generator=generator),
        "label": torch.randint(0, 2, (case.batch,), generator=generator).float(),
    }
    sparse = {
        name: Jagged(mixed_keys(case.batch * case.keys, case.rows, HOT, generator), lengths_B)
        for name in case.names
    }
    return Batch(case.batch, dense, sparse)


def make_trainer(case: DlrmCase, variant: Variant, comm: Communicator) -> Trainer:
    """Ours, with the ordinary settings of a user."""
    settings = TrainSettings(
        batch=case.batch * comm.size,
        device=case.device,
        rows=RowSettings(optimizer="rowwise_adagrad"),
        dense=DenseSettings(optimizer="sgd"),
        pipeline=pipeline_settings(variant),
    )
    return Trainer(BenchDlrm(case), case.tables(), settings, comm)


def pipeline_settings(variant: Variant) -> PipelineSettings:
    """The plan of a variant, as a user sets it."""
    return PipelineSettings(
        plan=variant.plan,
        retrieval=variant.retrieval,  # pyright: ignore[reportArgumentType]
        micro_batches=variant.micro_batches,
    )


class StepClock:
    """When each batch was done, by the host's clock; hand it to `fit` as `on_step`."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, _: object) -> None:
        self.times_s.append(time.perf_counter())

    def rounds_ms(self, warm: int, steps: int, rounds: int) -> list[float]:
        """The mean step of each round; they follow each other without a pause."""
        ends = [self.times_s[warm - 1 + number * steps] for number in range(rounds + 1)]
        return [(end - begin) * 1e3 / steps for begin, end in pairwise(ends)]


def time_own(comm: Communicator, job: Job) -> list[dict[str, Any]]:
    """One of our variants on the case of a job."""
    case, variant = DlrmCase.from_json(job["case"]), Variant(**job["variant"])
    clock = StepClock()
    with closing(make_trainer(case, variant, comm)) as trainer:
        source = Repeated(make_batches(case, comm.rank), case.all_steps)
        trainer.fit(source, steps=case.all_steps, on_step=clock)  # type: ignore[arg-type]
    rounds_ms = clock.rounds_ms(case.warm, case.steps, case.rounds)
    return [{"form": variant_name(variant), "rounds_ms": rounds_ms}]


def variant_name(variant: Variant) -> str:
    """Plan, retrieval, and N micro-batches where there are several."""
    several = f", N = {variant.micro_batches}" if variant.micro_batches > 1 else ""
    return f"{variant.plan} {variant.retrieval}{several}"


# Both systems: what is asked for, and what comes back.


@dataclass(frozen=True, slots=True)
class SideReading:
    """One system in one form on one workload."""

    work: str
    """What is done, e.g. `10 keys`."""
    system: str
    form: str
    """Our plan and retrieval; a pipeline of the peer's."""
    samples: int
    """Samples of a step, over all ranks."""
    rounds_ms: tuple[float, ...] = ()
    """The mean step of each round."""
    failed: str = ""
    """Why there are no rounds."""

    @property
    def step_ms(self) -> float:
        return median(self.rounds_ms)

    @property
    def range_ms(self) -> tuple[float, float]:
        """The fastest and the slowest round."""
        return min(self.rounds_ms), max(self.rounds_ms)

    @property
    def samples_per_s(self) -> float:
        return 1000 * self.samples / self.step_ms


@dataclass(frozen=True, slots=True)
class SideBySide:
    """All readings of one call."""

    readings: tuple[SideReading, ...]
    peers: tuple[str, ...] = field(default=(TORCHREC, "FBGEMM"))

    def ratio(self, reading: SideReading) -> float | None:
        """Speed over that of the fastest peer on the same work; None where there is none."""
        theirs = [
            other.step_ms
            for other in self.readings
            if other.work == reading.work and other.system in self.peers and other.rounds_ms
        ]
        if reading.system in self.peers or not theirs or not reading.rounds_ms:
            return None
        return min(theirs) / reading.step_ms

    @property
    def works(self) -> list[str]:
        """Each once, in the order in which they were asked for."""
        return list(dict.fromkeys(reading.work for reading in self.readings))

    @property
    def failed(self) -> list[str]:
        return [f"{r.system} {r.form} on {r.work}" for r in self.readings if not r.rounds_ms]

    def as_json(self) -> list[dict[str, Any]]:
        return [self._reading(reading) for reading in self.readings]

    def _reading(self, reading: SideReading) -> dict[str, Any]:
        timed = bool(reading.rounds_ms)
        return {
            **asdict(reading),
            "step_ms": reading.step_ms if timed else None,
            "range_ms": list(reading.range_ms) if timed else None,
            "samples_per_s": reading.samples_per_s if timed else None,
            "over_peer": self.ratio(reading),
        }


def readings_of(
    results: Iterable[Mapping[str, Any]], works: Sequence[SideReading]
) -> list[SideReading]:
    """What `run_jobs` brought back; `works` says for each job what it was meant to be."""
    found: list[SideReading] = []
    for result, work in zip(results, works, strict=True):
        if result["failed"]:
            found.append(replace(work, failed=result["failed"]))
        for reading in result["readings"]:
            rounds = tuple(reading["rounds_ms"])
            found.append(replace(work, form=reading["form"], rounds_ms=rounds))
    return found


def find_packages(named: Path | None, package: str) -> Path | None:
    """The folder that holds a peer's package: the one named, else wherever it is; None: nowhere.

    Without a name it is looked for where `tools/lab.py` unpacks it, then among what is installed.
    """
    if named is not None:
        if not (named / package).is_dir():
            raise ConfigError(f"{str(named)!r} holds no {package}; name the folder that does")
        return named
    home = Path(os.environ.get("NESTPIPE_LAB") or Path.home() / ".cache" / "nestpipe-lab")
    if (home / SITE / package).is_dir():
        return home / SITE
    installed = find_spec(package)
    return Path(installed.origin).parents[1] if installed and installed.origin else None


def compare_dlrm(
    cases: Sequence[DlrmCase],
    variants: Sequence[Variant],
    packages: Path | None,
    *,
    limit_s: float,
    so_far: Callable[[SideBySide], None] = lambda found: None,
) -> SideBySide:
    """TorchRec on every case where its packages are, then every variant of ours.

    `so_far` is called after each system.
    """
    check_names({v.plan for v in variants}, {v.retrieval for v in variants})
    for variant in variants:
        pipeline_settings(variant)  # refuses what cannot be, before anything runs
    ranks, device = cases[0].ranks, cases[0].device
    run_all = partial(run_jobs, ranks=ranks, device=device, limit_s=limit_s)
    readings: list[SideReading] = []
    if packages is not None:
        theirs = [(case, name) for case in cases for name in PEER_PIPELINES]
        works = [SideReading(_work(c), TORCHREC, name, c.batch * c.ranks) for c, name in theirs]
        jobs = [{"case": asdict(c), "pipeline": name} for c, name in theirs]
        readings += readings_of(run_all(PEER_MODULE, jobs, packages=packages), works)
        so_far(SideBySide(tuple(readings)))
    ours = [(case, variant) for case in cases for variant in variants]
    works = [SideReading(_work(c), NESTPIPE, variant_name(v), c.batch * c.ranks) for c, v in ours]
    results = run_all(MODULE, [{"case": asdict(c), "variant": asdict(v)} for c, v in ours])
    return SideBySide((*readings, *readings_of(results, works)))


def _work(case: DlrmCase) -> str:
    return f"{case.keys} key{'s' if case.keys > 1 else ''}"


# The host's part: processor time of each op, with its act and without.


@dataclass(frozen=True, slots=True)
class DispatchReading:
    """Host time of a mean batch."""

    training: HostTime
    executor: HostTime
    """The same plan with acts that do nothing."""

    def as_json(self) -> dict[str, Any]:
        return {
            name: {**asdict(seen), "between_ms": seen.between_ms, "threads_ms": seen.threads_ms}
            for name, seen in (("training", self.training), ("executor", self.executor))
        }


def measure_dispatch(case: DlrmCase, variant: Variant) -> DispatchReading:
    """Train one rank, then run its plan with empty acts; both by the processor's clock.

    On a GPU the first batches are traced, by two events an op, and most later ones are not: the
    clock starts behind them, when the warm-up is over.
    """
    check_names([variant.plan], [variant.retrieval])
    first, last = case.warm - 1, case.warm - 1 + case.steps
    with closing(make_trainer(case, variant, LocalCommunicator())) as trainer:
        clock = trainer.spans = HostTimes(trainer.spans, first, last)
        steps = last + 1 + LAST_STEPS
        source = Repeated(make_batches(case, 0), steps)
        trainer.fit(source, steps=steps)  # type: ignore[arg-type]
        training = clock.reading()
        idle = HostTimes(spans_for(trainer.device, 0), first, last)
        work = dict.fromkeys(Kind, _do_nothing)
        run(trainer.plan, work, trainer.lanes, batches=StopSignal(steps), spans=idle)
    return DispatchReading(training, idle.reading())


def _do_nothing(op: Op) -> None:
    """The act of an op when the executor runs alone."""


def main() -> None:
    """One rank of ours, or the start of several."""
    folder = Path(sys.argv[1])
    task = start_ranks(folder, MODULE)
    with closing(connect_ranks(task["device"])) as comm:
        do_jobs(folder, partial(time_own, comm))


if __name__ == "__main__":
    main()


# What the host spends on a batch: processor time of its acts, and of the threads that call them.


@dataclass(frozen=True, slots=True)
class HostTime:
    """Processor time of a mean batch in ms."""

    acts_ms: Mapping[str, float]
    """By kind of op, in the thread that calls the act."""
    issuing_ms: float
    """The thread that issues ops; without lanes of their own it runs their acts too."""
    lanes_ms: Mapping[str, float]
    """The threads of lanes: acts, and what is between them."""
    other_ms: float
    """All other threads: autograd's backward on a GPU, teams of math libraries."""

    @property
    def threads_ms(self) -> float:
        """The issuing thread and all lanes."""
        return self.issuing_ms + sum(self.lanes_ms.values())

    @property
    def between_ms(self) -> float:
        """What issuing, queues and waits cost: those threads without acts."""
        return self.threads_ms - sum(self.acts_ms.values())


class HostTimes:
    """A clock around another one: processor time from the end of batch `first` to that of `last`.

    A batch ends with its write-back.
    """

    def __init__(self, spans: Spans, first: int, last: int) -> None:
        assert first < last, f"no batches from {first} to {last}"
        self._spans = spans
        self._bounds = first, last
        self._acts: dict[Kind, float] = {}
        self._marks: list[_HostMoment] = []
        self._issuing = threading.current_thread()

    def begin(self) -> None:
        self._spans.begin()
        self._acts.clear()
        self._marks.clear()
        self._issuing = threading.current_thread()

    def timed(self, act: Act, lane: Lane, *, on_host: bool = False) -> Act:
        timed = self._spans.timed(act, lane, on_host=on_host)

        def counted(op: Op) -> None:
            before = time.thread_time()
            timed(op)
            # All ops of a kind run on one lane, so no other thread writes here.
            self._acts[op.kind] = self._acts.get(op.kind, 0.0) + time.thread_time() - before
            if op.kind is Kind.WRITEBACK and op.batch in self._bounds:
                self._marks.append(self._now())

        return counted

    def ended(self, facts: Mapping[str, Fact]) -> EndedRun:
        return self._spans.ended(facts)

    def recent(self, batches: int) -> list[Span]:
        return self._spans.recent(batches)

    def reading(self) -> HostTime:
        """After a run that came past both batches."""
        start, end = self._marks
        batches = self._bounds[1] - self._bounds[0]

        def per_batch(after: float, before: float) -> float:
            return (after - before) * 1e3 / batches

        acts = {k: per_batch(s, start.acts.get(k, 0.0)) for k, s in end.acts.items()}
        threads = {n: per_batch(s, start.threads[n]) for n, s in end.threads.items()}
        other = per_batch(end.process, start.process) - sum(threads.values())
        return HostTime(
            acts_ms={kind.value: spent for kind, spent in acts.items()},
            issuing_ms=threads.pop(self._issuing.name),
            lanes_ms=threads,
            other_ms=other,
        )

    def _now(self) -> _HostMoment:
        threads = [self._issuing, *(t for t in threading.enumerate() if t.name.startswith("lane "))]
        clocks = {t.name: time.pthread_getcpuclockid(t.ident or 0) for t in threads}
        spent = {name: time.clock_gettime(clock) for name, clock in clocks.items()}
        return _HostMoment(dict(self._acts), spent, time.process_time())


@dataclass(frozen=True, slots=True)
class _HostMoment:
    """Processor time since the beginning, in seconds."""

    acts: Mapping[Kind, float]
    threads: Mapping[str, float]
    process: float
