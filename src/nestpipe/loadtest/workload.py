"""Requests made ahead from a seed, so that every arm meets the very same ones."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from nestpipe.data.order import draw, mix, uniform
from nestpipe.data.synthetic import zipf
from nestpipe.loadtest.settings import WorkloadSettings
from nestpipe.serve.types import History, Ids, RankRequest, Signal

# Shapes: R requests, N events of a history, C candidates

ARRIVALS, USERS, RETURNS, DELAYS, LENGTHS, EVENTS, CANDIDATES = range(7)
"""Each has random numbers of its own: another length does not make other users come."""
EVENT_S = 600
"""Time between two events of a user, where events have times."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request: when its two legs are due, in seconds from the start, and what it asks."""

    number: int
    signal_s: float
    rank_s: float
    user: int
    long: int
    short: int
    candidates: int

    @property
    def asked(self) -> int:
        """Events that a full answer rests on."""
        return self.long + self.short


def visits(settings: WorkloadSettings) -> list[Visit]:
    """All requests of a run, in the order of their signals."""
    arrivals_R = _arrivals(settings)
    users_R = _users(settings, arrivals_R)
    delays_R = _delays(settings, len(arrivals_R))
    seen: Counter[int] = Counter()
    lengths = _Lengths(settings)
    made: list[Visit] = []
    for number, user in enumerate(users_R):
        long, short = lengths.of(user, seen[user])
        seen[user] += 1
        begin = float(arrivals_R[number])
        made.append(
            Visit(
                number=number,
                signal_s=begin,
                rank_s=begin + float(delays_R[number]),
                user=user,
                long=long,
                short=short,
                candidates=settings.candidates,
            )
        )
    return made


def reuse_share(made: Sequence[Visit]) -> float:
    """Share of requests whose long history was already that of an earlier request."""
    seen = set[tuple[int, int]]()
    again = 0
    for visit in made:
        again += (visit.user, visit.long) in seen
        seen.add((visit.user, visit.long))
    return again / len(made) if made else 0.0


def _arrivals(settings: WorkloadSettings) -> NDArray[np.float64]:
    random = _random(settings, ARRIVALS)
    parts: list[NDArray[np.float64]] = []
    end = 0.0
    while end < settings.seconds:
        gaps = random.exponential(1 / settings.rate, 1024)
        parts.append(end + np.cumsum(gaps))
        end = float(parts[-1][-1])
    arrivals_R = np.concatenate(parts)
    return arrivals_R[arrivals_R < settings.seconds]


def _users(settings: WorkloadSettings, arrivals_R: NDArray[np.float64]) -> list[int]:
    """The next user: the one whose return has been due longest, else one at random."""
    count = len(arrivals_R)
    bits_R = _random(settings, USERS).integers(0, 2**64, count, dtype=np.uint64)
    anybody_R = zipf(bits_R, settings.users, settings.popularity)
    random = _random(settings, RETURNS)
    returns_R = random.random(count) < settings.return_share
    gaps_R = settings.return_median_s * np.exp(settings.return_spread * _tail(settings, count))
    due: list[tuple[float, int]] = []
    users: list[int] = []
    for number, now in enumerate(arrivals_R):
        back = bool(due) and due[0][0] <= now
        user = heapq.heappop(due)[1] if back else int(anybody_R[number])
        users.append(user)
        if returns_R[number]:
            heapq.heappush(due, (float(now + gaps_R[number]), user))
    return users


def _tail(settings: WorkloadSettings, count: int) -> NDArray[np.float64]:
    """Logarithms of times of median 1 and spread 1."""
    random = np.random.default_rng((settings.seed, RETURNS, 1))
    if settings.return_tail == "log_normal":
        return random.standard_normal(count)
    return random.exponential(1.0, count) - math.log(2)


