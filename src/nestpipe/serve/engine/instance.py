"""`Instance`: one model, its prefixes in device and host memory, and the threads that compute."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Self

from nestpipe.errors import NestpipeError, ShedError
from nestpipe.serve.engine.admission import EngineLoad
from nestpipe.serve.engine.calibration import Probes, Recalibrate, recalibrated
from nestpipe.serve.engine.model_worker import ModelWorker
from nestpipe.serve.engine.scheduler import (
    AdmissionPolicy,
    PendingRanking,
    Predictions,
    check_history,
    check_request,
)
from nestpipe.serve.engine.state import ClosingError, EngineState, has_failed, start
from nestpipe.serve.engine.transfer import CopyStream, Transfer
from nestpipe.serve.kv_cache.acquire import Fill, Load, Miss, Promised, Purpose, Step, Use, Wait
from nestpipe.serve.kv_cache.cache import Cache
from nestpipe.serve.kv_cache.device_pool import DevicePool, Need
from nestpipe.serve.kv_cache.host_arena import give_arena, hand_over_arena
from nestpipe.serve.kv_cache.host_tier import HostTier
from nestpipe.serve.settings import ServeSettings
from nestpipe.serve.types import (
    AdmissionOutcome,
    Answer,
    Clock,
    Path,
    RankModel,
    RankRequest,
    RealClock,
    Signal,
)

MIB = 2**20
RECENT = 256
"""Rankings whose candidates stand for those of a ranking that has only been signalled."""


class Instance:
    """Answers both legs; may be called from any thread.

    One thread owns the model (`prefix`, `rank`): rankings first, together, then prefixes, a chunk
    at a time. With host memory, `reloads` more threads copy prefixes out and back beside it.
    """

    def __init__(
        self,
        model: RankModel,
        settings: ServeSettings,
        admission: AdmissionPolicy | None = None,
        clock: Clock | None = None,
        recalibrate: Recalibrate | None = None,
    ) -> None:
        """`recalibrate` is called, on a thread of its own, when another model takes over."""
        self.settings = settings
        self._model = model
        self._admission = admission
        self._recalibrate = recalibrate
        self._calibrating: list[threading.Thread] = []
        self._recent_candidates: deque[int] = deque(maxlen=RECENT)
        self._recent_short: deque[int] = deque(maxlen=RECENT)
        """Events after the long history: a signal does not know its own."""
        self._state = new_state(settings, admission, clock or RealClock())
        if self._state.cache.host_tier is not None:
            give_arena(model, self._state.cache.host_tier.bound)
        keep = self._state.cache.host_tier is not None and not settings.relay
        self._purpose = Purpose.RANK_AND_KEEP if keep else Purpose.RANK
        self._threads = [start("rank", self._state, ModelWorker(self._state).next_task, True)]
        num_copiers = 0 if self._state.cache.host_tier is None else settings.reloads
        copies = Transfer(self._state, num_copiers)
        for number in range(num_copiers):
            next_copy = partial(copies.next_task, CopyStream())
            self._threads.append(start(f"copy-{number}", self._state, next_copy, False))

    @property
    def version(self) -> str:
        """Of the model that new requests get."""
        return self._model.version

    # The early leg

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        """Decide at once; the prefix is computed or reloaded by itself."""
        check_history(signal.long, self.settings)
        self._refuse_if_closed()
        state = self._state
        try:
            outcome = self._decide(signal)
        except Exception as error:  # noqa: BLE001  without a decision the ranking runs inline
            state.warn("a signal failed", error)
            outcome = AdmissionOutcome.FAILED
        with state.change:
            state.counts[f"outcome_{outcome}"] += 1
            state.change.notify_all()
        return outcome

    def _decide(self, signal: Signal) -> AdmissionOutcome:
        if not self.settings.relay or not len(signal.long):
            return AdmissionOutcome.NOT_AT_RISK
        state = self._state
        while True:
            model = self._model
            need = Need.of(signal.user, signal.long, model)
            with state.change:
                here = state.cache.has(need, state.now())
            if not here and (outcome := self._ask_admission(need)) is not AdmissionOutcome.ADMITTED:
                return outcome
            with state.change:
                if model is self._model:  # else the model was swapped meanwhile: again
                    return _outcome(state.cache.acquire(need, Purpose.SIGNAL, state.now()))

    def _ask_admission(self, need: Need) -> AdmissionOutcome:
        if self._admission is None or not self.settings.admission:
            return AdmissionOutcome.ADMITTED
        state = self._state
        with state.change:
            candidates = max(self._recent_candidates, default=self.settings.max_candidates)
            length = need.key.length + max(self._recent_short, default=0)
            rank_ms = state.rank_queue_ms()
            prefix_ms = sum(state.predictions.rest_ms(entry) for entry in state.cache.fills)
            busy = EngineLoad(state.cache.device_pool.promised_bytes, rank_ms, rank_ms + prefix_ms)
        return self._admission.decide(length, candidates, busy)

    # The late leg

    def rank(self, request: RankRequest) -> Future[Answer]:
        """Scores as soon as they can be had; only a bad request fails its future."""
        self._refuse_if_closed()
        state, model = self._state, self._model
        ranking = PendingRanking(request, model, state.now(), self.settings)
        try:
            check_request(request, self.settings)
        except NestpipeError as error:
            ranking.future.set_exception(error)
            return ranking.future
        need = _need(request, model)
        with state.change:
            self._refuse_if_closed()
            self._refuse_if_full()
            if model is not self._model:
                ranking.model, need = self._model, _need(request, self._model)
            state.rank_queue.open[ranking] = None
            self._recent_candidates.append(ranking.num_candidates)
            self._recent_short.append(len(request.short))
            self._find_prefix(ranking, need, state.now())
            state.change.notify_all()
        return ranking.future

    def _find_prefix(self, ranking: PendingRanking, need: Need | None, now: float) -> None:
        """Use what is there, wait for what is worth it, else stand in line without."""
        state, costs, candidates = self._state, self._state.predictions, ranking.num_candidates
        ranking.predicted_ms = costs.cached_ms(len(ranking.request.long), candidates)
        step = self._acquire(ranking, need, now)
        if isinstance(step, Wait | Load | Fill):
            ranking.entry, ranking.path = step.entry, _path(step)
            last_call = ranking.deadline - costs.cut_ms(ranking) / 1e3
            state.rank_queue.wait_until(
                ranking, max(last_call, now + state.eta_s(step.entry, ranking))
            )
            return
        if isinstance(step, Use):
            ranking.entry = step.entry
            ranking.path = Path.LATE_HIT if step.entry.arriving else Path.HBM_HIT
        else:
            ranking.predicted_ms = costs.inline_ms(ranking.length, candidates)
        state.rank_queue.enqueue(ranking, now)

    def _acquire(self, ranking: PendingRanking, need: Need | None, now: float) -> Step:
        if need is None:
            return Miss.NOWHERE
        ready_by = ranking.deadline - ranking.predicted_ms / 1e3
        try:
            return self._state.cache.acquire(need, self._purpose, now, ready_by, ranking)
        except Exception as error:  # noqa: BLE001  a fault of the cache means inline
            self._state.warn("a prefix could not be looked up", error)
            return Miss.NOWHERE

    # Limits, and the end

    def _refuse_if_closed(self) -> None:
        state = self._state
        if state.broken is not None:
            raise has_failed(state.broken)
        if state.draining:
            state.count("refused_closing")
            raise ClosingError("the instance is closing; ask another, or again in a second")

    def _refuse_if_full(self) -> None:
        waiting = self._state.rank_queue.num_waiting
        if waiting >= self.settings.queue:
            self._state.counts["shed"] += 1
            raise ShedError(f"{waiting} rankings wait already; ask again in a second")

    def swap_model(self, model: RankModel) -> None:
        """Serve another model: what comes from now on uses it, what came before does not."""
        state = self._state
        hand_over_arena(self._model, model)
        with state.change:
            old, self._model = self._model, model
            state.cache.revive(model.version)
            if old.version != model.version:
                state.cache.retire(old.version)
                self._measure_anew(model)
            state.change.notify_all()

    def _measure_anew(self, model: RankModel) -> None:
        """Find out what the new model's work takes, between requests; with the lock held."""
        self._state.probes.cancel()  # those of the model before it
        if self._recalibrate is None or self._state.closed:
            return
        thread = threading.Thread(
            target=recalibrated,
            args=(self._recalibrate, model, partial(self._measure, model)),
            name="nestpipe-costs",
            daemon=True,
        )
        self._calibrating = [one for one in self._calibrating if one.is_alive()] + [thread]
        thread.start()

    def _measure(self, model: RankModel, reading: Callable[[], float]) -> float:
        """One reading, when it is its turn on the thread that owns the model."""
        state = self._state
        with state.change:
            if state.closed or model is not self._model:
                raise CancelledError
            future = state.probes.ask(reading)
            state.change.notify_all()
        return future.result()

    def drain(self, timeout_s: float) -> bool:
        """Take no new work, answer what was accepted; whether all of it was."""
        state = self._state
        with state.change:
            state.draining = True
            state.change.notify_all()
            return state.change.wait_for(lambda: not state.rank_queue.open, timeout_s)

    def close(self) -> None:
        """End the threads after what they are doing; rankings that still wait are refused."""
        state = self._state
        with state.change:
            state.draining = state.closed = True
            state.change.notify_all()
        for thread in self._threads:
            thread.join()
        closing = ClosingError("the instance closed before it came to this; ask another")
        left = state.fail_pending(closing)
        with state.change:
            state.counts["refused_closing"] += left
        for thread in self._calibrating:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wake(self) -> None:
        """Look at the clock again: for clocks that do not run by themselves."""
        with self._state.change:
            self._state.change.notify_all()

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name."""
        with self._state.change:
            return self._state.stats()


def new_state(
    settings: ServeSettings, admission: AdmissionPolicy | None, clock: Clock
) -> EngineState:
    """The parts of an instance, joined."""
    host = int(settings.host_mb * MIB)
    cache = Cache(
        DevicePool(int(settings.device_mb * MIB)),
        HostTier(host, settings.host_ttl_s) if host else None,
        life_s=settings.life_s,
        reloads=settings.reloads,
        single_flight=settings.single_flight,
    )
    state = EngineState(settings, clock, cache, Predictions(admission, settings), Probes(clock))
    cache.eta_s = state.eta_s
    return state


def _need(request: RankRequest, model: RankModel) -> Need | None:
    return Need.of(request.user, request.long, model) if len(request.long) else None


def _outcome(step: Step) -> AdmissionOutcome:
    if isinstance(step, Fill):
        return AdmissionOutcome.ADMITTED
    return (
        AdmissionOutcome.ALREADY_CACHED
        if isinstance(step, Promised | Load)
        else AdmissionOutcome.REJECTED_FOOTPRINT
    )


def _path(step: Wait | Load | Fill) -> Path:
    """Of a ranking that waits for its prefix, if it gets it."""
    if isinstance(step, Load):
        return Path.DRAM_HIT
    return Path.LATE_HIT if isinstance(step, Wait) else Path.MISS_FULL
