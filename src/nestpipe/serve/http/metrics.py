"""/metrics: the counters of a service, and how long its answers took."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from nestpipe.deprecated import old_metrics
from nestpipe.serve.kv_cache.device_pool import EntryState
from nestpipe.serve.types import AdmissionOutcome, Path

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
                for old in old_metrics(name):
                    text = f"Old name of {metric_name(name)}, for one release"
                    yield FAMILIES[about.kind](metric_name(old), text, value=value)

    def describe(self) -> Iterable[Metric]:
        return ()  # asked for when registered, where a service may not answer yet


def metric_name(name: str) -> str:
    """A name of `RankService.stats` as Prometheus allows it."""
    return "nestpipe_" + re.sub(r"\W", "_", name, flags=re.ASCII)


Kind = Literal["counter", "gauge", "unknown"]

COUNTERS = {
    **{f"path_{path}": f"Rankings answered by way of {path}" for path in Path},
    **{f"outcome_{outcome}": f"Signals that were {outcome}" for outcome in AdmissionOutcome},
    "fills": "Prefixes that were computed",
    "failed_fills": "Prefixes whose computation failed",
    "abandoned_fills": "Prefixes that nobody wanted any more before they were complete",
    "wasted_prefixes": "Prefixes that were ready and never read",
    "discarded": "Prefixes thrown away because the model failed on them",
    "reloads": "Prefixes that came back from host memory",
    "failed_reloads": "Reloads that failed",
    "offloads": "Prefixes copied to host memory",
    "failed_offloads": "Copies to host memory that failed",
    "batches": "Batches of rankings that were computed",
    "batched_rankings": "Rankings in those batches",
    "failed_batches": "Batches on which the model failed, so that each ranking was tried alone",
    "failed_rankings": "Rankings that failed alone and whole",
    "early_batches": "Batches that began before all layers of a prefix were back",
    "cancelled": "Rankings that nobody waited for any more",
    "shed": "Rankings turned away because too many waited",
    "refused_closing": "Signals and rankings turned away because the instance was closing",
    "faults": "Faults that cost time, but no answer",
    "device_evicted": "Read prefixes that made room in device memory",
    "host_evicted": "Prefixes that made room in host memory",
    "host_expired": "Prefixes in host memory that nobody used for too long",
    "http_shed_requests": "Requests turned away because too many were in hand",
    "http_shed_bodies": "Requests turned away because bodies filled their memory",
    "http_too_large": "Requests whose body was too large",
    "http_slow": "Requests whose body took too long",
    "router_signals": "Signals that came to the router",
    "router_lost_signals": "Signals that met a fault of an instance",
    "router_rankings": "Rankings that came to the router",
    "router_retries": "Rankings asked for again at the next instance",
    "router_sheds": "Rankings that instances turned away to the end",
    "router_errors": "Rankings that failed everywhere, or were bad",
}
GAUGES = {
    **{f"entries_{state}": f"Prefixes in device memory that are {state}" for state in EntryState},
    "device_bytes": "Device memory that prefixes hold or are promised",
    "device_bytes_bound": "Most device memory for prefixes",
    "host_bytes": "Host memory that prefixes hold",
    "host_bytes_bound": "Most host memory for prefixes",
    "host_entries": "Prefixes in host memory",
    "open_rankings": "Rankings that are not answered yet",
    "queue_rankings": "Rankings in line",
    "queue_fills": "Prefixes to be computed",
    "queue_reloads": "Prefixes to be reloaded, or on their way",
    "queue_offloads": "Prefixes to be copied to host memory",
    "largest_batch": "Most rankings that were computed together so far",
    "broken": "1 where the thread that computes has failed",
    "http_requests": "Requests in hand",
    "http_body_bytes": "Bytes of the bodies in hand",
    "router_in_flight": "Rankings that the router waits for",
    "router_members": "Instances that share the users",
    "router_members_alive": "Instances that are taken to be alive",
    "router_imbalance": "Most first choices of an instance over the mean",
}


@dataclass(frozen=True, slots=True)
class MetricInfo:
    """The type and the help of a metric."""

    kind: Kind
    help: str


def described(name: str) -> MetricInfo:
    """What a number of `RankService.stats` is; the HTTP service of a router has the same names."""
    for known in (name, name.removeprefix("router_")):
        if known in COUNTERS:
            return MetricInfo("counter", COUNTERS[known])
        if known in GAUGES:
            return MetricInfo("gauge", GAUGES[known])
    return MetricInfo("unknown", name.replace("_", " "))


LARGEST = frozenset({"largest_batch"})
"""Numbers that are the most that was seen: of several instances the largest counts."""


def totals(of_each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Every number added up, or the largest where a sum would say nothing."""
    found: dict[str, float] = {}
    for numbers in of_each:
        for name, number in numbers.items():
            so_far = found.get(name, 0.0)
            found[name] = max(so_far, number) if name in LARGEST else so_far + number
    return found
