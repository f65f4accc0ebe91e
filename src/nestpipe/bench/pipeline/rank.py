"""One rank of `nestpipe bench pipeline`: every plan takes turns on the same trainer.

Run as `python -m nestpipe.bench.pipeline.rank FOLDER` under torchrun. The folder holds what to do;
each rank adds the trace of every round, on a clock that all processes of a machine share.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from nestpipe.bench.machines import look_like_a_host
from nestpipe.bench.pipeline.cases import CURVE, PipelineCase, SerialLoop, Variant
from nestpipe.bench.pipeline.launch import read_task, trace_file, write_points
from nestpipe.bench.pipeline.model import (
    Repeated,
    fill_store,
    make_batches,
    make_model,
    make_tables,
)
from nestpipe.bench.pipeline.report import NET_CPU, step_times
from nestpipe.comm import Communicator, LocalCommunicator, connect
from nestpipe.errors import NestpipeError
from nestpipe.runtime import InlineLanes, Lanes, Spans, lanes_for
from nestpipe.runtime.lanes import Act
from nestpipe.schedule import Lane, Op, Shape
from nestpipe.sim import figures
from nestpipe.sim.trace_costs import BUCKETS
from nestpipe.trace import Span, Trace, write_chrome
from nestpipe.trace.span import Fact
from nestpipe.train.config import DenseSettings, PipelineSettings, RowSettings, TrainSettings
from nestpipe.train.grad_buckets import buckets_of
from nestpipe.train.trainer import Trainer

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

    def timed(self, act: Act, lane: Lane) -> Act:
        timed = self._spans.timed(act, lane)

        def counted(op: Op) -> None:
            before = time.process_time()
            timed(op)
            if op.collective:
                self.net_cpu_ms += (time.process_time() - before) * 1e3

        return counted

    def trace(self, facts: Mapping[str, Fact]) -> Trace:
        return self._spans.trace(facts)


class Rounds:
    """A trainer that runs its rounds with any plan."""

    def __init__(self, case: PipelineCase, comm: Communicator) -> None:
        settings = TrainSettings(
            batch=case.batch * comm.size,
            device=case.device,
            rows=RowSettings(optimizer=case.optimizer),  # pyright: ignore[reportArgumentType]
            dense=DenseSettings(optimizer="sgd"),
            pipeline=PipelineSettings(first=case.first, last=case.last, comm_dtype=case.comm_dtype),
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


def connect_ranks(case: PipelineCase) -> Communicator:
    """The group of a case's ranks; several of them may share one GPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return LocalCommunicator()
    if case.device == "cpu":
        return connect("gloo")
    look_like_a_host()
    return connect("nccl")


def main() -> None:
    """One rank of the benchmark."""
    folder = Path(sys.argv[1])
    case, variants = read_task(folder)
    torch.set_num_threads(1)
    try:
        with closing(connect_ranks(case)) as comm:
            measure(case, variants, comm, folder)
    except NestpipeError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
