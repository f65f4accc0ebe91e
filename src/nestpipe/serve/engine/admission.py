"""Admission control, and the cost model that it predicts with.

It acts on a signal only where its ranking might miss the target; the paper calls this the trigger.
It needs predictions (`Costs`), what the engine is busy with (`EngineLoad`), and the length of the
history. Costs are milliseconds fitted to a calibration, corrected by live requests.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import Protocol, Self

import numpy as np

from nestpipe.errors import ConfigError, DataError, ParseError
from nestpipe.serve.types import AdmissionOutcome, Clock, History, RankRequest, ServeSettings

SAMPLES = 256
"""Live measurements that a bucket keeps."""
ENOUGH = 32
"""Live measurements without which the start-up fit stands alone."""
KEEP_S = 60.0
"""Older ones are forgotten: lengths that stopped running inline must not count as slow forever."""
NO_TIME_MS = 1e-6
"""Below this a prediction is no measure for a ratio."""


class Work(StrEnum):
    """What is timed, and the size that its time grows with."""

    INLINE = "inline"
    """A ranking without a prefix: all of its events, and its candidates."""
    PREFIX = "prefix"
    """Keys and values of a prefix: its events."""
    CACHED = "cached"
    """A ranking with a prefix: the events of the prefix, and the candidates."""
    RELOAD = "reload"
    """A prefix from host to device memory: its bytes."""


Sample = tuple[int, int, float]
"""Size, candidates, milliseconds."""
Bucket = tuple[Work, int, int]
"""Sizes and candidates up to the same powers of two."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Milliseconds as base + n + n^2 + m + n*m, no factor negative: more never costs less."""

    base: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    m: float = 0.0
    nm: float = 0.0

    def at(self, size: int, candidates: int = 0) -> float:
        fixed = self.base + self.m * candidates
        return fixed + size * (self.n + self.nn * size + self.nm * candidates)


def fit(samples: Sequence[Sample]) -> Fit:
    """Least squares of the relative errors over all factors that are not negative.

    Relative, so that the long lengths do not drown the short ones. Every set of factors is tried,
    which is exact and, with five of them, quick.
    """
    if not samples:
        raise ConfigError("there are no measurements to fit costs to; give at least one length")
    n_S, m_S, ms_S = (np.asarray(part, dtype=np.float64) for part in zip(*samples, strict=True))
    terms_TS = np.stack([np.ones_like(n_S), n_S, n_S**2, m_S, n_S * m_S])
    weights_S = 1.0 / np.maximum(ms_S, max(float(ms_S.max()), NO_TIME_MS) * 1e-3)
    scales_T = np.maximum(terms_TS.max(axis=1), 1.0)
    rows_ST = (terms_TS / scales_T[:, None] * weights_S).T
    factors_T = _not_negative_least_squares(rows_ST, ms_S * weights_S) / scales_T
    return Fit(*(float(factor) for factor in factors_T))


def _not_negative_least_squares(rows_ST: np.ndarray, wanted_S: np.ndarray) -> np.ndarray:
    """The best of all subsets of columns whose own least squares solution is not negative."""
    columns = range(rows_ST.shape[1])
    best_T, least = np.zeros(rows_ST.shape[1]), float(wanted_S @ wanted_S)
    rounding = 1e-18 * least  # of errors that are squares: exact fits differ by less
    for size in range(1, len(columns) + 1):
        for chosen in map(list, combinations(columns, size)):
            solution = np.linalg.lstsq(rows_ST[:, chosen], wanted_S, rcond=None)[0]
            error = float(np.sum((rows_ST[:, chosen] @ solution - wanted_S) ** 2))
            # The first and smaller set wins a tie, so noise in the last bit chooses no factor.
            if (solution >= 0).all() and error < least * (1 - 1e-9) - rounding:
                best_T, least = np.zeros(rows_ST.shape[1]), error
                best_T[chosen] = solution
    return best_T


class Predicts(Protocol):
    """Predicts the milliseconds of work; `Costs` is one."""

    def inline_ms(self, length: int, candidates: int) -> float: ...
    def prefix_ms(self, length: int) -> float: ...
    def cached_ms(self, length: int, candidates: int) -> float: ...
    def reload_ms(self, num_bytes: int) -> float: ...


