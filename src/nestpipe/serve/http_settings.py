"""The settings of the HTTP service around an instance or a router."""

from __future__ import annotations

from dataclasses import dataclass

from nestpipe.config import positive

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
