"""The thread that owns the model: rankings first, together, then prefixes, a chunk at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nestpipe.errors import RunError
from nestpipe.serve.costs import Work
from nestpipe.serve.desk import Desk, Task
from nestpipe.serve.slots import Entry
from nestpipe.serve.types import KV, Answer, PrefixItem, Scores
from nestpipe.serve.work import (
    Planned,
    Ranking,
    checked_scores,
    chunk_of,
    for_people,
    plan,
    plan_one,
    wait_for_device,
)

Result = tuple[Planned, Scores | Exception]


class Compute:
    """What that thread does next; every call of `prefix` and `rank` is made here."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self._ranked_last = False

    def next_task(self) -> Task | None:
        """A batch of rankings, or a chunk of a prefix; with the lock held.

        A chunk that a ranking waits for takes turns with the rankings in line.
        """
        desk, now = self.desk, self.desk.now()
        if desk.cache.expire(now):
            desk.change.notify_all()  # there may be something to copy
        self._give_up(now)
        turn_of_chunk = self._ranked_last and desk.cache.fills.awaited
        self._ranked_last = False
        entry = None if len(desk.waiting) and not turn_of_chunk else desk.cache.next_fill()
        if entry is not None:
            return partial(self.fill, entry)
        if len(desk.waiting):
            self._ranked_last = True
            return partial(self.rank, desk.waiting.take(desk.settings.batch))
        return None

    def _give_up(self, now: float) -> None:
        for ranking in self.desk.waiting.overdue(now):
            assert ranking.entry is not None, "it waits for nothing"
            self.desk.cache.leave(ranking.entry, ranking)
            self.desk.do_without([ranking], now)

    # Prefixes

    def fill(self, entry: Entry) -> None:
        """One more chunk of a prefix."""
        desk, start = self.desk, self.desk.now()
        kv = self._next_chunk(entry)
        with desk.change:
            now = desk.now()
            entry.spent_s += now - start
            if kv is None:
                desk.do_without(desk.cache.failed(entry), now)
            else:
                desk.have_prefix(desk.cache.filled(entry, kv, now), now)
            desk.change.notify_all()
        if kv is not None and len(kv) == entry.key.length:
            desk.predictions.observe_one(Work.PREFIX, entry.spent_s * 1e3, len(kv))

    def _next_chunk(self, entry: Entry) -> KV | None:
        """None where it fails: those who wait for it are answered without."""
        history = chunk_of(entry.need.history, entry.num_events, self.desk.settings.chunk)
        try:
            kv = entry.need.model.prefix([PrefixItem(history, entry.kv)])[0]
            wait_for_device(kv)
        except Exception as error:  # noqa: BLE001  the ranking will say it, if it is the request
            self.desk.warn("a prefix could not be computed", error)
            return None
        return kv if entry.accepts(kv) else None

    # Rankings

    def rank(self, batch: Sequence[Ranking]) -> None:
        """Answer them, those of them that nobody waits for any more excepted."""
        desk, start = self.desk, self.desk.now()
        live = [ranking for ranking in batch if ranking.future.set_running_or_notify_cancel()]
        planned = plan(live, start, desk.settings, desk.predictions)
        with desk.change:
            desk.running_ms = sum(p.predicted_ms for p in planned)
        results = self._scores(planned) if planned else []
        with desk.change:
            self._leave(batch, results)
        for p, found in results:
            self._answer(p, found, start)
        with desk.change:
            desk.waiting.answered(batch)
            desk.change.notify_all()

    def _scores(self, planned: list[Planned]) -> list[Result]:
        """Scores of all; where the model fails, of each alone, at last without a prefix."""
        start = self.desk.now()
        try:
            found = self._ask_model(planned)
        except Exception as error:  # noqa: BLE001  every ranking of the batch gets another try
            return self._one_by_one(planned, error)
        self.desk.predictions.observe(planned, (self.desk.now() - start) * 1e3)
        return list(zip(planned, found, strict=True))

    def _ask_model(self, planned: list[Planned]) -> list[Scores]:
        found = planned[0].ranking.model.rank([p.item for p in planned])
        if len(found) != len(planned):
            raise RunError(f"the model answered {len(found)} of {len(planned)} rankings")
        return [checked_scores(s, p.ranking) for s, p in zip(found, planned, strict=True)]

    def _one_by_one(self, planned: list[Planned], error: Exception) -> list[Result]:
        if len(planned) > 1:
            self.desk.count("failed_batches")
            return [result for p in planned for result in self._scores([p])]
        ranking = planned[0].ranking
        if ranking.entry is None:
            return [(planned[0], error)]
        with self.desk.change:
            self.desk.cache.discard(ranking.entry)
            self.desk.cache.released(ranking.entry)
            ranking.entry = None
        settings, costs = self.desk.settings, self.desk.predictions
        return self._scores([plan_one(ranking, self.desk.now(), settings, costs)])

    def _leave(self, batch: Sequence[Ranking], results: list[Result]) -> None:
        """Give back what they read, and count; with the lock held."""
        desk = self.desk
        for ranking in batch:
            if ranking.entry is not None:
                desk.cache.released(ranking.entry)
                ranking.entry = None
        for p, found in results:
            name = "failed_rankings" if isinstance(found, Exception) else f"path_{p.path}"
            desk.counts[name] += 1
        desk.running_ms = 0.0
        desk.counts["cancelled"] += len(batch) - len(results)
        desk.counts["batches"] += bool(results)
        desk.counts["batched_rankings"] += len(results)
        desk.counts["largest_batch"] = max(desk.counts["largest_batch"], len(results))

    def _answer(self, planned: Planned, found: Scores | Exception, start: float) -> None:
        ranking = planned.ranking
        if isinstance(found, Exception):
            ranking.future.set_exception(for_people(found, ranking))
            return
        stages_ms = {
            "prefix": (ranking.queued - ranking.arrived) * 1e3,
            "queue": (start - ranking.queued) * 1e3,
            "compute": (self.desk.now() - start) * 1e3,
        }
        version = ranking.model.version
        ranking.future.set_result(Answer(found, planned.path, planned.length, version, stages_ms))
