"""From the traces of all plans to figures: measured steps, and steps predicted from `serial`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from nestpipe.bench.pipeline_cases import PipelineCase, Variant
from nestpipe.bench.pipeline_files import NET_CPU
from nestpipe.sim import Figures, figures
from nestpipe.sim.serial_costs import SerialRuns
from nestpipe.sim.sharing import Sharing
from nestpipe.trace import Span, Trace

NET = "net"
PREDICTED_BATCHES = 40
Middle = Callable[[list[float]], float]
"""The mean or the median."""


@dataclass(frozen=True, slots=True)
class VariantReport:
    """The steady state of one variant: medians over its rounds, means over its ranks."""

    variant: Variant
    step_ms: float
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
    """Step of `serial` in the same form and with the same micro-batches over this step."""
    ratio_best: float
    """Step of the fastest `serial` over this step."""
    predicted_ms: float | None
    """What the simulator says, from the traces of `serial`; None where it was not asked."""

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
            "micros": self.variant.micros,
            "step_ms": self.step_ms,
            "samples_per_s": self.samples_per_s,
            "ratio": self.ratio,
            "ratio_best": self.ratio_best,
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
        """The reference: as many micro-batches as the others."""
        micros = max(seen.variant.micros for seen in self.variants)
        wanted = Variant("serial", retrieval, micros)
        return next(seen for seen in self.variants if seen.variant == wanted)

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
        """All of the serial step that is not compute, over what is."""
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
    seen = {variant: _steady(case, traces) for variant, traces in rounds.items()}
    best = min(found.step_ms for variant, found in seen.items() if variant.plan == "serial")
    predicted = _predict(case, sharing, rounds)
    return PointReport(
        passes,
        tuple(
            VariantReport(
                variant=variant,
                step_ms=found.step_ms,
                samples_per_s=found.samples_per_s,
                compute_ms=found.compute_ms,
                lookup_ms=found.lookup_ms,
                exchange_ms=found.exposed_comm_ms,
                idle_ms=found.idle_ms,
                busy_ms=found.busy_ms,
                ratio=seen[replace(variant, plan="serial")].step_ms / found.step_ms,
                ratio_best=best / found.step_ms,
                predicted_ms=predicted.get(variant),
            )
            for variant, found in seen.items()
        ),
    )


def without_waiting(trace: Trace) -> Trace:
    """The same trace, in which a collective begins when its last member comes."""
    last = _last_starts(trace)
    return _with_net(trace, lambda s: replace(s, start=min(s.end, last[s.name])))


def network_in_use(trace: Trace) -> Trace:
    """The same trace, in which a collective lasts, for all, until its last member has ended.

    The network does one collective at a time: a rank that is done early finds it in use.
    """
    last, ends = _last_starts(trace), defaultdict[str, float](float)
    for span in trace.spans:
        ends[span.name] = max(ends[span.name], span.end)
    return _with_net(trace, lambda s: replace(s, start=last[s.name], end=ends[s.name]))


def _last_starts(trace: Trace) -> dict[str, float]:
    last: dict[str, float] = defaultdict(float)
    for span in trace.spans:
        last[span.name] = max(last[span.name], span.start)
    return last


def _with_net(trace: Trace, change: Callable[[Span], Span]) -> Trace:
    spans = (change(span) if span.lane == NET else span for span in trace.spans)
    return Trace(tuple(spans), trace.facts)


def _steady(case: PipelineCase, rounds: Sequence[Trace]) -> Figures:
    """The figures of a variant: exposure as each rank saw it, lanes as they were in use."""
    in_use = _mean_figures(case, [network_in_use(trace) for trace in rounds])
    return replace(
        _mean_figures(case, [without_waiting(trace) for trace in rounds]), busy_ms=in_use.busy_ms
    )


def _mean_figures(case: PipelineCase, rounds: Sequence[Trace]) -> Figures:
    """Over ranks the mean, over rounds the median."""
    of_rounds = [
        _merged([figures(t, samples=case.batch, rank=rank) for rank in t.ranks], mean)
        for t in rounds
    ]
    return _merged(of_rounds, median)


def _merged(parts: Sequence[Figures], middle: Middle) -> Figures:
    def of(name: str) -> float:
        return middle([getattr(part, name) for part in parts])

    names = ("step_ms", "compute_ms", "lookup_ms", "exposed_comm_ms", "idle_ms")
    return replace(
        parts[0],
        **{name: of(name) for name in names},
        samples_per_s=1 / middle([1 / part.samples_per_s for part in parts]),
        exposed_ms=_merged_maps([part.exposed_ms for part in parts], middle),
        busy_ms=_merged_maps([part.busy_ms for part in parts], middle),
    )


def _merged_maps(maps: Sequence[Mapping[str, float]], middle: Middle) -> dict[str, float]:
    names = sorted({name for of in maps for name in of})
    return {name: middle([of.get(name, 0.0) for of in maps]) for name in names}


def _predict(
    case: PipelineCase, sharing: Sharing, rounds: Mapping[Variant, Sequence[Trace]]
) -> dict[Variant, float]:
    """The step of every variant, from the traces of `serial` with as many micro-batches."""
    whole, new = (Variant("serial", form, case.micros) for form in ("whole", "new"))
    draw = collective_draw(rounds[whole]) if case.device == "cpu" else 0.0
    runs = SerialRuns(rounds[whole], rounds[new], replace(sharing, collective_draw=draw))
    return {
        variant: _mean_figures(
            case, [runs.predict(variant.make_plan(), batches=PREDICTED_BATCHES)]
        ).step_ms
        for variant in rounds
        if variant.micros == case.micros
    }


def collective_draw(serial: Sequence[Trace]) -> float:
    """The part of a core that a rank's collectives take while they run, from serial traces."""
    used = sum(float(trace.facts.get(NET_CPU, 0.0)) for trace in serial)
    ran = sum(
        span.duration
        for trace in serial
        for span in without_waiting(trace).of_rank(0)
        if span.lane == NET
    )
    return min(1.0, used / ran) if ran else 0.0
