"""/metrics: the counters of a service, and how long its answers took."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from nestpipe.serve.http_metric_names import described

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
PAGES = ("/v1/prefetch", "/v1/rank", "/v1/reload", "/v1/health", "/metrics")

FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "unknown": UnknownMetricFamily,
}
"""By the kind of a number; a counter's name gets `_total` at its end."""

Stats = Callable[[], Mapping[str, float]]


class Metrics:
    """Everything that a process tells Prometheus."""

    def __init__(self, *stats: Stats) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Stats(stats))
        self._http = Histogram(
            "nestpipe_http_seconds",
            "Time from a request's headers to the end of its answer",
            ["page", "status"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._rank = Histogram(
            "nestpipe_rank_seconds",
            "Time that a ranking took, by the way in which it was computed",
            ["path"],
            buckets=SECONDS,
            registry=self._registry,
        )

    def observe_http(self, page: str, status: int, seconds: float) -> None:
        """One answer; pages that do not exist share a name, so that nobody can make more."""
        self._http.labels(page if page in PAGES else "other", str(status)).observe(seconds)

    def observe_rank(self, path: str, seconds: float) -> None:
        """One ranking that was computed."""
        self._rank.labels(path).observe(seconds)

    def text(self, more: Mapping[str, float]) -> bytes:
        """In Prometheus' text format; `more` are numbers that others were asked for."""
        other = CollectorRegistry()
        other.register(_Stats([lambda: more]))
        return generate_latest(self._registry) + generate_latest(other)


class _Stats(Collector):
    """The numbers of a service, asked for when scraped."""

    def __init__(self, stats: Iterable[Stats]) -> None:
        self._stats = tuple(stats)

    def collect(self) -> Iterable[Metric]:
        for source in self._stats:
            for name, value in source().items():
                about = described(name)
                yield FAMILIES[about.kind](metric_name(name), about.help, value=value)

    def describe(self) -> Iterable[Metric]:
        return ()  # asked for when registered, where a service may not answer yet


def metric_name(name: str) -> str:
    """A name of `RankService.stats` as Prometheus allows it."""
    return "nestpipe_" + re.sub(r"\W", "_", name, flags=re.ASCII)
