"""Sends both legs of every request when they are due, and notes what came of them.

The loop is open: no answer is waited for before the next request goes out. Latency counts from the
moment at which a ranking was due, so a driver that is late cannot make the service look fast.

The same driver runs in virtual time, without a model: what comes out can be computed by hand.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np

from nestpipe.errors import ShedError
from nestpipe.loadtest.workload import Leg, Visit
from nestpipe.serve.types import (
    AdmissionOutcome,
    Answer,
    Clock,
    Path,
    RankRequest,
    RankService,
    Signal,
)

LEAD_S = 0.05
"""From the end of the preparations to the start of the run."""
GRACE_S = 30.0
"""How long answers are waited for after the last request."""
SIGNAL_THREADS = 64
"""Signals on their way at once, where each waits for a network."""

Send = Callable[[Signal], "Future[AdmissionOutcome]"]


class Pace(Protocol):
    """Where the driver's time comes from."""

    def now(self) -> float:
        """Seconds."""
        ...

    def wait_until(self, moment: float) -> None:
        """Come back at that moment, or at once where it has passed."""
        ...

    def settle(self, pending: Sequence[Future[None]], grace_s: float) -> None:
        """Come back when all have ended, or after `grace_s`."""
        ...


class RealPace:
    """Wall-clock time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._never = threading.Event()

    def now(self) -> float:
        return self.clock.now()

    def wait_until(self, moment: float) -> None:
        left = moment - self.now()
        while left > 0:
            self._never.wait(left)
            left = moment - self.now()

    def settle(self, pending: Sequence[Future[None]], grace_s: float) -> None:
        wait(pending, timeout=grace_s)


@dataclass(slots=True)
class Record:
    """What came of one request."""

    visit: Visit
    outcome: AdmissionOutcome | None = None
    """Of the signal; None: it failed, or never said."""
    answer: Answer | None = None
    error: BaseException | None = None
    latency_ms: float | None = None
    """From when the ranking was due to its answer or error; None: neither ever came."""
    late_ms: float = 0.0
    """How late the driver sent the later of the two legs."""

    @property
    def length_used(self) -> int:
        return 0 if self.answer is None else self.answer.length_used

    @property
    def full(self) -> bool:
        """Whether it was answered, with all the history that it asked for."""
        return self.answer is not None and self.length_used >= self.visit.asked

    @property
    def cut(self) -> bool:
        return self.answer is not None and self.length_used < self.visit.asked

    @property
    def shed(self) -> bool:
        """Whether the service said that it has no room."""
        return isinstance(self.error, ShedError)

    def within(self, target_ms: float) -> bool:
        """Whether it was answered at full length and in time."""
        return self.full and self.latency_ms is not None and self.latency_ms <= target_ms


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of a run, and what the service counted meanwhile."""

    records: list[Record]
    counted: dict[str, float] = field(default_factory=dict[str, float])
    """Increase of each counter of `RankService.stats`."""


def drive(
    service: RankService,
    legs: Sequence[Leg],
    pace: Pace,
    *,
    send: Send | None = None,
    grace_s: float = GRACE_S,
    progress: Callable[[], None] = lambda: None,
) -> Run:
    """Send every leg when it is due, then wait for the answers that are still to come."""
    send = send or at_once(service)
    records = {leg.visit.number: Record(leg.visit) for leg in legs}
    before = service.stats()
    pending: list[Future[None]] = []
    start = pace.now() + LEAD_S
    for leg in legs:
        due = start + leg.due_s
        record = records[leg.visit.number]
        pace.wait_until(due)
        record.late_ms = max(record.late_ms, 1e3 * (pace.now() - due))
        if isinstance(leg.message, Signal):
            _signal(send, leg.message, record)
        else:
            pending.append(_rank(service, leg.message, record, due, pace))
            progress()
    pace.settle(pending, grace_s)
    after = service.stats()
    counted = {name: after[name] - before.get(name, 0.0) for name in after}
    return Run([records[number] for number in sorted(records)], counted)


def at_once(service: RankService) -> Send:
    """Signals that the service takes without delay, as one in this process does."""

    def send(signal: Signal) -> Future[AdmissionOutcome]:
        said: Future[AdmissionOutcome] = Future()
        said.set_result(service.prefetch(signal))
        return said

    return send


