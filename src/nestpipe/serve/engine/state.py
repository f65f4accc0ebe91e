"""The state of an engine: cache, queues, counters, and the one lock around them.

`EngineState` is a monitor and the only owner of what it holds. The instance, the model's thread and
the copy threads call its methods, which take the lock, change the state and wake waiting threads.
Models are called and prefixes are copied outside of it, without the lock.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial

from nestpipe.errors import RunError, ShedError
from nestpipe.serve.engine.admission import AdmissionPolicy, EngineLoad
from nestpipe.serve.engine.calibration import Probes
from nestpipe.serve.engine.kv_cache import (
    Acquired,
    Cache,
    Fill,
    Load,
    Miss,
    Promised,
    Purpose,
    Use,
    Wait,
)
from nestpipe.serve.engine.kv_memory import (
    DevicePool,
    Entry,
    EntryState,
    HostTier,
    KVSource,
    Need,
    ReloadsByLayer,
)
from nestpipe.serve.engine.scheduler import (
    PendingRanking,
    PlannedRanking,
    Predictions,
    RankQueue,
)
from nestpipe.serve.types import (
    KV,
    AdmissionOutcome,
    Clock,
    ClosingError,
    RankModel,
    RankPath,
    RankRequest,
    Scores,
    ServeSettings,
    has_prefix,
)

_log = logging.getLogger(__name__)

Task = Callable[[], None]
Result = tuple[PlannedRanking, Scores | Exception]

MIB = 2**20
RECENT = 256
"""Recent rankings, whose candidates predict those of a ranking that has only been signalled."""
COUNTED = (
    *(f"path_{path}" for path in RankPath),
    *(f"outcome_{outcome}" for outcome in AdmissionOutcome),
    *("fills", "failed_fills", "abandoned_fills", "wasted_prefixes", "discarded"),
    *("reloads", "failed_reloads", "offloads", "failed_offloads"),
    *("batches", "batched_rankings", "largest_batch", "failed_batches", "failed_rankings"),
    *("early_batches", "cancelled", "shed", "refused_closing", "faults"),
)
"""Counters that are there from the start, at 0."""


@dataclass(eq=False, slots=True)
class EngineState:
    """Every method takes the lock, but for those whose name begins with `next_` or `_`.

    Those are called with the lock held: a thread asks for its next task under it.
    """

    model: RankModel
    """The one that new requests get."""
    settings: ServeSettings
    clock: Clock
    cache: Cache
    predictions: Predictions
    probes: Probes
    rank_queue: RankQueue = field(default_factory=RankQueue)
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(COUNTED, 0)))
    change: threading.Condition = field(default_factory=threading.Condition)
    """The lock; notified after every change."""
    running_ms: float = 0.0
    """Predicted time of the batch that is computed now."""
    num_offloading: int = 0
    recent_candidates: deque[int] = field(default_factory=lambda: deque[int](maxlen=RECENT))
    recent_short: deque[int] = field(default_factory=lambda: deque[int](maxlen=RECENT))
    """Events after the long history: a signal does not know its own."""
    draining: bool = False
    closed: bool = False
    broken: BaseException | None = None

    def now(self) -> float:
        return self.clock.now()

    def count(self, name: str) -> None:
        with self.change:
            self.counts[name] += 1

    def warn(self, what: str, error: Exception) -> None:
        """Log a fault that costs time, but no answer."""
        _log.warning("%s, its ranking runs inline: %r", what, error)
        self.count("faults")

    # The early leg

    def has_prefix(self, need: Need) -> bool:
        """Whether a prefix is in device or host memory, or on its way."""
        with self.change:
            return self.cache.has(need, self.now())

    def admission_question(self, need: Need) -> tuple[int, int, EngineLoad]:
        """The input of admission control for a signal: length, candidates, load."""
        with self.change:
            candidates = max(self.recent_candidates, default=self.settings.max_candidates)
            length = need.key.length + max(self.recent_short, default=0)
            rank_ms = self._rank_queue_ms()
            prefix_ms = sum(self.predictions.rest_ms(entry) for entry in self.cache.fills)
            live_bytes = self.cache.device_pool.promised_bytes
            return length, candidates, EngineLoad(live_bytes, rank_ms, rank_ms + prefix_ms)

    def promise(self, need: Need) -> AdmissionOutcome | None:
        """Keep a prefix for the ranking to come; None where its model has been replaced."""
        with self.change:
            if need.model is not self.model:
                return None
            return _outcome(self.cache.acquire(need, Purpose.SIGNAL, self.now()))

    def signalled(self, outcome: AdmissionOutcome) -> None:
        """Count a signal, and wake the threads that compute or copy its prefix."""
        with self.change:
            self.counts[f"outcome_{outcome}"] += 1
            self.change.notify_all()

    # The late leg

    def accept(self, ranking: PendingRanking, need: Need | None) -> None:
        """Find the ranking's prefix and queue it, or raise: closing, or too many wait."""
        with self.change:
            self.refuse_if_closed()
            self._refuse_if_full()
            if ranking.model is not self.model:
                ranking.model, need = self.model, need_of(ranking.request, self.model)
            self.rank_queue.open[ranking] = None
            self.recent_candidates.append(ranking.num_candidates)
            self.recent_short.append(len(ranking.request.short))
            self._find_prefix(ranking, need, self.now())
            self.change.notify_all()

    def _find_prefix(self, ranking: PendingRanking, need: Need | None, now: float) -> None:
        """Use a prefix that is there, wait for one that is worth it, else queue without."""
        costs, candidates = self.predictions, ranking.num_candidates
        ranking.predicted_ms = costs.cached_ms(len(ranking.request.long), candidates)
        step = self._acquire(ranking, need, now)
        if isinstance(step, Wait | Load | Fill):
            ranking.entry, ranking.path = step.entry, _path(step)
            last_call = ranking.deadline - costs.cut_ms(ranking) / 1e3
            eta_s = self._eta_s(step.entry, ranking)
            self.rank_queue.wait_until(ranking, max(last_call, now + eta_s))
            return
        if isinstance(step, Use):
            ranking.entry = step.entry
            ranking.path = RankPath.LATE_HIT if step.entry.arriving else RankPath.HBM_HIT
        else:
            ranking.predicted_ms = costs.inline_ms(ranking.length, candidates)
        self.rank_queue.enqueue(ranking, now)

    def _acquire(self, ranking: PendingRanking, need: Need | None, now: float) -> Acquired:
        if need is None:
            return Miss.NOWHERE
        keeps = self.cache.host_tier is not None and not self.settings.relay
        purpose = Purpose.RANK_AND_KEEP if keeps else Purpose.RANK
        ready_by = ranking.deadline - ranking.predicted_ms / 1e3

        def in_time(entry: Entry) -> bool:
            return now + self._eta_s(entry, ranking) <= ready_by

        try:
            return self.cache.acquire(need, purpose, now, ranking, in_time)
        except Exception as error:  # noqa: BLE001  a fault of the cache means inline
            self.warn("a prefix could not be looked up", error)
            return Miss.NOWHERE

    # Predicted times

    def _rank_queue_ms(self) -> float:
        """Until all rankings in the queue are answered."""
        return self.running_ms + sum(ranking.predicted_ms for ranking in self.rank_queue)

    def _eta_s(self, entry: Entry, ranking: PendingRanking) -> float:
        """Predicted seconds until a ranking can go on as if its prefix were there."""
        rest_ms, cache = self.predictions.rest_ms, self.cache
        if entry.source is KVSource.HOST:
            reload_ms = self._reload_ms(entry, ranking.predicted_ms)
            return max(0.0, self._begins_ms(entry) + reload_ms) / 1e3
        before = sum(rest_ms(e) for e in cache.fills if e.waiters and e is not entry)
        return (rest_ms(entry) + before + self._rank_queue_ms()) / 1e3

    def _begins_ms(self, entry: Entry) -> float:
        """Until its reload begins; negative where it has begun."""
        if entry.loading_since is not None:
            return (entry.loading_since - self.now()) * 1e3
        return self.predictions.rest_ms(entry) * len(self.cache.loads) / self.cache.reloads

    def _reload_ms(self, entry: Entry, cached_ms: float) -> float:
        """How much later a ranking ends than with its prefix in device memory.

        By layers the ranking is computed under the copies: it ends with the last of them, or as
        long after the first as it takes, whichever is later.
        """
        all_ms = self.predictions.rest_ms(entry)
        by_layer = self.settings.reload_by_layer and isinstance(entry.need.model, ReloadsByLayer)
        if not by_layer or self.cache.host_tier is None:
            return all_ms
        first_ms = self.predictions.layer_ms(entry, self.cache.host_tier.num_layers(entry.key))
        return max(first_ms, all_ms - cached_ms)

    # The model's thread

    def next_expiry(self) -> None:
        """End promises and waits that have expired."""
        now = self.now()
        if self.cache.expire(now):
            self.change.notify_all()  # there may be something to offload
        for ranking in self.rank_queue.overdue(now):
            assert ranking.entry is not None, "it waits for nothing"
            self.cache.leave(ranking.entry, ranking)
            self._run_inline([ranking], now)

    def next_probe(self, idle: bool) -> Task | None:
        """A measurement, if nothing else is to be done or it has waited long enough."""
        return self.probes.take(idle)

    def next_fills(self) -> list[Entry]:
        """Prefixes to compute together."""
        return self.cache.next_fills(self.settings.chunk, self.settings.batch)

    def next_batch(self) -> list[PendingRanking]:
        """Rankings to compute together."""
        return self.rank_queue.next_batch(self.settings.batch)

    def filled(self, entries: Sequence[Entry], found: Sequence[KV | None], start: float) -> None:
        """A chunk of each is computed, or failed where there is None."""
        with self.change:
            now = self.now()
            counts = [min(entry.num_missing, self.settings.chunk) for entry in entries]
            for entry, kv, count in zip(entries, found, counts, strict=True):
                entry.spent_s += (now - start) * count / sum(counts)
                if kv is None:
                    self._run_inline(self.cache.failed(entry), now)
                else:
                    self.rank_queue.enqueue_first(self.cache.filled(entry, kv, now), now)
            self.change.notify_all()

    def batch_begins(self, planned: Iterable[PlannedRanking]) -> None:
        with self.change:
            self.running_ms = sum(p.predicted_ms for p in planned)

    def batch_computed(self, batch: Sequence[PendingRanking], results: Sequence[Result]) -> None:
        """Give back what the batch read, and count it."""
        with self.change:
            for ranking in batch:
                if ranking.entry is not None:
                    self.cache.released(ranking.entry)
                    ranking.entry = None
            for p, found in results:
                name = "failed_rankings" if isinstance(found, Exception) else f"path_{p.path}"
                self.counts[name] += 1
            self.running_ms = 0.0
            self.counts["cancelled"] += len(batch) - len(results)
            self.counts["batches"] += bool(results)
            self.counts["batched_rankings"] += len(results)
            self.counts["largest_batch"] = max(self.counts["largest_batch"], len(results))

    def batch_answered(self, batch: Sequence[PendingRanking]) -> None:
        with self.change:
            self.rank_queue.answered(batch)
            self.change.notify_all()

    def discard_prefix(self, ranking: PendingRanking) -> None:
        """The model failed on a ranking with its prefix: no other ranking may read it."""
        with self.change:
            assert ranking.entry is not None, "it has no prefix"
            self.cache.discard(ranking.entry)
            self.cache.released(ranking.entry)
            ranking.entry = None

    def _run_inline(self, rankings: Iterable[PendingRanking], now: float) -> None:
        """What they waited for does not come: to the front of the queue, without."""
        rankings = list(rankings)
        for ranking in rankings:
            self._without_prefix(ranking)
        self.rank_queue.enqueue_first(rankings, now)

    def _without_prefix(self, ranking: PendingRanking) -> None:
        ranking.entry, ranking.path = None, RankPath.MISS_FULL
        ranking.predicted_ms = self.predictions.inline_ms(ranking.length, ranking.num_candidates)

    # The copy threads

    def next_reload(self) -> tuple[Entry, KV] | None:
        """A prefix to bring back from host memory."""
        return self.cache.next_load(self.now())

    def next_offload(self, most: int) -> tuple[Entry, KV] | None:
        """A prefix to copy to host memory, unless `most` are under way."""
        if self.num_offloading >= most:
            return None
        copy = self.cache.next_copy(self.now())
        self.num_offloading += copy is not None
        return copy

    def reload_begun(self, entry: Entry, kv: KV) -> None:
        """Rankings may read its layers as they arrive."""
        with self.change:
            now = self.now()
            self.rank_queue.enqueue_first(self.cache.begun(entry, kv, now), now)
            self.change.notify_all()

    def reloaded(self, entry: Entry, kv: KV | None) -> None:
        """All of it is back, or, without `kv`, the reload failed."""
        with self.change:
            now = self.now()
            if kv is not None:
                self.rank_queue.enqueue_first(self.cache.loaded(entry, kv, now), now)
            else:
                self._run_inline(self.cache.failed(entry), now)
                self._drop_prefix(entry)
            self.change.notify_all()

    def _drop_prefix(self, entry: Entry) -> None:
        """Drop a prefix that arrived only in part: rankings in the queue keep their place without
        it."""
        for ranking in self.rank_queue:
            if ranking.entry is entry:
                self.cache.released(entry)
                self._without_prefix(ranking)

    def offloaded(self, entry: Entry, kv: KV | None) -> None:
        """The copy in host memory is complete, or, without `kv`, failed."""
        with self.change:
            self.num_offloading -= 1
            self.cache.copied(entry, kv, self.now())
            self.change.notify_all()

    # Another model

    def swap(self, model: RankModel) -> bool:
        """Serve another model from now on; whether it is another version."""
        with self.change:
            old, self.model = self.model, model
            self.cache.revive(model.version)
            is_new = old.version != model.version
            if is_new:
                self.cache.retire(old.version)
                self.probes.cancel()  # those of the model before it
            self.change.notify_all()
            return is_new

    def probe(self, model: RankModel, reading: Callable[[], float]) -> Future[float]:
        """A measurement of the model, made when it is its turn on the model's thread."""
        with self.change:
            if self.closed or model is not self.model:
                raise CancelledError
            future = self.probes.ask(reading)
            self.change.notify_all()
            return future

    # Limits, and the end

    def refuse_if_closed(self) -> None:
        if self.broken is not None:
            raise has_failed(self.broken)
        if self.draining:
            self.count("refused_closing")
            raise ClosingError("the instance is closing; ask another, or again in a second")

    def _refuse_if_full(self) -> None:
        waiting = self.rank_queue.num_waiting
        if waiting >= self.settings.queue:
            self.counts["shed"] += 1
            raise ShedError(f"{waiting} rankings wait already; ask again in a second")

    def drain(self, timeout_s: float) -> bool:
        """Take no new work, answer what was accepted; whether all of it was."""
        with self.change:
            self.draining = True
            self.change.notify_all()
            return self.change.wait_for(lambda: not self.rank_queue.open, timeout_s)

    def close(self) -> None:
        """Let the threads end after their current task."""
        with self.change:
            self.draining = self.closed = True
            self.change.notify_all()

    def refuse_pending(self) -> None:
        """Tell rankings that were accepted and not answered that the instance has closed."""
        closing = ClosingError("the instance closed before it came to this; ask another")
        left = self._fail_pending(closing)
        with self.change:
            self.counts["refused_closing"] += left

    def break_down(self, error: BaseException) -> None:
        """A thread died: fail what waits, and refuse what comes."""
        self.broken, self.draining, self.closed = error, True, True
        self._fail_pending(has_failed(error))

    def _fail_pending(self, error: BaseException) -> int:
        """Fail rankings whose answer will not come; returns how many waited. Takes the lock."""
        with self.change:
            left, self.rank_queue = list(self.rank_queue.open), RankQueue()
            self.probes.cancel()
            self.change.notify_all()
        num_failed = 0
        for ranking in left:
            try:
                ranking.future.set_exception(error)
                num_failed += 1
            except InvalidStateError:
                continue  # it was cancelled, or answered just before
        return num_failed

    def wake(self) -> None:
        """Look at the clock again."""
        with self.change:
            self.change.notify_all()

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name."""
        with self.change:
            return {name: float(value) for name, value in self._numbers().items()}

    def _numbers(self) -> dict[str, float]:
        cache, device_pool = self.cache, self.cache.device_pool
        host = cache.host_tier if cache.host_tier is not None else HostTier(0, 0.0)
        states = Counter(entry.state for entry in device_pool)
        counts = self.counts + cache.counts
        return {
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


def new_state(
    model: RankModel, settings: ServeSettings, admission: AdmissionPolicy | None, clock: Clock
) -> EngineState:
    """The state of an engine that has not begun."""
    host = int(settings.host_mb * MIB)
    cache = Cache(
        DevicePool(int(settings.device_mb * MIB)),
        HostTier(host, settings.host_ttl_s) if host else None,
        life_s=settings.life_s,
        reloads=settings.reloads,
        single_flight=settings.single_flight,
    )
    predictions = Predictions(admission, settings)
    return EngineState(model, settings, clock, cache, predictions, Probes(clock))


def need_of(request: RankRequest, model: RankModel) -> Need | None:
    """The prefix of a ranking; None without a long history, or a model that has none."""
    if not len(request.long) or not has_prefix(model):
        return None
    return Need.of(request.user, request.long, model)


def has_failed(error: BaseException) -> RunError:
    """The error for callers after a thread has died."""
    return RunError(f"the instance has failed ({error!r}); start it again")


def _outcome(step: Acquired) -> AdmissionOutcome:
    if isinstance(step, Fill):
        return AdmissionOutcome.ADMITTED
    if isinstance(step, Promised | Load):
        return AdmissionOutcome.ALREADY_CACHED
    return AdmissionOutcome.REJECTED_FOOTPRINT


def _path(step: Wait | Load | Fill) -> RankPath:
    """Of a ranking that waits for its prefix, if it gets it."""
    if isinstance(step, Load):
        return RankPath.DRAM_HIT
    return RankPath.LATE_HIT if isinstance(step, Wait) else RankPath.MISS_FULL


def start_thread(
    name: str, state: EngineState, next_task: Callable[[], Task | None], watches_clock: bool
) -> threading.Thread:
    """A thread that runs the tasks of `next_task` until the state is closed. `next_task` is called
    with the lock held, after every change, and for one thread also when a deadline passes; the task
    runs without the lock.
    """
    timeout = partial(_seconds_to_next, state) if watches_clock else lambda: None

    def until_closed() -> None:
        try:
            while (task := _wait(state, next_task, timeout)) is not None:
                task()
        except BaseException as error:  # noqa: BLE001  callers hear of it
            _log.critical("thread %s of an instance died", name, exc_info=error)
            state.break_down(error)

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
    """Until the next promise or wait expires."""
    ends = [state.cache.device_pool.next_end(), state.rank_queue.next_give_up()]
    known = [end for end in ends if end is not None]
    return max(0.0, min(known) - state.now()) if known else None
