"""Adaptive training: micro-batches, their sizes and the pool follow the measured trace.

Settings change between batches, where that is exact. Each change is a `Choice` that the run records
in a file and in its checkpoints: results are those of that sequence, whatever led to it, and
`replay_choices` trains it again under `serial`. What to try next comes from a replay of the trace;
what stays is what was measured to be faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from nestpipe.checkpoint import disk
from nestpipe.checkpoint.folder import candidates, open_noted
from nestpipe.comm import Communicator
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.planner.choice import LEAST_SAMPLES
from nestpipe.schedule import Kind, Lane, Merge, Plan
from nestpipe.schedule.schedule import COLLECTIVES, MICRO_KINDS, Op
from nestpipe.sim.job_costs import Split
from nestpipe.sim.replay import Sharing, replay_shared
from nestpipe.trace import Span, Trace, exposure, lane_busy, steady_interval
from nestpipe.train.checkpoint import gathered_from_first
from nestpipe.train.config import PipelineSettings, choose_pipeline
from nestpipe.train.job import Job, JobConfig, make_job, saved_config
from nestpipe.train.trainer import Trainer, choose_device
from nestpipe.train.verify import (
    Findings,
    Tell,
    Trained,
    Verdict,
    Watch,
    combine,
    compare,
    serial_twin,
    unwatched,
)

FILE = "choices.jsonl"
LEAST_BATCHES = 8
"""Traced batches that tell a step; a shorter run between two stops tells nothing."""
FILL = 3
"""Batches at the start of a trace whose steps do not count."""
WORTH = 0.03
"""Part of a step that a change must promise."""
GAINED = 0.01
"""Part of a step that a setting must have been faster by, to leave what runs for it."""
NEAR, LOOKS = 1.1, 2
"""Times the best step: what is so near to the best is read so often before that stays."""
MOST_STEPS = 64
"""Of one setting that are kept, the newest."""
IN_REACH = 1.2
"""Times the best step: a setting next to the best is tried although so much is predicted."""
DRIFT = 1.3
"""A step that is so many times as long as it was, or as short: older readings are forgotten."""
LONGEST = 32
"""Times `run.adaptive_every`: between two looks at a run that has settled."""
FARTHEST = 4
"""Times as many micro-batches as were ever tried: predictions do not reach further."""
LADDER = (1, 2, 4, 8, 16, 32)
"""Numbers of micro-batches that are looked at from anywhere."""
EVEN_ENDS = (1.0, 1.0)
ENDS = (EVEN_ENDS, (0.5, 0.5), (0.3, 1.0), (1.0, 0.5))
MOVING = ("retrieve", "writeback")
POOL_GROWTH, MOST_OF_FREE = 2.0, 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Settings from one step on."""

    step: int = 0
    """Batches trained before."""
    micro_batches: int = 1
    first: float = 1.0
    last: float = 1.0
    device_memory: str = "auto"
    reason: str = ""

    @property
    def setting(self) -> Choice:
        """The same without when and why."""
        return replace(self, step=0, reason="")

    def pipeline(self, of: PipelineSettings) -> PipelineSettings:
        """The job's pipeline with these sizes."""
        return replace(of, micro_batches=self.micro_batches, first=self.first, last=self.last)

    def __str__(self) -> str:
        sizes = "" if (self.first, self.last) == EVEN_ENDS else f" {self.first:g}:1:{self.last:g}"
        pool = "" if self.device_memory == "auto" else f", pool {self.device_memory}"
        plural = "" if self.micro_batches == 1 else "es"
        return f"{self.micro_batches} micro-batch{plural}{sizes}{pool}"


def choice_of(trainer: Trainer, reason: str) -> Choice:
    """What a trainer does now."""
    settings = trainer.settings
    pipeline = settings.pipeline
    return Choice(
        step=trainer.progress.step,
        micro_batches=pipeline.micro_batches,
        first=pipeline.first,
        last=pipeline.last,
        device_memory=settings.device_memory,
        reason=reason,
    )


# What to try next, from the traces of what ran.


@dataclass(frozen=True, slots=True)
class Reading:
    """What one setting was measured to do."""

    steps: tuple[float, ...]
    """Of its last few looks, ms."""
    trace: Trace
    """Of the last one."""
    looks: int = 1

    @property
    def step_ms(self) -> float:
        return median(self.steps)

    def and_then(self, trace: Trace) -> Reading:
        """The same setting after one more look."""
        steps = (*self.steps, *step_times(trace))
        return Reading(steps[-MOST_STEPS:], trace, self.looks + 1)