def by_threads(service: RankService, pool: ThreadPoolExecutor) -> Send:
    """Signals that wait for a network, each in a thread of its own."""
    return lambda signal: pool.submit(service.prefetch, signal)


def _signal(send: Send, signal: Signal, record: Record) -> None:
    def done(said: Future[AdmissionOutcome]) -> None:
        if said.exception() is None:
            record.outcome = said.result()

    try:
        send(signal).add_done_callback(done)
    except Exception:  # noqa: BLE001 - a lost signal is no failed request: the ranking still comes
        record.outcome = None


def _rank(
    service: RankService, request: RankRequest, record: Record, due: float, pace: Pace
) -> Future[None]:
    """Ask for it; ends once what came of it is noted, which is later than the answer itself."""
    noted = Future[None]()

    def done(ended: Future[Answer]) -> None:
        record.latency_ms = 1e3 * (pace.now() - due)
        try:
            record.error = ended.exception()
            record.answer = None if record.error else ended.result()
        finally:
            noted.set_result(None)

    try:
        answer = service.rank(request)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's fate
        answer = Future[Answer]()
        answer.set_exception(error)
    answer.add_done_callback(done)
    return noted


class VirtualTime:
    """A clock that jumps from one event to the next; a `Pace` for the driver."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    def now(self) -> float:
        return self._now

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Let something happen at a moment."""
        heapq.heappush(self._events, (moment, next(self._serial), act))

    def wait_until(self, moment: float) -> None:
        while self._events and self._events[0][0] <= moment:
            self._now, _, act = heapq.heappop(self._events)
            act()
        self._now = max(self._now, moment)

    def settle(self, pending: Sequence[Future[None]], grace_s: float) -> None:
        self.wait_until(self._now + grace_s)


@dataclass(kw_only=True)
class FormulaService:
    """One server that answers in turn; signals take their turn like rankings.

    A ranking takes `full_ms(length)`, or `rank_ms(length)` where the prefix is ready.
    """

    time: VirtualTime
    full_ms: Callable[[int], float]
    rank_ms: Callable[[int], float] | None = None
    """None: there is no relay."""
    prefix_ms: Callable[[int], float] = lambda length: 0.0
    """Time that a signal takes of the server."""
    cut_length: int | None = None
    """Longer histories are cut to this where they come without a prefix."""
    queue: int | None = None
    """Rankings that may wait or run; more are shed."""

    def __post_init__(self) -> None:
        self._free = 0.0
        self._waiting = 0
        self._ready = dict[str, float]()
        self._counts = {"rankings": 0.0, "signals": 0.0}

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        self._counts["signals"] += 1
        if self.rank_ms is None:
            return AdmissionOutcome.NOT_AT_RISK
        if signal.user in self._ready:
            return AdmissionOutcome.ALREADY_CACHED
        self._ready[signal.user] = self._occupy(self.prefix_ms(len(signal.long)))
        return AdmissionOutcome.ADMITTED

    def rank(self, request: RankRequest) -> Future[Answer]:
        self._counts["rankings"] += 1
        if self.queue is not None and self._waiting >= self.queue:
            raise ShedError(f"{self.queue} rankings wait already; ask again later")
        length = len(request.long) + len(request.short)
        ready = self._ready.get(request.user)
        if ready is not None and self.rank_ms is not None:
            path = Path.HBM_HIT if ready <= self.time.now() else Path.LATE_HIT
            end = self._occupy(self.rank_ms(length))
        else:
            cut = self.cut_length is not None and length > self.cut_length
            path = Path.MISS_CUT if cut else Path.MISS_FULL
            length = min(length, self.cut_length or length)
            end = self._occupy(self.full_ms(length))
        answer: Future[Answer] = Future()
        scores_C = np.zeros(len(request.candidates_C), dtype=np.float32)
        self._waiting += 1
        self.time.at(end, lambda: self._answer(answer, Answer(scores_C, path, length, "formula")))
        return answer

    def stats(self) -> dict[str, float]:
        return dict(self._counts)

    def drain(self, timeout_s: float) -> bool:
        self.time.wait_until(self.time.now() + timeout_s)
        return self._waiting == 0

    def _occupy(self, ms: float) -> float:
        """The moment at which the server is done with so much more work."""
        self._free = max(self._free, self.time.now()) + ms / 1e3
        return self._free

    def _answer(self, answer: Future[Answer], value: Answer) -> None:
        self._waiting -= 1
        answer.set_result(value)
