"""The types of serving: settings, requests, prefixes, answers, protocols of models and services.

Imports no torch: the command line reads settings before it is needed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from nestpipe.config import fraction, not_negative, positive
from nestpipe.deprecated import old_names, renamed_fields
from nestpipe.errors import ConfigError, ShedError

if TYPE_CHECKING:
    from torch import Tensor

    from nestpipe.serve.engine.kv_memory import LayerEvents


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


# Shapes: N events of a history, C candidates, L layers, H heads, A width of keys, V width of values

Ids = NDArray[np.int64]
Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class History:
    """Events of one user, oldest first."""

    items_N: Ids
    times_N: Ids | None = None
    """Own time of each event, whole numbers; needed where the model reads times."""

    def __len__(self) -> int:
        return len(self.items_N)

    def last(self, count: int) -> History:
        """The newest events."""
        start = max(0, len(self) - count)
        return History(self.items_N[start:], None if self.times_N is None else self.times_N[start:])

    def joined(self, newer: History) -> History:
        """This history, then a newer part of it."""
        times = None
        if self.times_N is not None and newer.times_N is not None:
            times = np.concatenate([self.times_N, newer.times_N])
        return History(np.concatenate([self.items_N, newer.items_N]), times)


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """The cache key of a prefix: everything that its keys and values depend on."""

    user: str
    version: str
    """Of the model."""
    length: int
    events: str
    """A hash of the prefix's items and times."""
    dtype: str

    @classmethod
    def of(cls, user: str, history: History, version: str, dtype: str) -> PrefixKey:
        digest = hashlib.blake2b(np.ascontiguousarray(history.items_N).tobytes(), digest_size=16)
        if history.times_N is not None:
            digest.update(np.ascontiguousarray(history.times_N).tobytes())
        return cls(user, version, len(history), digest.hexdigest(), dtype)


@dataclass(frozen=True, slots=True)
class Signal:
    """The early leg: a user whose ranking is about to come."""

    user: str
    long: History


Values = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Context:
    """What a model without a prefix reads besides the candidates' own keys."""

    keys: Mapping[str, Ids] = field(default_factory=dict[str, Ids])
    """By feature, the same for all candidates."""
    values: Mapping[str, Values] = field(default_factory=dict[str, Values])
    """By dense column, the same for all: () a number, or (F,)."""
    candidate_keys: Mapping[str, Sequence[Ids]] = field(default_factory=dict[str, Sequence[Ids]])
    """By feature, a list for each candidate."""
    candidate_values: Mapping[str, Values] = field(default_factory=dict[str, Values])
    """By dense column, (C,) or (C, F)."""

    def __bool__(self) -> bool:
        return bool(self.keys or self.values or self.candidate_keys or self.candidate_values)


NO_CONTEXT = Context()

LEAST_DEADLINE_S = 0.001
"""A ranking with no time left is still sent on."""


@dataclass(frozen=True, slots=True)
class RankRequest:
    """The late leg: candidates to score."""

    user: str
    long: History
    short: History
    """Events after the long history; never cached."""
    candidates_C: Ids
    time: int | None = None
    """When it is asked, for models that read times."""
    deadline_s: float | None = None
    """Deadline in seconds from now; None: the target of the service."""
    context: Context = NO_CONTEXT

    def after(self, waited_s: float) -> RankRequest:
        """The same request with the rest of its deadline; at least a minimum, since late is better
        than never."""
        if self.deadline_s is None:
            return self
        return replace(self, deadline_s=max(self.deadline_s - waited_s, LEAST_DEADLINE_S))


class RankPath(StrEnum):
    """How a ranking was computed."""

    HBM_HIT = "hbm_hit"
    """The prefix was ready in device memory."""
    LATE_HIT = "late_hit"
    """It was on its way, and ready in time."""
    DRAM_HIT = "dram_hit"
    """It was reloaded from host memory."""
    MISS_FULL = "miss_full"
    """Inline, at full length."""
    MISS_CUT = "miss_cut"
    """Inline, truncated to the newest events to meet the target."""


class AdmissionOutcome(StrEnum):
    """What admission control did with a signal."""

    NOT_AT_RISK = "not_at_risk"
    ADMITTED = "admitted"
    ALREADY_CACHED = "already_cached"
    REJECTED_FOOTPRINT = "rejected_footprint"
    REJECTED_LOAD = "rejected_load"
    REJECTED_WINDOW = "rejected_window"
    FAILED = "failed"
    """Admission control failed: the ranking runs inline."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Scores, and how they were computed."""

    scores_C: Scores
    path: RankPath
    length_used: int
    """Events that the scores rest on, long and short."""
    version: str
    stages_ms: Mapping[str, float] = field(default_factory=dict[str, float])
    """Milliseconds per stage: queue, acquire, compute, ..."""


@dataclass(frozen=True, slots=True)
class KV:
    """Keys and values of one user's prefix, for every layer."""

    keys_LNHA: Tensor
    values_LNHV: Tensor
    times_N: Tensor | None = None
    layer_events: LayerEvents | None = None
    """Says when each layer is there, while they are on their way; times are there from the start.

    None: all is there.
    """

    def __len__(self) -> int:
        return self.keys_LNHA.shape[1]

    @property
    def num_bytes(self) -> int:
        parts = [self.keys_LNHA, self.values_LNHV]
        parts += [] if self.times_N is None else [self.times_N]
        return sum(part.numel() * part.element_size() for part in parts)


@dataclass(frozen=True, slots=True)
class PrefixItem:
    """Events to be turned into keys and values, after those of `past`."""

    history: History
    past: KV | None = None


@dataclass(frozen=True, slots=True)
class RankItem:
    """One ranking: the events after `past`, or all of them, and the candidates."""

    history: History
    candidates_C: Ids
    past: KV | None = None
    time: int | None = None
    context: Context = NO_CONTEXT


class RankModel(Protocol):
    """The model that is served.

    `prefix` and `rank` are called from one thread, `to_host` and `to_device` from others.
    """

    @property
    def version(self) -> str: ...

    @property
    def dtype(self) -> str:
        """Of keys and values: float32 or bfloat16."""
        ...

    def prefix(self, items: Sequence[PrefixItem]) -> list[KV]:
        """Keys and values of everything so far, the past included; each item by itself."""
        ...

    def rank(self, items: Sequence[RankItem]) -> list[Scores]:
        """Scores of the candidates of each item, whatever else is in the batch."""
        ...

    def kv_bytes(self, length: int) -> int:
        """Memory of a prefix of this length."""
        ...

    def to_host(self, kv: KV) -> KV:
        """A copy in (pinned) host memory, complete when this returns."""
        ...

    def to_device(self, kv: KV) -> KV:
        """A copy in device memory, ready for the next call of `rank`."""
        ...


def has_prefix(model: RankModel) -> bool:
    """Whether it computes prefixes before candidates are known; else all rankings are inline."""
    return getattr(model, "has_prefix", True)


class ClosingError(ShedError):
    """The instance closes: unlike after overload, another may answer at once."""


class Clock(Protocol):
    """A source of time that tests can replace."""

    def now(self) -> float:
        """Seconds."""
        ...


class RealClock:
    """The clock of the machine."""

    def now(self) -> float:
        return time.monotonic()


class RankService(Protocol):
    """Answers both legs: an instance, or a router in front of several."""

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        """Decide at once; the prefix is computed in the background."""
        ...

    def rank(self, request: RankRequest) -> Future[Answer]:
        """An answer, unless the request itself is bad."""
        ...

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name, for /metrics."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Take no new work, finish what is there; whether all of it was finished."""
        ...


__getattr__ = old_names(__name__)
