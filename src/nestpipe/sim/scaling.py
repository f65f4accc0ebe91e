"""Scaling curves: the same plan and work at more and more workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from nestpipe.schedule.plans import Plan
from nestpipe.sim.cluster import Cluster
from nestpipe.sim.costs import Scale
from nestpipe.sim.fit import FittedCosts
from nestpipe.sim.report import DEFAULT_BATCHES, Figures, simulate


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
