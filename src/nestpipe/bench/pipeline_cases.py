"""`nestpipe bench pipeline` without torch: workloads, the runs compared, and figures from traces.

Figures are measured steps, and steps that are predicted from the traces of `serial`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import pairwise
from statistics import mean, median
from typing import Literal

from nestpipe.config import fraction, not_negative, positive
from nestpipe.deprecated import renamed_fields
from nestpipe.errors import ConfigError
from nestpipe.schedule import (
    COLLECTIVES,
    PLANS,
    Exchange,
    Kind,
    Plan,
    PlanOptions,
    Retrieval,
    plan,
    with_separate_dense_group,
    with_separate_key_group,
)
from nestpipe.sim.replay import Sharing
from nestpipe.sim.report import EXCHANGE_KINDS, LOOKUP_KINDS
from nestpipe.sim.trace_costs import SerialRuns
from nestpipe.trace import IDLE, LANES, Span, Trace, exposure, lane_busy

EXACT_PLANS = ("serial", "sparse_dist", "dual_buffer", "frozen_window", "nested")
"""Compared by default: every plan that never reads stale rows."""
CURVE = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""(lookup + communication) / compute of the serial step, point by point."""


@renamed_fields
@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineCase:
    """One workload: how much is looked up, sent and computed."""

    name: str = ""
    device: Literal["cpu", "cuda"] = "cpu"
    ranks: int = 4
    rate: str = ""
    """Speed of each host's link, where ranks are hosts."""
    batch: int = 256
    """Samples per rank."""
    keys: int = 64
    """Keys of a sample."""
    rows: int = 1_000_000
    """Rows of the table."""
    hot: float = 0.5
    """Share of the keys that are log-uniform; the others are uniform over the table."""
    dim: int = 64
    """Width of a row."""
    optimizer: str = "rowwise_adagrad"
    """Of rows; its state travels with them between host and device."""
    full: bool = False
    """Store every row before the first batch, as in a table that has been trained for long."""
    model: Literal["blocks", "hstu"] = "blocks"
    """`blocks`: residual layers at every key; `hstu`: the sequence model that is shipped."""
    width: int = 64
    """blocks: width of the dense layers."""
    blocks: int = 1
    """Residual blocks, or blocks of HSTU."""
    passes: int = 1
    """blocks: how often a batch goes through the blocks: more compute, the same weights."""
    recompute: bool = False
    """blocks: keep what goes in alone and compute the rest again; many passes need the memory."""
    heads: int = 4
    """hstu: attention heads, each `dim` / `heads` wide."""
    micro_batches: int = 8
    """Micro-batches of a batch."""
    first: float = 1.0
    last: float = 1.0
    """Sizes of the first and the last micro-batch over that of those in the middle."""
    speculative_rows: bool = False
    """Send the rows of the first micro-batch early, in `nested`."""
    buffers: int = 2
    """Of rows on the device, in `nested` with new rows; else two."""
    comm_dtype: Literal["float32", "bfloat16"] = "float32"
    """Numbers of rows and row gradients between ranks."""
    distinct: int = 8
    """Different batches, drawn before the clock starts and then repeated."""
    steps: int = 24
    """Batches in a round."""
    rounds: int = 3
    """Timed rounds of each plan."""
    curve: bool = False
    """Scale the compute so that the serial step runs through the ratios of `CURVE`."""
    plans: str = ",".join(EXACT_PLANS)
    """Plans compared by default, separated by commas."""

    def __post_init__(self) -> None:
        for field in (
            *("ranks", "batch", "keys", "rows", "dim", "width", "blocks", "passes", "heads"),
            *("micro_batches", "distinct", "rounds"),
        ):
            positive(field, getattr(self, field))
        fraction("hot", self.hot)
        positive("first", self.first)
        positive("last", self.last)
        not_negative("steps", self.steps)
        if self.steps < 8:
            raise ConfigError(f"steps is {self.steps}; give at least 8, for a steady state")
        if self.buffers not in (2, 3):
            raise ConfigError(f"buffers is {self.buffers}; use 2 or 3")
        if self.micro_batches > self.batch:
            raise ConfigError(
                f"micro_batches is {self.micro_batches} and batch {self.batch}; "
                "give at most one per sample"
            )
        if self.model == "hstu" and self.dim % self.heads:
            raise ConfigError(f"dim is {self.dim}; make it a multiple of heads, {self.heads}")


