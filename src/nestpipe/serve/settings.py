"""The settings of serving."""

from __future__ import annotations

from dataclasses import dataclass

from nestpipe.config import fraction, not_negative, positive
from nestpipe.deprecated import renamed_fields
from nestpipe.errors import ConfigError


@renamed_fields
@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """One instance: its target, its memory, and what it may spend on prefixes."""

    target_ms: float = 50.0
    """P99 that a ranking must keep."""
    window_ms: float = 100.0
    """Time from a signal to its ranking: a prefix must be ready within it, or so soon after that
    the ranking can wait and still keep the target."""
    life_s: float = 0.5
    """How long a prefix waits for its ranking in device memory before it is given up."""
    margin: float = 0.1
    """Part of the target that is kept free: an inline ranking that would need it is cut."""
    risk: float = 0.2
    """Part of the target that an inline ranking must leave free, or its signal is acted on.

    More than `margin`, so that what was not prepared is not cut when it takes a little longer.
    """
    device_mb: float = 1024.0
    """Device memory for prefixes: a hard bound."""
    host_mb: float = 4096.0
    """Host memory for prefixes of users who may return; 0: none are kept."""
    host_ttl_s: float = 600.0
    """How long they are kept there."""
    reloads: int = 2
    """Prefixes that come back from host memory at the same time, at most."""
    reload_by_layer: bool = True
    """Whether a ranking may begin when the first layer is back; off: when all of them are."""
    prefix_share: float = 0.5
    """Part of the device's time that signals may take."""
    chunk: int = 512
    """Events of a prefix that are computed at a time: a ranking waits no longer than for one."""
    batch: int = 8
    """Rankings that are computed together, at most."""
    cut_length: int = 512
    """Events that an inline ranking keeps where the full length would miss the target."""
    max_events: int = 65536
    """Longest history that is accepted."""
    max_candidates: int = 4096
    """Most candidates that are accepted."""
    queue: int = 1024
    """Rankings that may wait; more are shed."""
    relay: bool = True
    """Whether signals are acted on; off: everything is inline."""
    admission: bool = True
    """Whether only rankings at risk are prepared; off: all are."""
    single_flight: bool = True
    """Whether two who need the same prefix share one fill or reload."""

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


# The settings of the HTTP service around an instance or a router.


MOST_DEADLINE_S = 60.0
"""No caller may ask an instance to work longer than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpSettings:
    """What one caller, and all of them together, may ask of a process."""

    body_mb: float = 8.0
    """Largest body of a request."""
    bodies_mb: float = 256.0
    """Bodies of all requests in hand; those that would need more are shed."""
    requests: int = 512
    """Requests in hand; more are shed."""
    connections: int = 2048
    """Open connections; more are turned away."""
    header_timeout_s: float = 10.0
    """How long the headers of a request may take to arrive."""
    body_timeout_s: float = 10.0
    """How long a body may take to arrive."""
    idle_timeout_s: float = 75.0
    """How long a connection without requests is kept."""
    drain_s: float = 30.0
    """How long accepted requests may take once the process was told to stop."""
    negative_ids: bool = False
    """Whether items may be negative."""
    probe_s: float = 0.5
    """Time between two questions of the router to an instance whether it is well."""
    answer_s: float = 10.0
    """How long the router waits for an instance before it asks another."""

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
