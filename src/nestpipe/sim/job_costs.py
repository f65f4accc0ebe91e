"""What a job's ops cost at settings that nobody measured, from a few serial runs of it.

Two runs, unsplit and split, separate what a micro-batch costs whatever its size from what grows
with it. Every other run differs from them in one setting, and tells by which factor each kind of op
changes. A replay of any plan then meets these costs, batch by batch as they varied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from math import inf, log
from typing import Any

import numpy as np
import numpy.typing as npt

from nestpipe.errors import ParseError
from nestpipe.schedule import Exchange, Lane, Retrieval, Shape
from nestpipe.schedule.schedule import COLLECTIVES, MICRO_KINDS, Kind, Op
from nestpipe.sim.replay import USUAL_BUCKETS, CostOf, Sharing
from nestpipe.sim.trace_costs import REFRESH_KINDS, WARM_UP, op_costs
from nestpipe.trace import Span, Trace

# Shapes: T batches, R ranks, M micro-batches
Times = npt.NDArray[np.float64]
EXCHANGED = (Kind.ROWS, Kind.GRADS)
"""Kinds whose cost follows the bytes that they send; that of `dense` follows its samples."""
POOL_MOVES = (Kind.RETRIEVE, Kind.WRITEBACK)
"""Kinds whose cost follows the rows that a pool lacks."""
SURE = 2.0
"""A factor counts where it is so many standard errors away from 1."""
MOST_OF_FREE = 0.8
"""Of free device memory: no pool is chosen that takes more."""
NEARLY_NOTHING = 0.01
"""Part of a batch's rows that a pool may lack and still count as one that holds all it needs."""
LEAST_TREND, MOST_DOUBLINGS = 0.95, 16
"""Larger pools are looked at where a doubling lacks so many times the rows, and so often."""
LEAST_PART = 0.2
"""Of what an op costs in the unsplit run: no fit goes below it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunForm:
    """Settings that a serial run of a profile had, as far as they change what ops cost."""

    retrieval: str = "new"
    micro_batches: int = 1
    exchange: str = "micro"
    micro_batching: str = "contiguous"
    comm_dtype: str = "float32"
    groups: int = 1
    threads: int = 0
    """Of each rank for torch; 0: as many as it has unless told."""

    def changed_from(self, other: RunForm) -> dict[str, Any]:
        """The settings that differ, with their value here."""
        names = (name for name in self.__slots__ if getattr(self, name) != getattr(other, name))
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class ProfiledRun:
    """A serial run: when every op of every rank ran, and what it sent."""

    form: RunForm
    traces: tuple[Trace, ...]
    """One for each round; rounds of different forms took turns."""
    sent: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean bytes that a rank sent in an op, by kind; those of a micro-batch as `rows.0`."""
    collective_draw: float = 0.0
    """Part of a core that a collective took while it ran."""
    rows_read: float = 0.0
    """Rows of a batch that came from host memory, on every rank; those of warm-up do not count."""

    cpu_ms: Mapping[str, float] = field(default_factory=dict[str, float])
    """Mean processor time of a rank in a collective, named as in `sent`."""

    def sent_by(self, kind: Kind) -> float:
        """Bytes of that kind in one batch, all micro-batches together."""
        return sum(b for name, b in self.sent.items() if name.partition(".")[0] == kind)

    def cpu_by(self, kind: Kind) -> float:
        """Processor time of that kind in one batch, all micro-batches together."""
        return sum(ms for name, ms in self.cpu_ms.items() if name.partition(".")[0] == kind)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """One size of a pool of rows."""

    num_bytes: float
    """Memory that it takes on the fullest rank."""
    batches: int
    """Neighbouring batches whose rows it holds; 0: every row that the tables may have."""
    missing: float
    """Rows of a batch on a rank that no batch before left there; they come from host memory."""
    counted: bool = True
    """Whether the keys of the profile tell so, and not the trend of smaller sizes."""