WARM_STEPS, TIMED_STEPS = 6, 12
"""Batches that warm up, and batches on the clock, for TorchRec as for NestPipe."""
LAST_STEPS = 2
"""Batches that follow, so that the clock stops in the middle of the run."""


def lab(
    name: str,
    *,
    ranks: int,
    rows: int,
    blocks: int,
    width: int,
    micro_batches: int,
    first: float = 1.0,
    last: float = 1.0,
    speculative_rows: bool = False,
) -> PipelineCase:
    """A configuration that TorchRec is timed on too, with the same batches and the same layers."""
    return PipelineCase(
        name=name,
        device="cuda",
        ranks=ranks,
        batch=1024 // ranks,
        keys=512,
        rows=rows,
        dim=128,
        full=True,
        width=width,
        blocks=blocks,
        micro_batches=micro_batches,
        first=first,
        last=last,
        speculative_rows=speculative_rows,
        distinct=WARM_STEPS + TIMED_STEPS + LAST_STEPS,  # as many as that script draws
        steps=WARM_STEPS + TIMED_STEPS + LAST_STEPS,
        plans="serial,nested",
    )


deep_lab = partial(lab, blocks=4, width=512, micro_batches=3, first=0.3, speculative_rows=True)
"""Where compute is the floor."""

CASES = {
    case.name: case
    for case in (
        PipelineCase(
            name="network",
            rate="100mbit",
            batch=256,
            keys=32,
            dim=256,
            passes=12,
            micro_batches=16,
            steps=10,
            rounds=3,
        ),
        PipelineCase(
            name="paper",
            device="cuda",
            batch=768,
            keys=512,
            dim=64,
            rows=40_000_000,
            optimizer="adam",
            full=True,
            width=352,
            micro_batches=4,
            first=0.4,
            last=0.4,
            comm_dtype="bfloat16",
            buffers=3,
            steps=14,
        ),
        PipelineCase(
            name="host",
            device="cuda",
            ranks=1,
            batch=256,
            keys=512,
            dim=128,
            rows=80_000_000,
            full=True,
            model="hstu",
            blocks=4,
            micro_batches=4,
            steps=10,
            rounds=2,
            plans="serial,dual_buffer,nested",
        ),
        PipelineCase(
            name="curve",
            device="cuda",
            batch=256,
            keys=512,
            dim=64,
            rows=40_000_000,
            optimizer="adagrad",
            full=True,
            width=256,
            micro_batches=2,
            first=0.5,
            last=0.5,
            curve=True,
            recompute=True,
            steps=16,
            rounds=2,
        ),
        deep_lab("lab_a", ranks=2, rows=20_000_000, last=0.3),
        lab("lab_b", ranks=2, rows=40_000_000, blocks=1, width=256, micro_batches=2),
        lab("lab_c", ranks=4, rows=40_000_000, blocks=1, width=512, micro_batches=2),
        deep_lab("lab_d", ranks=4, rows=40_000_000, last=0.6),
    )
}


