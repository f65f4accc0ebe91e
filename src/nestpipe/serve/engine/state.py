"""What the threads of an instance share, and the lock around it."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, field
from functools import partial

from nestpipe.errors import RunError, ShedError
from nestpipe.serve.engine.calibration import Probes
from nestpipe.serve.engine.scheduler import PendingRanking, Predictions, RankQueue
from nestpipe.serve.kv_cache.cache import Cache
from nestpipe.serve.kv_cache.device_pool import Entry, EntryState, KVSource
from nestpipe.serve.kv_cache.host_tier import HostTier, ReloadsByLayer
from nestpipe.serve.settings import ServeSettings
from nestpipe.serve.types import AdmissionOutcome, Clock, Path

_log = logging.getLogger(__name__)

Task = Callable[[], None]

COUNTED = (
    *(f"path_{path}" for path in Path),
    *(f"outcome_{outcome}" for outcome in AdmissionOutcome),
    *("fills", "failed_fills", "abandoned_fills", "wasted_prefixes", "discarded"),
    *("reloads", "failed_reloads", "offloads", "failed_offloads"),
    *("batches", "batched_rankings", "largest_batch", "failed_batches", "failed_rankings"),
    *("early_batches", "cancelled", "shed", "refused_closing", "faults"),
)
"""Counters that are there from the start, at 0."""


@dataclass(eq=False, slots=True)
class EngineState:
    """Read and change it only with `change` held; tell the others by `change.notify_all()`."""

    settings: ServeSettings
    clock: Clock
    cache: Cache
    predictions: Predictions
    probes: Probes
    rank_queue: RankQueue = field(default_factory=RankQueue)
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))
    change: threading.Condition = field(default_factory=threading.Condition)
    running_ms: float = 0.0
    """Predicted time of the batch that is computed now."""
    draining: bool = False
    closed: bool = False
    broken: BaseException | None = None

    def now(self) -> float:
        return self.clock.now()

    def rank_queue_ms(self) -> float:
        """Predicted time until all rankings in line are answered."""
        return self.running_ms + sum(ranking.predicted_ms for ranking in self.rank_queue)

    def eta_s(self, entry: Entry, ranking: PendingRanking) -> float:
        """Predicted seconds until a ranking can go on as if its prefix were there."""
        rest_ms, cache = self.predictions.rest_ms, self.cache
        if entry.source is KVSource.HOST:
            reload_ms = self._reload_ms(entry, ranking.predicted_ms)
            return max(0.0, self._begins_ms(entry) + reload_ms) / 1e3
        before = sum(rest_ms(e) for e in cache.fills if e.waiters and e is not entry)
        return (rest_ms(entry) + before + self.rank_queue_ms()) / 1e3

    def _begins_ms(self, entry: Entry) -> float:
        """Predicted time until its reload begins; negative where it has begun."""
        if entry.loading_since is not None:
            return (entry.loading_since - self.now()) * 1e3
        return self.predictions.rest_ms(entry) * len(self.cache.loads) / self.cache.reloads

    def _reload_ms(self, entry: Entry, cached_ms: float) -> float:
        """How much later than with its prefix a ranking ends that has it brought back.

        By layers the ranking is computed under the copies: it ends with the last of them, or as
        long after the first as it takes, whichever is later.
        """
        all_ms = self.predictions.rest_ms(entry)
        by_layer = self.settings.reload_by_layer and isinstance(entry.need.model, ReloadsByLayer)
        if not by_layer or self.cache.host_tier is None:
            return all_ms
        first_ms = self.predictions.layer_ms(entry, self.cache.host_tier.num_layers(entry.key))
        return max(first_ms, all_ms - cached_ms)

    def prefix_ready(self, rankings: Iterable[PendingRanking], now: float) -> None:
        """What they waited for is there."""
        self.rank_queue.enqueue_first(rankings, now)

    def run_inline(self, rankings: Iterable[PendingRanking], now: float) -> None:
        """What they waited for does not come."""
        rankings = list(rankings)
        for ranking in rankings:
            self._inline(ranking)
        self.rank_queue.enqueue_first(rankings, now)

    def drop_prefix(self, entry: Entry) -> None:
        """What they were to read came only in part: those in line keep their place without it."""
        for ranking in self.rank_queue:
            if ranking.entry is entry:
                self.cache.released(entry)
                self._inline(ranking)

    def _inline(self, ranking: PendingRanking) -> None:
        ranking.entry, ranking.path = None, Path.MISS_FULL
        ranking.predicted_ms = self.predictions.inline_ms(ranking.length, ranking.num_candidates)

    def warn(self, what: str, error: Exception) -> None:
        """A fault that costs time, but no answer."""
        _log.warning("%s, its ranking runs inline: %r", what, error)
        self.count("faults")

    def count(self, name: str) -> None:
        with self.change:
            self.counts[name] += 1

    def fail_pending(self, error: BaseException) -> int:
        """Let nobody wait for an answer that will not come; how many did."""
        with self.change:
            left, self.rank_queue = list(self.rank_queue.open), RankQueue()
            self.probes.cancel()
            self.change.notify_all()
        num_told = 0
        for ranking in left:
            try:
                ranking.future.set_exception(error)
                num_told += 1
            except InvalidStateError:
                continue  # it was cancelled, or answered just before
        return num_told

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name."""
        cache, device_pool = self.cache, self.cache.device_pool
        host = cache.host_tier if cache.host_tier is not None else HostTier(0, 0.0)
        states = Counter(entry.state for entry in device_pool)
        counts = self.counts + cache.counts
        gauges = {
            **{name: counts[name] for name in (*COUNTED, *counts)},
            "faults": self.counts["faults"] + self.predictions.faults,
            **{f"entries_{state}": states[state] for state in EntryState},
            "device_bytes": device_pool.num_bytes,
            "device_bytes_bound": device_pool.bound,
            "device_evicted": device_pool.evicted,
            "host_bytes": host.num_bytes,
            "host_bytes_bound": host.bound,
            "host_entries": len(host),
            "host_evicted": host.evicted,
            "host_expired": host.expired,
            "open_rankings": len(self.rank_queue.open),
            "queue_rankings": len(self.rank_queue),
            "queue_fills": len(cache.fills),
            "queue_reloads": len(cache.loads) + cache.loading,
            "queue_offloads": device_pool.num_idle,
            "broken": self.broken is not None,
        }
        return {name: float(value) for name, value in gauges.items()}