def with_trend(sizes: Sequence[PoolSize], rows: float) -> tuple[PoolSize, ...]:
    """The sizes that were counted, and twice as many batches again and again until a pool lacks
    nearly nothing of so many rows.

    Lacking rows are taken to become fewer by the same factor with each doubling, as they did in
    the last one; a pool of a batch more holds as many rows more as a batch lacks.
    """
    found = [size for size in sizes if size.batches]
    everything = [size for size in sizes if not size.batches]
    if len(found) < 2 or found[-1].missing <= NEARLY_NOTHING * rows:
        return (*found, *everything)
    half, last = found[-2], found[-1]
    fewer = last.missing / half.missing if half.missing else 1.0
    factor = fewer ** (log(2) / log(last.batches / half.batches))
    added = (last.batches - half.batches) * (half.missing + last.missing) / 2
    of_row = (last.num_bytes - half.num_bytes) / added if added else 0.0
    if factor > LEAST_TREND or of_row <= 0:
        return (*found, *everything)
    for _ in range(MOST_DOUBLINGS):
        missing = factor * last.missing
        more = of_row * last.batches * (missing + last.missing) / 2
        last = PoolSize(last.num_bytes + more, 2 * last.batches, missing, counted=False)
        found.append(last)
        if missing <= NEARLY_NOTHING * rows:
            break
    most = everything[0].num_bytes if everything else inf
    return (*(size for size in found if size.num_bytes < most), *everything)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReuse:
    """What pools of several sizes lack, from the keys of the batches of a profile."""

    rows: float
    """Distinct rows of a batch on a rank."""
    seen: int
    """Batches in a row whose keys are known."""
    free_bytes: float
    """Memory of each rank's device that its pool could have."""
    auto_bytes: float
    """What of it `run.device_memory = "auto"` takes."""
    sizes: tuple[PoolSize, ...]
    """From two batches on, ascending."""

    def size_in(self, num_bytes: float) -> PoolSize | None:
        """The largest that fits into so much memory; None: not even that of two batches does."""
        fits = [size for size in self.sizes if size.num_bytes <= num_bytes]
        return fits[-1] if fits else None

    def missing_in(self, num_bytes: float) -> float:
        """Rows that a pool of that size lacks; the smallest holds two batches."""
        return (self.size_in(num_bytes) or self.sizes[0]).missing

    def chosen(self, groups: int = 1) -> PoolSize | None:
        """The smallest that lacks nearly nothing, else as few rows as any that fits; None: none
        fits. A rank of several groups owns as many times the rows."""
        most = MOST_OF_FREE * self.free_bytes / groups
        fits = [size for size in self.sizes if size.num_bytes <= most]
        if not fits:
            return None
        least = min(size.missing for size in fits)
        near = NEARLY_NOTHING * self.rows
        return next(size for size in fits if size.missing <= least + near)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobProfile:
    """A few serial runs of one job, and the machines they ran on."""

    runs: tuple[ProfiledRun, ...]
    device: str
    pools: tuple[int, ...]
    """The ranks that share cores, or a GPU, have the same number."""
    cores: int
    """Cores of one such pool."""
    samples: int
    """Samples of one rank's batch."""
    threads: int
    """Threads of each rank for torch, unless a run says otherwise."""
    buckets: int = USUAL_BUCKETS
    gradient_norm: bool = False
    """Whether gradients of rows are clipped by their norm, which is an op more."""
    rows: int = 0
    """Rows that all tables had in the end, over all ranks."""
    reuse: RowReuse | None = None
    """How batches share rows; None: the keys of the job were not heard."""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the job is, for people."""

    @property
    def ranks(self) -> int:
        return len(self.pools)

    @property
    def plain(self) -> ProfiledRun:
        """The unsplit run that the others are compared with."""
        return self.runs[0]

    @property
    def split(self) -> ProfiledRun | None:
        """The run that has micro-batches and nothing else of its own; None: one sample a batch."""
        wanted = {"micro_batches"}
        of = self.plain.form
        return next((r for r in self.runs if set(r.form.changed_from(of)) == wanted), None)

    @property
    def shares_cores(self) -> bool:
        """Whether what its ranks compute with are cores, which messages need too."""
        return self.device != "cuda"

    def sharing(self, threads: int = 0) -> Sharing:
        """What its ranks compute with, and have to share."""
        if not self.shares_cores:
            return Sharing(self.pools, frozenset({Lane.COMPUTE}))
        capacity = self.cores / max(1, min(self.cores, threads or self.threads))
        draw = self.plain.collective_draw
        lanes = frozenset(Lane) - {Lane.NET}
        return Sharing(self.pools, lanes, capacity=capacity, collective_draw=draw)

    def as_json(self) -> dict[str, Any]:
        """Plain values that `profile_from_json` reads back."""
        names = ("device", "cores", "samples", "threads", "buckets", "gradient_norm", "rows")
        return {
            **{name: getattr(self, name) for name in names},
            "pools": list(self.pools),
            "reuse": None if self.reuse is None else asdict(self.reuse),
            "facts": dict(self.facts),
            "runs": [_run_as_json(run) for run in self.runs],
        }


def _run_as_json(run: ProfiledRun) -> dict[str, Any]:
    return {
        "form": {name: getattr(run.form, name) for name in run.form.__slots__},
        "traces": [
            {"facts": dict(trace.facts), "spans": [astuple(span) for span in trace.spans]}
            for trace in run.traces
        ],
        "sent": dict(run.sent),
        "collective_draw": run.collective_draw,
        "rows_read": run.rows_read,
        "cpu_ms": dict(run.cpu_ms),
    }


def profile_from_json(value: Any, where: str) -> JobProfile:
    """The profile that `as_json` made; `where` names the file in an error."""
    try:
        runs = tuple(
            ProfiledRun(
                RunForm(**run["form"]),
                tuple(
                    Trace(tuple(Span(*span) for span in trace["spans"]), trace["facts"])
                    for trace in run["traces"]
                ),
                run["sent"],
                run["collective_draw"],
                run.get("rows_read", 0.0),
                run.get("cpu_ms", {}),
            )
            for run in value["runs"]
        )
        given = {name: value[name] for name in value if name not in ("runs", "pools", "reuse")}
        reuse = _reuse_from_json(value.get("reuse"))
        return JobProfile(runs=runs, pools=tuple(value["pools"]), reuse=reuse, **given)
    except (KeyError, TypeError, ValueError) as error:
        raise ParseError(
            f"{where!r} is no profile of a job ({error}); give a file of --save-profile"
        ) from None


def _reuse_from_json(value: Any) -> RowReuse | None:
    if value is None:
        return None
    return RowReuse(**(value | {"sizes": tuple(PoolSize(**one) for one in value["sizes"])}))


_OfBatch = dict[tuple[Kind, int | None, int], float]


def _steady(trace: Trace, form: RunForm, sharing: Sharing) -> list[_OfBatch]:
    """What each op of each batch cost, without the batches that warm up and those that end."""
    costs = op_costs(trace, sharing)
    of_batch: dict[int, _OfBatch] = defaultdict(dict)
    for (kind, batch, micro, rank), ms in costs.items():
        of_batch[batch][kind, micro, rank] = ms
    # The last batches end unlike the others: no keys tell which rows leave.
    late = 2 if form.retrieval == Retrieval.POOLED else 1
    return [of_batch[batch] for batch in sorted(of_batch)[WARM_UP : len(of_batch) - late]]


class _Measured:
    """Costs of one run's ops by kind, batch and rank."""

    def __init__(self, run: ProfiledRun, sharing: Sharing, rng: np.random.Generator | None) -> None:
        self.form, self.run = run.form, run
        batches = [one for trace in run.traces for one in _steady(trace, run.form, sharing)]
        if len(batches) < 2:
            raise ParseError("the runs of a profile are too short to tell costs; give more steps")
        drawn = (
            range(len(batches)) if rng is None else rng.integers(len(batches), size=len(batches))
        )
        shape = (len(batches), run.form.micro_batches, len(sharing.pools))
        self._costs: dict[Kind, Times] = defaultdict(lambda: np.zeros(shape))
        for t, place in enumerate(drawn):
            for (kind, micro, rank), ms in batches[place].items():
                self._costs[kind][t, micro or 0, rank] = ms

    @property
    def kinds(self) -> set[Kind]:
        return set(self._costs)

    def totals(self, kind: Kind) -> Times:
        """Of every batch and rank, all micro-batches together."""
        return self._costs[kind].sum(axis=1)

    def typical(self, kind: Kind) -> Times:
        """The median over batches, of every rank."""
        return np.median(self.totals(kind), axis=0)


