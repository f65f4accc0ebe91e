"""`Instance`: one model, its prefixes in device and host memory, and the threads of both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Self

import torch

from nestpipe.errors import NestpipeError, RunError
from nestpipe.serve.engine.admission import AdmissionPolicy, Work, check_history, check_request
from nestpipe.serve.engine.calibration import Recalibrate, recalibrated
from nestpipe.serve.engine.kv_memory import Entry, Need, ReloadsByLayer, give_arena, hand_over_arena
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
from nestpipe.serve.engine.state import EngineState, Result, Task, need_of, new_state, start_thread
from nestpipe.serve.types import (
    KV,
    AdmissionOutcome,
    Answer,
    Clock,
    PrefixItem,
    RankModel,
    RankRequest,
    RealClock,
    Scores,
    ServeSettings,
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
            self._recalibrate_for(model)

    def _recalibrate_for(self, model: RankModel) -> None:
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


# The thread that owns the model: batches of rankings first, then prefixes, a chunk at a time.
# Measurements of a model come last, or now and then where there is no end of requests.


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
        """Answer them, but for those that were cancelled."""
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


# Threads that copy prefixes between device and host memory, beside the one that computes.


class CopyStream:
    """A CUDA stream of its own for the copies of one thread, so that they run beside the model."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, device: torch.device) -> AbstractContextManager[object]:
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream)


class Transfer:
    """The next task of those threads: a reload that a ranking waits for, else an offload."""

    def __init__(self, state: EngineState, threads: int) -> None:
        self._state = state
        self._max_offloads = max(1, threads - 1)
        """At once: a reload shall find a thread."""
        self._device = torch.device("cpu")
        """Where prefixes come from, and go back to."""

    def next_task(self, stream: CopyStream) -> Task | None:
        """With the lock held."""
        if load := self._state.next_reload():
            return partial(self.reload, *load, stream)
        if copy := self._state.next_offload(self._max_offloads):
            return partial(self.offload, *copy, stream)
        return None

    def reload(self, entry: Entry, host: KV, stream: CopyStream) -> None:
        """Bring a prefix back; where that fails, those who wait for it are answered without."""
        state, start = self._state, self._state.now()
        with stream(self._device):
            kv = self._try(lambda: self._bring(entry, host), "a prefix did not come back")
        spent_ms = (state.now() - start) * 1e3
        state.reloaded(entry, kv)
        if kv is not None:
            state.predictions.observe_one(Work.RELOAD, spent_ms, entry.num_bytes)

    def _bring(self, entry: Entry, host: KV) -> KV:
        """All of it, complete; by layers, rankings read it from the moment that it has begun."""
        model = entry.need.model
        if not (self._state.settings.reload_by_layer and isinstance(model, ReloadsByLayer)):
            return _checked(model.to_device(host), entry)
        reload = model.begin_reload(host)
        self._state.reload_begun(entry, _checked(reload.kv, entry))
        return reload.run()

    def offload(self, entry: Entry, kv: KV, stream: CopyStream) -> None:
        """Keep a prefix for a user who may return."""
        self._device = kv.keys_LNHA.device
        with stream(self._device):
            host = self._try(lambda: entry.need.model.to_host(kv), "a prefix could not be kept")
        self._state.offloaded(entry, host)

    def _try(self, copy: Callable[[], KV], what: str) -> KV | None:
        try:
            return copy()
        except Exception as error:  # noqa: BLE001  no ranking depends on a copy
            self._state.warn(what, error)
            return None


def _checked(kv: KV, entry: Entry) -> KV:
    """What came back, if it is what the memory was set aside for."""
    if len(kv) != entry.key.length or kv.num_bytes > entry.num_bytes:
        raise RunError(
            f"{len(kv)} events in {kv.num_bytes} bytes came back for {entry.key.length} in "
            f"{entry.num_bytes}; this is a fault of the model"
        )
    return kv
