"""What the numbers of a service are: those that only go up, those that go up and down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nestpipe.serve.slots import State
from nestpipe.serve.types import Outcome, Path

Kind = Literal["counter", "gauge", "unknown"]

COUNTERS = {
    **{f"path_{path}": f"Rankings answered by way of {path}" for path in Path},
    **{f"outcome_{outcome}": f"Signals that were {outcome}" for outcome in Outcome},
    "fills": "Prefixes that were computed",
    "failed_fills": "Prefixes whose computation failed",
    "abandoned_fills": "Prefixes that nobody wanted any more before they were complete",
    "wasted_prefixes": "Prefixes that were ready and never read",
    "discarded": "Prefixes thrown away because the model failed on them",
    "reloads": "Prefixes that came back from host memory",
    "failed_reloads": "Reloads that failed",
    "copies": "Prefixes copied to host memory",
    "failed_copies": "Copies to host memory that failed",
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
    **{f"entries_{state}": f"Prefixes in device memory that are {state}" for state in State},
    "device_bytes": "Device memory that prefixes hold or are promised",
    "device_bytes_bound": "Most device memory for prefixes",
    "host_bytes": "Host memory that prefixes hold",
    "host_bytes_bound": "Most host memory for prefixes",
    "host_entries": "Prefixes in host memory",
    "open_rankings": "Rankings that are not answered yet",
    "queue_rankings": "Rankings in line",
    "queue_fills": "Prefixes to be computed",
    "queue_reloads": "Prefixes to be reloaded, or on their way",
    "queue_copies": "Prefixes to be copied to host memory",
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
class Description:
    """The type and the help of a metric."""

    kind: Kind
    help: str


def described(name: str) -> Description:
    """What a number of `RankService.stats` is; the HTTP service of a router has the same names."""
    for known in (name, name.removeprefix("router_")):
        if known in COUNTERS:
            return Description("counter", COUNTERS[known])
        if known in GAUGES:
            return Description("gauge", GAUGES[known])
    return Description("unknown", name.replace("_", " "))
