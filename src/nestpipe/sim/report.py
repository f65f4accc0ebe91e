"""What simulations show: the figures of a run, scaling curves, the best groups, and the chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape

from nestpipe.schedule import Plan, PlanOptions, plan
from nestpipe.schedule.schedule import Kind
from nestpipe.sim.costs import Cluster, Costs, Layout, Scale, costs, merged_bytes
from nestpipe.sim.replay import replay
from nestpipe.sim.trace_costs import FittedCosts
from nestpipe.trace import IDLE, Span, Trace, exposure, lane_busy, steady_interval

K = Kind
EXCHANGE_KINDS = (K.PATCH, K.ROWS, K.GRADS, K.TOTALS, K.REDUCE, K.NORM, K.REPLICA_SYNC)
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


# Scaling curves: the same plan and work at more and more workers.


@dataclass(frozen=True, slots=True)
class Point:
    """One scale of a curve."""

    figures: Figures
    scaling_efficiency: float
    """Percent: the step of the curve's first point over this one."""


def scaling_curve(
    plan: Plan,
    cluster: Cluster,
    scales: Sequence[Scale],
    *,
    batches: int = DEFAULT_BATCHES,
    fitted: FittedCosts | None = None,
    progress: Callable[[int], None] = lambda batch: None,
) -> list[Point]:
    """Simulate every scale in turn; efficiency is relative to the first."""
    cluster = with_samples_of(cluster, fitted)
    runs = [
        simulate(
            plan,
            cluster,
            scale,
            batches=batches,
            op_costs=fitted.at(plan, cluster, scale) if fitted is not None else None,
            progress=progress,
        )
        for scale in scales
    ]
    return [Point(run, 100 * runs[0].step_ms / run.step_ms) for run in runs]


def with_samples_of(cluster: Cluster, fitted: FittedCosts | None) -> Cluster:
    """The cluster with batches as large as those of the measured run, where it tells."""
    if fitted is None or fitted.samples is None:
        return cluster
    work = replace(cluster.workload, samples=max(1, round(fitted.samples)))
    return replace(cluster, workload=work)


def curve_as_json(points: Sequence[Point]) -> list[dict[str, object]]:
    """The curve as plain values."""
    return [
        {
            **asdict(point.figures),
            "scaling_efficiency": point.scaling_efficiency,
            "utilisation": point.figures.utilisation,
            "pipeline_efficiency": point.figures.pipeline_efficiency,
            "busiest_lane": point.figures.busiest_lane,
        }
        for point in points
    ]


# Into how many groups to split the workers (2D parallelism): every choice simulated.


MOST_GROUPS = 64
"""Of the numbers that are tried unasked; each group needs room for all tables."""
BASE_WORKERS = 128
"""Efficiency compares with so many workers in one group, or with all of them where they are fewer:
the same measure for every number of groups."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One number of groups."""

    figures: Figures
    efficiency: float
    """Percent: the step of `BASE_WORKERS` in one group over this one."""
    merged_bytes: float
    """What one worker merges with its replicas, per batch."""

    @property
    def groups(self) -> int:
        return self.figures.groups

    @property
    def shards(self) -> int:
        return self.figures.workers // self.figures.groups

    @property
    def exposed_ms(self) -> float:
        """All of the step that is not compute."""
        return self.figures.step_ms - self.figures.compute_ms

    @property
    def exposed_merge_ms(self) -> float:
        return self.figures.exposed_ms.get("replica_sync", 0.0)


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """Every number of groups that was tried for so many workers."""

    workers: int
    rows: tuple[GroupRow, ...]

    @property
    def best(self) -> GroupRow:
        """The fastest; of equals the one with the fewest copies of the tables."""
        return min(self.rows, key=lambda row: (round(row.figures.step_ms, 6), row.groups))


