"""/metrics: counters, gauges and latency histograms of a service for Prometheus."""

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
from nestpipe.serve.engine.kv_memory import EntryState
from nestpipe.serve.types import AdmissionOutcome, RankPath

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
    """Everything that a process exports to Prometheus."""

    def __init__(self, *stats: Stats) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Stats(stats))
        self._http = Histogram(
            "nestpipe_http_seconds",
            "Latency from the headers of a request to the end of its response",
            ["page", "status"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._rank = Histogram(
            "nestpipe_rank_seconds",
            "Latency of rankings by path",
            ["path"],
            buckets=SECONDS,
            registry=self._registry,
        )

    def observe_http(self, page: str, status: int, seconds: float) -> None:
        """One response; unknown pages share a label, so that callers cannot add more."""
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
    """The numbers of a service, collected at each scrape."""

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
    **{f"path_{path}": f"Rankings with path {path}" for path in RankPath},
    **{f"outcome_{outcome}": f"Signals that were {outcome}" for outcome in AdmissionOutcome},
    "fills": "Prefixes filled",
    "failed_fills": "Fills that failed",
    "abandoned_fills": "Fills abandoned before they were complete",
    "wasted_prefixes": "Prefixes whose ranking did not come in time",
    "discarded": "Prefixes discarded because the model failed on them",
    "reloads": "Prefixes reloaded from host memory",
    "failed_reloads": "Reloads that failed",
    "offloads": "Prefixes offloaded to host memory",
    "failed_offloads": "Offloads that failed",
    "batches": "Batches of rankings",
    "batched_rankings": "Rankings in those batches",
    "failed_batches": "Batches that failed and were retried one by one",
    "failed_rankings": "Rankings that failed alone and inline",
    "early_batches": "Batches that began before all layers of a prefix were reloaded",
    "cancelled": "Rankings cancelled by their callers",
    "shed": "Rankings shed because the queue was full",
    "refused_closing": "Signals and rankings refused because the instance was closing",
    "faults": "Faults after which a ranking ran inline",
    "device_evicted": "Prefixes evicted from device memory",
    "host_evicted": "Prefixes evicted from host memory",
    "host_expired": "Prefixes in host memory whose TTL ended",
    "http_shed_requests": "Requests shed because too many were in flight",
    "http_shed_bodies": "Requests shed because bodies filled their memory",
    "http_too_large": "Requests whose body was too large",
    "http_slow": "Requests whose body took too long",
    "router_signals": "Signals at the router",
    "router_lost_signals": "Signals lost to a fault of an instance",
    "router_rankings": "Rankings at the router",
    "router_retries": "Rankings retried at the next instance",
    "router_sheds": "Rankings shed by the instances",
    "router_errors": "Rankings that failed at every instance, or were bad",
}
GAUGES = {
    **{f"entries_{state}": f"Prefixes in device memory that are {state}" for state in EntryState},
    "device_bytes": "Device memory of prefixes, reservations included",
    "device_bytes_bound": "Limit of device memory for prefixes",
    "host_bytes": "Host memory of prefixes",
    "host_bytes_bound": "Limit of host memory for prefixes",
    "host_entries": "Prefixes in host memory",
    "open_rankings": "Rankings that are not answered yet",
    "queue_rankings": "Rankings in the rank queue",
    "queue_fills": "Prefixes to fill",
    "queue_reloads": "Prefixes to reload, those under way included",
    "queue_offloads": "Prefixes to offload",
    "largest_batch": "Largest batch of rankings so far",
    "broken": "1 if a thread of the instance has died",
    "http_requests": "Requests in flight",
    "http_body_bytes": "Bytes of the bodies in flight",
    "router_in_flight": "Rankings in flight at the router",
    "router_members": "Instances on the hash ring",
    "router_members_alive": "Healthy instances",
    "router_imbalance": "Load of the busiest instance over the mean",
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
"""Maxima: of several instances the largest counts."""


def totals(of_each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sum of every number over instances, or its maximum."""
    found: dict[str, float] = {}
    for numbers in of_each:
        for name, number in numbers.items():
            so_far = found.get(name, 0.0)
            found[name] = max(so_far, number) if name in LARGEST else so_far + number
    return found
