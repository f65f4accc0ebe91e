"""A short profile of a job on its ranks: serial runs in a few forms, and real runs of candidates.

All of it is scratch work: nothing is evaluated or saved, and the trainer goes away with it.
"""

from __future__ import annotations

import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from nestpipe.batch import Batch
from nestpipe.comm import Communicator
from nestpipe.data import Source, StreamingSource
from nestpipe.errors import ConfigError
from nestpipe.planner.choice import (
    DRAWS,
    ELSEWHERE,
    LEAST_SAMPLES,
    Candidate,
    PlanChoice,
    ProfilePredictor,
    checked,
    choose,
)
from nestpipe.runtime import Work
from nestpipe.schedule import Kind, Op, Retrieval
from nestpipe.sim.job_costs import JobProfile, ProfiledRun, draw_of
from nestpipe.sim.trace_costs import WARM_UP
from nestpipe.trace import Span, Trace
from nestpipe.train.config import PipelineSettings, choose_pipeline
from nestpipe.train.gradients import buckets_of
from nestpipe.train.job import JobConfig, make_job
from nestpipe.train.trainer import Trainer

SPLITS = (8, 4, 2)
"""Micro-batches of the split run: as many as leave each enough samples."""
WARM_STEPS = 4
PROFILE_STEPS, PROFILE_ROUNDS = 8, 2
"""Batches of each run of a profile, and how often the runs take turns."""
CHECK_STEPS, CHECK_ROUNDS = 10, 2
"""The same for the short runs that the last word is of."""
LEAST_STEPS = WARM_UP + 4
FILL, DRAIN = 3, 1
"""Batches at both ends of a checked run whose steps do not count."""
Tell = Callable[[object], None]


class Endless:
    """A source that begins anew where it ends, so that any number of steps can be trained."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def batches(self, *, epoch: int = 0, start: int = 0, **where: int) -> Iterator[Batch]:
        """Batches without end."""
        while True:
            seen = 0
            for batch in self._source.batches(epoch=epoch, start=start, **where):
                seen += 1
                yield batch
            if not seen and not start:
                raise ConfigError("the data has no samples; check its path and its filters")
            epoch, start = epoch + 1, 0


class SentBytes:
    """Counts what a rank sends in each op, and its processor time in collectives."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.sent: dict[str, float] = defaultdict(float)
        self.batches: set[int] = set()
        self.cpu_ms = 0.0

    def around(self, work: Work) -> Work:
        """The same work, counted; right where ops run one after the other."""
        return {kind: self._counted(kind, act) for kind, act in work.items()}

    def _counted(self, kind: Kind, act: Callable[[Op], None]) -> Callable[[Op], None]:
        def counted(op: Op) -> None:
            before, began = self._comm.bytes_sent, time.process_time()
            act(op)
            self.batches.add(op.batch)
            if op.collective:
                name = str(kind) if op.micro is None else f"{kind}.{op.micro}"
                self.sent[name] += self._comm.bytes_sent - before
                self.cpu_ms += (time.process_time() - began) * 1e3

        return counted


class JobBench:
    """One rank of a job that runs a few batches at a time, in any settings."""

    def __init__(self, config: JobConfig, comm: Communicator) -> None:
        self.config, self.comm = config, comm
        self._trainers: dict[tuple[int, bool], tuple[Trainer, Source]] = {}
        self.threads = torch.get_num_threads()
        """Of this rank for torch, where a candidate has no number of its own."""

    def close(self) -> None:
        """Give back what the trainers have."""
        for trainer, _ in self._trainers.values():
            trainer.close()
        self._trainers = {}
        torch.set_num_threads(self.threads)

    def trainer_for(self, candidate: Candidate) -> tuple[Trainer, Source]:
        """The trainer with as many groups and such owners, in the candidate's settings."""
        pipeline = self.pipeline_of(candidate)
        key = (candidate.groups, pipeline.owners_add_up)
        if key not in self._trainers:
            parallel = replace(self.config.parallel, groups=candidate.groups)
            plain = replace(pipeline, plan="serial")
            job = make_job(replace(self.config, pipeline=plain, parallel=parallel), self.comm)
            if isinstance(job.train, StreamingSource):
                job.trainer.close()
                raise ConfigError(
                    "a stream cannot be profiled, because its samples come when they come; plan "
                    "with stored data of the same form"
                )
            self._trainers[key] = job.trainer, cast("Source", Endless(job.train))
        trainer, source = self._trainers[key]
        trainer.change_pipeline(pipeline)
        return trainer, source

    def pipeline_of(self, candidate: Candidate) -> PipelineSettings:
        """The job's pipeline with the candidate's settings."""
        return replace(self.config.pipeline, **candidate.sections()["pipeline"])

    def run(
        self, candidate: Candidate, steps: int, around: Callable[[Work], Work] | None = None
    ) -> Trace:
        """Train so many batches; the trace of all ranks."""
        trainer, source = self.trainer_for(candidate)
        trainer.around = around or (lambda work: work)
        torch.set_num_threads(candidate.threads or self.threads)
        trainer.fit(source, steps=steps, epochs=1 << 62)
        return gathered(self.comm, trainer.trace)


