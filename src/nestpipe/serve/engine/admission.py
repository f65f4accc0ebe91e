"""Admission control: act on a signal only where its ranking might miss the target.

The paper calls this the trigger. It needs predictions (`Costs`), what the engine is busy with
(`EngineLoad`), and the length of the history.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from nestpipe.errors import DataError
from nestpipe.serve.engine.cost_model import Costs, Predicts, Work
from nestpipe.serve.settings import ServeSettings
from nestpipe.serve.types import AdmissionOutcome, Clock, History, RankRequest

_log = logging.getLogger(__name__)

REFRESH_S = 1.0
"""How often live measurements change the predictions."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an instance is busy with when a signal comes."""

    live_bytes: int = 0
    """Device memory that prefixes hold or have been promised."""
    rank_queue_ms: float = 0.0
    """How long a ranking would wait before it is computed."""
    prefix_queue_ms: float = 0.0
    """How long a prefix would."""
    already: bool = False
    """Whether this prefix is in device or host memory, or on its way."""


class AdmissionPolicy(Protocol):
    """Decides which signals are acted on; `AdmissionControl` is one."""

    @property
    def costs(self) -> Predicts: ...
    def decide(self, length: int, candidates: int, load: EngineLoad) -> AdmissionOutcome: ...
    def observe(self, work: Work, ms: float, size: int, candidates: int = 0) -> None: ...


def at_risk(
    length: int, candidates: int, queue_ms: float, costs: Costs, settings: ServeSettings
) -> bool:
    """Whether an inline ranking at full length might miss the target.

    Asked with more to spare than the ranking itself will be: what takes a little longer by then
    than was predicted here would else be neither prepared nor in time, and cut.
    """
    allowed_ms = settings.target_ms * (1 - settings.risk)
    return costs.inline_ms(length, candidates) + queue_ms > allowed_ms


def fits_window(
    length: int, candidates: int, queue_ms: float, costs: Costs, settings: ServeSettings
) -> bool:
    """Whether the prefix would be ready in time for its ranking, which may wait for it a while."""
    allowed_ms = settings.target_ms * (1 - settings.margin)
    spare_ms = max(0.0, allowed_ms - costs.cached_ms(length, candidates))
    return costs.prefix_ms(length) + queue_ms <= settings.window_ms + spare_ms


def fits_memory(num_bytes: int, live_bytes: int, settings: ServeSettings) -> bool:
    """Whether device memory has room for the prefix, a hard limit."""
    return live_bytes + num_bytes <= device_bytes(settings)


def device_bytes(settings: ServeSettings) -> int:
    """The memory for prefixes, in bytes."""
    return int(settings.device_mb * 2**20)


def seconds_apart(length: int, num_bytes: int, costs: Costs, settings: ServeSettings) -> float:
    """Mean time between prefixes of this size at the highest rate that memory and time allow.

    Memory: by Little's law, a prefix that lives `life_s` may come every life_s * bytes / bound.
    Time: one that takes t of a device of which signals may have a share, every t / share.
    """
    memory_s = settings.life_s * num_bytes / device_bytes(settings)
    prefix_s = costs.prefix_ms(length) / 1e3
    load_s = prefix_s / settings.prefix_share if settings.prefix_share else float("inf")
    return max(memory_s, load_s)


class TokenBucket:
    """A token bucket in seconds: it gains one per second, and admissions spend them.

    It may be overdrawn by one admission, so that one that costs more than the bucket holds is late,
    not impossible; over any time T at most T + burst + one admission is spent.
    """

    def __init__(self, burst_s: float, now: float):
        self.burst_s = burst_s
        self._level_s = burst_s
        self._at = now

    def spend(self, seconds: float, now: float) -> bool:
        """Take so many seconds; whether there was anything left to take from."""
        self._level_s = min(self.burst_s, self._level_s + max(0.0, now - self._at))
        self._at = max(self._at, now)
        if self._level_s <= 0 or seconds == float("inf"):
            return False
        self._level_s -= seconds
        return True


