"""Sends both legs of every request when they are due, and reports the outcomes.

The loop is open: no answer is waited for before the next request goes out. Latency counts from the
moment at which a ranking was due, so a driver that is late cannot make the service look fast.
The same driver runs in virtual time, without a model: what comes out can be computed by hand.

A report has latencies, cache hits, lengths, requests within target, and pictures.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nestpipe.errors import ConfigError, ShedError
from nestpipe.loadtest.workload import Leg, Visit
from nestpipe.serve.types import (
    AdmissionOutcome,
    Answer,
    Clock,
    RankPath,
    RankRequest,
    RankService,
    Signal,
)

if TYPE_CHECKING:
    from nestpipe.loadtest.run import SearchStep

LEAD_S = 0.05
"""From the end of the preparations to the start of the run."""
GRACE_S = 30.0
"""How long answers are waited for after the last request."""
SIGNAL_THREADS = 64
"""Signals on their way at once, where each waits for a network."""

Send = Callable[[Signal], "Future[AdmissionOutcome]"]


class Pace(Protocol):
    """Where the driver's time comes from."""

    def now(self) -> float:
        """Seconds."""
        ...

    def wait_until(self, moment: float) -> None:
        """Return at that moment, or at once if it has passed."""
        ...

    def settle(self, pending: Sequence[Future[None]], grace_s: float) -> None:
        """Return when all have ended, or after `grace_s`."""
        ...


class RealPace:
    """Wall-clock time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._never = threading.Event()

    def now(self) -> float:
        return self.clock.now()

    def wait_until(self, moment: float) -> None:
        left = moment - self.now()
        while left > 0:
            self._never.wait(left)
            left = moment - self.now()

    def settle(self, pending: Sequence[Future[None]], grace_s: float) -> None:
        wait(pending, timeout=grace_s)


@dataclass(slots=True)
class Record:
    """The outcome of one request."""

    visit: Visit
    outcome: AdmissionOutcome | None = None
    """Of the signal; None: it failed, or was never answered."""
    answer: Answer | None = None
    error: BaseException | None = None
    latency_ms: float | None = None
    """From when the ranking was due to its answer or error; None: neither ever came."""
    late_ms: float = 0.0
    """How late the driver sent the later of the two legs."""

    @property
    def length_used(self) -> int:
        return 0 if self.answer is None else self.answer.length_used

    @property
    def full(self) -> bool:
        """Whether it was answered, with all the history that it asked for."""
        return self.answer is not None and self.length_used >= self.visit.asked

    @property
    def cut(self) -> bool:
        return self.answer is not None and self.length_used < self.visit.asked

    @property
    def shed(self) -> bool:
        """Whether the service shed it."""
        return isinstance(self.error, ShedError)

    def within(self, target_ms: float) -> bool:
        """Whether it was answered at full length and in time."""
        return self.full and self.latency_ms is not None and self.latency_ms <= target_ms


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of a run, and what the service counted meanwhile."""

    records: list[Record]
    counted: dict[str, float] = field(default_factory=dict[str, float])
    """Increase of each counter of `RankService.stats`."""


def drive(
    service: RankService,
    legs: Sequence[Leg],
    pace: Pace,
    *,
    send: Send | None = None,
    grace_s: float = GRACE_S,
    progress: Callable[[], None] = lambda: None,
) -> Run:
    """Send every leg when it is due, then wait for the answers that are still to come."""
    send = send or at_once(service)
    records = {leg.visit.number: Record(leg.visit) for leg in legs}
    before = service.stats()
    pending: list[Future[None]] = []
    start = pace.now() + LEAD_S
    for leg in legs:
        due = start + leg.due_s
        record = records[leg.visit.number]
        pace.wait_until(due)
        record.late_ms = max(record.late_ms, 1e3 * (pace.now() - due))
        if isinstance(leg.message, Signal):
            _signal(send, leg.message, record)
        else:
            pending.append(_rank(service, leg.message, record, due, pace))
            progress()
    pace.settle(pending, grace_s)
    after = service.stats()
    counted = {name: after[name] - before.get(name, 0.0) for name in after}
    return Run([records[number] for number in sorted(records)], counted)


def at_once(service: RankService) -> Send:
    """Signals that the service takes without delay, as one in this process does."""

    def send(signal: Signal) -> Future[AdmissionOutcome]:
        decision: Future[AdmissionOutcome] = Future()
        decision.set_result(service.prefetch(signal))
        return decision

    return send