class Costs:
    """Predicted milliseconds: the fit, times the live P99 of measured over fitted.

    The ratio is kept by bucket, so inside one the prediction still follows the length. Where live
    measurements are few the fit stands alone. The highest readings are left out: a length that is
    predicted too cheap runs inline, is measured and corrected; one predicted too expensive never
    would be.
    """

    def __init__(self, fits: Mapping[Work, Fit], ratios: Mapping[Bucket, float] | None = None):
        self.fits = {work: fits.get(work, Fit()) for work in Work}
        self.ratios: Mapping[Bucket, float] = dict(ratios or {})
        self._given = self.ratios
        self._recent: dict[Bucket, deque[tuple[float, float]]] = {}
        self._lock = threading.Lock()

    def inline_ms(self, length: int, candidates: int) -> float:
        return self._predict(Work.INLINE, length, candidates)

    def prefix_ms(self, length: int) -> float:
        return self._predict(Work.PREFIX, length)

    def cached_ms(self, length: int, candidates: int) -> float:
        return self._predict(Work.CACHED, length, candidates)

    def reload_ms(self, num_bytes: int) -> float:
        return self._predict(Work.RELOAD, num_bytes)

    def _predict(self, work: Work, size: int, candidates: int = 0) -> float:
        ratio = self.ratios.get(bucket(work, size, candidates), 1.0)
        return ratio * self.fits[work].at(size, candidates)

    def observe(self, work: Work, ms: float, now: float, size: int, candidates: int = 0) -> None:
        """Record the time of one piece of work; `refresh` uses it."""
        ratio = ms / max(self.fits[work].at(size, candidates), NO_TIME_MS)
        with self._lock:
            recent = self._recent.setdefault(
                bucket(work, size, candidates), deque[tuple[float, float]](maxlen=SAMPLES)
            )
            recent.append((now, ratio))

    def refresh(self, now: float) -> None:
        """Take the P99 of every bucket that has enough measurements of the last minute."""
        with self._lock:
            for samples in self._recent.values():
                while samples and samples[0][0] < now - KEEP_S:
                    samples.popleft()
            live = {
                where: p99(ratio for _, ratio in samples)
                for where, samples in self._recent.items()
                if len(samples) >= ENOUGH
            }
        self.ratios = {**self._given, **live}

    def to_json(self) -> str:
        """The fits and the present ratios; single measurements stay behind."""
        fits = {
            str(work): [fit.base, fit.n, fit.nn, fit.m, fit.nm] for work, fit in self.fits.items()
        }
        ratios = [[*where, ratio] for where, ratio in self.ratios.items()]
        return json.dumps({"fits": fits, "ratios": ratios})

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            held = json.loads(text)
            fits = {Work(name): Fit(*map(float, held["fits"][name])) for name in held["fits"]}
            ratios = {
                (Work(work), int(size), int(candidates)): float(ratio)
                for work, size, candidates, ratio in held["ratios"]
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ParseError(f"costs do not read as such ({error}); calibrate again") from None
        return cls(fits, ratios)


def bucket(work: Work, size: int, candidates: int = 0) -> Bucket:
    """Where live measurements of about this size are kept."""
    return work, int(size).bit_length(), int(candidates).bit_length()


def p99(values: Iterable[float]) -> float:
    """The smallest value that 99 of 100 do not exceed."""
    ordered = sorted(values)
    return ordered[-(-99 * len(ordered) // 100) - 1]


_log = logging.getLogger(__name__)

REFRESH_S = 1.0
"""How often live measurements change the predictions."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of an instance when a signal comes."""

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
    """Whether an inline ranking at full length might miss the target. The margin is larger than
    that of the ranking itself: otherwise a ranking that takes a little longer than predicted here
    would be neither prepared nor in time, and would be cut.
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
        """Take this many seconds; whether the budget had any left."""
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
        """Record the time of a piece of work, so that predictions follow."""
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
    """Refuse a malformed history."""
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
    """Refuse a malformed ranking."""
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
