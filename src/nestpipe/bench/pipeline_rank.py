"""The ranks of `nestpipe bench pipeline`: their data, their models, and every plan in turns.

`run_pipeline` starts them as `python -m nestpipe.bench.pipeline_rank FOLDER` under torchrun, and
reads what they measured. The folder holds what to do; each rank adds the trace of every round, on a
clock that all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nestpipe.batch import Batch
from nestpipe.bench.machines import (
    launch_on_hosts,
    launch_on_one_gpu,
    look_like_a_host,
    shaped_hosts,
)
from nestpipe.bench.pipeline_cases import (
    CURVE,
    NET_CPU,
    PipelineCase,
    PointReport,
    SerialLoop,
    Variant,
    report,
    step_times,
)
from nestpipe.comm import Communicator, LocalCommunicator, connect, launch
from nestpipe.config import Table
from nestpipe.embedding.routing.lists import owner_of
from nestpipe.errors import ConfigError, NestpipeError, RunError
from nestpipe.jagged import Jagged
from nestpipe.models import HstuConfig
from nestpipe.models.hstu_models import HstuRanker
from nestpipe.models.protocol import Loss
from nestpipe.runtime import InlineLanes, Lanes, Spans, lanes_for
from nestpipe.runtime.executor import EndedRun
from nestpipe.runtime.lanes import Act
from nestpipe.schedule import Lane, Op, Shape
from nestpipe.sim import figures
from nestpipe.sim.replay import Sharing
from nestpipe.sim.trace_costs import BUCKETS
from nestpipe.trace import Span, Trace, read_chrome, write_chrome
from nestpipe.trace.span import Fact
from nestpipe.train.config import DenseSettings, PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.gradients import buckets_of
from nestpipe.train.trainer import Trainer

MOVE_DRAW = 0.115
"""What a rank's rows take of a GPU that moves them, in one direction, while others compute on it.

Measured by itself on an H200, not in a pipeline: four ranks that read and wrote rows without end
made the dense compute of all four take 18.7 instead of 15.2 ms, which is 1 + 2 x 0.115 times as
long (docs/experiments/2026-11-16-bulk-copies.md).
"""


def run_pipeline(
    case: PipelineCase, variants: Sequence[Variant], folder: Path, *, hosts: bool
) -> list[PointReport]:
    """Measure every variant, and predict its step from the traces of `serial`."""
    sharing = sharing_of(case, hosts=hosts)
    done = measure_rounds(case, variants, folder, hosts=hosts)
    return [
        report(case, passes, sharing, {v: read_rounds(folder, case, point, v) for v in variants})
        for point, passes in enumerate(done.passes)
    ]


def measure_rounds(
    case: PipelineCase, variants: Sequence[Variant], folder: Path, *, hosts: bool
) -> Points:
    """Start the ranks and let them run every variant; their traces are then in the folder."""
    if case.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"case {case.name!r} needs a GPU and torch finds none; use --device cpu")
    write_task(folder, case, variants)
    command = [sys.executable, "-m", "nestpipe.bench.pipeline_rank", str(folder)]
    status = launch_ranks(case, command, hosts=hosts)
    if status != 0:
        raise RunError(f"the benchmark ended with status {status}; see above")
    return read_points(folder)


def launch_ranks(case: PipelineCase, command: Sequence[str], *, hosts: bool) -> int:
    """Run a command on every rank of a case: hosts, ranks on one GPU, or plain processes."""
    if hosts:
        if case.device != "cpu":
            raise ConfigError("hosts have no GPU of their own; use --hosts with --device cpu")
        with shaped_hosts(case.ranks, case.rate) as made:
            return launch_on_hosts(made, command)
    if case.device == "cuda":
        return launch_on_one_gpu(command, case.ranks)
    return launch(command, case.ranks)


def sharing_of(case: PipelineCase, *, hosts: bool) -> Sharing:
    """What the ranks of a run compute with, and have to share."""
    everyone = (0,) * case.ranks
    if case.device == "cuda":
        # Routing is done in host memory.
        return Sharing(everyone, frozenset({Lane.COMPUTE}), move_draw=MOVE_DRAW)
    off_network = frozenset(Lane) - {Lane.NET}
    cores = len(os.sched_getaffinity(0))
    if hosts:  # each has one core, as `launch_on_hosts` gives them out
        return Sharing(tuple(rank % cores for rank in range(case.ranks)), off_network)
    return Sharing(everyone, off_network, capacity=cores)


# What the command and its ranks tell each other, as files in one folder.


@dataclass(frozen=True, slots=True)
class Points:
    """What the ranks did, one point for each amount of compute."""

    passes: tuple[int, ...]
    stored_bytes: int
    """Memory of rank 0's host store."""