def has_failed(error: BaseException) -> RunError:
    """What callers hear after a thread has died."""
    return RunError(f"the instance has failed ({error!r}); start it again")


def start(
    name: str, state: EngineState, next_task: Callable[[], Task | None], minds_the_clock: bool
) -> threading.Thread:
    """A thread that does what `next_task` gives it, until the state is closed.

    `next_task` is called with the lock held, after every change, and for one thread also when
    somebody's time is up; what it returns is run without the lock.
    """
    timeout = partial(_seconds_to_next, state) if minds_the_clock else lambda: None

    def until_closed() -> None:
        try:
            while (task := _wait(state, next_task, timeout)) is not None:
                task()
        except BaseException as error:  # noqa: BLE001  callers hear of it
            _log.critical("thread %s of an instance died", name, exc_info=error)
            state.broken, state.draining, state.closed = error, True, True
            state.fail_pending(has_failed(error))

    thread = threading.Thread(target=until_closed, name=f"nestpipe-{name}", daemon=True)
    thread.start()
    return thread


def _wait(
    state: EngineState, next_task: Callable[[], Task | None], timeout: Callable[[], float | None]
) -> Task | None:
    with state.change:
        while not state.closed:
            task = next_task()
            if task is not None:
                return task
            state.change.wait(timeout())
    return None


def _seconds_to_next(state: EngineState) -> float | None:
    """Until a promise or somebody's patience ends."""
    ends = [state.cache.device_pool.next_end(), state.rank_queue.next_give_up()]
    known = [end for end in ends if end is not None]
    return max(0.0, min(known) - state.now()) if known else None


# What an instance that ends says to those who ask it.


class ClosingError(ShedError):
    """The instance ends: another may answer at once, and nobody has too much to do."""