class SettingSearch:
    """Chooses the next setting from the readings so far; knows nothing of ranks and trainers."""

    def __init__(self, samples: int, plan_of: Callable[[Choice], Plan]) -> None:
        """`samples` of one rank's batch; `plan_of` gives the plan of a setting."""
        self._samples, self._plan_of = samples, plan_of
        self.seen: dict[Choice, Reading] = {}

    def next_after(self, current: Choice, trace: Trace) -> tuple[Choice, bool]:
        """The setting to go on with, and whether there is nothing more to try."""
        now = Reading(tuple(step_times(trace)), trace)
        setting = current.setting
        before = self.seen.get(setting)
        if before is not None and not 1 / DRIFT < now.step_ms / before.step_ms < DRIFT:
            self.seen, before = {}, None
        self.seen[setting] = now if before is None else before.and_then(trace)
        best = min(self.seen, key=lambda one: self.seen[one].step_ms)
        if self.seen[best].step_ms > (1 - GAINED) * self.seen[setting].step_ms:
            best = setting  # too close to leave what runs
        reading = self.seen[best]
        offer = self._offer(best, reading) or self._again(best, reading)
        if offer is not None:
            return offer, False
        told = f"the fastest that was tried, {reading.step_ms:.1f} ms"
        return replace(best, reason=told), True

    def _offer(self, best: Choice, reading: Reading) -> Choice | None:
        """What to try next: what promises to be faster, else what nobody knows enough of."""
        costs = _SizedCosts(self.seen)
        scale = reading.step_ms / self._replayed(best, costs)
        untried = [one for one in self._neighbours(best) if one not in self.seen]
        predicted = {one: scale * self._replayed(one, costs) for one in untried}
        if not predicted:
            return None
        one = min(predicted, key=lambda one: predicted[one])
        why = f"predicted {predicted[one]:.1f} ms, {best} takes {reading.step_ms:.1f}"
        if predicted[one] < (1 - WORTH) * reading.step_ms:
            return replace(one, reason=why)
        near = [one for one in self._next_to(best, reading) if one in predicted]
        for one in near:
            if predicted[one] < IN_REACH * reading.step_ms:
                why = f"to see what it takes, {best} takes {reading.step_ms:.1f} ms"
                return replace(one, reason=why)
        return None

    def _again(self, best: Choice, reading: Reading) -> Choice | None:
        """What was nearly as fast as the best: one look may have been in a bad moment."""
        for one in sorted(self.seen, key=lambda one: self.seen[one].step_ms):
            seen = self.seen[one]
            if one == best or seen.looks >= LOOKS or seen.step_ms > NEAR * reading.step_ms:
                continue
            why = f"to read it again, it took {seen.step_ms:.1f} ms"
            return replace(one, reason=f"{why} and {best} {reading.step_ms:.1f}")
        return None

    def _next_to(self, best: Choice, reading: Reading) -> list[Choice]:
        """Two steps down the ladder, and up where compute waits: predictions may be wrong there.

        What a message costs by its size is known only where several sizes were tried, and the step
        between may have been read in a bad moment.
        """
        count = best.micro_batches
        fewer = [n for n in reversed(LADDER) if n < count][:2]
        more = [n for n in LADDER if n > count][:2]
        counts = [*fewer, *(more if _compute_share(reading.trace) < 1 - WORTH else ())]
        return [replace(best, micro_batches=n, first=1.0, last=1.0) for n in counts]

    def _replayed(self, one: Choice, costs: _SizedCosts) -> float:
        split = Split.of(one.micro_batches, one.first, one.last)
        plan = self._plan_of(one)
        trace = replay_shared(
            plan, costs.of(split), Sharing((0,), frozenset()), batches=2 * LEAST_BATCHES
        )
        start, end, steps = steady_interval(trace.spans)
        return (end - start) / steps

    def _neighbours(self, best: Choice) -> list[Choice]:
        count = best.micro_batches
        tried = max(one.micro_batches for one in self.seen)
        most = min(max(LADDER), FARTHEST * tried, max(1, self._samples // LEAST_SAMPLES))
        counts = {count, *LADDER, 2 * count, count // 2, *((count + 1, count - 1) * (count < 6))}
        ends = [(best.first, best.last), *ENDS]
        return [
            replace(best, micro_batches=n, first=first, last=last)
            for n in sorted(counts)
            if 1 <= n <= most
            for first, last in (ends if n == count and n > 1 else [EVEN_ENDS])
        ]


class _SizedCosts:
    """What ops cost by the size of their micro-batch, from readings of several settings."""

    def __init__(self, seen: Mapping[Choice, Reading]) -> None:
        points: dict[Kind, list[tuple[float, float]]] = {kind: [] for kind in MICRO_KINDS}
        batch: dict[Kind, list[float]] = {}
        for one, reading in seen.items():
            shares = Split.of(one.micro_batches, one.first, one.last).shares
            for (kind, micro), ms in _typical(reading.trace).items():
                if micro is None:
                    batch.setdefault(kind, []).append(ms)
                else:
                    points[kind].append((shares[micro], ms))
        self._batch = {kind: median(values) for kind, values in batch.items()}
        self._lines = {kind: _line(values) for kind, values in points.items()}

    def of(self, split: Split) -> Callable[[Op, int], float]:
        """The costs of a batch that is cut like that."""

        def cost_of(op: Op, rank: int) -> float:
            if op.micro is None:
                return self._batch.get(op.kind, 0.0)
            fixed, slope = self._lines[op.kind]
            return fixed + slope * split.shares[op.micro]

        return cost_of


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fixed and growing part of a cost; of one size alone, all of it is taken to grow."""
    if not points:
        return 0.0, 0.0
    shares, ms = (np.array(column) for column in zip(*points, strict=True))
    through_zero = float(ms.sum() / shares.sum())
    if len({round(float(share), 3) for share in shares}) < 2:
        return 0.0, through_zero
    slope, fixed = (float(value) for value in np.polyfit(shares, ms, 1))
    if slope <= 0:
        return float(ms.mean()), 0.0
    return (fixed, slope) if fixed > 0 else (0.0, through_zero)


def _typical(trace: Trace) -> dict[tuple[Kind, int | None], float]:
    """The median cost of each op; a collective counts from when its last member came."""
    first = min(span.batch for span in trace.spans) + FILL
    ops: dict[tuple[str, int, int | None], list[Span]] = {}
    for span in trace.spans:
        if span.batch >= first:
            ops.setdefault((span.kind, span.batch, span.micro), []).append(span)
    values: dict[tuple[Kind, int | None], list[float]] = {}
    for (kind, _, micro), spans in ops.items():
        last = max(s.start for s in spans) if kind in COLLECTIVES else None
        each = [s.end - (s.start if last is None else min(s.end, last)) for s in spans]
        values.setdefault((Kind(kind), micro), []).append(median(each))
    return {key: median(ms) for key, ms in values.items()}


def step_times(trace: Trace) -> list[float]:
    """From update to update on the first rank, without the batches that fill the pipeline."""
    spans = trace.of_rank(trace.ranks[0])
    ends = sorted(span.end for span in spans if span.kind == Kind.UPDATE)[FILL:]
    return [later - earlier for earlier, later in pairwise(ends)]


def _compute_share(trace: Trace) -> float:
    """The part of a step for which the compute lane of the first rank is busy."""
    spans = trace.of_rank(trace.ranks[0])
    start, end, _ = steady_interval(spans)
    return lane_busy(spans, start, end).get(Lane.COMPUTE, 0.0) / max(end - start, 1e-9)


def exposed_moving(trace: Trace) -> float:
    """The part of a step that waits for rows to come to the device or to leave it."""
    spans = trace.of_rank(trace.ranks[0])
    start, end, _ = steady_interval(spans)
    seen = exposure(spans, start, end)
    return sum(seen.exposed.get(kind, 0.0) for kind in MOVING) / max(seen.total_ms, 1e-9)


# The run.


class AdaptiveRun:
    """Decides for one run, at the stops that it asks for; every rank makes one."""

    def __init__(self, job: Job, tell: Callable[[str], None] = lambda line: None) -> None:
        self._job, self._tell = job, tell
        trainer, run = job.trainer, job.config.run
        self._every = self._wait = run.adaptive_every
        self.file = choices_file(job.config)
        if trainer.choices:  # it goes on from a checkpoint
            self._use(Choice(**trainer.choices[-1]))
        elif trainer.progress.step:
            raise ConfigError(
                f"the run has trained {trainer.progress.step} steps and recorded no choices, so "
                "its results could not be replayed; begin with --adaptive, or go on without"
            )
        else:
            self._note(choice_of(trainer, "as the config has it"))
        self._search = SettingSearch(run.batch // trainer.comm.size, self._plan_of)
        self._last = Trace(())
        self.settled = False
        """Whether the last look found nothing more to try."""
        self.next_stop = trainer.progress.step + self._every
        """The step at which to call `decide`."""

    def _plan_of(self, one: Choice) -> Plan:
        trainer = self._job.trainer
        pipeline = one.pipeline(trainer.settings.pipeline)
        return trainer.placed(pipeline.make_plan(trainer.settings.parallel))

    def decide(self) -> None:
        """Choose what the next batches run with; all ranks call it between two `fit`."""
        trainer = self._job.trainer
        trace, trainer.trace = trainer.trace, Trace(())
        gathered = _gathered(trainer, trace)
        pools = cast("list[list[float]]", trainer.comm.all_gather_values([*trainer.pool_memory()]))
        told = gathered_from_first(trainer.comm, self._decision(gathered, pools))
        if trace.spans:
            self._last = trace
        if told is not None:
            chosen = Choice(**cast("dict[str, Any]", told["choice"]))
            self.settled = bool(told["settled"])
            longer = min(2 * self._wait, LONGEST * self._every)
            self._wait = longer if self.settled else self._every
            if chosen.setting != choice_of(trainer, "").setting:
                self._note(replace(chosen, step=trainer.progress.step))
                self._use(chosen)
        self.next_stop = trainer.progress.step + self._wait

    def _decision(self, trace: Trace, pools: list[list[float]]) -> dict[str, Any] | None:
        """What rank 0 wants; None where the trace is too short to say."""
        trainer = self._job.trainer
        if trainer.comm.rank != 0 or len(step_times(trace) if trace.spans else []) < 4:
            return None
        current = choice_of(trainer, "")
        chosen, settled = self._search.next_after(current, trace)
        if settled and self._plan_of(current).shape.pooled:
            larger = self._larger_pool(chosen, trace, pools)
            chosen, settled = (larger, False) if larger is not None else (chosen, settled)
        return {"choice": asdict(chosen), "settled": settled}

    def _larger_pool(self, chosen: Choice, trace: Trace, pools: list[list[float]]) -> Choice | None:
        """The setting with a larger pool, where rows that it lacks hold up the step."""
        exposed = exposed_moving(trace)
        now, most = max(now for now, _ in pools), min(most for _, most in pools)
        wanted = min(POOL_GROWTH * now, MOST_OF_FREE * most)
        if exposed < WORTH or wanted < 1.1 * now:
            return None
        larger = replace(
            chosen,
            device_memory=f"{wanted / 1e6:.1f}MB",
            reason=f"rows that the pool lacks take {100 * exposed:.0f} % of the step",
        )
        return None if larger.setting in self._search.seen else larger

    def _use(self, chosen: Choice) -> None:
        trainer = self._job.trainer
        pipeline = chosen.pipeline(trainer.settings.pipeline)
        trainer.change_pipeline(pipeline, device_memory=chosen.device_memory)

    def _note(self, chosen: Choice) -> None:
        trainer = self._job.trainer
        trainer.choices.append(asdict(chosen))
        if trainer.comm.rank == 0:
            self._tell(f"from step {chosen.step} on: {chosen} ({chosen.reason})")
            write_choices(self.file, trainer.choices)

    def finish(self) -> None:
        """Leave a trace that tells of a step, where the last batches were too few for one."""
        trainer = self._job.trainer
        if len({span.batch for span in trainer.trace.spans}) < LEAST_BATCHES:
            trainer.trace = self._last if self._last.spans else trainer.trace


def _gathered(trainer: Trainer, trace: Trace) -> Trace:
    """The traces of all ranks in one."""
    mine = [[s.kind, s.lane, s.batch, s.micro, s.rank, s.start, s.end] for s in trace.spans]
    ranks = cast("list[list[list[Any]]]", trainer.comm.all_gather_values(mine))
    return Trace(tuple(Span(*span) for of_rank in ranks for span in of_rank), trace.facts)


def choices_file(config: JobConfig) -> Path:
    """Where a run records its choices; refuses a run that could not be replayed from them."""
    parallel = config.parallel
    if parallel.groups > 1 and parallel.merge is Merge.AVERAGED and parallel.merge_every > 1:
        raise ConfigError(
            f"run.adaptive is true and parallel.merge_every {parallel.merge_every}: each look at "
            "the trace would merge the replicas once more and change results; set "
            'parallel.merge = "exact", or merge_every = 1'
        )
    folder = config.run.checkpoint or config.run.log
    if not folder:
        raise ConfigError(
            "run.adaptive is true but there is no folder to record the choices in; set "
            "run.checkpoint, or run.log"
        )
    return Path(folder) / FILE


def write_choices(file: Path, choices: Sequence[Mapping[str, Any]]) -> None:
    """All choices of a run, a line each; the file is whole or as it was."""
    with disk.explained(f"to {str(file)!r}"):
        disk.make_folder(file.parent)
        hidden = file.with_name(f".partial-{file.name}.txt")
        hidden.write_text("".join(json.dumps(dict(one)) + "\n" for one in choices))
        hidden.replace(file)


def choices_in(trainer_choices: Sequence[Mapping[str, Any]], where: str) -> list[Choice]:
    """The recorded choices, from the first step on."""
    try:
        found = [Choice(**one) for one in trainer_choices]
    except TypeError as error:
        raise CheckpointError(f"the choices in {where!r} do not read ({error})") from None
    if not found or found[0].step != 0:
        raise CheckpointError(
            f"{where!r} has no choices from the first step on; replay a run that was trained with "
            "--adaptive from its beginning"
        )
    return found


# The proof: what was recorded, trained again under `serial`, is what the run has saved.


def replay_choices(path: Path, comm: Communicator, watch: Watch = unwatched) -> Verdict:
    """Train an adaptive run's recorded settings under `serial`, and compare with its checkpoint.

    `path` is a checkpoint, or a folder whose newest good one is taken. All ranks take part.
    """
    found = gathered_from_first(comm, [str(one) for one in candidates(path)])
    if not found:
        raise CheckpointError(f"there is no checkpoint in {str(path)!r}; check its name")
    checkpoint = Path(cast("list[str]", found)[0])
    manifest = open_noted(checkpoint, tell=comm.rank == 0).manifest
    config = saved_config(manifest, checkpoint)
    choices = choices_in(manifest.choices, str(checkpoint))
    if config is None or config.data.kind == "stream":
        raise CheckpointError(
            f"{str(checkpoint)!r} cannot be replayed: its data does not come again; use one of "
            "stored data, trained by `nestpipe train`"
        )
    if manifest.ranks != comm.size:
        raise ConfigError(
            f"{str(checkpoint)!r} was trained by {manifest.ranks} ranks, and sums depend on them; "
            f"add --ranks {manifest.ranks}"
        )
    device = choose_device(config.run.device).type
    chosen = choose_pipeline(config.pipeline, device, comm.size).pipeline
    with ExitStack() as closing:
        again = make_job(replace(config, pipeline=serial_twin(chosen)), comm)
        closing.callback(again.trainer.close)
        with watch("serial", manifest.step) as tell:
            _train_again(again, choices, manifest.step, manifest.epoch, tell)
        run = make_job(replace(config, pipeline=chosen), comm)
        closing.callback(run.trainer.close)
        run.trainer.load(checkpoint)
        names = ("the replay", "the run")
        pair = [Trained(n, job.trainer, [], []) for n, job in zip(names, (again, run), strict=True)]
        mine = asdict(compare(*pair))
        findings = [Findings(**cast("dict[str, Any]", of)) for of in comm.all_gather_values(mine)]
        return combine(
            findings,
            plan=chosen.plan,
            steps=manifest.step,
            micro_batches=choices[-1].micro_batches,
        )


def _train_again(job: Job, choices: Sequence[Choice], steps: int, epoch: int, tell: Tell) -> None:
    trainer = job.trainer
    ends = [*(one.step for one in choices[1:]), steps]
    for chosen, end in zip(choices, ends, strict=True):
        if end > trainer.progress.step:
            trainer.change_pipeline(chosen.pipeline(trainer.settings.pipeline))
            left = end - trainer.progress.step
            trainer.fit(job.train, steps=left, epochs=job.config.run.epochs, on_step=tell)
    # The run came to the end of the data and saw it; so many steps alone end just before.
    if epoch > trainer.progress.epoch:
        trainer.fit(job.train, epochs=epoch, on_step=tell)
