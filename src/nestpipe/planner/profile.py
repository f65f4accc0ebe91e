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
from dataclasses import asdict, astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from nestpipe.batch import Batch
from nestpipe.comm import Communicator
from nestpipe.data import Source, StreamingSource
from nestpipe.embedding.pool import (
    memory_for,
    memory_for_all,
    pool_sizes,
    pools_bytes,
    pools_on_one_device,
)
from nestpipe.embedding.routing.owners import WorkingSet
from nestpipe.embedding.store.protocol import StoreLayout
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
from nestpipe.sim.job_costs import (
    JobProfile,
    PoolSize,
    ProfiledRun,
    RowReuse,
    draw_of,
    with_trend,
)
from nestpipe.sim.trace_costs import WARM_UP
from nestpipe.trace import Span, Trace
from nestpipe.train.config import PipelineSettings, choose_pipeline
from nestpipe.train.gradients import buckets_of
from nestpipe.train.job import JobConfig, make_job
from nestpipe.train.ops import StepReport
from nestpipe.train.trainer import Trainer

SPLITS = (8, 4, 2)
"""Micro-batches of the split run: as many as leave each enough samples."""
WARM_STEPS = 4
PROFILE_STEPS, PROFILE_ROUNDS = 8, 2
"""Batches of each run of a profile, and how often the runs take turns."""
CHECK_STEPS, CHECK_ROUNDS = 10, 2
"""The same for the short runs that the last word is of."""
LEAST_STEPS = WARM_UP + 4
POOL_BATCHES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Sizes of pools, by the neighbouring batches whose rows they hold."""
LEAST_SEEN = 4
"""Batches that tell what a pool lacks: so many come after those that have filled it."""
MOST_KEYS = 1 << 26
"""Of all batches that are heard, half a gigabyte of memory."""
FILL, DRAIN = 3, 1
"""Batches at both ends of a checked run whose steps do not count."""
Tell = Callable[[object], None]
Numbers = npt.NDArray[np.int64]


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
    """Counts what a rank sends in each op, its processor time in collectives, and rows that come
    from host memory."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.sent: dict[str, float] = defaultdict(float)
        self.batches: set[int] = set()
        self.cpu_ms: dict[str, float] = defaultdict(float)
        self._rows_read: list[int] = []
        """Of each batch of the runs so far, those of warm-up left out."""
        self._reports = 0

    def begin_run(self) -> None:
        """The next batches warm up."""
        self._reports = 0

    def note(self, report: StepReport) -> None:
        """One more batch is done."""
        self._reports += 1
        if self._reports > WARM_UP:
            self._rows_read.append(report.rows_read)

    @property
    def rows_read(self) -> float:
        """Rows of a batch that came from host memory."""
        return sum(self._rows_read) / max(1, len(self._rows_read))

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
                self.cpu_ms[name] += (time.process_time() - began) * 1e3

        return counted


class RowHistory:
    """The rows that a rank owned in each batch, and from them what a pool of any size would lack.

    A pool of n batches is counted as one that keeps the rows which any of the last n batches used,
    so a batch lacks those that none of them used. Real pools keep rows that are used often longer:
    they lack as many or fewer.
    """

    def __init__(self) -> None:
        self._batches: list[Sequence[WorkingSet]] = []
        self._last_step, self._keys = -1, 0

    def hear(self, step: int, rows: Sequence[WorkingSet]) -> None:
        """One more batch; those behind a gap, or behind very many keys, are left out."""
        goes_on = not self._batches or step == self._last_step + 1
        if goes_on and self._keys <= MOST_KEYS:
            self._batches.append(rows)
            self._last_step = step
            self._keys += sum(of.size for of in rows)

    @property
    def seen(self) -> int:
        """Batches in a row that it has heard of."""
        return len(self._batches)

    def rows(self) -> float:
        """Distinct rows of a batch."""
        return self._keys / max(1, self.seen)

    def sizes(self, layouts: Sequence[StoreLayout]) -> list[PoolSize]:
        """What pools of more and more batches take and lack."""
        found = [_Windows.of(self._numbered(store)) for store in range(len(layouts))]
        sizes = [
            PoolSize(
                float(memory_for([w.rows[n] for w in found], [w.new[n] for w in found], layouts)),
                n,
                sum(w.missing[n] for w in found),
            )
            for n in POOL_BATCHES
            if n + LEAST_SEEN <= self.seen
        ]
        most = memory_for_all(layouts)
        return [*(s for s in sizes if not 0 < most <= s.num_bytes), *_everything(most)]

    def _numbered(self, store: int) -> list[Numbers]:
        """The rows of each batch by numbers from 0 on."""
        tables = range(len(self._batches[0][store].table_counts)) if self._batches else ()
        parts: list[list[Numbers]] = [[] for _ in self._batches]
        first = 0
        for table in tables:
            keys = [_of_table(batch[store], table) for batch in self._batches]
            distinct, numbers = np.unique(np.concatenate(keys), return_inverse=True)
            ends = np.cumsum([len(k) for k in keys])[:-1]
            for part, of_batch in zip(parts, np.split(numbers + first, ends), strict=True):
                part.append(of_batch)
            first += len(distinct)
        return [np.concatenate(part) for part in parts]