def by_threads(service: RankService, pool: ThreadPoolExecutor) -> Send:
    """Signals that wait for a network, each in a thread of its own."""
    return lambda signal: pool.submit(service.prefetch, signal)


def _signal(send: Send, signal: Signal, record: Record) -> None:
    def done(decision: Future[AdmissionOutcome]) -> None:
        if decision.exception() is None:
            record.outcome = decision.result()

    try:
        send(signal).add_done_callback(done)
    except Exception:  # noqa: BLE001 - a lost signal is no failed request: the ranking still comes
        record.outcome = None


def _rank(
    service: RankService, request: RankRequest, record: Record, due: float, pace: Pace
) -> Future[None]:
    """Send the ranking; ends once its outcome is recorded, which is later than the answer
    itself."""
    noted = Future[None]()

    def done(ended: Future[Answer]) -> None:
        record.latency_ms = 1e3 * (pace.now() - due)
        try:
            record.error = ended.exception()
            record.answer = None if record.error else ended.result()
        finally:
            noted.set_result(None)

    try:
        answer = service.rank(request)
    except Exception as error:  # noqa: BLE001 - any error is this request's outcome
        answer = Future[Answer]()
        answer.set_exception(error)
    answer.add_done_callback(done)
    return noted


class VirtualTime:
    """A clock that jumps from one event to the next; a `Pace` for the driver."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    def now(self) -> float:
        return self._now

    def at(self, moment: float, act: Callable[[], None]) -> None:
        """Let something happen at a moment."""
        heapq.heappush(self._events, (moment, next(self._serial), act))

    def wait_until(self, moment: float) -> None:
        while self._events and self._events[0][0] <= moment:
            self._now, _, act = heapq.heappop(self._events)
            act()
        self._now = max(self._now, moment)

    def settle(self, pending: Sequence[Future[None]], grace_s: float) -> None:
        self.wait_until(self._now + grace_s)


@dataclass(kw_only=True)
class FormulaService:
    """A single server with a FIFO queue; signals queue like rankings.

    A ranking takes `full_ms(length)`, or `rank_ms(length)` where the prefix is ready.
    """

    time: VirtualTime
    full_ms: Callable[[int], float]
    rank_ms: Callable[[int], float] | None = None
    """None: there is no relay."""
    prefix_ms: Callable[[int], float] = lambda length: 0.0
    """Time that a signal takes of the server."""
    cut_length: int | None = None
    """Longer histories are cut to this where they come without a prefix."""
    queue: int | None = None
    """Rankings that may wait or run; more are shed."""

    def __post_init__(self) -> None:
        self._free = 0.0
        self._waiting = 0
        self._ready = dict[str, float]()
        self._counts = {"rankings": 0.0, "signals": 0.0}

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        self._counts["signals"] += 1
        if self.rank_ms is None:
            return AdmissionOutcome.NOT_AT_RISK
        if signal.user in self._ready:
            return AdmissionOutcome.ALREADY_CACHED
        self._ready[signal.user] = self._occupy(self.prefix_ms(len(signal.long)))
        return AdmissionOutcome.ADMITTED

    def rank(self, request: RankRequest) -> Future[Answer]:
        self._counts["rankings"] += 1
        if self.queue is not None and self._waiting >= self.queue:
            raise ShedError(f"{self.queue} rankings wait already; ask again later")
        length = len(request.long) + len(request.short)
        ready = self._ready.get(request.user)
        if ready is not None and self.rank_ms is not None:
            path = RankPath.HBM_HIT if ready <= self.time.now() else RankPath.LATE_HIT
            end = self._occupy(self.rank_ms(length))
        else:
            cut = self.cut_length is not None and length > self.cut_length
            path = RankPath.MISS_CUT if cut else RankPath.MISS_FULL
            length = min(length, self.cut_length or length)
            end = self._occupy(self.full_ms(length))
        answer: Future[Answer] = Future()
        scores_C = np.zeros(len(request.candidates_C), dtype=np.float32)
        self._waiting += 1
        self.time.at(end, lambda: self._answer(answer, Answer(scores_C, path, length, "formula")))
        return answer

    def stats(self) -> dict[str, float]:
        return dict(self._counts)

    def drain(self, timeout_s: float) -> bool:
        self.time.wait_until(self.time.now() + timeout_s)
        return self._waiting == 0

    def _occupy(self, ms: float) -> float:
        """The moment at which the server is done with so much more work."""
        self._free = max(self._free, self.time.now()) + ms / 1e3
        return self._free

    def _answer(self, answer: Future[Answer], value: Answer) -> None:
        self._waiting -= 1
        answer.set_result(value)


LATE_SHARE = 0.1
"""Part of the target by which the driver may be late at P99; a run beyond that shows nothing."""
MOST_SPOILT = 0.01
"""Share of requests that may be cut, shed or fail while the target counts as kept."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from when a ranking was due to its answer."""

    count: int
    mean_ms: float
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, values_ms: Sequence[float]) -> Latency | None:
        if not values_ms:
            return None
        p50, p99 = percentile(values_ms, 0.5), percentile(values_ms, 0.99)
        return cls(len(values_ms), fmean(values_ms), p50, p99, max(values_ms))


