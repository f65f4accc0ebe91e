"""The thread that owns the model: batches of rankings first, then prefixes, a chunk at a time.

Measurements of a model come last, or now and then where there is no end of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nestpipe.errors import RunError
from nestpipe.serve.engine.cost_model import Work
from nestpipe.serve.engine.scheduler import (
    PendingRanking,
    PlannedRanking,
    checked_scores,
    chunk_of,
    error_for_caller,
    plan,
    plan_one,
    wait_for_device,
)
from nestpipe.serve.engine.state import EngineState, Result, Task
from nestpipe.serve.kv_cache.device_pool import Entry
from nestpipe.serve.types import KV, Answer, PrefixItem, Scores


class ModelWorker:
    """What that thread does next; every call of `prefix` and `rank` is made here."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._ranked_last = False

    def next_task(self) -> Task | None:
        """A batch of rankings, or a chunk of prefixes; with the lock held.

        A chunk that a ranking waits for takes turns with the rankings in the queue.
        """
        state = self._state
        state.next_expiry()
        if probe := state.next_probe(idle=False):
            return probe
        turn_of_chunk = self._ranked_last and state.cache.fills.awaited
        self._ranked_last = False
        no_rankings = not len(state.rank_queue)
        if (turn_of_chunk or no_rankings) and (entries := state.next_fills()):
            return partial(self.fill, entries)
        if len(state.rank_queue):
            self._ranked_last = True
            return partial(self.rank, state.next_batch())
        return state.next_probe(idle=True)

    # Prefixes

    def fill(self, entries: Sequence[Entry]) -> None:
        """One more chunk of a prefix, or the rest of several: no more events than a chunk has."""
        state, start = self._state, self._state.now()
        try:
            found = self._next_chunks(entries)
        except Exception as error:  # noqa: BLE001  the ranking will say it, if it is the request
            if len(entries) > 1:  # it may be the fault of one of them
                for entry in entries:
                    self.fill([entry])
                return
            state.warn("a prefix could not be computed", error)
            found = [None]
        state.filled(entries, found, start)
        for entry, kv in zip(entries, found, strict=True):
            if kv is not None and len(kv) == entry.key.length:
                state.predictions.observe_one(Work.PREFIX, entry.spent_s * 1e3, len(kv))

    def _next_chunks(self, entries: Sequence[Entry]) -> list[KV | None]:
        """None for one that cannot be kept: those who wait for it are answered without."""
        chunk = self._state.settings.chunk
        items = [PrefixItem(chunk_of(e.need.history, e.num_events, chunk), e.kv) for e in entries]
        found = entries[0].need.model.prefix(items)
        wait_for_device(found[0])
        return [kv if e.accepts(kv) else None for e, kv in zip(entries, found, strict=True)]

    # Rankings

    def rank(self, batch: Sequence[PendingRanking]) -> None:
        """Answer them, those of them that nobody waits for any more excepted."""
        state, start = self._state, self._state.now()
        live = [ranking for ranking in batch if ranking.future.set_running_or_notify_cancel()]
        planned = plan(live, start, state.settings, state.predictions)
        state.batch_begins(planned)
        results = self._scores(planned) if planned else []
        state.batch_computed(batch, results)
        for p, found in results:
            self._answer(p, found, start)
        state.batch_answered(batch)

    def _scores(self, planned: list[PlannedRanking]) -> list[Result]:
        """Scores of all; where the model fails, of each alone, at last without a prefix."""
        start = self._state.now()
        try:
            found = self._ask_model(planned)
        except Exception as error:  # noqa: BLE001  every ranking of the batch gets another try
            return self._one_by_one(planned, error)
        if any(p.early for p in planned):  # part of the time is that of the copies
            self._state.count("early_batches")
        else:
            self._state.predictions.observe(planned, (self._state.now() - start) * 1e3)
        return list(zip(planned, found, strict=True))

    def _ask_model(self, planned: list[PlannedRanking]) -> list[Scores]:
        found = planned[0].ranking.model.rank([p.item for p in planned])
        if len(found) != len(planned):
            raise RunError(f"the model answered {len(found)} of {len(planned)} rankings")
        return [checked_scores(s, p.ranking) for s, p in zip(found, planned, strict=True)]

    def _one_by_one(self, planned: list[PlannedRanking], error: Exception) -> list[Result]:
        if len(planned) > 1:
            self._state.count("failed_batches")
            return [result for p in planned for result in self._scores([p])]
        ranking = planned[0].ranking
        if ranking.entry is None:
            return [(planned[0], error)]
        self._state.discard_prefix(ranking)
        settings, costs = self._state.settings, self._state.predictions
        return self._scores([plan_one(ranking, self._state.now(), settings, costs)])

    def _answer(self, planned: PlannedRanking, found: Scores | Exception, start: float) -> None:
        ranking = planned.ranking
        if isinstance(found, Exception):
            ranking.future.set_exception(error_for_caller(found, ranking))
            return
        stages_ms = {
            "prefix": (ranking.queued - ranking.arrived) * 1e3,
            "queue": (start - ranking.queued) * 1e3,
            "compute": (self._state.now() - start) * 1e3,
        }
        version = ranking.model.version
        ranking.future.set_result(Answer(found, planned.path, planned.length, version, stages_ms))
