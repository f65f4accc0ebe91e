"""A load test without a model and without waiting: time is made, service times are a formula.

What comes out can be computed by hand, so it is how the load test itself is tested.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

import numpy as np

from nestpipe.errors import ShedError
from nestpipe.serve.types import AdmissionOutcome, Answer, Path, RankRequest, Signal


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
