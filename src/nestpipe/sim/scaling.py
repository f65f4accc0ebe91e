"""Scaling curves: the same plan and work at more and more workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from nestpipe.schedule import Plan, PlanOptions, plan
from nestpipe.sim.cluster import Cluster
from nestpipe.sim.costs import Layout, Scale, merged_bytes
from nestpipe.sim.report import DEFAULT_BATCHES, Figures, simulate
from nestpipe.sim.trace_costs import FittedCosts


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