@dataclass(frozen=True, slots=True)
class Split:
    """How a batch is cut: the part of its samples that each micro-batch has."""

    shares: tuple[float, ...]

    @classmethod
    def of(cls, count: int, first: float = 1.0, last: float = 1.0) -> Split:
        """So many micro-batches, the ends `first` and `last` times those in the middle."""
        weights = [1.0] * count
        if count > 1:
            weights[0], weights[-1] = first, last
        return cls(tuple(weight / sum(weights) for weight in weights))

    def exchanged(self, kind: Kind, exchange: str, growth: float) -> tuple[float, ...]:
        """What each sends over what the whole batch does: x of the samples have x^growth keys.

        In a window rows come with their first use, and gradients leave after their last.
        """
        if exchange == Exchange.MICRO:
            return tuple(share**growth for share in self.shares)
        shares = self.shares if kind is Kind.ROWS else self.shares[::-1]
        ends = np.cumsum((0.0, *shares)) ** growth
        parts = tuple(float(part) for part in np.diff(ends))
        return parts if kind is Kind.ROWS else parts[::-1]


def _on_lines(
    whole: Times, small: Times, least: Times, at: float, parts: Sequence[float]
) -> list[Times]:
    """Values of each rank at such parts, on lines through nothing, a micro-batch and a whole batch.

    `small` is the value at the part `at`; nothing costs no less than `least`, and no more than it.
    """
    if at == 1:
        return [whole * part for part in parts]
    fixed = np.clip(small - at * (whole - small) / (1 - at), np.minimum(least, small), small)
    known = np.stack([fixed, small, whole])
    ranks = range(known.shape[1])
    return [np.array([np.interp(x, (0, at, 1), known[:, r]) for r in ranks]) for x in parts]


