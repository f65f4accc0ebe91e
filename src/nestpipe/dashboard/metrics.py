"""/metrics of the dashboard: a run in Prometheus' text format, made anew at each scrape."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nestpipe.dashboard.recorder import FAILED, FINISHED, RUNNING, STOPPED
from nestpipe.dashboard.view import LOST, RunRecords
from nestpipe.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

STATES = (RUNNING, FINISHED, STOPPED, FAILED, LOST)
Sample = tuple[Mapping[str, str], float]


@dataclass(frozen=True, slots=True)
class RunMetric:
    """A metric of training: its name without `nestpipe_train_`, its labels and its help."""

    name: str
    help: str
    labels: tuple[str, ...] = ("rank",)
    kind: Literal["counter", "gauge"] = "counter"

    @property
    def full_name(self) -> str:
        """As a query asks for it."""
        return f"nestpipe_train_{self.name}" + ("_total" if self.kind == "counter" else "")


PLAIN = {
    "steps": "Batches trained",
    "samples": "Samples trained, of the global batches",
    "rows_read": "Rows read from host memory",
    "rows_refreshed": "Rows refreshed from the batch before",
    "rows_written": "Rows written back to host memory",
    "keys_asked": "Keys asked for, the rank's own included",
    "faults": "Gradients that were NaN or inf",
    "seconds": "Seconds of training by the clock",
}
COUNTED = {
    "bytes_sent": "Bytes sent to other ranks",
    "keys_shared": "Keys that the batch before had too, of those compared",
    "keys_compared": "Keys compared with the batch before",
}
SAMPLED = {
    "batches": ("timed_batches", "Batches whose ops were looked at"),
    "step_ms": ("timed_seconds", "Seconds of those batches"),
    "compute_ms": ("compute_seconds", "Seconds of compute and updates in them"),
}
BY_NAME = {
    "exposed_ms": ("exposed_seconds", "op", "Seconds without compute, by the op waited for"),
    "hidden_ms": ("hidden_seconds", "op", "Seconds of an op under compute"),
    "lane_ms": ("lane_seconds", "lane", "Seconds in which a lane ran an op"),
}
METRICS = {
    made.name: made
    for made in (
        *(RunMetric(name, text) for name, text in (PLAIN | COUNTED).items()),
        *(RunMetric(name, text) for name, text in SAMPLED.values()),
        *(RunMetric(name, text, ("rank", label)) for name, label, text in BY_NAME.values()),
        RunMetric("step", "The last step that was written down", kind="gauge"),
        RunMetric("loss", "Mean loss between the last two points", (), "gauge"),
        RunMetric("table_rows", "Rows of a table in host memory", ("rank", "table"), "gauge"),
        RunMetric("pool_slots", "Slots of the pool", kind="gauge"),
        RunMetric("pool_slots_used", "Slots of the pool that are taken", kind="gauge"),
        RunMetric("evaluation", "A metric of the last evaluation", ("split", "metric"), "gauge"),
        RunMetric("last_sign_seconds", "When the rank last gave a sign of life", kind="gauge"),
        RunMetric("state", "1 for the state that the run is in", ("state",), "gauge"),
    )
}
"""Every metric of training, by its short name."""


def exposition(run: RunRecords) -> bytes:
    """The run as Prometheus reads it."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ModuleNotFoundError:
        raise ConfigError(
            "metrics need prometheus_client, which is not installed; pip install 'nestpipe[train]'"
        ) from None
    registry = CollectorRegistry()
    registry.register(_Families(run))  # type: ignore[arg-type]
    return generate_latest(registry)


class _Families:
    """A collector of one run."""

    def __init__(self, run: RunRecords) -> None:
        self._run = run

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        found: dict[str, list[Sample]] = {name: [] for name in METRICS}
        for name, labels, value in _samples(self._run):
            found[name].append((labels, value))
        for name, samples in found.items():
            about = METRICS[name]
            family = families[about.kind](
                f"nestpipe_train_{name}", about.help, labels=list(about.labels)
            )
            for labels, value in samples:
                family.add_metric([labels[label] for label in about.labels], value)
            yield family


def _samples(run: RunRecords) -> Iterator[tuple[str, Mapping[str, str], float]]:
    state, _ = run.status(time.time())
    yield from (("state", {"state": each}, float(each == state)) for each in STATES)
    for record in run.ranks:
        rank = {"rank": str(record.about.get("rank", 0))}
        yield "last_sign_seconds", rank, run.signs[record.about.get("rank", 0)]
        if record.points:
            yield from _of_point(record.points[-1], rank)
    points = run.first.points
    if points:
        before: Mapping[str, Any] = points[-2] if len(points) > 1 else {}
        steps = points[-1]["finite"] - before.get("finite", 0)
        if steps:
            yield "loss", {}, (points[-1]["loss"] - before.get("loss", 0)) / steps
    if run.first.evaluations:
        newest = run.first.evaluations[-1]
        for metric, value in newest["metrics"].items():
            if value is not None:
                yield "evaluation", {"split": str(newest["split"]), "metric": metric}, value


def _of_point(
    point: Mapping[str, Any], rank: Mapping[str, str]
) -> Iterator[tuple[str, Mapping[str, str], float]]:
    yield "step", rank, point["step"]
    yield from ((name, rank, point.get(name, 0)) for name in PLAIN)
    yield from ((name, rank, point.get("counters", {}).get(name, 0)) for name in COUNTED)
    for name, (metric, _) in SAMPLED.items():
        value = point.get(name, 0)
        yield metric, rank, value if name == "batches" else value / 1e3
    for name, (metric, label, _) in BY_NAME.items():
        for kind, spent_ms in point.get(name, {}).items():
            yield metric, {**rank, label: kind}, spent_ms / 1e3
    for table, rows in point.get("tables", {}).items():
        yield "table_rows", {**rank, "table": table}, rows
    if pool := point.get("pool"):
        yield "pool_slots", rank, pool["slots"]
        yield "pool_slots_used", rank, pool["used"]
