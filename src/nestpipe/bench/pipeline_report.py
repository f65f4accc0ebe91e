"""From the traces of all plans to figures: measured steps, and steps predicted from `serial`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median

from nestpipe.bench.pipeline_cases import PipelineCase, SerialLoop, Variant
from nestpipe.schedule import COLLECTIVES, Kind, Retrieval
from nestpipe.sim.replay import Sharing
from nestpipe.sim.report import EXCHANGE_KINDS, LOOKUP_KINDS
from nestpipe.sim.trace_costs import SerialRuns
from nestpipe.trace import IDLE, LANES, Span, Trace, exposure, lane_busy

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
    other lanes hold up nobody else's.
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