class SerialLoop(StrEnum):
    """The two baselines of plan `serial`; on a CPU they are the same loop."""

    STRICT = "strict"
    """Nothing overlaps: the host waits for the device before every op of its own."""
    ASYNC = "async"
    """The loop that a user would write: the host issues work without such waits."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the workload."""

    plan: str
    retrieval: str
    micro_batches: int
    exchange: str = "micro"
    speculative_rows: bool = False
    """Whether the rows of the first micro-batch are sent early."""
    buffers: int = 2
    """Buffers of rows on the device, of a plan that looks up ahead."""
    loop: str = SerialLoop.STRICT
    """Which baseline it is, of plan `serial`; overlapping plans have lanes instead."""

    @property
    def serial(self) -> bool:
        """Whether it is a baseline, with no lanes to overlap."""
        return not plan(self.plan).shape.overlaps

    @property
    def words(self) -> tuple[str, ...]:
        """What tells it apart; the exchange only where it is not the usual one."""
        usual = self.exchange == Exchange.MICRO
        return (
            *((self.plan, str(self.loop)) if self.serial else (self.plan,)),
            *(self.retrieval, str(self.micro_batches)),
            *(() if usual else (self.exchange,)),
            *(("early",) if self.speculative_rows else ()),
            *(("third",) if self.buffers == 3 else ()),
        )

    @property
    def name(self) -> str:
        return "-".join(self.words)

    def make_plan(self, device: str = "cpu") -> Plan:
        """Its plan, as `Trainer.placed` has it on that device."""
        options = PlanOptions(
            micro_batches=self.micro_batches,
            retrieval=Retrieval(self.retrieval),
            exchange=Exchange(self.exchange),
            speculative_rows=self.speculative_rows,
            buffers=self.buffers,
        )
        made = plan(self.plan, options)
        return (
            with_separate_dense_group(with_separate_key_group(made)) if device == "cuda" else made
        )


BASELINE_FORMS = (Retrieval.WHOLE, Retrieval.NEW)
"""Forms of retrieval that `serial` always runs in; a pool only where it is asked for."""


def case_of(name: str) -> PipelineCase:
    """The workload of that name."""
    if name not in CASES:
        raise ConfigError(f"unknown case {name!r}; use {', '.join(CASES)}")
    return CASES[name]


def check_names(
    plans: Iterable[str], forms: Iterable[str], exchanges: Iterable[str] = ("micro",)
) -> None:
    """Refuse plans and forms of retrieval and exchange that do not exist."""
    for name in plans:
        if name not in PLANS:
            raise ConfigError(f"unknown plan {name!r}; the plans are {', '.join(PLANS)}")
    for form in forms:
        if form not in list(Retrieval):
            raise ConfigError(f"unknown retrieval {form!r}; use whole, new or pooled")
    for exchange in exchanges:
        if exchange not in list(Exchange):
            raise ConfigError(f"unknown exchange {exchange!r}; use {' or '.join(Exchange)}")


def variant_of(case: PipelineCase, name: str, form: str, exchange: str = "micro") -> Variant:
    """A plan as the case wants it: what only nested pipelines can have, others do without."""
    stale = plan(name).shape.stale  # it has one form only
    shape = plan(name, PlanOptions(retrieval=Retrieval.WHOLE if stale else Retrieval(form))).shape
    nested = shape.refreshes_ahead and shape.window_overlaps
    buffers = case.buffers if nested and form == Retrieval.NEW else 2
    return Variant(
        name, form, case.micro_batches, exchange, case.speculative_rows and nested, buffers
    )


def variants_of(
    case: PipelineCase,
    plans: tuple[str, ...],
    forms: tuple[str, ...],
    exchanges: tuple[str, ...] = ("micro",),
) -> list[Variant]:
    """The runs to compare: each plan in each form of retrieval and of exchange.

    `serial` is always among them, in every form of retrieval that moves copies of rows, in those
    asked for, and with every exchange: it is what the others are measured against, and what their
    steps are predicted from. It also runs without
    micro-batches, which it has no use for, so that the comparison is with the best of it. On a GPU
    all of these run twice, as strict and as async loop.
    """
    check_names(plans, forms, exchanges)
    if case.micro_batches == 1 and Exchange.WINDOW in exchanges:
        raise ConfigError(
            "exchange is 'window' and micro_batches 1: one micro-batch shares rows with none; "
            "set more micro_batches or use micro"
        )
    ways = list(dict.fromkeys(exchanges))
    others = [
        variant_of(case, name, form, exchange)
        for name in dict.fromkeys(plans)
        if plan(name).shape.overlaps
        for form in dict.fromkeys(forms)
        if form == "whole" or not plan(name).shape.stale
        for exchange in ways
    ]
    bases = dict.fromkeys((*BASELINE_FORMS, *map(Retrieval, forms)))
    serial = [Variant("serial", form, case.micro_batches, way) for way in ways for form in bases]
    unsplit = [Variant("serial", form, 1) for form in bases] if case.micro_batches > 1 else []
    return [*serial_loops(case, [*unsplit, *serial]), *others]


