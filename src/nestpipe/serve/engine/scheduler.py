"""The scheduler: the rank queue, the plan of a batch, and the predictions that both rest on."""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

import torch

from nestpipe.errors import NestpipeError, RunError
from nestpipe.serve.engine.admission import AdmissionPolicy, Predicts, Work
from nestpipe.serve.engine.kv_memory import Entry, KVSource
from nestpipe.serve.types import (
    KV,
    Answer,
    History,
    RankItem,
    RankModel,
    RankPath,
    RankRequest,
    Scores,
    ServeSettings,
)

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class PendingRanking:
    """One ranking from its arrival to its answer."""

    request: RankRequest
    model: RankModel
    """The one that served when it came."""
    arrived: float
    settings: ServeSettings
    future: Future[Answer] = field(default_factory=Future[Answer])
    path: RankPath = RankPath.MISS_FULL
    entry: Entry | None = None
    """The prefix that it reads, or waits for."""
    waiting: bool = False
    queued: float = 0.0
    """When it was ready to compute."""
    predicted_ms: float = 0.0

    @property
    def num_candidates(self) -> int:
        return len(self.request.candidates_C)

    @property
    def whole(self) -> History:
        """All events; a part without events does not take the times of the other away."""
        long, short = self.request.long, self.request.short
        if not len(long) or not len(short):
            return long if len(long) else short
        return long.joined(short)

    @property
    def length(self) -> int:
        return len(self.request.long) + len(self.request.short)

    @property
    def deadline(self) -> float:
        """When it should be answered, by the clock."""
        budget_s = self.settings.target_ms * (1 - self.settings.margin) / 1e3
        return self.arrived + min(budget_s, self.request.deadline_s or budget_s)


@dataclass(frozen=True, slots=True)
class PlannedRanking:
    """A ranking as the model will get it."""

    ranking: PendingRanking
    item: RankItem
    path: RankPath
    length: int
    predicted_ms: float

    @property
    def early(self) -> bool:
        """Whether it begins before all layers of its prefix are there."""
        return self.item.past is not None and self.item.past.layer_events is not None

    @property
    def work(self) -> tuple[Work, int, int]:
        """What is timed: the kind of work, its size, its candidates."""
        candidates = self.ranking.num_candidates
        if self.item.past is not None:
            return Work.CACHED, len(self.item.past), candidates
        return Work.INLINE, self.length, candidates


