"""The settings that a plan is chosen from, what the simulator says of each, and the choice.

A choice comes with its reason, and with how sure its gain is.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil
from typing import Any, Protocol

from nestpipe.config.load import memory_size, show_memory
from nestpipe.errors import PlanError
from nestpipe.schedule import (
    Exchange,
    Merge,
    Plan,
    PlanOptions,
    Retrieval,
    plan,
    with_gradient_norm,
    with_separate_dense_group,
    with_separate_key_group,
)
from nestpipe.sim import Cluster, Figures, Scale, costs, figures, replay
from nestpipe.sim.job_costs import JobCosts, JobProfile, RowReuse, RunForm, Split
from nestpipe.sim.replay import replay_shared

OVERLAPPING = ("frozen_window", "nested")
"""Plans with a use for micro-batches."""
UNSPLIT = ("serial", "sparse_dist", "dual_buffer")
COUNTS = (2, 3, 4, 6, 8, 12, 16)
ENDS = ((0.3, 0.3), (0.5, 0.5), (0.3, 1.0), (0.5, 1.0), (1.0, 0.5), (0.7, 0.7))
"""First and last micro-batch over those in the middle."""
LEAST_SAMPLES = 4
"""Of a micro-batch of even size; smaller ones are never worth their messages."""
SEARCH_BATCHES, FINAL_BATCHES = 16, 24
"""Batches that are replayed while searching, and for the figures that are told."""
EQUAL = 0.01
"""Predictions within this part of each other are equal: then the plainer setting wins."""
ELSEWHERE = ("groups", "threads", "device_memory")
"""Settings that are not keys of `[pipeline]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to run a job; every field is a key of its config."""

    plan: str = "serial"
    micro_batches: int = 1
    first: float = 1.0
    last: float = 1.0
    exchange: str = "micro"
    retrieval: str = "whole"
    buffers: int = 2
    speculative_rows: bool = False
    micro_batching: str = "contiguous"
    comm_dtype: str = "float32"
    groups: int = 1
    threads: int = 0
    device_memory: str = "auto"
    """Of a pool of rows; the others have none."""

    @property
    def form(self) -> RunForm:
        """What of it changes what ops cost."""
        return RunForm(**{f: getattr(self, f) for f in RunForm.__slots__})

    @property
    def split(self) -> Split:
        return Split.of(self.micro_batches, self.first, self.last)

    @property
    def complexity(self) -> int:
        """In how many settings it is not the plainest."""
        plainest = Candidate()
        return sum(getattr(self, f.name) != getattr(plainest, f.name) for f in fields(self))

    def make_plan(self, device: str, ranks: int, *, gradient_norm: bool = False) -> Plan:
        """Its plan, as `Trainer.placed` has it there; raises `PlanError` where there is none."""
        merged: dict[str, Any] = {"merge": Merge.EXACT, "merge_every": 1} if self.groups > 1 else {}
        made = plan(
            self.plan,
            PlanOptions(
                micro_batches=self.micro_batches,
                retrieval=Retrieval(self.retrieval),
                exchange=Exchange(self.exchange),
                speculative_rows=self.speculative_rows,
                buffers=self.buffers,
                **merged,
            ),
        )
        made = with_gradient_norm(made) if gradient_norm else made
        if device != "cuda":
            return made
        on_device = ranks == 1 and made.shape.pooled and self.micro_batches == 1
        if made.shape.overlaps or not on_device:
            made = with_separate_key_group(made)
        return made if ranks == 1 else with_separate_dense_group(made)

    def sections(self) -> dict[str, dict[str, Any]]:
        """Its settings as sections of a config, those of the pipeline in full."""
        found = {"pipeline": {k: v for k, v in asdict(self).items() if k not in ELSEWHERE}}
        if self.groups > 1:
            found["parallel"] = {"groups": self.groups, "merge": "exact", "merge_every": 1}
        run: dict[str, Any] = {"threads": self.threads} if self.threads else {}
        run |= {"device_memory": self.device_memory} if self.device_memory != "auto" else {}
        return found | ({"run": run} if run else {})

    def __str__(self) -> str:
        words = [self.plan, f"retrieval {self.retrieval}"]
        if self.micro_batches > 1:
            ends = (
                "" if (self.first, self.last) == (1.0, 1.0) else f" {self.first:g}:1:{self.last:g}"
            )
            words.append(f"{self.micro_batches} micro-batches{ends}, exchange {self.exchange}")
        words += [f"{self.buffers} buffers"] if self.buffers > 2 else []
        words += ["speculative rows"] if self.speculative_rows else []
        words += [self.micro_batching] if self.micro_batching != "contiguous" else []
        words += [self.comm_dtype] if self.comm_dtype != "float32" else []
        words += [f"pool of {self.device_memory}"] if self.device_memory != "auto" else []
        words += [f"{self.groups} groups"] if self.groups > 1 else []
        words += [f"{self.threads} threads"] if self.threads else []
        return ", ".join(words)


class Predictor(Protocol):
    """Says what a step of a candidate would be."""

    def figures(
        self, candidate: Candidate, *, batches: int = ..., seed: int | None = ...
    ) -> Figures:
        """The steady state; with a seed, with costs drawn anew from what is known of them."""
        ...

    def axes(self) -> Axes:
        """What there is to choose from."""
        ...

    def about_pool(self, candidate: Candidate) -> str:
        """Why the candidate's pool has its size, as sentences; nothing where it has no pool."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """The values of each setting that a prediction can be made for."""

    samples: int
    """Of one rank's batch."""
    ranks: int
    retrievals: tuple[str, ...] = ("whole", "new")
    exchanges: tuple[str, ...] = ("micro", "window")
    micro_batchings: tuple[str, ...] = ("contiguous",)
    comm_dtypes: tuple[str, ...] = ("float32",)
    groups: tuple[int, ...] = (1,)
    threads: tuple[int, ...] = (0,)
    pools: Mapping[int, str] = field(default_factory=dict[int, str])
    """The `device_memory` of a pool, by the number of groups; without one it stays `auto`."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of micro-batches; one rank has no exchange that they could hide."""
        if self.ranks == 1:
            return ()
        return tuple(n for n in COUNTS if n * LEAST_SAMPLES <= self.samples)


class ProfilePredictor:
    """Predicts from serial runs of the job itself."""

    def __init__(self, profile: JobProfile, *, rounding: bool = False) -> None:
        """`rounding`: whether settings that lose bits are looked at too."""
        self.profile, self._rounding = profile, rounding
        self._costs: dict[int | None, JobCosts] = {}

    def costs(self, seed: int | None = None) -> JobCosts:
        """Costs as measured, or as batches that are drawn anew from them would have them."""
        if seed not in self._costs:
            self._costs[seed] = JobCosts(self.profile, seed)
        return self._costs[seed]

    def figures(
        self, candidate: Candidate, *, batches: int = SEARCH_BATCHES, seed: int | None = None
    ) -> Figures:
        """Replay the plan on the ranks of the profile."""
        of = self.profile
        made = candidate.make_plan(of.device, of.ranks, gradient_norm=of.gradient_norm)
        missing = self._missing(candidate)
        cost_of = self.costs(seed).of(candidate.form, candidate.split, made.shape, missing=missing)
        sharing = of.sharing(candidate.threads)
        form, split = candidate.form, candidate.split
        cpu_of = self.costs(seed).cpu_of(form, split) if of.shares_cores else None
        trace = replay_shared(
            made, cost_of, sharing, batches=batches, buckets=of.buckets, cpu_of=cpu_of
        )
        return figures(trace, samples=of.samples)

    def _missing(self, candidate: Candidate) -> float | None:
        """Rows of a batch that the candidate's pool lacks; None: it has no pool, or nobody knows.

        A rank of several groups owns as many times the rows.
        """
        reuse = self.profile.reuse
        if reuse is None or candidate.retrieval != Retrieval.POOLED:
            return None
        memory = pool_memory(candidate.device_memory, reuse)
        return candidate.groups * reuse.missing_in(memory / candidate.groups)

    def about_pool(self, candidate: Candidate) -> str:
        """What the pool holds and lacks, by the keys of the profile."""
        if candidate.retrieval != Retrieval.POOLED:
            return ""
        reuse = self.profile.reuse
        if reuse is None:
            return "The size of its pool stays as it is: the profile has no keys."
        memory = pool_memory(candidate.device_memory, reuse)
        size = reuse.size_in(memory / candidate.groups)
        free = f"{show_memory(reuse.free_bytes)} are free"
        if size is None:
            return f"Its pool of {show_memory(memory)} may not hold two batches; {free}."
        held = f"the rows of {size.batches} batches" if size.batches else "every row there can be"
        lacks = 100 * size.missing / max(1.0, reuse.rows)
        trend = "" if size.counted else f", by the trend of the {reuse.seen} batches of the profile"
        return (
            f"Its pool of {show_memory(memory)} a rank holds {held} and lacks {lacks:.1f} % of "
            f"those of a batch, which come from host memory{trend}; {free}."
        )

    def axes(self) -> Axes:
        """What the profile has a run for."""
        costs, reuse = self.costs(), self.profile.reuse
        retrievals, groups = costs.known("retrieval"), costs.known("groups")
        pools: dict[int, str] = {}
        if reuse is not None and Retrieval.POOLED in retrievals:
            sizes = {m: reuse.chosen(m) for m in groups}
            pools = {m: memory_text(m * s.num_bytes) for m, s in sizes.items() if s is not None}
            if 1 not in pools:  # not even two batches fit
                retrievals.remove(Retrieval.POOLED)
        return Axes(
            samples=self.profile.samples if self.profile.split is not None else 1,
            ranks=self.profile.ranks,
            retrievals=tuple(retrievals),
            exchanges=tuple(costs.known("exchange")),
            micro_batchings=tuple(costs.known("micro_batching")),
            comm_dtypes=tuple(costs.known("comm_dtype"))[: None if self._rounding else 1],
            groups=tuple(groups),
            threads=tuple(costs.known("threads")),
            pools=pools,
        )


def pool_memory(device_memory: str, reuse: RowReuse) -> float:
    """Bytes of a rank's pool with that setting, on the ranks of the profile."""
    if device_memory == "auto":
        return reuse.auto_bytes
    return memory_size("device_memory", device_memory, auto=1, free=lambda: reuse.free_bytes)


def memory_text(num_bytes: float) -> str:
    """A value of `run.device_memory` that is at least so much."""
    units = (("GB", 1e9), ("MB", 1e6), ("KB", 1e3))
    name, unit = next((one for one in units if num_bytes >= one[1]), units[-1])
    return f"{ceil(100 * num_bytes / unit) / 100:g}{name}"


class HardwarePredictor:
    """Predicts from a hardware file alone; nothing runs."""

    def __init__(
        self, cluster: Cluster, workers: int, device: str, *, rounding: bool = False
    ) -> None:
        """`rounding`: whether settings that lose bits are looked at too."""
        self._cluster, self._workers, self._device = cluster, workers, device
        self._comm_dtypes = ("float32", "bfloat16") if rounding else ("float32",)

    def figures(
        self, candidate: Candidate, *, batches: int = SEARCH_BATCHES, seed: int | None = None
    ) -> Figures:
        """Replay the plan on the cluster; a seed draws other stragglers."""
        made = candidate.make_plan(self._device, self._workers)
        scale = Scale(self._workers, candidate.groups)
        wire = 2 if candidate.comm_dtype == "bfloat16" else self._cluster.workload.weight_bytes
        cluster = replace(
            self._cluster, workload=replace(self._cluster.workload, weight_bytes=wire)
        )
        stragglers = replace(cluster.stragglers, seed=cluster.stragglers.seed + (seed or 0))
        played = replay(
            made, costs(cluster, made.shape, scale), scale, batches=batches, stragglers=stragglers
        )
        return figures(played.trace, samples=cluster.workload.samples)

    def about_pool(self, candidate: Candidate) -> str:
        """A hardware file has no keys."""
        pooled = candidate.retrieval == Retrieval.POOLED
        told = "The size of its pool stays as it is: a hardware file says nothing of keys."
        return told if pooled else ""

    def axes(self) -> Axes:
        """What a hardware file can tell apart: equal micro-batches, no clustering, no threads."""
        pooled = (str(Retrieval.POOLED),) if self._device == "cuda" else ()
        groups = (m for m in (2, 4, 8) if self._workers % m == 0 and self._workers // m > 1)
        return Axes(
            samples=self._cluster.workload.samples,
            ranks=self._workers,
            retrievals=("whole", "new", *pooled),
            comm_dtypes=self._comm_dtypes,
            groups=(1, *groups),
        )


Told = Callable[[object], None]


class Search:
    """Every plan in its plain forms first, then one setting after the other from the best few."""

    def __init__(self, predictor: Predictor, tell: Told = lambda _: None) -> None:
        self._predictor, self._axes, self._tell = predictor, predictor.axes(), tell
        self.found: dict[Candidate, Figures] = {}

    def run(self, start: Candidate, beam: int = 3) -> list[Candidate]:
        """All candidates that were looked at, the best first."""
        self._look_at([start])
        self._look_at(map(self._sized, self._grid()))
        while True:
            best = self.ranked[:beam]
            known = len(self.found)
            before = self._step(best[0])
            self._look_at(self._sized(c) for one in best for c in self._neighbours(one))
            if len(self.found) == known or self._step(self.ranked[0]) > (1 - EQUAL / 2) * before:
                return self.ranked

    @property
    def plainest(self) -> Candidate:
        """The fastest of `serial`: what every gain is over."""
        serial = [c for c in self.found if not plan(c.plan).shape.overlaps]
        return min(serial, key=self._step)

    @property
    def ranked(self) -> list[Candidate]:
        """By predicted step; of those that are as good as equal to the best, the plainest first."""
        ordered = sorted(self.found, key=self._step)
        most = (1 + EQUAL) * self._step(ordered[0])
        equal = [c for c in ordered if self._step(c) <= most]

        def plainness(one: Candidate) -> tuple[int, bool, float]:
            return one.complexity, one != self._sized(one), self._step(one)

        return [*sorted(equal, key=plainness), *ordered[len(equal) :]]

    def _sized(self, one: Candidate) -> Candidate:
        """The same with the pool that was chosen for it, or with none where it needs none."""
        pooled = one.retrieval == Retrieval.POOLED
        memory = self._axes.pools.get(one.groups, "auto") if pooled else "auto"
        return replace(one, device_memory=memory)

    def _has_room(self, one: Candidate) -> bool:
        """Whether a pool that holds two batches of such groups fits, for all that is known."""
        pools = self._axes.pools
        return one.retrieval != Retrieval.POOLED or not pools or one.groups in pools

    def _step(self, candidate: Candidate) -> float:
        return self.found[candidate].step_ms

    def _look_at(self, candidates: Iterable[Candidate]) -> None:
        for candidate in candidates:
            if candidate in self.found or not self._has_room(candidate):
                continue
            try:
                self.found[candidate] = self._predictor.figures(candidate)
            except PlanError:  # the plan has no use for one of the settings
                continue
            self._tell(candidate)

    def _grid(self) -> Iterable[Candidate]:
        axes = self._axes
        for retrieval in axes.retrievals:
            for name in UNSPLIT:
                yield Candidate(plan=name, retrieval=retrieval)
            for threads in axes.threads:
                yield Candidate(retrieval=retrieval, threads=threads)
            for name in OVERLAPPING:
                for count in axes.counts:
                    for exchange in axes.exchanges:
                        yield Candidate(
                            plan=name, retrieval=retrieval, micro_batches=count, exchange=exchange
                        )

    def _neighbours(self, one: Candidate) -> Iterable[Candidate]:
        axes = self._axes
        for retrieval in axes.retrievals:
            yield replace(one, retrieval=retrieval, buffers=2)
        for name, values in (
            ("comm_dtype", axes.comm_dtypes),
            ("groups", axes.groups),
            ("threads", axes.threads),
        ):
            for value in values:
                yield replace(one, **{name: value})
        if one.plan not in OVERLAPPING or one.micro_batches == 1:
            return
        for exchange in axes.exchanges:
            yield replace(one, exchange=exchange)
        for how in axes.micro_batchings:
            yield replace(one, micro_batching=how)
        near = sorted(axes.counts, key=lambda count: abs(count - one.micro_batches))
        for count in near[:3]:
            yield replace(one, micro_batches=count)
        by_profile = isinstance(self._predictor, ProfilePredictor)
        if by_profile:
            for first, last in ENDS:
                yield replace(one, first=first, last=last)
        shape = plan(one.plan).shape
        if not (shape.refreshes_ahead and shape.window_overlaps):
            return
        if by_profile and one.groups == 1 and one.retrieval != Retrieval.POOLED:
            yield replace(one, speculative_rows=True)
        if one.retrieval == Retrieval.NEW:
            yield replace(one, buffers=3)


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """The range that four of five values are in."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[round(0.1 * last)], ordered[round(0.9 * last)]


DRAWS = 16
"""How often costs are drawn anew to see how sure a gain is."""
SHOWN = 5
"""Candidates that are told, besides the plainest."""
HIDDEN_SHOWN = 3
SURPRISE = 0.25
"""Part of the predicted step that a measured one is off by, to be worth a sentence."""
FINALISTS = 3
"""The best few by prediction, which run before one is kept."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """One candidate, its step, and its gain over the fastest `serial` with a range."""

    candidate: Candidate
    figures: Figures
    gain: float
    low: float
    high: float
    """Four of five draws of the measured costs have a gain between these, and so has the choice."""
    measured_ms: float | None = None
    """The median step of its own short runs, where it had some."""
    pool: str = ""
    """Why its pool has its size, as sentences."""

    @property
    def drawn(self) -> bool:
        """Whether draws of the costs tell how sure the gain is."""
        return self.low != self.high

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "settings": self.candidate.sections(),
            "step_ms": self.figures.step_ms,
            "gain": self.gain,
            "gain_range": [self.low, self.high],
            "busiest_lane": self.figures.busiest_lane,
            "pipeline_efficiency": self.figures.pipeline_efficiency,
            "exposed_ms": dict(self.figures.exposed_ms),
            "measured_ms": self.measured_ms,
            "pool": self.pool,
        }


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """What was chosen, beside the best of the others."""

    rows: tuple[Predicted, ...]
    """The best candidates, the chosen one first."""
    serial: Predicted
    """The fastest `serial`, which gains are over."""
    today: Predicted
    """The job as its config has it now."""
    looked_at: int
    """Candidates that were replayed."""

    @property
    def chosen(self) -> Predicted:
        return self.rows[0]

    @property
    def finalists(self) -> list[Candidate]:
        """What should run before one is kept: the best few, the job as it is, and `serial`."""
        rows = (*self.rows[:FINALISTS], self.today, self.serial)
        return list(dict.fromkeys(row.candidate for row in rows))

    def reason(self) -> str:
        """Why it is the one, as sentences."""
        best, run = self.chosen, self.chosen.figures
        hidden = _hidden(self.serial.figures, run)
        is_serial = best.candidate == self.serial.candidate
        drawn = f" (4 of 5 draws: {best.low:.2f}x to {best.high:.2f}x)" if best.drawn else ""
        gain = "the fastest serial" if is_serial else f"{best.gain:.2f}x over the fastest serial"
        parts = [
            f"{best.candidate}: {gain}{drawn}.",
            f"Its busiest lane is {run.busiest_lane}, {run.busy_ms[run.busiest_lane]:.1f} of "
            f"{run.step_ms:.1f} ms.",
        ]
        today = self.today.figures.step_ms / run.step_ms
        if best.candidate != self.today.candidate:
            parts.append(f"Over the config as it is ({self.today.candidate}): {today:.2f}x.")
            parts += self._measured()
        if best.measured_ms is not None and abs(best.measured_ms / run.step_ms - 1) > SURPRISE:
            parts.append(
                f"It ran in {best.measured_ms:.1f} ms: do not rely on the predicted milliseconds."
            )
        if not plan(best.candidate.plan).shape.overlaps:
            known = "is predicted to be" if best.measured_ms is None else "ran"
            parts.append(f"Nothing is hidden: no other plan {known} faster.")
        elif hidden:
            told = ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in hidden)
            parts.append(f"It hides {told} that serial waits for.")
        parts += [best.pool] if best.pool else []
        left = sorted(run.exposed_ms.items(), key=lambda item: -item[1])[:2]
        still = [f"{kind} {ms:.1f} ms" for kind, ms in left if ms >= 0.02 * run.step_ms]
        parts += [f"Still exposed: {', '.join(still)}."] if still else []
        return " ".join(parts)

    def _measured(self) -> list[str]:
        """The gain of the choice where it ran beside the job as it is."""
        best, today = self.chosen.measured_ms, self.today.measured_ms
        if best is None or today is None:
            return []
        return [f"Measured over the config as it is: {today / best:.2f}x."]

    def note(self) -> str:
        """The choice and its gain, for the file that it is written to."""
        best, serial = self.chosen, self.serial
        known = f"predicted {best.gain:.2f}x over serial"
        if best.measured_ms is not None and serial.measured_ms is not None:
            known += f", measured {serial.measured_ms / best.measured_ms:.2f}x"
        return f"Chosen by `nestpipe plan`: {best.candidate}; {known}."

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "chosen": self.chosen.as_json(),
            "reason": self.reason(),
            "serial": self.serial.as_json(),
            "today": self.today.as_json(),
            "others": [row.as_json() for row in self.rows[1:]],
            "looked_at": self.looked_at,
        }


def _hidden(serial: Figures, run: Figures) -> list[tuple[str, float]]:
    """Kinds that serial waits longer for, most of all first."""
    less = {k: ms - run.exposed_ms.get(k, 0.0) for k, ms in serial.exposed_ms.items()}
    ranked = sorted(less.items(), key=lambda item: -item[1])[:HIDDEN_SHOWN]
    return [(kind, ms) for kind, ms in ranked if ms >= 0.02 * serial.step_ms]


def choose(
    predictor: Predictor,
    start: Candidate,
    *,
    shown: int = SHOWN,
    draws: int = DRAWS,
    tell: Told = lambda _: None,
) -> PlanChoice:
    """Search for the fastest settings, and see how sure the gain of the best few is."""
    search = Search(predictor, tell)
    ranked = search.run(start)
    serial = search.plainest

    def final(candidate: Candidate, seed: int | None = None) -> Figures:
        tell(candidate)
        return predictor.figures(candidate, batches=FINAL_BATCHES, seed=seed)

    base = final(serial)
    base_draws = [final(serial, seed).step_ms for seed in range(1, draws + 1)]

    def judged(candidate: Candidate) -> Predicted:
        run = final(candidate)
        steps = [final(candidate, seed).step_ms for seed in range(1, draws + 1)]
        low, high = quantiles([b / s for b, s in zip(base_draws, steps, strict=True)])
        gain = base.step_ms / run.step_ms
        pool = predictor.about_pool(candidate)
        return Predicted(candidate, run, gain, min(low, gain), max(high, gain), pool=pool)

    rows = {candidate: judged(candidate) for candidate in ranked[:shown]}
    of_serial = Predicted(serial, base, 1.0, 1.0, 1.0, pool=predictor.about_pool(serial))
    today = of_serial if start == serial else rows.get(start) or judged(start)
    return PlanChoice(tuple(rows.values()), of_serial, today, len(search.found))


def checked(choice: PlanChoice, measured: Mapping[Candidate, float]) -> PlanChoice:
    """The same choice after short runs: the fastest of those that ran comes first."""

    def read(row: Predicted) -> Predicted:
        return replace(row, measured_ms=measured.get(row.candidate))

    serial, today = read(choice.serial), read(choice.today)
    rows = {row.candidate: row for row in (*map(read, choice.rows), today, serial)}.values()
    ran = [row for row in rows if row.measured_ms is not None]
    others = [row for row in map(read, choice.rows) if row.measured_ms is None]
    fastest = sorted(ran, key=lambda row: row.measured_ms or 0.0)
    return PlanChoice((*fastest, *others), serial, today, choice.looked_at)


def config_text(given: str, candidate: Candidate, note: str, settings: Sequence[str] = ()) -> str:
    """A config with the candidate's settings in it; comments of the given one stay.

    `settings` are overrides in the form `section.key=value`, which come before the choice.
    """
    import tomlkit

    document: Any = tomlkit.parse(given)
    for setting in settings:
        key, _, value = setting.partition("=")
        *sections, name = (part.strip() for part in key.split("."))
        _table_in(document, sections)[name] = _toml_value(value)
    for section, values in candidate.sections().items():
        table = _table_in(document, [section])
        for name, value in values.items():
            table[name] = value
    return f"# {note}\n\n{tomlkit.dumps(document).lstrip()}"


def _table_in(document: Any, sections: Sequence[str]) -> Any:
    import tomlkit

    for section in sections:
        if section not in document:
            document[section] = tomlkit.table()
        document = document[section]
    return document


def _toml_value(text: str) -> Any:
    """What a setting on the command line means: a value of TOML, or else a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
