"""The rankings that an instance has accepted: those that wait for a prefix, and those in line."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count

from nestpipe.serve.engine.scheduler import Ranking


class Waiting:
    """Plain state, without threads: the caller holds a lock and says what time it is."""

    def __init__(self) -> None:
        self.open: dict[Ranking, None] = {}
        """Accepted and not answered, in order of arrival."""
        self.num_running = 0
        self._line: deque[Ranking] = deque()
        self._give_up: list[tuple[float, int, Ranking]] = []
        self._serial = count()

    def __len__(self) -> int:
        """Rankings that wait in line."""
        return len(self._line)

    def __iter__(self) -> Iterator[Ranking]:
        return iter(self._line)

    @property
    def num_waiting(self) -> int:
        """Rankings that are not being computed."""
        return len(self.open) - self.num_running

    def stand_in_line(self, ranking: Ranking, now: float) -> None:
        ranking.waiting, ranking.queued = False, now
        self._line.append(ranking)

    def go_first(self, rankings: Iterable[Ranking], now: float) -> None:
        """Into the front of the line: they have waited elsewhere."""
        for ranking in reversed(list(rankings)):
            ranking.waiting, ranking.queued = False, now
            self._line.appendleft(ranking)

    def wait_until(self, ranking: Ranking, until: float) -> None:
        """It waits for its prefix, but not longer than that."""
        ranking.waiting = True
        heapq.heappush(self._give_up, (until, next(self._serial), ranking))

    def next_give_up(self) -> float | None:
        """When the next of them may have waited long enough."""
        while self._give_up and not self._give_up[0][2].waiting:
            heapq.heappop(self._give_up)
        return self._give_up[0][0] if self._give_up else None

    def overdue(self, now: float) -> list[Ranking]:
        """Those that have waited long enough."""
        found: list[Ranking] = []
        while (until := self.next_give_up()) is not None and until <= now:
            found.append(heapq.heappop(self._give_up)[2])
        return found

    def take(self, most: int) -> list[Ranking]:
        """The first in line, and those after it that the same model can compute with it."""
        batch: list[Ranking] = []
        others: list[Ranking] = []
        while self._line and len(batch) < most:
            ranking = self._line.popleft()
            same = not batch or ranking.model is batch[0].model
            (batch if same else others).append(ranking)
        self._line.extendleft(reversed(others))
        self.num_running = len(batch)
        return batch

    def answered(self, rankings: Iterable[Ranking]) -> None:
        """The batch is done with."""
        self.num_running = 0
        for ranking in rankings:
            self.open.pop(ranking, None)
