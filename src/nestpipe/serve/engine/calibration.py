"""Calibration: time a model at start-up, or beside the requests, so that `Costs` can predict.

A model in a tight loop is faster than between requests: caches are warm, threads and clocks are
awake. So a point is never timed twice in a row. Every round goes through all points of a length,
each with other events, after a pause. A high quantile of the rounds counts, not the best or median.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from nestpipe.config import positive
from nestpipe.serve.engine.admission import AdmissionControl, Costs, Sample, Work, fit
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.engine.scheduler import chunk_of, wait_for_device
from nestpipe.serve.types import (
    KV,
    Clock,
    History,
    Ids,
    PrefixItem,
    RankItem,
    RankModel,
    RealClock,
    ServeSettings,
)

HIGH = 0.8
"""Quantile of the readings that counts: of five, the fourth."""
PAUSE_S = 0.002
"""Before a reading: long enough for idle threads to fall asleep."""

GRID = 4
"""Lengths at which work is timed."""

Run = Callable[[Callable[[], float]], float]
"""Makes one reading, when and where that may be done."""
Draw = np.random.Generator
Point = tuple[Work, int, int]
"""What is timed, its size, its candidates."""


def at_once(reading: Callable[[], float]) -> float:
    """Read at once, on this thread."""
    return reading()


def lengths_up_to(longest: int) -> list[int]:
    """Some lengths, each about twice the one before."""
    return sorted({max(1, longest >> place) for place in range(GRID)})


def calibrate(
    model: RankModel,
    lengths: Sequence[int],
    candidates: Sequence[int],
    clock: Clock,
    repeats: int = 5,
    short: int = 64,
    *,
    chunk: int | None = None,
    longest_inline: int | None = None,
    run: Run = at_once,
) -> Costs:
    """Time the model over a grid of lengths and numbers of candidates, and fit.

    `short` is the number of events after the prefix in a ranking that has one, `chunk` how many of
    a prefix are computed at a time (None: all). A first round counts for nothing (compilation).

    Inline rankings of more than `longest_inline` events are not made: they are taken to need what
    their prefix and a ranking with it need, one after the other. It is the same work, and no
    reading then takes longer than a chunk or a ranking with a prefix does.
    """
    for name, values in (("lengths", lengths), ("candidates", candidates), ("repeats", [repeats])):
        for value in values or [0]:
            positive(f"{name} of the calibration", value)
    samples: dict[Work, list[Sample]] = {work: [] for work in Work}
    for length in lengths:
        bench = Calibrator(model, clock, run, short, chunk or length, longest_inline or length)
        for (work, size, count), ms in bench.times(length, candidates, repeats).items():
            samples[work].append((size, count, ms))
    return Costs({work: fit(samples[work]) for work in Work})


@dataclass(frozen=True, slots=True)
class Calibrator:
    """What is timed, and how."""

    model: RankModel
    clock: Clock
    run: Run
    short: int
    chunk: int
    longest_inline: int

    def times(self, length: int, candidates: Sequence[int], repeats: int) -> dict[Point, float]:
        """Milliseconds of every point at one length."""
        draw = np.random.default_rng(length)
        points = self._points(length, candidates, draw)
        readings: dict[Point, list[float]] = {point: [] for point in points}
        for _ in range(repeats + 1):
            for point, read in points.items():
                threading.Event().wait(PAUSE_S)
                readings[point].append(read(draw))
        found = {point: high(ms[1:]) for point, ms in readings.items()}
        for count in candidates:
            whole = found[Work.PREFIX, length, 0] + found[Work.CACHED, length, count]
            found.setdefault((Work.INLINE, length, count), whole)
        return found

    def _points(
        self, length: int, candidates: Sequence[int], draw: Draw
    ) -> dict[Point, Callable[[Draw], float]]:
        """How to read each."""
        model = self.model
        past = self._fill(_events(length, draw))[0]
        host = model.to_host(past)
        points: dict[Point, Callable[[Draw], float]] = {
            (Work.PREFIX, length, 0): lambda draw: self._fill(_events(length, draw))[1],
            (Work.RELOAD, host.num_bytes, 0): lambda _: self._ms(lambda: model.to_device(host)),
        }
        for count in candidates:
            if length <= self.longest_inline:
                points[Work.INLINE, length, count] = self._ranking(0, length, count, None)
            points[Work.CACHED, length, count] = self._ranking(length, self.short, count, past)
        return points

    def _ranking(
        self, start: int, length: int, count: int, past: KV | None
    ) -> Callable[[Draw], float]:
        def read(draw: Draw) -> float:
            ids_C = draw.permutation(count).astype(np.int64)
            item = RankItem(_events(length, draw, start), ids_C, past, start + length)
            return self._ms(lambda: self.model.rank([item]))

        return read

    def _fill(self, history: History) -> tuple[KV, float]:
        """A prefix as an instance computes it, and the milliseconds of all its chunks."""
        past: list[KV] = []
        total_ms = 0.0
        for start in range(0, len(history), self.chunk):
            part = chunk_of(history, start, self.chunk)
            item = PrefixItem(part, past[-1] if past else None)
            total_ms += self._ms(lambda item=item: past.append(self._prefix(item)))
            del past[:-1]
        return past[0], total_ms

    def _prefix(self, item: PrefixItem) -> KV:
        """Computed when this returns; scores come back as numbers and need no waiting for."""
        kv = self.model.prefix([item])[0]
        wait_for_device(kv)
        return kv

    def _ms(self, act: Callable[[], object]) -> float:
        def reading() -> float:
            start = self.clock.now()
            act()
            return (self.clock.now() - start) * 1e3

        return self.run(reading)


def high(values: Sequence[float]) -> float:
    """One that `HIGH` of them do not exceed: a single outlier of five is left out."""
    return sorted(values)[math.ceil(HIGH * len(values)) - 1]


def _events(count: int, draw: Draw, start: int = 0) -> History:
    """Different items in any order, one after the other in time."""
    items_N: Ids = draw.permutation(count).astype(np.int64)
    return History(items_N + start, np.arange(start, start + count, dtype=np.int64))


FEW, MANY, LONG = 1, 1100, 2200
"""Events on either side of the sizes at which the attention changes its kernel: how many are new,
and how many came before them (kernels/attention/triton_forward.py)."""


def warm_up(model: HstuRankModel) -> None:
    """Compute prefixes and rankings of few and many events, without a past, a short and a long one.

    Takes half a minute where nothing has been compiled on this machine before. A CPU needs none.
    """
    if model.device.type != "cuda":
        return
    for past in (None, _prefix(model, FEW), _prefix(model, LONG)):
        for item in _rankings(past):
            model.rank([item])
        for events in (FEW, MANY):
            model.prefix([PrefixItem(_history(events), past)])


def _rankings(past: KV | None) -> Iterator[RankItem]:
    for events in (FEW, MANY):
        yield RankItem(_history(events), np.ones(FEW, np.int64), past, LONG)


def _prefix(model: HstuRankModel, events: int) -> KV:
    return model.prefix([PrefixItem(_history(events))])[0]


def _history(events: int) -> History:
    return History(np.ones(events, np.int64), np.arange(events))


_log = logging.getLogger(__name__)

SHARE = 0.05
"""Fraction of the thread's time for measurements under load."""

