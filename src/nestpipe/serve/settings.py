"""The settings of an instance, and of the HTTP service around it or a router."""

from __future__ import annotations

from dataclasses import dataclass

from nestpipe.config import fraction, not_negative, positive
from nestpipe.deprecated import renamed_fields
from nestpipe.errors import ConfigError


@renamed_fields
@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """One instance: its latency target, its memory, and its budget for prefixes."""

    target_ms: float = 50.0
    """P99 target of a ranking, in milliseconds."""
    window_ms: float = 100.0
    """Time from a signal to its ranking; admission control rejects a prefix that would be ready too
    late for a ranking that waits as long as its target allows."""
    life_s: float = 0.5
    """TTL in device memory of a prefix whose ranking does not come."""
    margin: float = 0.1
    """Safety margin, a fraction of the target: an inline ranking that would use it is truncated."""
    risk: float = 0.2
    """Fraction of the target that an inline ranking must leave free, or its signal is acted on.

    At least `margin`: else rankings are truncated that nothing was prepared for.
    """
    device_mb: float = 1024.0
    """Device memory for prefixes, a hard limit."""
    host_mb: float = 4096.0
    """Host memory for prefixes of returning users; 0 turns the host tier off."""
    host_ttl_s: float = 600.0
    """TTL of a prefix in the host tier."""
    reloads: int = 2
    """Reloads from the host tier at the same time, at most."""
    reload_by_layer: bool = True
    """Start a ranking when the first layer is reloaded; off: when all layers are."""
    prefix_share: float = 0.5
    """Fraction of the device's time for prefixes."""
    chunk: int = 512
    """Events of a prefix that are computed at a time; a ranking waits for one chunk at most."""
    batch: int = 8
    """Largest batch of rankings."""
    cut_length: int = 512
    """Newest events that a truncated ranking keeps."""
    max_events: int = 65536
    """Longest history that is accepted, in events."""
    max_candidates: int = 4096
    """Most candidates that are accepted."""
    queue: int = 1024
    """Length of the rank queue; further rankings are shed."""
    relay: bool = True
    """Act on signals; off: every ranking is inline."""
    admission: bool = True
    """Admission control: prepare only rankings at risk; off: prepare all."""
    single_flight: bool = True
    """Share one fill or reload among requests that need the same prefix."""

    candidate_feature: str = ""
    """Models without a prefix: the feature that candidates are keys of; empty: the model's own
    `candidate_feature`, or `item`."""

    def __post_init__(self) -> None:
        for name in ("target_ms", "window_ms", "life_s", "device_mb", "host_ttl_s", "reloads"):
            positive(name, getattr(self, name))
        for name in ("chunk", "batch", "cut_length", "max_events", "max_candidates", "queue"):
            positive(name, getattr(self, name))
        not_negative("host_mb", self.host_mb)
        fraction("margin", self.margin)
        fraction("risk", self.risk)
        if self.risk < self.margin:
            raise ConfigError(
                f"risk is {self.risk} and margin is {self.margin}; give a risk that is not below "
                "the margin, or rankings are cut that nothing was prepared for"
            )
        fraction("prefix_share", self.prefix_share)


MOST_DEADLINE_S = 60.0
"""Longest deadline that a caller may set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpSettings:
    """Limits of one process, per request and in total."""

    body_mb: float = 8.0
    """Largest body of a request."""
    bodies_mb: float = 256.0
    """Bodies of all requests in flight; further requests are shed."""
    requests: int = 512
    """Requests in flight; further ones are shed."""
    connections: int = 2048
    """Open connections; further ones are refused."""
    header_timeout_s: float = 10.0
    """How long the headers of a request may take to arrive."""
    body_timeout_s: float = 10.0
    """How long a body may take to arrive."""
    idle_timeout_s: float = 75.0
    """How long a connection without requests is kept."""
    drain_s: float = 30.0
    """Time for accepted requests to finish after SIGTERM."""
    negative_ids: bool = False
    """Whether items may be negative."""
    probe_s: float = 0.5
    """Interval of the router's health checks."""
    answer_s: float = 10.0
    """How long the router waits for an instance before it tries another."""

    def __post_init__(self) -> None:
        for name in ("body_mb", "bodies_mb", "requests", "connections", "header_timeout_s"):
            positive(name, getattr(self, name))
        for name in ("body_timeout_s", "idle_timeout_s", "drain_s", "probe_s", "answer_s"):
            positive(name, getattr(self, name))

    @property
    def body_bytes(self) -> int:
        return int(self.body_mb * 1e6)

    @property
    def bodies_bytes(self) -> int:
        return int(self.bodies_mb * 1e6)