def _everything(num_bytes: int) -> list[PoolSize]:
    """The pool that holds all rows, where tables have limits."""
    return [PoolSize(float(num_bytes), 0, 0.0)] if num_bytes else []


def _of_table(working: WorkingSet, table: int) -> Numbers:
    first = sum(working.table_counts[:table])
    return working.keys_K[first : first + working.table_counts[table]].numpy()


@dataclass(frozen=True, slots=True)
class _Windows:
    """Of any number of neighbouring batches: the rows of one store that they have."""

    rows: list[int]
    """At most, by the number of batches."""
    new: list[int]
    """The most that the batch behind them has beside ..."""
    missing: list[float]
    """... and how many that is in the mean."""

    @classmethod
    def of(cls, batches: Sequence[Numbers]) -> _Windows:
        count = len(batches)
        rows, new = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
        sums = np.zeros(count + 1)
        last_used = np.full(1 + max((int(b.max(initial=-1)) for b in batches), default=0), -1)
        used_last = np.zeros(count, np.int64)
        for t, batch in enumerate(batches):
            before = last_used[batch]
            again = np.bincount(before[before >= 0], minlength=count)
            lacking = len(batch) - np.cumsum(again[:t][::-1])
            sums[1 : t + 1] += lacking
            new[1 : t + 1] = np.maximum(new[1 : t + 1], lacking)
            used_last -= again
            used_last[t] = len(batch)
            last_used[batch] = t
            held = np.cumsum(used_last[: t + 1][::-1])
            rows[1 : t + 2] = np.maximum(rows[1 : t + 2], held)
        means = sums / np.maximum(1, count - np.arange(count + 1))
        return cls(rows.tolist(), new.tolist(), means.tolist())


class JobBench:
    """One rank of a job that runs a few batches at a time, in any settings."""

    def __init__(self, config: JobConfig, comm: Communicator) -> None:
        self.config, self.comm = config, comm
        self._trainers: dict[tuple[int, bool], tuple[Trainer, Source]] = {}
        self.threads = torch.get_num_threads()
        """Of this rank for torch, where a candidate has no number of its own."""

    def free_for_pools(self) -> float:
        """Memory that the pools of this rank could have, if they took all that is free."""
        known = [trainer.pool_memory() for trainer, _ in self._trainers.values()]
        return max(most for _, most in known)

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
        memory = candidate.device_memory if pipeline.retrieval is Retrieval.POOLED else None
        trainer.change_pipeline(pipeline, device_memory=memory)
        return trainer, source

    def pipeline_of(self, candidate: Candidate) -> PipelineSettings:
        """The job's pipeline with the candidate's settings."""
        return replace(self.config.pipeline, **candidate.sections()["pipeline"])

    def run(
        self,
        candidate: Candidate,
        steps: int,
        around: Callable[[Work], Work] | None = None,
        on_step: Callable[[StepReport], None] = lambda report: None,
    ) -> Trace:
        """Train so many batches; the trace of all ranks."""
        trainer, source = self.trainer_for(candidate)
        trainer.around = around or (lambda work: work)
        torch.set_num_threads(candidate.threads or self.threads)
        trainer.fit(source, steps=steps, epochs=1 << 62, on_step=on_step)
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
    if device == "cuda" or config.pipeline.retrieval == Retrieval.POOLED:
        pool = "auto" if device == "cuda" else config.run.device_memory
        forms.append(replace(plain, retrieval=str(Retrieval.POOLED), device_memory=pool))
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
    history = RowHistory()
    first.on_rows = history.hear
    auto_bytes = _auto_pool_bytes(first)
    bench.run(forms[0], WARM_STEPS)
    traces: dict[Candidate, list[Trace]] = defaultdict(list)
    counted: dict[Candidate, SentBytes] = {form: SentBytes(comm) for form in forms}
    for _ in range(rounds):
        for form in forms:
            counted[form].begin_run()
            trace = bench.run(form, steps, counted[form].around, counted[form].note)
            traces[form].append(trace)
            tell(form)
    first.on_rows = lambda step, rows: None
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
        reuse=_reuse_of(history, first, bench.free_for_pools(), auto_bytes),
        facts={"model": type(first.model).__name__, "ranks": str(comm.size)},
    )


