"""One rank of `nestpipe bench groups`.

Run as `python -m nestpipe.bench.groups.rank FOLDER` under torchrun; the folder holds what to do,
and rank 0 leaves the readings there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import mean

import torch

from nestpipe.bench.groups.launch import LAST_STEPS, WARM_STEPS, GroupVariant
from nestpipe.bench.pipeline.cases import PipelineCase
from nestpipe.bench.pipeline.model import make_batches, make_model, make_tables
from nestpipe.bench.pipeline.rank import connect_ranks
from nestpipe.bench.repeated import Repeated
from nestpipe.comm import Communicator
from nestpipe.errors import NestpipeError
from nestpipe.train.config import (
    DenseSettings,
    ParallelSettings,
    PipelineSettings,
    RowSettings,
    TrainSettings,
)
from nestpipe.train.ops import StepReport
from nestpipe.train.trainer import Trainer


class Timed:
    """A trainer of one variant, and what its rounds came to."""

    def __init__(self, case: PipelineCase, variant: GroupVariant, comm: Communicator) -> None:
        parallel = ParallelSettings(
            groups=variant.groups,
            merge=variant.merge,  # pyright: ignore[reportArgumentType]  checked by whoever asks
            merge_every=variant.merge_every,
        )
        settings = TrainSettings(
            batch=case.batch * comm.size,
            device=case.device,
            rows=RowSettings(optimizer=case.optimizer),  # pyright: ignore[reportArgumentType]
            dense=DenseSettings(optimizer="sgd"),
            pipeline=PipelineSettings(
                plan="nested",
                micro_batches=case.micros,
                retrieval="new",
                first=case.first,
                last=case.last,
                comm_dtype=case.wire,
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
    every = [Timed(case, variant, comm) for variant in variants]
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
        with closing(connect_ranks(case)) as comm:
            measure(folder, comm)
    except NestpipeError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
