"""`Instance`: one model, its prefixes in device and host memory, and the threads that compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Self

from nestpipe.errors import NestpipeError
from nestpipe.serve.engine.admission import AdmissionPolicy, check_history, check_request
from nestpipe.serve.engine.calibration import Recalibrate, recalibrated
from nestpipe.serve.engine.model_worker import ModelWorker
from nestpipe.serve.engine.scheduler import PendingRanking
from nestpipe.serve.engine.state import need_of, new_state, start_thread
from nestpipe.serve.engine.transfer import CopyStream, Transfer
from nestpipe.serve.kv_cache.device_pool import Need
from nestpipe.serve.kv_cache.host_arena import give_arena, hand_over_arena
from nestpipe.serve.settings import ServeSettings
from nestpipe.serve.types import (
    AdmissionOutcome,
    Answer,
    Clock,
    RankModel,
    RankRequest,
    RealClock,
    Signal,
)


class Instance:
    """Answers both legs; may be called from any thread.

    One thread owns the model (`prefix`, `rank`): rankings first, in batches, then prefixes, a chunk
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
        self._admission = admission
        self._recalibrate = recalibrate
        self._calibrating: list[threading.Thread] = []
        self._state = new_state(model, settings, admission, clock or RealClock())
        host_tier = self._state.cache.host_tier
        if host_tier is not None:
            give_arena(model, host_tier.bound)
        next_task = ModelWorker(self._state).next_task
        self._threads = [start_thread("rank", self._state, next_task, watches_clock=True)]
        num_copiers = 0 if host_tier is None else settings.reloads
        transfer = Transfer(self._state, num_copiers)
        for number in range(num_copiers):
            next_copy = partial(transfer.next_task, CopyStream())
            thread = start_thread(f"copy-{number}", self._state, next_copy, watches_clock=False)
            self._threads.append(thread)

    @property
    def version(self) -> str:
        """Of the model that new requests get."""
        return self._state.model.version

    # The early leg

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        """Decide at once; the prefix is computed or reloaded by itself."""
        check_history(signal.long, self.settings)
        self._state.refuse_if_closed()
        try:
            outcome = self._decide(signal)
        except Exception as error:  # noqa: BLE001  without a decision the ranking runs inline
            self._state.warn("a signal failed", error)
            outcome = AdmissionOutcome.FAILED
        self._state.signalled(outcome)
        return outcome

    def _decide(self, signal: Signal) -> AdmissionOutcome:
        if not self.settings.relay or not len(signal.long):
            return AdmissionOutcome.NOT_AT_RISK
        while True:
            need = Need.of(signal.user, signal.long, self._state.model)
            if not self._state.has_prefix(need):
                outcome = self._ask_admission(need)
                if outcome is not AdmissionOutcome.ADMITTED:
                    return outcome
            outcome = self._state.promise(need)
            if outcome is not None:  # else the model was swapped meanwhile: again
                return outcome

    def _ask_admission(self, need: Need) -> AdmissionOutcome:
        if self._admission is None or not self.settings.admission:
            return AdmissionOutcome.ADMITTED
        return self._admission.decide(*self._state.admission_question(need))

    # The late leg

    def rank(self, request: RankRequest) -> Future[Answer]:
        """Scores as soon as they can be had; only a bad request fails its future."""
        state = self._state
        state.refuse_if_closed()
        ranking = PendingRanking(request, state.model, state.now(), self.settings)
        try:
            check_request(request, self.settings)
        except NestpipeError as error:
            ranking.future.set_exception(error)
            return ranking.future
        state.accept(ranking, need_of(request, ranking.model))
        return ranking.future

    # Another model

    def swap_model(self, model: RankModel) -> None:
        """Serve another model: what comes from now on uses it, what came before does not."""
        hand_over_arena(self._state.model, model)
        if self._state.swap(model):
            self._measure_anew(model)

    def _measure_anew(self, model: RankModel) -> None:
        """Find out what the new model's work takes, between requests."""
        if self._recalibrate is None:
            return
        thread = threading.Thread(
            target=recalibrated,
            args=(self._recalibrate, model, partial(self._measure, model)),
            name="nestpipe-costs",
            daemon=True,
        )
        with self._state.change:
            if self._state.closed:
                return
            self._calibrating = [one for one in self._calibrating if one.is_alive()] + [thread]
            thread.start()

    def _measure(self, model: RankModel, reading: Callable[[], float]) -> float:
        """One reading, when it is its turn on the thread that owns the model."""
        return self._state.probe(model, reading).result()

    # The end

    def drain(self, timeout_s: float) -> bool:
        """Take no new work, answer what was accepted; whether all of it was."""
        return self._state.drain(timeout_s)

    def close(self) -> None:
        """End the threads after what they are doing; rankings that still wait are refused."""
        self._state.close()
        for thread in self._threads:
            thread.join()
        self._state.refuse_pending()
        for thread in self._calibrating:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wake(self) -> None:
        """Look at the clock again: for clocks that do not run by themselves."""
        self._state.wake()

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name."""
        return self._state.stats()
