"""The cost model: milliseconds fitted to a calibration, corrected by live requests."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import Protocol, Self

import numpy as np

from nestpipe.errors import ConfigError, ParseError

SAMPLES = 256
"""Live measurements that a bucket keeps."""
ENOUGH = 32
"""Live measurements without which the start-up fit stands alone."""
KEEP_S = 60.0
"""Older ones are forgotten: lengths that stopped running inline must not stay slow for ever."""
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
    for size in range(1, len(columns) + 1):
        for chosen in map(list, combinations(columns, size)):
            solution = np.linalg.lstsq(rows_ST[:, chosen], wanted_S, rcond=None)[0]
            error = float(np.sum((rows_ST[:, chosen] @ solution - wanted_S) ** 2))
            # The smaller set wins a tie, so noise in the last bit adds no factor.
            if (solution >= 0).all() and error < least * (1 - 1e-9):
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
    measurements are few the fit stands alone. Of its readings the highest are left out: a length
    that is called cheap by mistake runs inline, is measured and corrected, one called dear never
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
        """Remember what one piece of work took; `refresh` makes use of it."""
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
