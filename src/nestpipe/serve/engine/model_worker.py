"""The thread that owns the model: rankings first, together, then prefixes, a chunk at a time.

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
from nestpipe.serve.engine.state import EngineState, Task
from nestpipe.serve.kv_cache.device_pool import Entry
from nestpipe.serve.types import KV, Answer, PrefixItem, Scores

Result = tuple[PlannedRanking, Scores | Exception]


class ModelWorker:
    """What that thread does next; every call of `prefix` and `rank` is made here."""

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self._ranked_last = False

    def next_task(self) -> Task | None:
        """A batch of rankings, or a chunk of a prefix; with the lock held.

        A chunk that a ranking waits for takes turns with the rankings in line.
        """
        state, now = self.state, self.state.now()
        if state.cache.expire(now):
            state.change.notify_all()  # there may be something to copy
        self._give_up(now)
        if probe := state.probes.take(idle=False):
            return probe
        turn_of_chunk = self._ranked_last and state.cache.fills.awaited
        self._ranked_last = False
        if turn_of_chunk or not len(state.rank_queue):
            settings = state.settings
            if entries := state.cache.next_fills(settings.chunk, settings.batch):
                return partial(self.fill, entries)
        if len(state.rank_queue):
            self._ranked_last = True
            return partial(self.rank, state.rank_queue.take(state.settings.batch))
        return state.probes.take(idle=True)

    def _give_up(self, now: float) -> None:
        for ranking in self.state.rank_queue.overdue(now):
            assert ranking.entry is not None, "it waits for nothing"
            self.state.cache.leave(ranking.entry, ranking)
            self.state.run_inline([ranking], now)

    # Prefixes

    def fill(self, entries: Sequence[Entry]) -> None:
        """One more chunk of a prefix, or the rest of several: no more events than a chunk has."""
        state, start = self.state, self.state.now()
        counts = [min(entry.num_missing, state.settings.chunk) for entry in entries]
        try:
            found = self._next_chunks(entries)
        except Exception as error:  # noqa: BLE001  the ranking will say it, if it is the request
            if len(entries) > 1:  # it may be the fault of one of them
                for entry in entries:
                    self.fill([entry])
                return
            state.warn("a prefix could not be computed", error)
            found = [None]
        with state.change:
            now = state.now()
            for entry, kv, count in zip(entries, found, counts, strict=True):
                entry.spent_s += (now - start) * count / sum(counts)
                self._filled(entry, kv, now)
            state.change.notify_all()
        for entry, kv in zip(entries, found, strict=True):
            if kv is not None and len(kv) == entry.key.length:
                state.predictions.observe_one(Work.PREFIX, entry.spent_s * 1e3, len(kv))

    def _next_chunks(self, entries: Sequence[Entry]) -> list[KV | None]:
        """None for one that cannot be kept: those who wait for it are answered without."""
        chunk = self.state.settings.chunk
        items = [PrefixItem(chunk_of(e.need.history, e.num_events, chunk), e.kv) for e in entries]
        found = entries[0].need.model.prefix(items)
        wait_for_device(found[0])
        return [kv if e.accepts(kv) else None for e, kv in zip(entries, found, strict=True)]

    def _filled(self, entry: Entry, kv: KV | None, now: float) -> None:
        """With the lock held."""
        state = self.state
        if kv is None:
            state.run_inline(state.cache.failed(entry), now)
        else:
            state.prefix_ready(state.cache.filled(entry, kv, now), now)

    # Rankings

    def rank(self, batch: Sequence[PendingRanking]) -> None:
        """Answer them, those of them that nobody waits for any more excepted."""
        state, start = self.state, self.state.now()
        live = [ranking for ranking in batch if ranking.future.set_running_or_notify_cancel()]
        planned = plan(live, start, state.settings, state.predictions)
        with state.change:
            state.running_ms = sum(p.predicted_ms for p in planned)
        results = self._scores(planned) if planned else []
        with state.change:
            self._leave(batch, results)
        for p, found in results:
            self._answer(p, found, start)
        with state.change:
            state.rank_queue.answered(batch)
            state.change.notify_all()

    def _scores(self, planned: list[PlannedRanking]) -> list[Result]:
        """Scores of all; where the model fails, of each alone, at last without a prefix."""
        start = self.state.now()
        try:
            found = self._ask_model(planned)
        except Exception as error:  # noqa: BLE001  every ranking of the batch gets another try
            return self._one_by_one(planned, error)
        if any(p.early for p in planned):  # part of the time is that of the copies
            self.state.count("early_batches")
        else:
            self.state.predictions.observe(planned, (self.state.now() - start) * 1e3)
        return list(zip(planned, found, strict=True))

    def _ask_model(self, planned: list[PlannedRanking]) -> list[Scores]:
        found = planned[0].ranking.model.rank([p.item for p in planned])
        if len(found) != len(planned):
            raise RunError(f"the model answered {len(found)} of {len(planned)} rankings")
        return [checked_scores(s, p.ranking) for s, p in zip(found, planned, strict=True)]

    def _one_by_one(self, planned: list[PlannedRanking], error: Exception) -> list[Result]:
        if len(planned) > 1:
            self.state.count("failed_batches")
            return [result for p in planned for result in self._scores([p])]
        ranking = planned[0].ranking
        if ranking.entry is None:
            return [(planned[0], error)]
        with self.state.change:
            self.state.cache.discard(ranking.entry)
            self.state.cache.released(ranking.entry)
            ranking.entry = None
        settings, costs = self.state.settings, self.state.predictions
        return self._scores([plan_one(ranking, self.state.now(), settings, costs)])

    def _leave(self, batch: Sequence[PendingRanking], results: list[Result]) -> None:
        """Give back what they read, and count; with the lock held."""
        state = self.state
        for ranking in batch:
            if ranking.entry is not None:
                state.cache.released(ranking.entry)
                ranking.entry = None
        for p, found in results:
            name = "failed_rankings" if isinstance(found, Exception) else f"path_{p.path}"
            state.counts[name] += 1
        state.running_ms = 0.0
        state.counts["cancelled"] += len(batch) - len(results)
        state.counts["batches"] += bool(results)
        state.counts["batched_rankings"] += len(results)
        state.counts["largest_batch"] = max(state.counts["largest_batch"], len(results))

    def _answer(self, planned: PlannedRanking, found: Scores | Exception, start: float) -> None:
        ranking = planned.ranking
        if isinstance(found, Exception):
            ranking.future.set_exception(error_for_caller(found, ranking))
            return
        stages_ms = {
            "prefix": (ranking.queued - ranking.arrived) * 1e3,
            "queue": (start - ranking.queued) * 1e3,
            "compute": (self.state.now() - start) * 1e3,
        }
        version = ranking.model.version
        ranking.future.set_result(Answer(found, planned.path, planned.length, version, stages_ms))