Probe = tuple[Callable[[], float], Future[float]]
Recalibrate = Callable[[RankModel, Run], None]
"""Measures a model that has become the current one, each reading through `Run`."""


class Probes:
    """Measurements between requests, on the thread that owns the model.

    Plain state, without threads: the caller holds a lock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._line: deque[Probe] = deque()
        self._not_before = 0.0
        """Where there is other work."""

    def ask(self, act: Callable[[], float]) -> Future[float]:
        """What `act` says, once it was its turn."""
        future: Future[float] = Future()
        self._line.append((act, future))
        return future

    def take(self, idle: bool) -> Callable[[], None] | None:
        """The next one, if nothing else is to be done or it has waited long enough."""
        if not self._line or not (idle or self._clock.now() >= self._not_before):
            return None
        act, future = self._line.popleft()
        return lambda: self._run(act, future)

    def cancel(self) -> None:
        """Cancel the measurements that wait."""
        while self._line:
            self._line.popleft()[1].cancel()

    def _run(self, act: Callable[[], float], future: Future[float]) -> None:
        """Without the lock."""
        start = self._clock.now()
        try:
            found = act()
        except Exception as error:  # noqa: BLE001  the caller gets it
            future.set_exception(error)
        else:
            future.set_result(found)
        end = self._clock.now()
        self._not_before = end + (end - start) * (1 / SHARE - 1)


def recalibrated(recalibrate: Recalibrate, model: RankModel, run: Run) -> None:
    """Measure a model; what was known before stands where that fails or is overtaken."""
    try:
        recalibrate(model, run)
    except CancelledError:
        _log.info("costs of %s are not measured: it serves no longer", model.version)
    except Exception:  # noqa: BLE001  predictions are then those of the model before
        _log.warning("costs of %s could not be measured", model.version, exc_info=True)


SHORTEST = 64
SEEN = 4.0
"""Times are measured up to lengths that take N times the target; then they are fitted."""


class Calibration:
    """Admission control with measured costs, measured again when another model takes over."""

    def __init__(
        self, model: RankModel, settings: ServeSettings, kv_bytes: Callable[[int], int]
    ) -> None:
        self._settings = settings
        self._clock = RealClock()
        candidates = min(256, settings.max_candidates)
        # Two numbers, so that the cost of a candidate can be separated from that of a ranking.
        self._counts = sorted({max(1, candidates // 4), candidates})
        longest = _longest_timed(model, candidates, settings)
        self._lengths = lengths_up_to(longest)
        costs = calibrate(model, self._lengths, self._counts, self._clock, chunk=settings.chunk)
        self.admission = AdmissionControl(settings, costs, kv_bytes, self._clock)

    def again(self, model: RankModel, run: Run) -> None:
        """The same for a model that takes over: every reading is short, and made by `run`."""
        chunk = self._settings.chunk
        costs = calibrate(
            model,
            self._lengths,
            self._counts,
            self._clock,
            chunk=chunk,
            longest_inline=chunk,
            run=run,
        )
        self.admission.renew(costs)


def _longest_timed(model: RankModel, candidates: int, settings: ServeSettings) -> int:
    """The first length, doubling, that clearly misses the target; not longer than accepted."""
    length = min(SHORTEST, settings.max_events)
    while length < settings.max_events:
        if _inline_ms(model, length, candidates) > SEEN * settings.target_ms:
            break
        length = min(2 * length, settings.max_events)
    return length


def _inline_ms(model: RankModel, length: int, candidates: int) -> float:
    events_N = np.arange(length, dtype=np.int64)
    ids_C = np.arange(candidates, dtype=np.int64)
    item = RankItem(History(events_N, events_N), ids_C, time=length)
    model.rank([item])
    start = perf_counter()
    model.rank([item])
    return (perf_counter() - start) * 1e3
