"""`Instance`: one model, its prefixes in device and host memory, and the threads that compute."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Self

from nestpipe.errors import NestpipeError, ShedError
from nestpipe.serve.engine.admission import Load as Busy
from nestpipe.serve.engine.calibration import Probes, Recalibrate, recalibrated
from nestpipe.serve.engine.model_worker import Compute
from nestpipe.serve.engine.scheduler import (
    Decides,
    Predictions,
    Ranking,
    check_history,
    check_request,
)
from nestpipe.serve.engine.state import ClosingError, Desk, has_failed, start
from nestpipe.serve.engine.transfer import Copies, CopyStream
from nestpipe.serve.kv_cache.acquire import Fill, Load, Miss, Promised, Purpose, Step, Use, Wait
from nestpipe.serve.kv_cache.cache import Cache
from nestpipe.serve.kv_cache.device_pool import Need, Slots
from nestpipe.serve.kv_cache.host_arena import give_arena, hand_over_arena
from nestpipe.serve.kv_cache.host_tier import Expander
from nestpipe.serve.settings import ServeSettings
from nestpipe.serve.types import (
    Answer,
    Clock,
    Outcome,
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
        trigger: Decides | None = None,
        clock: Clock | None = None,
        recalibrate: Recalibrate | None = None,
    ) -> None:
        """`recalibrate` is called, on a thread of its own, when another model takes over."""
        self.settings = settings
        self._model = model
        self._trigger = trigger
        self._recalibrate = recalibrate
        self._calibrating: list[threading.Thread] = []
        self._recent_candidates: deque[int] = deque(maxlen=RECENT)
        self._recent_short: deque[int] = deque(maxlen=RECENT)
        """Events after the long history: a signal does not know its own."""
        self._desk = make_desk(settings, trigger, clock or RealClock())
        if self._desk.cache.expander is not None:
            give_arena(model, self._desk.cache.expander.bound)
        keep = self._desk.cache.expander is not None and not settings.relay
        self._purpose = Purpose.RANK_AND_KEEP if keep else Purpose.RANK
        self._threads = [start("rank", self._desk, Compute(self._desk).next_task, True)]
        num_copiers = 0 if self._desk.cache.expander is None else settings.reloads
        copies = Copies(self._desk, num_copiers)
        for number in range(num_copiers):
            next_copy = partial(copies.next_task, CopyStream())
            self._threads.append(start(f"copy-{number}", self._desk, next_copy, False))

    @property
    def version(self) -> str:
        """Of the model that new requests get."""
        return self._model.version

    # The early leg

    def prefetch(self, signal: Signal) -> Outcome:
        """Decide at once; the prefix is computed or reloaded by itself."""
        check_history(signal.long, self.settings)
        self._refuse_if_closed()
        desk = self._desk
        try:
            outcome = self._decide(signal)
        except Exception as error:  # noqa: BLE001  without a decision the ranking runs inline
            desk.warn("a signal failed", error)
            outcome = Outcome.FAILED
        with desk.change:
            desk.counts[f"outcome_{outcome}"] += 1
            desk.change.notify_all()
        return outcome

    def _decide(self, signal: Signal) -> Outcome:
        if not self.settings.relay or not len(signal.long):
            return Outcome.NOT_AT_RISK
        desk = self._desk
        while True:
            model = self._model
            need = Need.of(signal.user, signal.long, model)
            with desk.change:
                here = desk.cache.has(need, desk.now())
            if not here and (outcome := self._ask_trigger(need)) is not Outcome.ADMITTED:
                return outcome
            with desk.change:
                if model is self._model:  # else the model was swapped meanwhile: again
                    return _outcome(desk.cache.acquire(need, Purpose.SIGNAL, desk.now()))

    def _ask_trigger(self, need: Need) -> Outcome:
        if self._trigger is None or not self.settings.trigger:
            return Outcome.ADMITTED
        desk = self._desk
        with desk.change:
            candidates = max(self._recent_candidates, default=self.settings.most_candidates)
            length = need.key.length + max(self._recent_short, default=0)
            rank_ms = desk.rank_queue_ms()
            prefix_ms = sum(desk.predictions.rest_ms(entry) for entry in desk.cache.fills)
            busy = Busy(desk.cache.slots.promised_bytes, rank_ms, rank_ms + prefix_ms)
        return self._trigger.decide(length, candidates, busy)

    # The late leg

    def rank(self, request: RankRequest) -> Future[Answer]:
        """Scores as soon as they can be had; only a bad request fails its future."""
        self._refuse_if_closed()
        desk, model = self._desk, self._model
        ranking = Ranking(request, model, desk.now(), self.settings)
        try:
            check_request(request, self.settings)
        except NestpipeError as error:
            ranking.future.set_exception(error)
            return ranking.future
        need = _need(request, model)
        with desk.change:
            self._refuse_if_closed()
            self._refuse_if_full()
            if model is not self._model:
                ranking.model, need = self._model, _need(request, self._model)
            desk.waiting.open[ranking] = None
            self._recent_candidates.append(ranking.num_candidates)
            self._recent_short.append(len(request.short))
            self._find_prefix(ranking, need, desk.now())
            desk.change.notify_all()
        return ranking.future

    def _find_prefix(self, ranking: Ranking, need: Need | None, now: float) -> None:
        """Use what is there, wait for what is worth it, else stand in line without."""
        desk, costs, candidates = self._desk, self._desk.predictions, ranking.num_candidates
        ranking.predicted_ms = costs.cached_ms(len(ranking.request.long), candidates)
        step = self._acquire(ranking, need, now)
        if isinstance(step, Wait | Load | Fill):
            ranking.entry, ranking.path = step.entry, _path(step)
            last_call = ranking.deadline - costs.cut_ms(ranking) / 1e3
            desk.waiting.wait_until(ranking, max(last_call, now + desk.eta_s(step.entry, ranking)))
            return
        if isinstance(step, Use):
            ranking.entry = step.entry
            ranking.path = Path.LATE_HIT if step.entry.arriving else Path.HBM_HIT
        else:
            ranking.predicted_ms = costs.inline_ms(ranking.length, candidates)
        desk.waiting.stand_in_line(ranking, now)

    def _acquire(self, ranking: Ranking, need: Need | None, now: float) -> Step:
        if need is None:
            return Miss.NOWHERE
        ready_by = ranking.deadline - ranking.predicted_ms / 1e3
        try:
            return self._desk.cache.acquire(need, self._purpose, now, ready_by, ranking)
        except Exception as error:  # noqa: BLE001  a fault of the cache means inline
            self._desk.warn("a prefix could not be looked up", error)
            return Miss.NOWHERE

    # Limits, and the end

    def _refuse_if_closed(self) -> None:
        desk = self._desk
        if desk.broken is not None:
            raise has_failed(desk.broken)
        if desk.draining:
            desk.count("refused_closing")
            raise ClosingError("the instance is closing; ask another, or again in a second")

    def _refuse_if_full(self) -> None:
        waiting = self._desk.waiting.num_waiting
        if waiting >= self.settings.queue:
            self._desk.counts["shed"] += 1
            raise ShedError(f"{waiting} rankings wait already; ask again in a second")

    def swap_model(self, model: RankModel) -> None:
        """Serve another model: what comes from now on uses it, what came before does not."""
        desk = self._desk
        hand_over_arena(self._model, model)
        with desk.change:
            old, self._model = self._model, model
            desk.cache.revive(model.version)
            if old.version != model.version:
                desk.cache.retire(old.version)
                self._measure_anew(model)
            desk.change.notify_all()

    def _measure_anew(self, model: RankModel) -> None:
        """Find out what the new model's work takes, between requests; with the lock held."""
        self._desk.probes.cancel()  # those of the model before it
        if self._recalibrate is None or self._desk.closed:
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
        desk = self._desk
        with desk.change:
            if desk.closed or model is not self._model:
                raise CancelledError
            future = desk.probes.ask(reading)
            desk.change.notify_all()
        return future.result()

    def drain(self, timeout_s: float) -> bool:
        """Take no new work, answer what was accepted; whether all of it was."""
        desk = self._desk
        with desk.change:
            desk.draining = True
            desk.change.notify_all()
            return desk.change.wait_for(lambda: not desk.waiting.open, timeout_s)

    def close(self) -> None:
        """End the threads after what they are doing; rankings that still wait are refused."""
        desk = self._desk
        with desk.change:
            desk.draining = desk.closed = True
            desk.change.notify_all()
        for thread in self._threads:
            thread.join()
        closing = ClosingError("the instance closed before it came to this; ask another")
        left = desk.fail_open(closing)
        with desk.change:
            desk.counts["refused_closing"] += left
        for thread in self._calibrating:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wake(self) -> None:
        """Look at the clock again: for clocks that do not run by themselves."""
        with self._desk.change:
            self._desk.change.notify_all()

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name."""
        with self._desk.change:
            return self._desk.stats()


def make_desk(settings: ServeSettings, trigger: Decides | None, clock: Clock) -> Desk:
    """The parts of an instance, joined."""
    host = int(settings.host_mb * MIB)
    cache = Cache(
        Slots(int(settings.device_mb * MIB)),
        Expander(host, settings.host_ttl_s) if host else None,
        life_s=settings.life_s,
        reloads=settings.reloads,
        single_flight=settings.single_flight,
    )
    desk = Desk(settings, clock, cache, Predictions(trigger, settings), Probes(clock))
    cache.eta_s = desk.eta_s
    return desk


def _need(request: RankRequest, model: RankModel) -> Need | None:
    return Need.of(request.user, request.long, model) if len(request.long) else None


def _outcome(step: Step) -> Outcome:
    if isinstance(step, Fill):
        return Outcome.ADMITTED
    return (
        Outcome.ALREADY_CACHED if isinstance(step, Promised | Load) else Outcome.REJECTED_FOOTPRINT
    )


def _path(step: Wait | Load | Fill) -> Path:
    """Of a ranking that waits for its prefix, if it gets it."""
    if isinstance(step, Load):
        return Path.DRAM_HIT
    return Path.LATE_HIT if isinstance(step, Wait) else Path.MISS_FULL