def serial_loops(case: PipelineCase, strict: Sequence[Variant]) -> list[Variant]:
    """The baselines, first those that are strict; on a CPU no loop is asynchronous."""
    loops = SerialLoop if case.device == "cuda" else (SerialLoop.STRICT,)
    return [replace(variant, loop=str(loop)) for loop in loops for variant in strict]


NET_CPU = "net_cpu_ms"
"""A fact of a trace: processor time of rank 0 in collectives, all batches together."""
NET = "net"
COMPUTE = "useful compute"
FILL, DRAIN = 3, 1
"""Batches at the start and at the end of a round whose updates do not count."""
PREDICTED_BATCHES = 40


@dataclass(frozen=True, slots=True)
class VariantReport:
    """The steady state of one variant."""

    variant: Variant
    rounds_ms: tuple[float, ...]
    """The median step of each round."""
    samples_per_s: float
    compute_ms: float
    lookup_ms: float
    """Exposed time of all that brings rows to the device and back."""
    exchange_ms: float
    """Exposed time of rows, gradients and reductions on the network."""
    idle_ms: float
    """Exposed time in which nothing ran: waiting for other ranks, or for a thread to wake up."""
    busy_ms: Mapping[str, float]
    """Busy time by lane; a collective is busy from its last start on any rank to its last end."""
    ratio: float
    """Step of strict `serial` in the same form, with the same micro-batches and exchange, over
    this."""
    over_strict: float
    """Step of the fastest strict `serial` over this step."""
    over_async: float
    """Step of the fastest async `serial` over this step; on a CPU the strict one is meant."""
    predicted_ms: float | None
    """What the simulator says, from the traces of strict `serial`; None where it was not asked."""

    @property
    def step_ms(self) -> float:
        """The median over rounds."""
        return median(self.rounds_ms)

    @property
    def busiest_lane(self) -> str:
        return max(self.busy_ms, key=lambda lane: self.busy_ms[lane])

    @property
    def efficiency(self) -> float:
        """Busy time of the busiest lane over the step."""
        return self.busy_ms[self.busiest_lane] / self.step_ms

    @property
    def error(self) -> float | None:
        """By how much the prediction is off, as a part of the measured step."""
        return None if self.predicted_ms is None else self.predicted_ms / self.step_ms - 1

    def as_json(self) -> dict[str, object]:
        return {
            "plan": self.variant.plan,
            "retrieval": self.variant.retrieval,
            "micro_batches": self.variant.micro_batches,
            "exchange": self.variant.exchange,
            "speculative_rows": self.variant.speculative_rows,
            "buffers": self.variant.buffers,
            "loop": self.variant.loop if self.variant.serial else None,
            "step_ms": self.step_ms,
            "step_ms_range": [min(self.rounds_ms), max(self.rounds_ms)],
            "rounds_ms": list(self.rounds_ms),
            "samples_per_s": self.samples_per_s,
            "ratio": self.ratio,
            "over_strict_serial": self.over_strict,
            "over_async_serial": self.over_async,
            "ratio_best": self.over_strict,  # its name before there were two baselines
            "pipeline_efficiency": self.efficiency,
            "busiest_lane": self.busiest_lane,
            "compute_ms": self.compute_ms,
            "exposed_lookup_ms": self.lookup_ms,
            "exposed_exchange_ms": self.exchange_ms,
            "idle_ms": self.idle_ms,
            "busy_ms": dict(self.busy_ms),
            "predicted_ms": self.predicted_ms,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class PointReport:
    """All variants at one amount of compute."""

    passes: int
    variants: tuple[VariantReport, ...]

    def serial(self, retrieval: str = "whole") -> VariantReport:
        """The reference: strict, with the micro-batches of the others and their first exchange."""
        micro_batches = max(seen.variant.micro_batches for seen in self.variants)
        wanted = (SerialLoop.STRICT, retrieval, micro_batches)
        return next(
            seen
            for seen in self.variants
            if seen.variant.serial
            and (seen.variant.loop, seen.variant.retrieval, seen.variant.micro_batches) == wanted
        )

    @property
    def shares(self) -> dict[str, float]:
        """Lookup, exchange and compute as parts of the serial step; what is left is waiting."""
        serial = self.serial()
        return {
            "lookup": serial.lookup_ms / serial.step_ms,
            "exchange": serial.exchange_ms / serial.step_ms,
            "compute": serial.compute_ms / serial.step_ms,
        }

    @property
    def moved_over_compute(self) -> float:
        """Time of the strict serial step outside compute, over its compute."""
        serial = self.serial()
        return (serial.step_ms - serial.compute_ms) / serial.compute_ms

    def as_json(self) -> dict[str, object]:
        return {
            "passes": self.passes,
            "moved_over_compute": self.moved_over_compute,
            "serial_shares": self.shares,
            "plans": [seen.as_json() for seen in self.variants],
        }


def report(
    case: PipelineCase,
    passes: int,
    sharing: Sharing,
    rounds: Mapping[Variant, Sequence[Trace]],
) -> PointReport:
    """Figures of every variant, beside what the simulator predicts."""
    seen = {variant: steady(traces) for variant, traces in rounds.items()}
    strict, run_ahead = (fastest_serial(seen, loop) for loop in SerialLoop)
    predicted = _predict(case, sharing, rounds)
    return PointReport(
        passes,
        tuple(
            VariantReport(
                variant=variant,
                rounds_ms=found.rounds_ms,
                samples_per_s=1000 * case.batch * case.ranks / found.step_ms,
                compute_ms=found.compute * found.step_ms,
                lookup_ms=found.lookup * found.step_ms,
                exchange_ms=found.exchange * found.step_ms,
                idle_ms=found.idle * found.step_ms,
                busy_ms={lane: part * found.step_ms for lane, part in found.busy.items()},
                ratio=seen[_serial(variant)].step_ms / found.step_ms,
                over_strict=strict / found.step_ms,
                over_async=run_ahead / found.step_ms,
                predicted_ms=predicted.get(variant),
            )
            for variant, found in seen.items()
        ),
    )


def _serial(variant: Variant) -> Variant:
    """The strict serial run with the same bits."""
    return replace(
        variant, plan="serial", speculative_rows=False, buffers=2, loop=str(SerialLoop.STRICT)
    )


def fastest_serial(seen: Mapping[Variant, Steady], loop: SerialLoop) -> float:
    """The fastest step of a baseline; where it did not run apart, the two are the same."""
    serial = [(variant.loop, found.step_ms) for variant, found in seen.items() if variant.serial]
    return min([ms for name, ms in serial if name == loop] or [ms for _, ms in serial])


def without_waiting(trace: Trace) -> Trace:
    """The same trace, in which a collective begins when its last member comes."""
    last = _last_starts(trace)
    return _changed(
        trace,
        lambda s: s.kind in COLLECTIVES,
        lambda s: replace(s, start=min(s.end, last[s.name])),
    )


def network_in_use(trace: Trace) -> Trace:
    """The same trace, in which the network lane's ops last until their last member has ended.

    It does one collective at a time: a rank that is done early finds it in use. Collectives on
    other lanes do not delay others.
    """
    last, ends = _last_starts(trace), defaultdict[str, float](float)
    for span in trace.spans:
        ends[span.name] = max(ends[span.name], span.end)
    return _changed(
        without_waiting(trace),
        lambda s: s.lane == NET,
        lambda s: replace(s, start=last[s.name], end=ends[s.name]),
    )


def _last_starts(trace: Trace) -> dict[str, float]:
    last: dict[str, float] = defaultdict(float)
    for span in trace.spans:
        last[span.name] = max(last[span.name], span.start)
    return last


def _changed(trace: Trace, which: Callable[[Span], bool], change: Callable[[Span], Span]) -> Trace:
    spans = (change(span) if which(span) else span for span in trace.spans)
    return Trace(tuple(spans), trace.facts)


@dataclass(frozen=True, slots=True)
class Steady:
    """One variant's steps, and how they were spent: parts of the step, 0 to 1."""

    rounds_ms: tuple[float, ...]
    """The median step of each round."""
    compute: float
    lookup: float
    exchange: float
    idle: float
    busy: Mapping[str, float]

    @property
    def step_ms(self) -> float:
        """The median over rounds."""
        return median(self.rounds_ms)


def steady(rounds: Sequence[Trace]) -> Steady:
    """The median step of each round; its parts are means over ranks, then medians over rounds."""
    parts = [_mean([_parts(trace, rank) for rank in trace.ranks]) for trace in rounds]
    found = {name: median([part.get(name, 0.0) for part in parts]) for name in parts[0]}
    return Steady(
        rounds_ms=tuple(median(step_times(trace)) for trace in rounds),
        compute=found[COMPUTE],
        lookup=sum(found.get(kind, 0.0) for kind in LOOKUP_KINDS),
        exchange=sum(found.get(kind, 0.0) for kind in EXCHANGE_KINDS),
        idle=found.get(IDLE, 0.0),
        busy={lane: found.get(_lane(lane), 0.0) for lane in LANES},
    )


def step_times(trace: Trace) -> list[float]:
    """From update to update on the first rank, without the batches that fill and drain."""
    return [later - earlier for earlier, later in pairwise(_updates(trace, trace.ranks[0]))]


def _updates(trace: Trace, rank: int) -> list[float]:
    ends = sorted(s.end for s in trace.of_rank(rank) if s.kind == Kind.UPDATE)
    return ends[FILL:-DRAIN]


def _parts(trace: Trace, rank: int) -> dict[str, float]:
    """What a rank did in its steady time: exposed kinds, compute, busy lanes, as parts of it."""
    start, *_, end = _updates(trace, rank)
    seen = exposure(without_waiting(trace).of_rank(rank), start, end)
    busy = lane_busy(network_in_use(trace).of_rank(rank), start, end)
    ms = {**seen.exposed, COMPUTE: seen.compute_ms, **{_lane(name): busy[name] for name in busy}}
    return {name: value / (end - start) for name, value in ms.items()}


def _lane(name: str) -> str:
    return f"lane {name}"


def _mean(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for part in parts for name in part})
    return {name: mean([part.get(name, 0.0) for part in parts]) for name in names}


