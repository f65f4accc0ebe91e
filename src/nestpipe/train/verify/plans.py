"""Proof that a plan changes nothing: the same job with `serial` and with the plan, compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

from nestpipe.comm import Communicator
from nestpipe.data import Source
from nestpipe.runtime import Work, inject_delays
from nestpipe.train.config import PipelineSettings
from nestpipe.train.job import JobConfig, make_job
from nestpipe.train.ops import StepReport
from nestpipe.train.trainer import Trainer
from nestpipe.train.verify.compare import Findings, Trained, compare

DELAY_MS, DELAYED_SHARE = 25.0, 0.2
"""Few ops and long delays: where all are late, nobody overtakes."""
Tell = Callable[[StepReport], None]
Watch = Callable[[str, int | None], AbstractContextManager[Tell]]
"""Called before each run with its name and steps, if known; what it yields hears of every step."""
Start = Callable[[PipelineSettings], tuple[Trainer, Source]]
"""A fresh trainer with these settings, and its data; the same weights and order every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether two runs came to the same bits, over all ranks."""

    plan: str
    ranks: int
    steps: int
    """Batches that `serial` trained."""
    micro_batches: int
    rows_compared: int
    """Rows of all tables, each with its optimizer state."""
    tensors_compared: int
    """Dense weights, states of their optimizer, counters and losses, on every rank."""
    rows_different: int
    tensors_different: int
    largest_difference: float | None
    """None where one of two different numbers is infinite or not a number."""
    first_different_step: int | None
    """The first step whose loss differs."""
    first_difference: str | None

    @property
    def identical(self) -> bool:
        return self.first_difference is None

    def figures(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"identical": self.identical, **asdict(self)}


def unwatched(name: str, total: int | None) -> AbstractContextManager[Tell]:
    """Nobody looks on."""
    return nullcontext(lambda report: None)


def serial_twin(pipeline: PipelineSettings) -> PipelineSettings:
    """The plain settings that must come to the same bits: nothing overlaps, all rows are read."""
    return replace(pipeline, plan="serial", retrieval="whole", speculative_rows=False, buffers=2)


def verify_job(
    config: JobConfig,
    comm: Communicator,
    watch: Watch = unwatched,
    delays: int | None = None,
) -> Verdict:
    """Train a config's job with `serial` and with its plan, and compare what came out.

    Nothing is evaluated or saved. All ranks take part, and all get the same verdict.
    """

    def start(pipeline: PipelineSettings) -> tuple[Trainer, Source]:
        job = make_job(replace(config, pipeline=pipeline), comm)
        return job.trainer, job.train

    run = config.run
    length = {"steps": run.steps or None, "epochs": run.epochs}
    return verify(start, config.pipeline, **length, watch=watch, delays=delays)


def verify(
    start: Start,
    pipeline: PipelineSettings,
    *,
    steps: int | None = None,
    epochs: int = 1,
    watch: Watch = unwatched,
    delays: int | None = None,
) -> Verdict:
    """Train twice from the same start, with `serial` and with `pipeline`, and compare.

    Both trainers live until the comparison is made, so host memory holds all rows twice. With
    `delays`, a seed, some ops of the second run take longer by chance, others on each rank.
    """
    with ExitStack() as closing:

        def train(settings: PipelineSettings, name: str, seed: int | None = None) -> Trained:
            trainer, source = start(settings)
            closing.callback(trainer.close)
            if seed is not None:
                trainer.around = delay_ops(seed, trainer.comm)
                trainer.poison_buffers = True
            with watch(name, expected_steps(trainer, source, steps, epochs)) as tell:
                return train_to_compare(trainer, source, name, steps, epochs, tell)

        twin = serial_twin(pipeline)
        serial = train(twin, twin.plan)
        again = " again" if pipeline.plan == twin.plan else ""
        other = train(pipeline, pipeline.plan + again, delays)
        findings = compare(serial, other)
        comm = serial.trainer.comm
        return combine(
            [
                Findings(**cast("dict[str, Any]", of))
                for of in comm.all_gather_values(asdict(findings))
            ],
            plan=pipeline.plan,
            steps=serial.trainer.progress.step,
            micro_batches=pipeline.micro_batches,
        )


def delay_ops(seed: int, comm: Communicator) -> Callable[[Work], Work]:
    """Hold some ops up for so long that whatever does not wait for them overtakes them."""
    own = seed * comm.size + comm.rank
    return partial(inject_delays, seed=own, max_ms=DELAY_MS, share=DELAYED_SHARE)


def expected_steps(trainer: Trainer, source: Source, steps: int | None, epochs: int) -> int | None:
    """How many steps a run will have, if that can be known."""
    if source.num_samples is None:
        return steps
    every = epochs * -(-source.num_samples // trainer.settings.batch)
    return min(every, steps) if steps else every


def train_to_compare(
    trainer: Trainer, source: Source, name: str, steps: int | None, epochs: int, tell: Tell
) -> Trained:
    """Train, and keep what every step says."""
    losses: list[float] = []
    samples: list[int] = []

    def on_step(report: StepReport) -> None:
        losses.append(report.loss)
        samples.append(report.samples)
        tell(report)

    trainer.fit(source, steps=steps, epochs=epochs, on_step=on_step)
    return Trained(name, trainer, losses, samples)


def combine(of_ranks: Sequence[Findings], *, plan: str, steps: int, micro_batches: int) -> Verdict:
    """What all ranks found, together; their shards have no row in common."""
    largest = max(found.largest_difference for found in of_ranks)
    different = [found.first_step for found in of_ranks if found.first_step is not None]
    return Verdict(
        plan=plan,
        ranks=len(of_ranks),
        steps=steps,
        micro_batches=micro_batches,
        rows_compared=sum(found.rows_compared for found in of_ranks),
        tensors_compared=sum(found.tensors_compared for found in of_ranks),
        rows_different=sum(found.rows_different for found in of_ranks),
        tensors_different=sum(found.tensors_different for found in of_ranks),
        largest_difference=largest if math.isfinite(largest) else None,
        first_different_step=min(different, default=None),
        first_difference=_first(of_ranks),
    )


def _first(of_ranks: Sequence[Findings]) -> str | None:
    """The first row that differs on any rank, else the first tensor."""
    rows = [(rank, found.first_row) for rank, found in enumerate(of_ranks)]
    tensors = [(rank, found.first_tensor) for rank, found in enumerate(of_ranks)]
    for rank, sentence in rows + tensors:
        if sentence is not None:
            return f"on rank {rank}, {sentence}"
    return None