def usual_groups(workers: int) -> list[int]:
    """Powers of two that leave every group at least two shards."""
    numbers = [2**power for power in range(MOST_GROUPS.bit_length())]
    return [m for m in numbers if m == 1 or (workers % m == 0 and workers // m > 1)]


def plan_for(name: str, options: PlanOptions, groups: int) -> Plan:
    """The plan for so many groups: a single one has no replicas to merge."""
    return plan(name, options if groups > 1 else replace(options, merge_every=0))


def choose_groups(
    name: str,
    options: PlanOptions,
    cluster: Cluster,
    workers: int,
    groups: Sequence[int],
    *,
    layout: Layout = Layout.AUTO,
    batches: int = DEFAULT_BATCHES,
    fitted: FittedCosts | None = None,
    progress: Callable[[int], None] = lambda batch: None,
) -> GroupChoice:
    """Simulate the plan with each number of groups."""

    def run(scale: Scale) -> Figures:
        chosen = plan_for(name, options, scale.groups)
        (point,) = scaling_curve(
            chosen, cluster, [scale], batches=batches, fitted=fitted, progress=progress
        )
        return point.figures

    work = with_samples_of(cluster, fitted).workload
    base = run(Scale(min(workers, BASE_WORKERS)))
    rows: list[GroupRow] = []
    for number in dict.fromkeys(groups):
        seen = run(Scale(workers, number, layout))
        shape = plan_for(name, options, number).shape
        merged = merged_bytes(work, shape, number) / max(1, shape.merge_every)
        rows.append(GroupRow(seen, 100 * base.step_ms / seen.step_ms, merged))
    return GroupChoice(workers, tuple(rows))


def choice_as_json(choice: GroupChoice) -> dict[str, object]:
    """The choice as plain values."""
    return {
        "workers": choice.workers,
        "best_groups": choice.best.groups,
        "rows": [
            {
                **asdict(row.figures),
                "shards": row.shards,
                "efficiency": row.efficiency,
                "all_exposed_ms": row.exposed_ms,
                "exposed_merge_ms": row.exposed_merge_ms,
                "merged_bytes": row.merged_bytes,
            }
            for row in choice.rows
        ],
    }


# The chart: a scaling curve as an SVG, with where a step's time goes, and what that leaves.


WIDTH, HEIGHT = 960, 420
LEFT, RIGHT, TOP, BOTTOM = 72, 72, 104, 64
INK, FAINT, RULE, PAPER = "#1d2733", "#64707d", "#dde3ea", "#fcfdfe"
PARTS = (
    ("compute", "compute_ms", "#4477aa"),
    ("exposed exchange", "exposed_comm_ms", "#ee7733"),
    ("exposed lookup", "lookup_ms", "#ccaa22"),
    ("waiting", "idle_ms", "#c3cad2"),
)
"""The parts of a step that add up to it, from the bottom of a bar to its top."""
LINE = "#228833"
_STYLE = f"""
.nc text{{font:12px ui-sans-serif,system-ui,'Segoe UI',Helvetica,Arial,sans-serif;fill:{FAINT}}}
.nc .t{{font-size:18px;font-weight:600;fill:{INK}}}
.nc .m{{text-anchor:middle}}
.nc .e{{text-anchor:end}}
.nc .v{{text-anchor:middle;font-weight:600;fill:{LINE};paint-order:stroke;stroke:{PAPER};
stroke-width:4px}}
"""


def chart(points: Sequence[Point], title: str) -> str:
    """A bar per scale, split into compute and what is exposed, under the efficiency line."""
    top_ms = _round_up(max(point.figures.step_ms for point in points))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="nc" role="img" width="{WIDTH}"'
        f' height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"><style>{_STYLE}</style>',
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="12" fill="{PAPER}"'
        f' stroke="{RULE}"/>',
        f'<text class="t" x="{LEFT - 48}" y="34">{escape(title)}</text>',
        *_legend(),
        *_axes(top_ms),
    ]
    for i, point in enumerate(points):
        parts += _bar(point, _x(i, len(points)), top_ms, 0.5 * _pitch(len(points)))
    parts += _efficiency_line(points)
    return "\n".join([*parts, "</svg>", ""])


def _pitch(count: int) -> float:
    return min(140.0, (WIDTH - LEFT - RIGHT) / count)


def _x(i: int, count: int) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) / count * (i + 0.5)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _round_up(value: float) -> float:
    """The next 1, 2, 2.5 or 5 times a power of ten that leaves some air above the value."""
    unit = 1.0
    while unit * 10 <= value:
        unit *= 10
    while unit > value:
        unit /= 10
    return next(unit * m for m in (1, 2, 2.5, 5, 10, 20) if unit * m >= 1.08 * value)


def _axes(top_ms: float) -> list[str]:
    parts: list[str] = []
    for quarter in range(5):
        y = _y(quarter / 4)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{RULE}"/>')
        parts.append(
            f'<text class="e" x="{LEFT - 8}" y="{y + 4:.1f}">{top_ms * quarter / 4:g}</text>'
        )
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{y + 4:.1f}" fill="{LINE}">{25 * quarter} %</text>'
        )
    middle, bottom = (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16
    parts.append(f'<text class="m" x="{middle}" y="{bottom}">workers</text>')
    parts.append(f'<text x="{LEFT - 48}" y="{TOP - 20}">step, ms</text>')
    parts.append(f'<text class="e" x="{WIDTH - 24}" y="{TOP - 20}">scaling efficiency</text>')
    return parts


def _legend() -> list[str]:
    parts: list[str] = []
    x = float(LEFT - 48)
    for name, _, color in (*PARTS, ("scaling efficiency", "", LINE)):
        parts.append(f'<rect x="{x:.1f}" y="46" width="14" height="12" rx="3" fill="{color}"/>')
        parts.append(f'<text x="{x + 20:.1f}" y="56">{name}</text>')
        x += 36 + 6.6 * len(name)
    return parts


def _bar(point: Point, x: float, top_ms: float, width: float) -> list[str]:
    figures = point.figures
    parts: list[str] = []
    low = 0.0
    for name, field, color in PARTS:
        ms = float(getattr(figures, field))
        y, height = _y((low + ms) / top_ms), _y(low / top_ms) - _y((low + ms) / top_ms)
        parts.append(
            f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
            f' fill="{color}"><title>{name}: {ms:.1f} ms of {figures.step_ms:.1f} ms</title></rect>'
        )
        low += ms
    label = f"{figures.workers:,}"
    parts.append(f'<text class="m" x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}">{label}</text>')
    return parts


def _efficiency_line(points: Sequence[Point]) -> list[str]:
    spots = [
        (_x(i, len(points)), _y(min(point.scaling_efficiency, 110) / 100), point)
        for i, point in enumerate(points)
    ]
    path = " ".join(f"{'ML'[i > 0]}{x:.1f} {y:.1f}" for i, (x, y, _) in enumerate(spots))
    parts = [f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="2.5"/>']
    for x, y, point in spots:
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{PAPER}" stroke="{LINE}"'
            ' stroke-width="2.5"/>'
        )
        text = f"{point.scaling_efficiency:.1f} %"
        parts.append(f'<text class="v" x="{x:.1f}" y="{y - 10:.1f}">{text}</text>')
    return parts