def write_task(folder: Path, case: PipelineCase, variants: Sequence[Variant]) -> None:
    """Say what to do."""
    task = {"case": asdict(case), "variants": [asdict(variant) for variant in variants]}
    (folder / "task.json").write_text(json.dumps(task))


def read_task(folder: Path) -> tuple[PipelineCase, list[Variant]]:
    """What to do."""
    task = json.loads((folder / "task.json").read_text())
    return PipelineCase(**task["case"]), [Variant(**given) for given in task["variants"]]


def trace_file(folder: Path, point: int, variant: Variant, number: int, rank: int) -> Path:
    """Where a rank leaves the trace of a round."""
    return folder / f"{point}-{variant.name}-round{number}-rank{rank}.json"


def write_points(folder: Path, passes: Sequence[int], stored_bytes: int) -> None:
    """Write the amounts of compute that ran, for the command."""
    done = {"passes": list(passes), "stored_bytes": stored_bytes}
    (folder / "points.json").write_text(json.dumps(done))


def read_points(folder: Path) -> Points:
    """Read the amounts of compute that ran."""
    done = json.loads((folder / "points.json").read_text())
    return Points(tuple(done["passes"]), done["stored_bytes"])


def read_rounds(folder: Path, case: PipelineCase, point: int, variant: Variant) -> list[Trace]:
    """The rounds of one variant, each with the spans of all ranks."""
    return [
        joined(
            [
                read_chrome(trace_file(folder, point, variant, number, rank))
                for rank in range(case.ranks)
            ]
        )
        for number in range(1, case.rounds + 1)
    ]


def joined(traces: Sequence[Trace]) -> Trace:
    """One trace of all ranks, from time zero."""
    begin = min(span.start for trace in traces for span in trace.spans)
    spans = (replace(s, start=s.start - begin, end=s.end - begin) for t in traces for s in t.spans)
    return Trace(tuple(sorted(spans, key=lambda s: (s.start, s.end))), traces[0].facts)


# One rank: it measures every plan in turn.


OVERLAPPING = "overlapping"
"""The lanes that all plans but `serial` share."""
CALIBRATION_PASSES = (1, 9)
"""Serial steps with so much compute tell what a pass costs, and what all the rest does."""