def _profiled(
    form: Candidate, traces: Sequence[Trace], counted: SentBytes, comm: Communicator, rounds: int
) -> ProfiledRun:
    batches = max(1, rounds * len(counted.batches))

    def mean(totals: Mapping[str, float]) -> dict[str, float]:
        mine = {name: total / batches for name, total in totals.items()}
        ranks = cast("list[dict[str, float]]", comm.all_gather_values(mine))
        names = dict.fromkeys(name for rank in ranks for name in rank)
        return {name: sum(rank.get(name, 0.0) for rank in ranks) / len(ranks) for name in names}

    all_ms = cast("list[float]", comm.all_gather_values(sum(counted.cpu_ms.values())))
    read = cast("list[float]", comm.all_gather_values(counted.rows_read))
    return ProfiledRun(
        form.form,
        tuple(traces),
        sent=mean(counted.sent),
        collective_draw=draw_of(traces, sum(all_ms)),
        rows_read=sum(read) / len(read),
        cpu_ms=mean(counted.cpu_ms),
    )


def _auto_pool_bytes(trainer: Trainer) -> float:
    """What the pools of this rank would take by themselves."""
    layouts = [store.layout for store in trainer.stores]
    sharing = pools_on_one_device(trainer.device, trainer.comm.size)
    return float(pools_bytes(pool_sizes("auto", layouts, trainer.device, sharing), layouts))


def _reuse_of(
    history: RowHistory, trainer: Trainer, free_bytes: float, auto_bytes: float
) -> RowReuse | None:
    """What pools lack over all ranks; None where too few batches were heard."""
    mine = [asdict(size) for size in history.sizes([s.layout for s in trainer.stores])]
    told = (mine, history.rows(), history.seen, free_bytes, auto_bytes)
    ranks = cast("list[tuple[Any, ...]]", trainer.comm.all_gather_values(told))
    of_ranks = [{one["batches"]: PoolSize(**one) for one in rank[0]} for rank in ranks]
    common = [n for n in of_ranks[0] if all(n in sizes for sizes in of_ranks)]
    sizes = tuple(
        PoolSize(
            max(sizes[n].num_bytes for sizes in of_ranks),
            n,
            sum(sizes[n].missing for sizes in of_ranks) / len(of_ranks),
        )
        for n in common
    )
    if not sizes:
        return None
    rows = sum(rank[1] for rank in ranks) / len(ranks)
    return RowReuse(
        rows=rows,
        seen=min(rank[2] for rank in ranks),
        free_bytes=min(rank[3] for rank in ranks),
        auto_bytes=min(rank[4] for rank in ranks),
        sizes=with_trend(sizes, rows),
    )


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
    pooled = values["retrieval"] == Retrieval.POOLED
    memory = config.run.device_memory if pooled else "auto"
    return Candidate(**values, groups=config.parallel.groups, device_memory=memory)
