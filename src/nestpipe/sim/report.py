"""The figures of a simulated run: step, throughput, what is exposed, how busy each lane is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nestpipe.schedule.op import Kind
from nestpipe.schedule.plans import Plan
from nestpipe.sim.cluster import Cluster
from nestpipe.sim.costs import Costs, Scale, costs
from nestpipe.sim.replay import replay
from nestpipe.trace import IDLE, Span, Trace, exposure, lane_busy, steady_interval

K = Kind
EXCHANGE_KINDS = (K.PATCH, K.ROWS, K.GRADS, K.TOTALS, K.REDUCE, K.REPLICA_SYNC)
LOOKUP_KINDS = (
    K.PREFETCH,
    K.COPY,
    K.DEDUP,
    K.COUNTS,
    K.KEYS,
    K.UNION,
    K.REPLICA_KEYS,
    K.REPLICA_UNION,
    K.STALE_MASK,
    K.RETRIEVE,
    K.SYNC,
    K.SWAP,
    K.WRITEBACK,
)
DEFAULT_BATCHES = 40


@dataclass(frozen=True, slots=True)
class Figures:
    """The steady state of one run, per step of one worker."""

    plan: str
    workers: int
    groups: int
    micro_batches: int
    step_ms: float
    samples_per_s: float
    """Of the whole cluster."""
    compute_ms: float
    lookup_ms: float
    """Exposed time of everything that brings rows to the device and back."""
    exposed_comm_ms: float
    """Exposed time of rows, gradients and reductions on the network."""
    idle_ms: float
    """Exposed time in which the worker does nothing but wait for others."""
    exposed_ms: Mapping[str, float]
    """Exposed time by kind of op."""
    busy_ms: Mapping[str, float]
    """Busy time by lane."""

    @property
    def utilisation(self) -> float:
        """Share of the step in which the accelerator does useful work, 0 to 1."""
        return self.compute_ms / self.step_ms

    @property
    def busiest_lane(self) -> str:
        return max(self.busy_ms, key=lambda lane: self.busy_ms[lane])

    @property
    def pipeline_efficiency(self) -> float:
        """Busy time of the busiest lane over the step: 1 is as fast as that lane allows."""
        return self.busy_ms[self.busiest_lane] / self.step_ms


def simulate(
    plan: Plan,
    cluster: Cluster,
    scale: Scale,
    *,
    batches: int = DEFAULT_BATCHES,
    op_costs: Costs | None = None,
    progress: Callable[[int], None] = lambda batch: None,
) -> Figures:
    """Replay the plan on the cluster and read its steady state."""
    played = replay(
        plan,
        op_costs if op_costs is not None else costs(cluster, plan.shape, scale),
        scale,
        batches=whole_intervals(batches, plan.shape.merge_every),
        stragglers=cluster.stragglers,
        progress=progress,
    )
    return figures(played.trace, samples=cluster.workload.samples)


def whole_intervals(batches: int, every: int) -> int:
    """At least so many batches, and as many as it takes that their steady part is a whole number of
    times `every`: else it would count a merge of replicas too often or too rarely."""
    count = batches
    while every > 1 and _steady_steps(count) % every:
        count += 1
    return count


def _steady_steps(batches: int) -> int:
    """How many steps `steady_interval` keeps of a replay."""
    updates = (Span("update", "compute", t, None, 0, t, t + 1) for t in range(batches))
    return steady_interval(updates)[2]


def figures(trace: Trace, *, samples: float, rank: int = 0) -> Figures:
    """The steady state of a trace, as one of its ranks saw it."""
    spans = trace.of_rank(rank)
    start, end, steps = steady_interval(spans)
    seen = exposure(spans, start, end)
    exposed = {kind: ms / steps for kind, ms in seen.exposed.items()}
    step_ms = (end - start) / steps
    workers = int(trace.facts.get("workers", len(trace.ranks)))
    return Figures(
        plan=str(trace.facts.get("plan", "unknown")),
        workers=workers,
        groups=int(trace.facts.get("groups", 1)),
        micro_batches=int(trace.facts.get("micro_batches", _count_micros(spans))),
        step_ms=step_ms,
        samples_per_s=1000 * samples * workers / step_ms,
        compute_ms=seen.compute_ms / steps,
        lookup_ms=sum(exposed.get(kind, 0.0) for kind in LOOKUP_KINDS),
        exposed_comm_ms=sum(exposed.get(kind, 0.0) for kind in EXCHANGE_KINDS),
        idle_ms=exposed.get(IDLE, 0.0),
        exposed_ms=exposed,
        busy_ms={lane: ms / steps for lane, ms in lane_busy(spans, start, end).items()},
    )


def _count_micros(spans: tuple[Span, ...]) -> int:
    return 1 + max((span.micro for span in spans if span.micro is not None), default=0)