class JobCosts:
    """Milliseconds of every op of a job, for any setting between those of its profile.

    With a seed, batches are drawn anew from those that were measured: what that changes is how
    sure a prediction is.
    """

    def __init__(self, profile: JobProfile, seed: int | None = None) -> None:
        self.profile = profile
        rng = None if seed is None else np.random.default_rng(seed)
        self._rng = np.random.default_rng(seed or 0)
        measured = [_Measured(r, profile.sharing(r.form.threads), rng) for r in profile.runs]
        self._plain = measured[0]
        split = profile.split
        self._split = measured[profile.runs.index(split)] if split is not None else measured[0]
        self.growth = self._growth()
        """x of a batch's samples have x^growth of its keys."""
        others = (one for one in measured if one not in (self._plain, self._split))
        self._factors = {self._name(one.form): self._factors_of(one) for one in others}
        self._cpu_factors = {
            self._name(one.form): self._cpu_factors_of(one)
            for one in measured
            if one not in (self._plain, self._split)
        }
        self._shared = self._shared_share()
        pooled = (r.rows_read for r in profile.runs if r.form.retrieval == Retrieval.POOLED)
        self._pool_read = next(pooled, 0.0)

    def _name(self, form: RunForm) -> tuple[str, Any]:
        """The one setting that is this run's own, besides its micro-batches."""
        changed = form.changed_from(self._plain.form)
        names = [name for name in changed if name != "micro_batches"]
        assert len(names) == 1, f"a run of the profile differs in {', '.join(changed)}"
        return names[0], changed[names[0]]

    def _growth(self) -> float:
        """From the bytes of rows, unsplit and split; 1 where nothing is sent or nothing shared."""
        count = self._split.form.micro_batches
        one, many = (m.run.sent_by(Kind.ROWS) for m in (self._plain, self._split))
        if count < 2 or one <= 0 or many <= one:
            return 1.0
        return max(0.0, 1 - log(many / one) / log(count))

    def _base(self, kind: Kind, split: Split, exchange: str) -> list[Times]:
        """What an op costs each rank; one entry for each micro-batch where it comes per one."""
        plain = self._plain.typical(kind)
        high, count = self._split.typical(kind), self._split.form.micro_batches
        if kind not in MICRO_KINDS:
            slope = (high - plain) / max(1, count - 1)
            return [np.maximum(LEAST_PART * plain, plain + slope * (len(split.shares) - 1))]
        follows_bytes = kind in EXCHANGED and self._plain.run.sent_by(kind) > 0
        if not follows_bytes:
            return self._curve(kind, 1.0, split.shares)
        parts = split.exchanged(kind, exchange, self.growth)
        return self._curve(kind, self.growth, parts)

    def _curve(self, kind: Kind, growth: float, parts: Sequence[float]) -> list[Times]:
        """What ops of such sizes cost: lines through nothing, a micro-batch and a whole batch.

        A large message, or one that caches cannot hold, may cost more than its part.
        """
        whole, count = self._plain.typical(kind), self._split.form.micro_batches
        small = self._split.typical(kind) / count
        least = self._plain.typical(Kind.COUNTS) if kind in EXCHANGED else 0 * small
        return _on_lines(whole, small, least, (1 / count) ** growth, parts)

    def cpu_of(self, form: RunForm, split: Split) -> CostOf | None:
        """How long a collective needs a core; None where the profile does not say."""
        if not self._plain.run.cpu_ms:
            return None
        table = {kind: self._cpu_in(kind, form, split) for kind in COLLECTIVES}
        table[Kind.STALE_MASK] = table[Kind.COUNTS]
        table[Kind.PATCH] = [self._shared * table[Kind.ROWS][0]]
        return lambda op, rank: table[op.kind][op.micro or 0]

    def _cpu_in(self, kind: Kind, form: RunForm, split: Split) -> list[float]:
        cpu = self._cpu_base(kind, split, form.exchange)
        changed = replace(form, micro_batches=self._plain.form.micro_batches)
        for item in changed.changed_from(self._plain.form).items():
            factor = self._cpu_factors.get(item, {}).get(kind, 1.0)
            cpu = [factor * ms for ms in cpu]
        return cpu

    def _cpu_base(self, kind: Kind, split: Split, exchange: str) -> list[float]:
        """The same lines as those of costs, of processor time."""
        whole, many = self._plain.run.cpu_by(kind), self._split.run.cpu_by(kind)
        count = self._split.form.micro_batches
        if kind not in EXCHANGED:
            slope = (many - whole) / max(1, count - 1)
            return [max(LEAST_PART * whole, whole + slope * (len(split.shares) - 1))]
        parts = split.exchanged(kind, exchange, self.growth)
        least = self._plain.run.cpu_by(Kind.COUNTS)
        large, small, empty = (np.array([ms]) for ms in (whole, many / count, least))
        found = _on_lines(large, small, empty, (1 / count) ** self.growth, parts)
        return [float(ms[0]) for ms in found]

    def _cpu_factors_of(self, one: _Measured) -> dict[Kind, float]:
        """By what the processor time of each kind changes."""
        found: dict[Kind, float] = {}
        for kind in COLLECTIVES & one.kinds:
            base = sum(self._cpu_base(kind, Split.of(one.form.micro_batches), one.form.exchange))
            found[kind] = one.run.cpu_by(kind) / base if base > 0 else 1.0
        return found

    def _factors_of(self, one: _Measured) -> dict[Kind, tuple[float, Times | None]]:
        """By what each kind's cost changes; where there is nothing to compare, what it costs."""
        form = one.form
        found: dict[Kind, tuple[float, Times | None]] = {}
        for kind in sorted(one.kinds):
            base = sum(self._base(kind, Split.of(form.micro_batches), form.exchange))
            mine = one.totals(kind)
            if kind not in self._plain.kinds or not np.any(base):
                found[kind] = 1.0, np.median(mine, axis=0)
                continue
            ratio = mine.mean(axis=1) / np.mean(base)
            factor = float(np.median(ratio))
            error = float(ratio.std()) / len(ratio) ** 0.5 + self._error(kind)
            found[kind] = (factor if abs(factor - 1) > SURE * error else 1.0), None
        return found

    def _error(self, kind: Kind) -> float:
        mine = self._plain.totals(kind).mean(axis=1)
        return float(mine.std() / mine.mean()) / len(mine) ** 0.5 if mine.mean() > 0 else 0.0

    def _shared_share(self) -> float:
        """The part of a batch's rows that the batch before has too: what `new` need not read."""
        whole = self._factors.get(("retrieval", "whole"))
        factor = whole.get(Kind.RETRIEVE, (1.0, None))[0] if whole is not None else 1.0
        return min(1.0, max(0.0, 1 - 1 / factor)) if factor > 0 else 0.0

    def of(
        self, form: RunForm, split: Split, shape: Shape, *, missing: float | None = None
    ) -> CostOf:
        """What an op costs a rank in that form, with such a split; batches take turns.

        `missing`: rows of a batch that a pool lacks; None: as many as in the profile.
        """
        table = {kind: self._costs_in(kind, form, split, shape) for kind in Kind}
        if missing is not None:
            table |= {kind: self._moved(kind, table[kind], missing) for kind in POOL_MOVES}
        table[Kind.STALE_MASK] = table[Kind.COUNTS]
        table[Kind.PATCH] = [self._shared * table[Kind.ROWS][0]]
        spread = {kind: self._spread(kind) for kind in Kind}

        def cost_of(op: Op, rank: int) -> float:
            values, spread_TR = table[op.kind], spread[op.kind]
            value = values[op.micro or 0][rank]
            return float(value * spread_TR[op.batch % len(spread_TR), rank])

        return cost_of

    def _moved(self, kind: Kind, costs: list[Times], missing: float) -> list[Times]:
        """The cost with more rows than the profile's pool moved, or fewer; each costs what it does
        in the unsplit run."""
        if self._plain.run.rows_read <= 0:
            return costs
        more = (missing - self._pool_read) / self._plain.run.rows_read
        return [np.maximum(0.0, c + more * self._plain.typical(kind)) for c in costs]

    def _costs_in(self, kind: Kind, form: RunForm, split: Split, shape: Shape) -> list[Times]:
        costs = self._base(kind, split, form.exchange)
        changed = replace(form, micro_batches=self._plain.form.micro_batches)
        for name, value in changed.changed_from(self._plain.form).items():
            refreshes = value == Retrieval.WHOLE and shape.buffers > 1 and kind in REFRESH_KINDS
            factor, instead = self._factors.get((name, value), {}).get(kind, (1.0, None))
            if refreshes:
                continue
            costs = [factor * c for c in costs] if instead is None else [instead] * len(costs)
        return costs

    def _spread(self, kind: Kind) -> Times:
        """How the unsplit run's batches differed from the typical one, on every rank."""
        totals_TR = self._plain.totals(kind)
        typical_R = np.median(totals_TR, axis=0)
        safe_R = np.where(typical_R > 0, typical_R, 1.0)
        return np.where(typical_R > 0, np.clip(totals_TR / safe_R, 0.25, 4.0), 1.0)

    def typical(self, kind: Kind) -> Times:
        """What the unsplit run's ops of a kind cost each rank in a batch; medians."""
        return self._plain.typical(kind)

    def spread_of(self, kind: Kind) -> float:
        """The standard deviation of a kind's cost over its mean, among batches and ranks."""
        totals = self._plain.totals(kind)
        return float(totals.std() / totals.mean()) if totals.mean() > 0 else 0.0

    def known(self, name: str) -> list[Any]:
        """The values of a setting that the profile has a run for, the usual one first."""
        others = [value for key, value in self._factors if key == name]
        return [getattr(self._plain.form, name), *others]


def draw_of(traces: Sequence[Trace], cpu_ms: float) -> float:
    """The part of a core that collectives take, from processor time of all ranks in them."""
    ran = 0.0
    for trace in traces:
        last: dict[str, float] = defaultdict(float)
        for span in trace.spans:
            last[span.name] = max(last[span.name], span.start)
        spans = (span for span in trace.spans if span.kind in COLLECTIVES)
        ran += sum(max(0.0, span.end - last[span.name]) for span in spans)
    return min(1.0, cpu_ms / ran) if ran else 0.0