def _predict(
    case: PipelineCase, sharing: Sharing, rounds: Mapping[Variant, Sequence[Trace]]
) -> dict[Variant, float]:
    """The step of every variant, from strict `serial` with its micro-batches and its exchange.

    What the host of an async loop hides is not in those traces, so it has no prediction.
    """
    split = [
        v for v in rounds if v.micro_batches == case.micro_batches and v.loop == SerialLoop.STRICT
    ]
    predicted: dict[Variant, float] = {}
    for exchange in dict.fromkeys(variant.exchange for variant in split):
        whole, new, pooled = (
            rounds.get(Variant("serial", form, case.micro_batches, exchange), ())
            for form in Retrieval
        )
        draw = collective_draw(whole) if case.device == "cpu" else 0.0
        runs = SerialRuns(whole, new, replace(sharing, collective_draw=draw), pooled)
        for variant in split:
            if variant.exchange == exchange:
                made = runs.predict(variant.make_plan(case.device), batches=PREDICTED_BATCHES)
                predicted[variant] = median(step_times(made))
    return predicted


def collective_draw(serial: Sequence[Trace]) -> float:
    """The part of a core that a rank's collectives take while they run, from serial traces."""
    used = sum(float(trace.facts.get(NET_CPU, 0.0)) for trace in serial)
    ran = sum(
        span.duration
        for trace in serial
        for span in without_waiting(trace).of_rank(0)
        if span.kind in COLLECTIVES
    )
    return min(1.0, used / ran) if ran else 0.0