class SharedClock:
    """Spans that remember when they began, by the clock of the machine.

    Also the processor time of this process while a collective ran: in a serial run, where nothing
    else does, that is what the collective took of the processor.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self.began_ms = 0.0
        self.net_cpu_ms = 0.0

    def begin(self) -> None:
        self._spans.begin()
        self.began_ms, self.net_cpu_ms = time.perf_counter() * 1e3, 0.0

    def timed(self, act: Act, lane: Lane, *, on_host: bool = False) -> Act:
        timed = self._spans.timed(act, lane, on_host=on_host)

        def counted(op: Op) -> None:
            before = time.process_time()
            timed(op)
            if op.collective:
                self.net_cpu_ms += (time.process_time() - before) * 1e3

        return counted

    def ended(self, facts: Mapping[str, Fact]) -> EndedRun:
        return self._spans.ended(facts)

    def recent(self, batches: int) -> list[Span]:
        return self._spans.recent(batches)


class Rounds:
    """A trainer that runs its rounds with any plan."""

    def __init__(self, case: PipelineCase, comm: Communicator) -> None:
        settings = TrainSettings(
            batch=case.batch * comm.size,
            device=case.device,
            rows=RowSettings(optimizer=case.optimizer),  # pyright: ignore[reportArgumentType]
            dense=DenseSettings(optimizer="sgd"),
            pipeline=PipelineSettings(
                plan="serial", first=case.first, last=case.last, comm_dtype=case.comm_dtype
            ),
        )
        self.case = case
        self.comm = comm
        self.trainer = Trainer(make_model(case), make_tables(case), settings, comm)
        self.source = Repeated(make_batches(case, comm.rank), case.steps)
        self._clock = SharedClock(self.trainer.spans)
        self._lanes: dict[str, Lanes] = {}

    def run(self, variant: Variant) -> Trace:
        """One round; its trace, by the clock of the machine."""
        trainer = self.trainer
        plan = trainer.placed(variant.make_plan())
        trainer.plan, trainer.lanes = plan, self._lanes_of(variant, plan.shape)
        trainer.spans, trainer.trace = self._clock, Trace(())
        self.comm.barrier()
        trainer.fit(self.source, epochs=trainer.progress.epoch + 1)  # type: ignore[arg-type]
        parameters = trainer.model.parameters()
        facts = {
            **trainer.trace.facts,
            NET_CPU: self._clock.net_cpu_ms,
            BUCKETS: len(buckets_of([p for p in parameters if p.requires_grad])),
        }
        return Trace(_shifted(trainer.trace.spans, self._clock.began_ms), facts)

    def set_passes(self, passes: int) -> None:
        """Choose the compute of the rounds that follow."""
        setattr(self.trainer.model, "passes", passes)  # noqa: B010  torch types it as a tensor

    def _lanes_of(self, variant: Variant, shape: Shape) -> Lanes:
        """Lanes are kept: streams have memory of their own."""
        kind = variant.loop if variant.serial else OVERLAPPING
        if kind not in self._lanes:
            self._lanes[kind] = (
                # Every op goes to the current stream, and the host runs ahead as far as it can.
                InlineLanes() if kind == SerialLoop.ASYNC else lanes_for(shape, self.trainer.device)
            )
        return self._lanes[kind]


def _shifted(spans: Sequence[Span], by_ms: float) -> tuple[Span, ...]:
    return tuple(replace(s, start=s.start + by_ms, end=s.end + by_ms) for s in spans)


def measure(case: PipelineCase, variants: Sequence[Variant], comm: Communicator, folder: Path):
    """Alternate rounds of all variants, for every amount of compute that is asked for."""
    say = _say if comm.rank == 0 else lambda line: None
    rounds = Rounds(case, comm)
    if case.full:
        say(f"storing {case.rows:,} rows")
        fill_store(rounds.trainer, case)
    points = curve_passes(rounds) if case.curve else [case.passes]
    for point, passes in enumerate(points):
        rounds.set_passes(passes)
        at = f"{passes} passes, " if case.curve else ""
        # Round 0 warms everything up, for all points: those after the first compute less.
        for number in range(min(point, 1), case.rounds + 1):
            for variant in variants:
                trace = rounds.run(variant)
                if number > 0:
                    write_chrome(trace, trace_file(folder, point, variant, number, comm.rank))
                step_ms = median(step_times(trace))
                say(f"{at}round {number} of {case.rounds}, {variant.name}: {step_ms:,.0f} ms")
    stored = sum(store.num_bytes() for store in rounds.trainer.stores)
    if comm.rank == 0:
        write_points(folder, points, stored)
    rounds.trainer.close()


def curve_passes(rounds: Rounds) -> list[int]:
    """How often the blocks must run so that the serial step has the ratios of `CURVE`."""
    variant = Variant("serial", "whole", rounds.case.micro_batches)
    rounds.run(variant)
    few, many = (_serial_ms(rounds, variant, passes) for passes in CALIBRATION_PASSES)
    pass_ms = (many[0] - few[0]) / (CALIBRATION_PASSES[1] - CALIBRATION_PASSES[0])
    fixed_ms, rest_ms = few[0] - CALIBRATION_PASSES[0] * pass_ms, median([few[1], many[1]])
    wanted = [round((rest_ms / ratio - fixed_ms) / pass_ms) for ratio in CURVE]
    # Every rank must do the same: what rank 0 has found.
    agreed = rounds.comm.all_gather_values([max(1, passes) for passes in wanted])[0]
    assert isinstance(agreed, list)
    return sorted({int(passes) for passes in agreed}, reverse=True)


def _serial_ms(rounds: Rounds, variant: Variant, passes: int) -> tuple[float, float]:
    """Compute and all else of a serial step."""
    rounds.set_passes(passes)
    trace = rounds.run(variant)
    seen = figures(trace, samples=rounds.case.batch, rank=rounds.comm.rank)
    return seen.compute_ms, seen.step_ms - seen.compute_ms


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def connect_ranks(device: str) -> Communicator:
    """The group of this run's ranks; several of them may share one GPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return LocalCommunicator()
    if device == "cpu":
        return connect("gloo")
    look_like_a_host()
    return connect("nccl")


# What they train: data and models, which other benchmarks and the peers share.

# Shapes: B samples, L keys of a sample, T all keys of a batch, D width of a row, W dense width,
# K keys, S width of a stored row

CHUNK = 1 << 18
"""Rows stored at a time."""


class Blocks(nn.Module):
    """Residual layers at every key, then the mean over a sample's keys, then a click."""

    def __init__(self, case: PipelineCase) -> None:
        super().__init__()
        self.keys = case.keys
        self.passes = case.passes
        self.through = again if case.recompute else at_once
        width = case.width
        self.first = nn.Linear(case.dim, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            )
            for _ in range(case.blocks)
        )
        self.last = nn.Linear(width, 1)

    def sparse_keys(self, batch: Batch) -> Mapping[str, Jagged]:
        return {"history": batch.sparse["history"]}

    def dense(self, rows: Mapping[str, Tensor], batch: Batch) -> Loss:
        with torch.autocast("cuda", torch.bfloat16, enabled=rows["history"].is_cuda):
            logits_B = self.logits(rows["history"], batch.size)
        total = nn.functional.binary_cross_entropy_with_logits(
            logits_B.float(), batch.dense["label"], reduction="sum"
        )
        return Loss(total, batch.size)

    def logits(self, rows_TD: Tensor, samples: int) -> Tensor:
        """A click from the rows of all keys, sample by sample."""
        x_BLW = self.first(rows_TD.view(samples, self.keys, -1))
        for _ in range(self.passes):
            for block in self.blocks:
                x_BLW = x_BLW + self.through(block, x_BLW)
        return self.last(x_BLW.mean(1)).squeeze(1)