@dataclass(frozen=True, slots=True)
class Lengths:
    """Events of histories."""

    mean: float
    p50: float

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Lengths:
        return cls(fmean(lengths), percentile(lengths, 0.5)) if lengths else cls(0.0, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The figures of one run."""

    name: str
    target_ms: float
    seconds: float
    """Of arrivals, those of the warm-up left out."""
    requests: int
    latency: Latency | None
    """Of all answers; None: there was none."""
    paths: dict[str, Latency]
    outcomes: dict[str, int]
    """Outcomes of signals, by name; `lost` for those without an answer."""
    cuts: int
    """Answers that rest on fewer events than asked for."""
    sheds: int
    errors: int
    """Other errors."""
    unanswered: int
    wasted: int
    """Prefixes computed for a signal whose own ranking did not use them."""
    reused: float
    """Share of requests whose prefix was there when the signal came, or came from host memory."""
    host_hits: float | None
    """Reloads from host memory over all requests; None: the service does not count them."""
    asked: Lengths
    used: Lengths
    """Of the answers."""
    compliant: int
    """Answers at full length within the target."""
    late_p99_ms: float
    """How late the driver was."""
    late_max_ms: float
    counted: dict[str, float]
    """Counters of the service."""

    @property
    def offered_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def compliant_per_s(self) -> float:
        """Requests per second that were answered at full length within the target."""
        return self.compliant / self.seconds

    @property
    def spoilt(self) -> float:
        """Share of requests that were cut, shed, failed or left without an answer."""
        bad = self.cuts + self.sheds + self.errors + self.unanswered
        return bad / self.requests if self.requests else 0.0

    @property
    def valid(self) -> bool:
        """Whether the driver sent the requests when they were due."""
        return self.late_p99_ms <= LATE_SHARE * self.target_ms

    @property
    def keeps_target(self) -> bool:
        """Whether P99 is within the target, and not by cutting or shedding."""
        p99_ms = self.latency.p99_ms if self.latency else float("inf")
        return self.valid and p99_ms <= self.target_ms and self.spoilt <= MOST_SPOILT


def report(name: str, run: Run, *, target_ms: float, seconds: float, warmup_s: float) -> Report:
    """The figures of a run; requests that arrived during the warm-up do not count."""
    records = [record for record in run.records if record.visit.signal_s >= warmup_s]
    answered = [record for record in records if record.answer is not None]
    late_ms = [record.late_ms for record in records] or [0.0]
    return Report(
        name=name,
        target_ms=target_ms,
        seconds=seconds - warmup_s,
        requests=len(records),
        latency=Latency.of(_latencies(answered)),
        paths=_by_path(answered),
        outcomes=dict(Counter(str(record.outcome or "lost") for record in records)),
        cuts=sum(record.cut for record in records),
        sheds=sum(record.shed for record in records),
        errors=sum(record.error is not None and not record.shed for record in records),
        unanswered=sum(record.latency_ms is None for record in records),
        wasted=sum(_wasted(record) for record in records),
        reused=sum(_reused(record) for record in records) / max(1, len(records)),
        host_hits=_host_hits(run),
        asked=Lengths.of([record.visit.asked for record in records]),
        used=Lengths.of([record.length_used for record in answered]),
        compliant=sum(record.within(target_ms) for record in records),
        late_p99_ms=percentile(late_ms, 0.99),
        late_max_ms=max(late_ms),
        counted=run.counted,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is at least as large as this share of all values."""
    ordered = sorted(values)
    place = -(-round(share * 1000) * len(ordered) // 1000)
    return ordered[max(0, place - 1)]


def as_json(figures: Report) -> dict[str, Any]:
    """All figures as plain values."""
    derived = ("offered_per_s", "compliant_per_s", "spoilt", "valid", "keeps_target")
    return {**asdict(figures), **{name: getattr(figures, name) for name in derived}}


def _host_hits(run: Run) -> float | None:
    reloads = run.counted.get("reloads")
    return None if reloads is None else reloads / max(1, len(run.records))


def _latencies(records: Sequence[Record]) -> list[float]:
    return [record.latency_ms for record in records if record.latency_ms is not None]


def _by_path(answered: Sequence[Record]) -> dict[str, Latency]:
    found: dict[str, Latency] = {}
    for path in RankPath:
        taken = [record for record in answered if record.answer and record.answer.path is path]
        latency = Latency.of(_latencies(taken))
        if latency is not None:
            found[str(path)] = latency
    return found


def _wasted(record: Record) -> bool:
    used = record.answer is not None and record.answer.path in (RankPath.HBM_HIT, RankPath.LATE_HIT)
    return record.outcome is AdmissionOutcome.ADMITTED and not used


def _reused(record: Record) -> bool:
    if record.answer is None:
        return False
    if record.answer.path is RankPath.DRAM_HIT:
        return True
    hit = record.answer.path in (RankPath.HBM_HIT, RankPath.LATE_HIT)
    return hit and record.outcome is AdmissionOutcome.ALREADY_CACHED


# Plots; matplotlib is imported only here.


KINDS = (".png", ".svg", ".pdf")
SIZE = (9.0, 5.0)


def check_plot(path: Path) -> None:
    """Refuse a plot that could not be drawn, before the work is done."""
    if path.suffix not in KINDS:
        raise ConfigError(f"cannot draw {str(path)!r}; end its name in {', '.join(KINDS)}")
    try:
        import matplotlib  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError:
        raise ConfigError(
            "a picture needs matplotlib, which is not installed; run pip install matplotlib"
        ) from None


def full_length_curve(run: Run, warmup_s: float = 0.0) -> tuple[list[float], list[float]]:
    """Milliseconds, and the share of all requests that had a full-length answer by then."""
    records = [record for record in run.records if record.visit.signal_s >= warmup_s]
    times_ms = sorted(r.latency_ms for r in records if r.full and r.latency_ms is not None)
    return times_ms, [(place + 1) / len(records) for place in range(len(times_ms))]


def p99_curve(steps: Sequence[SearchStep]) -> tuple[list[float], list[float]]:
    """Values that a search tried, and the median P99 of their runs, where there is one."""
    points: list[tuple[float, float]] = []
    for step in steps:
        found = [figures.latency.p99_ms for figures in step.reports if figures.latency is not None]
        if found:
            points.append((step.value, percentile(found, 0.5)))
    points.sort()
    return [value for value, _ in points], [p99_ms for _, p99_ms in points]


def plot_latencies(
    path: Path, runs: Mapping[str, Run], target_ms: float, warmup_s: float = 0.0
) -> None:
    """A curve per arm: cut answers never count, so it ends at the share of full-length ones."""
    figure, axes = _axes()
    for name, run in runs.items():
        times_ms, shares = full_length_curve(run, warmup_s)
        if times_ms:
            axes.step(times_ms, shares, where="post", label=name)
        else:
            axes.plot([], [], label=f"{name} (none at full length)")
    axes.axvline(target_ms, color="0.5", linestyle="--", label=f"target, {target_ms:g} ms")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("time from when the ranking was due, ms")
    axes.set_ylabel("share of requests answered at full length")
    _save(figure, axes, path)


def plot_search(
    path: Path, found: Mapping[str, Sequence[SearchStep]], target_ms: float, what: str
) -> None:
    """P99 of every value that was tried, a line per arm; filled where the target was kept."""
    figure, axes = _axes()
    for name, steps in found.items():
        values, p99_ms = p99_curve(steps)
        (line,) = axes.plot(values, p99_ms, label=name)
        kept = {step.value for step in steps if step.kept}
        for value, height in zip(values, p99_ms, strict=True):
            face = line.get_color() if value in kept else "white"
            axes.plot(value, height, "o", color=line.get_color(), markerfacecolor=face)
    axes.axhline(target_ms, color="0.5", linestyle="--", label=f"target, {target_ms:g} ms")
    axes.set_yscale("log")
    axes.set_xlabel(what)
    axes.set_ylabel("P99, ms (filled: target kept at full length)")
    _save(figure, axes, path)


def _axes() -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(True, color="0.9")
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(
            f"cannot write {str(path)!r}: {error.strerror}; choose another file"
        ) from None