class AdmissionControl:
    """Decides about signals and counts its decisions; thread-safe."""

    def __init__(
        self, settings: ServeSettings, costs: Costs, kv_bytes: Callable[[int], int], clock: Clock
    ):
        self.settings = settings
        self.costs = costs
        self._kv_bytes = kv_bytes
        self._clock = clock
        self._bucket = TokenBucket(settings.window_ms / 1e3, clock.now())
        self._refreshed = clock.now()
        self._counts = dict.fromkeys(AdmissionOutcome, 0)
        self._lock = threading.Lock()

    def decide(self, length: int, candidates: int, load: EngineLoad) -> AdmissionOutcome:
        """Whether to fill the prefix; a fault in here is an outcome, never an error."""
        try:
            outcome = self._decide(length, candidates, load)
        except Exception:  # noqa: BLE001  without a decision the ranking runs inline
            _log.warning("admission control failed; the ranking runs inline", exc_info=True)
            outcome = AdmissionOutcome.FAILED
        with self._lock:
            self._counts[outcome] += 1
        return outcome

    def _decide(self, length: int, candidates: int, load: EngineLoad) -> AdmissionOutcome:
        now, settings, costs = self._clock.now(), self.settings, self.costs
        self._refresh(now)
        num_bytes = self._kv_bytes(length)
        if load.already:
            return AdmissionOutcome.ALREADY_CACHED
        if settings.admission:
            if not at_risk(length, candidates, load.rank_queue_ms, costs, settings):
                return AdmissionOutcome.NOT_AT_RISK
            if not fits_window(length, candidates, load.prefix_queue_ms, costs, settings):
                return AdmissionOutcome.REJECTED_WINDOW
        if not fits_memory(num_bytes, load.live_bytes, settings):
            return AdmissionOutcome.REJECTED_FOOTPRINT
        if settings.admission:
            seconds = seconds_apart(length, num_bytes, costs, settings)
            with self._lock:
                if not self._bucket.spend(seconds, now):
                    return AdmissionOutcome.REJECTED_LOAD
        return AdmissionOutcome.ADMITTED

    def observe(self, work: Work, ms: float, size: int, candidates: int = 0) -> None:
        """Tell what a piece of work took, so that predictions follow."""
        self.costs.observe(work, ms, self._clock.now(), size, candidates)

    def renew(self, costs: Costs) -> None:
        """Predict by other costs: those of a model that has become the current one."""
        self.costs = costs

    def _refresh(self, now: float) -> None:
        with self._lock:
            if now < self._refreshed + REFRESH_S:
                return
            self._refreshed = now
        self.costs.refresh(now)

    def counts(self) -> dict[AdmissionOutcome, int]:
        """How often each outcome was given so far."""
        with self._lock:
            return dict(self._counts)


def check_history(history: History, settings: ServeSettings) -> None:
    """Refuse what cannot be a history."""
    if len(history) > settings.max_events:
        raise DataError(
            f"a history has {len(history)} events and at most {settings.max_events} are accepted; "
            "send the newest"
        )
    if history.times_N is not None and len(history.times_N) != len(history):
        raise DataError(
            f"a history has {len(history)} events and {len(history.times_N)} times; "
            "give a time for each event, or none"
        )


def check_request(request: RankRequest, settings: ServeSettings) -> None:
    """Refuse what cannot be ranked."""
    check_history(request.long, settings)
    check_history(request.short, settings)
    total, candidates = len(request.long) + len(request.short), len(request.candidates_C)
    if total > settings.max_events:
        raise DataError(
            f"a ranking has {total} events and at most {settings.max_events} are accepted; "
            "send the newest"
        )
    if not 0 < candidates <= settings.max_candidates:
        raise DataError(
            f"a ranking has {candidates} candidates; give 1 to {settings.max_candidates}"
        )
    if request.deadline_s is not None and not request.deadline_s > 0:
        raise DataError(f"a deadline is {request.deadline_s} s; give a number above 0, or none")
