"""`nestpipe bench groups`: the same work in one dimension and in groups of ranks.

A rank runs as `python -m nestpipe.bench.groups FOLDER` under torchrun. The folder holds what to do,
and rank 0 leaves the readings there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import torch

from nestpipe.bench.pipeline_cases import PipelineCase
from nestpipe.bench.pipeline_rank import (
    Repeated,
    connect_ranks,
    launch_ranks,
    make_batches,
    make_model,
    make_tables,
)
from nestpipe.comm import Communicator
from nestpipe.errors import ConfigError, NestpipeError, RunError
from nestpipe.schedule import Retrieval
from nestpipe.train.config import (
    DenseSettings,
    ParallelSettings,
    PipelineSettings,
    RowSettings,
    TrainSettings,
)
from nestpipe.train.ops import StepReport
from nestpipe.train.trainer import Trainer

WARM_STEPS, LAST_STEPS = 4, 4
"""Steps before and after those on the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupVariant:
    """How ranks are grouped, and how groups keep together."""

    groups: int = 1
    merge: str = "exact"
    merge_every: int = 1

    @property
    def name(self) -> str:
        if self.groups == 1:
            return "one dimension"
        every = f", every {self.merge_every}" if self.merge == "averaged" else ""
        return f"{self.groups} groups, {self.merge}{every}"


@dataclass(frozen=True, slots=True)
class GroupReading:
    """What one variant took and sent."""

    variant: GroupVariant
    step_ms: float
    """Median of the rounds' mean steps."""
    rounds_ms: tuple[float, ...]
    sent_mb: float
    """Sent by a rank to others in a step, the mean of all ranks."""


def group_variants(groups: int, intervals: Sequence[int]) -> list[GroupVariant]:
    """One dimension, exact groups, and averaged ones with each interval."""
    averaged = [
        GroupVariant(groups=groups, merge="averaged", merge_every=every) for every in intervals
    ]
    return [GroupVariant(), GroupVariant(groups=groups), *averaged]


def timed_steps(variants: Sequence[GroupVariant]) -> int:
    """Steps on the clock: at least 16, and whole intervals of every variant."""
    longest = max(variant.merge_every for variant in variants)
    if any(longest % variant.merge_every for variant in variants):
        raise ConfigError(
            f"intervals are {', '.join(str(v.merge_every) for v in variants[2:])}; use such that "
            "divide the longest, so that all are timed over whole intervals"
        )
    return longest * max(1, -(-16 // longest))


def measure_groups(
    case: PipelineCase, variants: Sequence[GroupVariant], *, hosts: bool
) -> list[GroupReading]:
    """Run all variants in turns, with the plan `nested`."""
    timed = timed_steps(variants)
    with tempfile.TemporaryDirectory(prefix="nestpipe-groups-") as name:
        folder = Path(name)
        task = {
            "case": asdict(case),
            "variants": [asdict(variant) for variant in variants],
            "timed": timed,
        }
        (folder / "task.json").write_text(json.dumps(task))
        command = [sys.executable, "-m", "nestpipe.bench.groups", str(folder)]
        status = launch_ranks(case, command, hosts=hosts)
        if status != 0:
            raise RunError(f"the benchmark ended with status {status}; see above")
        found = json.loads((folder / "readings.json").read_text())
    return [
        GroupReading(variant, median(of["ms"]), tuple(of["ms"]), median(of["mb"]))
        for variant, of in zip(variants, found, strict=True)
    ]


class GroupTimer:
    """A trainer of one variant, with the step times and bytes of its rounds."""

    def __init__(self, case: PipelineCase, variant: GroupVariant, comm: Communicator) -> None:
        parallel = ParallelSettings(
            groups=variant.groups,
            merge=variant.merge,  # pyright: ignore[reportArgumentType]  checked by the caller
            merge_every=variant.merge_every,
        )
        settings = TrainSettings(
            batch=case.batch * comm.size,
            device=case.device,
            rows=RowSettings(optimizer=case.optimizer),  # pyright: ignore[reportArgumentType]
            dense=DenseSettings(optimizer="sgd"),
            pipeline=PipelineSettings(
                plan="nested",
                micro_batches=case.micro_batches,
                retrieval=Retrieval.NEW,
                first=case.first,
                last=case.last,
                comm_dtype=case.comm_dtype,
            ),
            parallel=parallel,
        )
        self._comm = comm
        self._trainer = Trainer(make_model(case), make_tables(case), settings, comm)
        self.ms: list[float] = []
        self.mb: list[float] = []

    def run(self, source: Repeated, timed: int) -> None:
        """One round: time and bytes from one step's end to another's."""
        first, last = WARM_STEPS, WARM_STEPS + timed
        begin = self._trainer.progress.step
        seen: dict[int, tuple[float, int]] = {}

        def on_step(report: StepReport) -> None:
            if report.step - begin in (first, last):
                seen[report.step - begin] = time.perf_counter(), self._comm.bytes_sent

        self._comm.barrier()
        epochs = self._trainer.progress.epoch + 1
        self._trainer.fit(source, epochs=epochs, on_step=on_step)  # type: ignore[arg-type]
        seconds, sent = (seen[last][i] - seen[first][i] for i in range(2))
        everyones = self._comm.all_gather_values(sent / timed / 1e6)
        self.ms.append(seconds / timed * 1e3)
        self.mb.append(mean([float(str(mb)) for mb in everyones]))


def measure(folder: Path, comm: Communicator) -> None:
    """Alternate rounds of all variants; the first one warms up."""
    task = json.loads((folder / "task.json").read_text())
    case = PipelineCase(**task["case"])
    variants = [GroupVariant(**given) for given in task["variants"]]
    source = Repeated(make_batches(case, comm.rank), WARM_STEPS + task["timed"] + LAST_STEPS)
    every = [GroupTimer(case, variant, comm) for variant in variants]
    for number in range(case.rounds + 1):
        for variant, timed in zip(variants, every, strict=True):
            timed.run(source, task["timed"])
            if comm.rank == 0:
                sys.stderr.write(
                    f"round {number} of {case.rounds}, {variant.name}: {timed.ms[-1]:,.0f} ms, "
                    f"{timed.mb[-1]:.2f} MB\n"
                )
    if comm.rank == 0:
        readings = [{"ms": timed.ms[1:], "mb": timed.mb[1:]} for timed in every]
        (folder / "readings.json").write_text(json.dumps(readings))


def main() -> None:
    """One rank of the benchmark."""
    folder = Path(sys.argv[1])
    case = PipelineCase(**json.loads((folder / "task.json").read_text())["case"])
    torch.set_num_threads(1)
    try:
        with closing(connect_ranks(case.device)) as comm:
            measure(folder, comm)
    except NestpipeError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
