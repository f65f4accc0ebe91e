"""The types of serving: requests, prefixes, answers, and the protocols of models and services."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nestpipe.deprecated import old_names
from nestpipe.errors import RunError, ShedError

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
"""A ranking with no time left is still asked for."""


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
    """Seconds from now until an answer is worth nothing; None: the target of the service."""
    context: Context = NO_CONTEXT

    def after(self, waited_s: float) -> RankRequest:
        """With what is left of its deadline; late is better than never, so that is above 0."""
        if self.deadline_s is None:
            return self
        return replace(self, deadline_s=max(self.deadline_s - waited_s, LEAST_DEADLINE_S))


class Path(StrEnum):
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
    path: Path
    length_used: int
    """Events that the scores rest on, long and short."""
    version: str
    stages_ms: Mapping[str, float] = field(default_factory=dict[str, float])
    """Milliseconds by stage: queue, acquire, compute, ..."""


class LayerEvents:
    """Which layers of a prefix are readable, between the thread that copies and those that read.

    One thread adds layers in order; any number of threads wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event | None] = []
        self._failed = False
        self._change = threading.Condition()

    def add(self, event: torch.cuda.Event | None) -> None:
        """The next layer is readable; with a CUDA event, once the device has reached it."""
        with self._change:
            self._events.append(event)
            self._change.notify_all()

    def fail(self) -> None:
        """The copy failed: whoever waits for a layer gets an error."""
        with self._change:
            self._failed = True
            self._change.notify_all()

    def wait_for(self, layer: int) -> None:
        """Return when kernels that this thread launches next may read the layer.

        On a GPU the thread waits only until the copy is enqueued; its current stream then waits for
        the copy's event.
        """
        with self._change:
            self._change.wait_for(lambda: self._failed or layer < len(self._events))
            if self._failed:
                raise RunError("a prefix came back only in part; compute it again")
            event = self._events[layer]
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


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
        """Memory of a prefix of so many events."""
        ...

    def to_host(self, kv: KV) -> KV:
        """A copy in (pinned) host memory, complete when this returns."""
        ...

    def to_device(self, kv: KV) -> KV:
        """A copy in device memory, ready for the next call of `rank`."""
        ...


def has_prefix(model: RankModel) -> bool:
    """Whether it computes a prefix before candidates are known; else all rankings are inline."""
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