def at_once(block: nn.Module, x: Tensor) -> Tensor:
    """What a block makes of its input; all of it is kept for the way back."""
    return block(x)


def again(block: nn.Module, x: Tensor) -> Tensor:
    """The same; it is computed once more on the way back."""
    made = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(made, Tensor)
    return made


class Ranker(HstuRanker):
    """HSTU over a history of all keys of a sample, and one candidate."""

    def __init__(self, case: PipelineCase) -> None:
        head = case.dim // case.heads
        super().__init__(
            HstuConfig(
                blocks=case.blocks,
                heads=case.heads,
                dim=case.dim,
                attention_dim=head,
                value_dim=head,
                max_len=case.keys + 1,
            )
        )


def make_model(case: PipelineCase) -> nn.Module:
    """The dense half; the same weights on every rank."""
    torch.manual_seed(0)
    return Ranker(case) if case.model == "hstu" else Blocks(case)


def make_tables(case: PipelineCase) -> list[Table]:
    """One table of items, for the history and, with HSTU, the candidate."""
    features = ("history", "candidates") if case.model == "hstu" else ("history",)
    return [Table(name="items", dim=case.dim, features=features)]


def make_batches(case: PipelineCase, rank: int) -> list[Batch]:
    """Every rank has batches of its own."""
    generator = torch.Generator().manual_seed(rank)
    return [_make_batch(case, generator) for _ in range(case.distinct)]


def _make_batch(case: PipelineCase, generator: torch.Generator) -> Batch:
    keys_T = draw_keys(case, case.batch * case.keys, generator)
    label_B = torch.randint(0, 2, (case.batch,), generator=generator)
    history = Jagged(keys_T, torch.full((case.batch,), case.keys))
    if case.model == "blocks":
        return Batch(case.batch, {"label": label_B.float()}, {"history": history})
    candidates = Jagged.one_each(draw_keys(case, case.batch, generator))
    labels = Jagged.one_each(label_B)
    sparse = {"history": history, "candidates": candidates, "labels": labels}
    return Batch(case.batch, {}, sparse)


def draw_keys(case: PipelineCase, count: int, generator: torch.Generator) -> Tensor:
    """A few hot keys and a long tail, mixed as the case says.

    Half and half it draws, number by number, what TorchRec's lab script draws for its batches.
    """
    return mixed_keys(count, case.rows, case.hot, generator)


def mixed_keys(count: int, rows: int, hot: float, generator: torch.Generator) -> Tensor:
    """Keys of which a share is log-uniform, the others uniform over all rows."""
    uniform = torch.rand(count, generator=generator)
    hot_T = torch.exp(uniform * torch.log(torch.tensor(float(rows)))).long().sub_(1)
    is_any = torch.rand(count, generator=generator) < 1 - hot
    any_T = torch.randint(0, rows, (count,), generator=generator)
    return torch.where(is_any, any_T, hot_T).clamp_(0, rows - 1)


def fill_store(trainer: Trainer, case: PipelineCase) -> int:
    """Store every row that this rank owns; returns how many bytes the store then has."""
    (store,), (home,) = trainer.stores, trainer.groups[0].table_owners
    rank, ranks = trainer.comm.rank, trainer.comm.size
    rows_KS = torch.full((CHUNK, store.layout.width), 0.01)
    for begin in range(0, case.rows, CHUNK):
        keys_K = torch.arange(begin, min(begin + CHUNK, case.rows))
        keys_K = keys_K[owner_of(keys_K, 0, ranks, home) == rank]
        store.scatter(keys_K, [len(keys_K)], rows_KS[: len(keys_K)])
    return store.num_bytes()


class Repeated:
    """A source that cycles through given batches, `count` in all."""

    def __init__(self, batches: Sequence[Batch], count: int) -> None:
        self._batches = batches
        self._count = count

    def batches(self, **_: int) -> Iterator[Batch]:
        return (self._batches[i % len(self._batches)] for i in range(self._count))

    def empty(self) -> Batch:
        return self._batches[0].empty()


def main() -> None:
    """One rank of the benchmark."""
    folder = Path(sys.argv[1])
    case, variants = read_task(folder)
    torch.set_num_threads(1)
    try:
        with closing(connect_ranks(case.device)) as comm:
            measure(case, variants, comm, folder)
    except NestpipeError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