class Predictions:
    """Predicted milliseconds of work; 0 without costs, or if they fail: then everything fits."""

    def __init__(self, admission: AdmissionPolicy | None, settings: ServeSettings) -> None:
        self.admission = admission
        self.settings = settings
        self.faults = 0

    def inline_ms(self, length: int, candidates: int) -> float:
        return self._ask(lambda costs: costs.inline_ms(length, candidates))

    def cached_ms(self, length: int, candidates: int) -> float:
        return self._ask(lambda costs: costs.cached_ms(length, candidates))

    def cut_ms(self, ranking: PendingRanking) -> float:
        """Of the ranking, truncated."""
        length = min(ranking.length, self.settings.cut_length)
        return self.inline_ms(length, ranking.num_candidates)

    def rest_ms(self, entry: Entry) -> float:
        """Of the rest of a fill or reload."""
        if entry.source is KVSource.HOST:
            return self._ask(lambda costs: costs.reload_ms(entry.num_bytes))
        done, all_of_it = entry.num_events, entry.key.length
        return self._ask(lambda costs: costs.prefix_ms(all_of_it) - costs.prefix_ms(done))

    def layer_ms(self, entry: Entry, layers: int) -> float:
        """Of the first layer of a reload."""
        return self._ask(lambda costs: costs.reload_ms(-(-entry.num_bytes // layers)))

    def observe(self, planned: list[PlannedRanking], ms: float) -> None:
        """Split the measured time of a batch among its rankings as predicted."""
        total_ms = sum(p.predicted_ms for p in planned)
        for p in planned:
            part = p.predicted_ms / total_ms if total_ms > 0 else 1 / len(planned)
            work, size, candidates = p.work
            self.observe_one(work, ms * part, size, candidates)

    def observe_one(self, work: Work, ms: float, size: int, candidates: int = 0) -> None:
        if self.admission is not None:
            try:
                self.admission.observe(work, ms, size, candidates)
            except Exception:  # noqa: BLE001  a fault here must not cost an answer
                self._note_fault()

    def _ask(self, question: Callable[[Predicts], float]) -> float:
        if self.admission is None:
            return 0.0
        try:
            return max(0.0, question(self.admission.costs))
        except Exception:  # noqa: BLE001  a fault here must not cost an answer
            self._note_fault()
            return 0.0

    def _note_fault(self) -> None:
        _log.warning("what work takes could not be predicted", exc_info=True)
        self.faults += 1


def plan(
    rankings: Iterable[PendingRanking], now: float, settings: ServeSettings, costs: Predictions
) -> list[PlannedRanking]:
    """Plan a batch: each ranking from its prefix, in full, or truncated if time is short."""
    planned: list[PlannedRanking] = []
    before_ms = 0.0
    for ranking in rankings:
        made = plan_one(ranking, now + before_ms / 1e3, settings, costs)
        before_ms += made.predicted_ms
        planned.append(made)
    return planned


def plan_one(
    ranking: PendingRanking, start: float, settings: ServeSettings, costs: Predictions
) -> PlannedRanking:
    """Plan one ranking that starts at `start`."""
    request, candidates = ranking.request, ranking.num_candidates
    if ranking.entry is not None:
        past = ranking.entry.kv
        assert past is not None, "a prefix is read before it is there"
        item = RankItem(request.short, request.candidates_C, past, request.time, request.context)
        ms = costs.cached_ms(len(past), candidates)
        return PlannedRanking(ranking, item, ranking.path, ranking.length, ms)
    ms = costs.inline_ms(ranking.length, candidates)
    history, path = ranking.whole, RankPath.MISS_FULL
    left_ms = max(0.0, (ranking.deadline - start) * 1e3)
    if ms > left_ms and ranking.length > settings.cut_length:
        history, path = history.last(settings.cut_length), RankPath.MISS_CUT
        ms = costs.cut_ms(ranking)
    item = RankItem(history, request.candidates_C, None, request.time, request.context)
    return PlannedRanking(ranking, item, path, len(history), ms)


def chunk_of(history: History, start: int, count: int) -> History:
    """So many events from `start` on."""
    part = slice(start, start + count)
    times_N = history.times_N
    return History(history.items_N[part], None if times_N is None else times_N[part])


def error_for_caller(error: Exception, ranking: PendingRanking) -> Exception:
    """The error that the caller of a ranking gets to see."""
    if isinstance(error, NestpipeError):
        return error
    failed = RunError(
        f"a ranking of {ranking.length} events and {ranking.num_candidates} candidates failed "
        f"({type(error).__name__}: {error}); look at the request, and at the log of the instance"
    )
    failed.__cause__ = error
    return failed


def wait_for_device(kv: KV) -> None:
    """Synchronize: then any stream may read it, and chunks do not pile up."""
    if kv.keys_LNHA.is_cuda:
        torch.cuda.current_stream(kv.keys_LNHA.device).synchronize()


def checked_scores(scores_C: Scores, ranking: PendingRanking) -> Scores:
    """The scores, if there is one for each candidate."""
    if scores_C.shape != (ranking.num_candidates,):
        raise RunError(
            f"the model gave scores of shape {scores_C.shape} for {ranking.num_candidates} "
            "candidates; use another checkpoint"
        )
    return scores_C


class RankQueue:
    """Accepted rankings: those that wait for a prefix, and those that are ready to compute.

    Plain state, without threads: the caller holds a lock and gives the time.
    """

    def __init__(self) -> None:
        self.open: dict[PendingRanking, None] = {}
        """Accepted and not answered, in order of arrival."""
        self.num_running = 0
        self._line: deque[PendingRanking] = deque()
        self._give_up: list[tuple[float, int, PendingRanking]] = []
        self._serial = count()

    def __len__(self) -> int:
        """Rankings that are ready to compute."""
        return len(self._line)

    def __iter__(self) -> Iterator[PendingRanking]:
        return iter(self._line)

    @property
    def num_waiting(self) -> int:
        """Rankings that are not being computed."""
        return len(self.open) - self.num_running

    def enqueue(self, ranking: PendingRanking, now: float) -> None:
        ranking.waiting, ranking.queued = False, now
        self._line.append(ranking)

    def enqueue_first(self, rankings: Iterable[PendingRanking], now: float) -> None:
        """To the front of the queue: they have waited elsewhere."""
        for ranking in reversed(list(rankings)):
            ranking.waiting, ranking.queued = False, now
            self._line.appendleft(ranking)

    def wait_until(self, ranking: PendingRanking, until: float) -> None:
        """It waits for its prefix, but not longer than that."""
        ranking.waiting = True
        heapq.heappush(self._give_up, (until, next(self._serial), ranking))

    def next_give_up(self) -> float | None:
        """When the next wait may be over."""
        while self._give_up and not self._give_up[0][2].waiting:
            heapq.heappop(self._give_up)
        return self._give_up[0][0] if self._give_up else None

    def overdue(self, now: float) -> list[PendingRanking]:
        """Rankings whose wait is over."""
        found: list[PendingRanking] = []
        while (until := self.next_give_up()) is not None and until <= now:
            found.append(heapq.heappop(self._give_up)[2])
        return found

    def next_batch(self, most: int) -> list[PendingRanking]:
        """The first in the queue, and those after it that have the same model."""
        batch: list[PendingRanking] = []
        others: list[PendingRanking] = []
        while self._line and len(batch) < most:
            ranking = self._line.popleft()
            same = not batch or ranking.model is batch[0].model
            (batch if same else others).append(ranking)
        self._line.extendleft(reversed(others))
        self.num_running = len(batch)
        return batch

    def answered(self, rankings: Iterable[PendingRanking]) -> None:
        """The batch is answered."""
        self.num_running = 0
        for ranking in rankings:
            self.open.pop(ranking, None)