def _delays(settings: WorkloadSettings, count: int) -> NDArray[np.float64]:
    random = _random(settings, DELAYS)
    spread = settings.delay_jitter**2
    total_R = np.zeros(count)
    for mean_ms in (settings.retrieval_ms, settings.preprocess_ms):
        if spread == 0:
            total_R += mean_ms / 1e3
        else:
            total_R += random.gamma(1 / spread, mean_ms * spread / 1e3, count)
    return total_R


class _Lengths:
    """How long the two histories of a user are at each visit: the long one grows in steps."""

    def __init__(self, settings: WorkloadSettings) -> None:
        self.settings = settings
        self._first = dict[int, int]()

    def of(self, user: int, visit: int) -> tuple[int, int]:
        settings = self.settings
        if user not in self._first:
            self._first[user] = self._draw(user)
        first = self._first[user]
        short = min(settings.short, first - 1)
        new = min(visit * settings.new_events, settings.most_length - first)
        passed = new - new % settings.grow_by
        return first - short + passed, short + new - passed

    def _draw(self, user: int) -> int:
        settings = self.settings
        if settings.length_spread == 0:
            return settings.length
        bits = draw(mix(settings.seed, LENGTHS), np.array([user]))
        place = min(max(float(uniform(bits)[0]), 1e-12), 1 - 1e-12)
        length = settings.length * math.exp(settings.length_spread * NormalDist().inv_cdf(place))
        return int(min(max(round(length), 2), settings.most_length))


class Histories:
    """The events of every user: a function of (seed, user, place), so they never change."""

    def __init__(self, settings: WorkloadSettings) -> None:
        self.settings = settings
        self._events = dict[int, Ids]()

    def of(self, visit: Visit) -> tuple[History, History]:
        """The long and the short history at a visit."""
        items_N = self._items(visit.user, visit.asked)
        times_N = None
        if self.settings.times:
            times_N = EVENT_S * np.arange(1, visit.asked + 1, dtype=np.int64)
        whole = History(items_N[: visit.asked], times_N)
        return _part(whole, 0, visit.long), _part(whole, visit.long, visit.asked)

    def candidates(self, visit: Visit) -> Ids:
        key = mix(self.settings.seed, CANDIDATES, visit.number)
        return _items_of(key, visit.candidates, self.settings.items)

    def _items(self, user: int, count: int) -> Ids:
        known = self._events.get(user)
        if known is None or len(known) < count:
            key = mix(self.settings.seed, EVENTS, user)
            known = self._events[user] = _items_of(key, count, self.settings.items)
        return known


def _items_of(key: int, count: int, items: int) -> Ids:
    return (draw(key, np.arange(count)) % np.uint64(items)).astype(np.int64) + 1


def _part(history: History, begin: int, end: int) -> History:
    times_N = None if history.times_N is None else history.times_N[begin:end]
    return History(history.items_N[begin:end], times_N)


@dataclass(frozen=True, slots=True)
class Leg:
    """A signal or a ranking, and when it is due."""

    due_s: float
    visit: Visit
    message: Signal | RankRequest


def legs(
    settings: WorkloadSettings, made: Sequence[Visit], cap: int | None = None
) -> Iterator[Leg]:
    """Both legs of every visit, in the order in which they are due.

    With a cap only the newest `cap` events are sent, whatever the visit asks for.
    """
    histories = Histories(settings)
    ready: list[Leg] = []
    for visit in reversed(made):  # a user's last history holds all earlier ones
        long, short = histories.of(visit)
        if cap is not None:
            short = short.last(cap)
            long = long.last(cap - len(short))
        user = f"u{visit.user}"
        time = None if not settings.times else EVENT_S * (visit.asked + 1)
        request = RankRequest(user, long, short, histories.candidates(visit), time)
        ready.append(Leg(visit.signal_s, visit, Signal(user, long)))
        ready.append(Leg(visit.rank_s, visit, request))
    return iter(sorted(ready, key=lambda leg: (leg.due_s, leg.visit.number)))


def _random(settings: WorkloadSettings, purpose: int) -> np.random.Generator:
    return np.random.default_rng((settings.seed, purpose))