def gathered(comm: Communicator, trace: Trace) -> Trace:
    """The traces of all ranks in one; they began together."""
    ranks = cast("list[list[Any]]", comm.all_gather_values([astuple(s) for s in trace.spans]))
    return Trace(tuple(Span(*span) for of_rank in ranks for span in of_rank), trace.facts)


def forms_of(
    config: JobConfig, device: str, ranks: int, threads: int, *, rounding: bool
) -> list[Candidate]:
    """The serial runs of a profile: each differs in one setting from the first or the second."""
    plain = Candidate(retrieval="new")
    samples = config.run.batch // ranks
    count = next((n for n in SPLITS if n * LEAST_SAMPLES <= samples and ranks > 1), 0)
    forms = [plain, *([replace(plain, micro_batches=count)] if count else [])]
    forms.append(replace(plain, retrieval="whole"))
    if device == "cuda":
        forms.append(replace(plain, retrieval=str(Retrieval.POOLED)))
    if count:
        split = forms[1]
        forms += [replace(split, exchange="window"), replace(split, micro_batching="clustered")]
        if rounding:
            forms.append(replace(split, comm_dtype="bfloat16"))
    if device == "cpu" and threads > 1 and not config.run.threads:
        forms += [replace(plain, threads=n) for n in sorted({1, threads // 2} - {threads})]
    if config.parallel.groups == 1:
        groups = [m for m in (2, 4) if ranks % m == 0 and ranks // m > 1]
        forms += [replace(plain, groups=m) for m in groups]
    return forms


def profile_job(
    bench: JobBench,
    *,
    steps: int = PROFILE_STEPS,
    rounds: int = PROFILE_ROUNDS,
    rounding: bool = False,
    tell: Tell = lambda _: None,
) -> JobProfile:
    """Run the job's serial forms in turns; every rank gets the same profile."""
    config, comm = bench.config, bench.comm
    if steps < LEAST_STEPS:
        raise ConfigError(f"steps is {steps}; profile at least {LEAST_STEPS} steps of each form")
    first, _ = bench.trainer_for(Candidate(retrieval="new"))
    device = first.device.type
    forms = forms_of(config, device, comm.size, bench.threads, rounding=rounding)
    bench.run(forms[0], WARM_STEPS)
    traces: dict[Candidate, list[Trace]] = defaultdict(list)
    counted: dict[Candidate, SentBytes] = {form: SentBytes(comm) for form in forms}
    for _ in range(rounds):
        for form in forms:
            traces[form].append(bench.run(form, steps, counted[form].around))
            tell(form)
    runs = [_profiled(form, traces[form], counted[form], comm, rounds) for form in forms]
    parameters = [p for p in first.model.parameters() if p.requires_grad]
    rows = sum(count for store in first.stores for count in store.num_rows())
    return JobProfile(
        runs=tuple(runs),
        device=device,
        **_machines(comm, device),
        samples=config.run.batch // comm.size,
        threads=bench.threads,
        buckets=len(buckets_of(parameters)) or 1,
        gradient_norm=first.settings.clips_rows,
        rows=sum(cast("list[int]", comm.all_gather_values(rows))),
        facts={"model": type(first.model).__name__, "ranks": str(comm.size)},
    )


def _profiled(
    form: Candidate, traces: Sequence[Trace], counted: SentBytes, comm: Communicator, rounds: int
) -> ProfiledRun:
    batches = max(1, rounds * len(counted.batches))
    mine = {name: total / batches for name, total in counted.sent.items()}
    ranks = cast("list[dict[str, float]]", comm.all_gather_values(mine))
    names = dict.fromkeys(name for rank in ranks for name in rank)
    sent = {name: sum(rank.get(name, 0.0) for rank in ranks) / len(ranks) for name in names}
    cpu_ms = sum(cast("list[float]", comm.all_gather_values(counted.cpu_ms)))
    return ProfiledRun(form.form, tuple(traces), sent, draw_of(traces, cpu_ms))


def _machines(comm: Communicator, device: str) -> dict[str, Any]:
    """Which ranks share cores or a GPU, and how many cores there are for them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else platform.node()
    if device == "cuda":
        where = [machine, str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)]
    else:
        where = [machine, *map(str, cores)]
    told = [tuple(cast("list[str]", one)) for one in comm.all_gather_values(where)]
    numbers = {place: n for n, place in enumerate(dict.fromkeys(told))}
    count = len(cores) or os.cpu_count() or 1
    smallest = min(cast("list[int]", comm.all_gather_values(count)))
    return {"pools": tuple(numbers[place] for place in told), "cores": smallest}


def check_candidates(
    bench: JobBench,
    candidates: Sequence[Candidate],
    *,
    steps: int,
    rounds: int,
    tell: Tell = lambda _: None,
) -> dict[Candidate, float]:
    """The median step of each candidate's own short runs, which take turns."""
    steps_ms: dict[Candidate, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for candidate in candidates:
            trace = bench.run(candidate, steps + FILL + DRAIN)
            if number > 0:  # the first round warms up
                steps_ms[candidate] += step_times(trace)
            tell(candidate)
    return {candidate: median(ms) for candidate, ms in steps_ms.items()}


def step_times(trace: Trace) -> list[float]:
    """From update to update on the first rank, without the batches that fill and drain."""
    spans = trace.of_rank(trace.ranks[0])
    ends = sorted(span.end for span in spans if span.kind == Kind.UPDATE)[FILL:-DRAIN]
    return [later - earlier for earlier, later in pairwise(ends)]


@contextmanager
def job_bench(config: JobConfig, comm: Communicator) -> Iterator[JobBench]:
    """A bench that is closed in the end."""
    bench = JobBench(config, comm)
    try:
        yield bench
    finally:
        bench.close()


# Rank 0 thinks, the others wait for what it says: no collective lasts as long as its thoughts.

WAIT, EVERY_S = "wait", 2.0


class FirstThinks:
    """Rank 0's side: tells the others now and then that it still thinks."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._spoke = comm, time.monotonic()

    def still(self, _: object = None) -> None:
        """Call it often."""
        if time.monotonic() - self._spoke >= EVERY_S:
            self._comm.all_gather_values(WAIT)
            self._spoke = time.monotonic()

    def say(self, value: Mapping[str, Any]) -> None:
        """End the waiting."""
        self._comm.all_gather_values(dict(value))


def heard(comm: Communicator) -> Mapping[str, Any]:
    """What rank 0 says once it has thought; the other ranks call this."""
    while (word := comm.all_gather_values(None)[0]) == WAIT:
        pass
    return cast("Mapping[str, Any]", word)


def thought(
    profile: JobProfile,
    start: Candidate,
    comm: Communicator,
    *,
    draws: int = DRAWS,
    rounding: bool = False,
    tell: Tell = lambda _: None,
) -> PlanChoice | None:
    """What rank 0 chooses by prediction; None on the other ranks, which wait for it."""
    if comm.rank != 0:
        heard(comm)
        return None
    waiting = FirstThinks(comm)

    def told(candidate: object) -> None:
        waiting.still()
        tell(candidate)

    predictor = ProfilePredictor(profile, rounding=rounding)
    choice = choose(predictor, start, draws=draws, tell=told)
    waiting.say({})
    return choice


def run_off(
    bench: JobBench,
    choice: PlanChoice | None,
    *,
    steps: int = CHECK_STEPS,
    tell: Tell = lambda _: None,
) -> PlanChoice | None:
    """The choice after its best few have run; all ranks run them, rank 0 has the choice."""
    mine = [asdict(one) for one in choice.finalists] if choice is not None else []
    told = cast("list[list[dict[str, Any]]]", bench.comm.all_gather_values(mine))[0]
    finalists = [Candidate(**one) for one in told]
    measured = check_candidates(bench, finalists, steps=steps, rounds=CHECK_ROUNDS, tell=tell)
    return checked(choice, measured) if choice is not None else None


def candidate_of(config: JobConfig, device: str, ranks: int) -> Candidate:
    """The job's own settings, where `auto` stands for what `train` would choose."""
    chosen = choose_pipeline(config.pipeline, device, ranks).pipeline
    names = [name for name in Candidate.__slots__ if name not in ELSEWHERE]
    values: dict[str, Any] = {name: getattr(chosen, name) for name in names}
    values |= {name: str(values[name]) for name in ("retrieval", "exchange")}  # of enums
    return Candidate(**values, groups=config.parallel.groups)
