"""One run of one arm, and the search for the load at which an arm still keeps the target.

Instances and a router run in this process. A search finds the longest history, or the highest rate,
in brackets, then halves.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nestpipe.config import build, positive
from nestpipe.errors import ConfigError
from nestpipe.loadtest.driver import (
    SIGNAL_THREADS,
    RealPace,
    Report,
    Run,
    by_threads,
    drive,
    report,
)
from nestpipe.loadtest.settings import TOLERANCE, Arm, LoadSettings, check_tolerance
from nestpipe.loadtest.workload import Leg, legs, visits
from nestpipe.models import HstuConfig
from nestpipe.serve.engine.admission import AdmissionControl, Costs, Fit, Work
from nestpipe.serve.engine.calibration import calibrate, lengths_up_to, warm_up
from nestpipe.serve.engine.instance import Instance
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.http.metrics import totals
from nestpipe.serve.http.router import Router, RouterSettings
from nestpipe.serve.http.worker import gc_frozen
from nestpipe.serve.types import (
    KV,
    AdmissionOutcome,
    Answer,
    Clock,
    PrefixItem,
    RankItem,
    RankModel,
    RankRequest,
    RankService,
    Scores,
    ServeSettings,
    Signal,
)

REMOTE_GB_PER_S = 5.0
REMOTE_MS = 1.0
"""Assumed cost of a fetch from another machine."""
DRAIN_S = 10.0


class EmulatedRemoteFetch:
    """A model whose host memory seems to be on another machine: each reload is delayed.

    An emulation: nothing goes through a network; the thread that reloads waits instead.
    """

    def __init__(self, model: RankModel, wait: Callable[[float], object] | None = None) -> None:
        self._model = model
        self._wait = wait or threading.Event().wait

    @property
    def version(self) -> str:
        return self._model.version

    @property
    def dtype(self) -> str:
        return self._model.dtype

    def prefix(self, items: Sequence[PrefixItem]) -> list[KV]:
        return self._model.prefix(items)

    def rank(self, items: Sequence[RankItem]) -> list[Scores]:
        return self._model.rank(items)

    def kv_bytes(self, length: int) -> int:
        return self._model.kv_bytes(length)

    def to_host(self, kv: KV) -> KV:
        return self._model.to_host(kv)

    def to_device(self, kv: KV) -> KV:
        self._wait(remote_fit(Fit()).at(kv.num_bytes) / 1e3)
        return self._model.to_device(kv)


def remote_fit(local: Fit) -> Fit:
    """The time of a reload with the emulated fetch before it."""
    ms_per_byte = 1e3 / (REMOTE_GB_PER_S * 1e9)
    return replace(local, base=local.base + REMOTE_MS, n=local.n + ms_per_byte)


class Several:
    """A router and its instances as one service whose counters are those of all together."""

    def __init__(self, router: Router, instances: Sequence[Instance]) -> None:
        self._router = router
        self._instances = instances

    def prefetch(self, signal: Signal) -> AdmissionOutcome:
        return self._router.prefetch(signal)

    def rank(self, request: RankRequest) -> Future[Answer]:
        return self._router.rank(request)

    def stats(self) -> dict[str, float]:
        together = totals(instance.stats() for instance in self._instances)
        return {**together, **self._router.stats()}

    def drain(self, timeout_s: float) -> bool:
        return self._router.drain(timeout_s)


@contextmanager
def open_arm(
    arm: Arm, base: ServeSettings, models: Sequence[RankModel], costs: Costs, clock: Clock
) -> Generator[Several]:
    """An instance per model, all of them cold, behind a router."""
    settings = arm.settings(base)
    fits = dict(costs.fits)
    if arm.remote:
        models = [EmulatedRemoteFetch(model) for model in models]
        fits[Work.RELOAD] = remote_fit(fits[Work.RELOAD])
    affinity = "random" if arm.scattered else "user"
    with ExitStack() as stack:
        instances: list[Instance] = []
        for model in models:
            admission = AdmissionControl(settings, Costs(fits), model.kv_bytes, clock)
            instances.append(stack.enter_context(Instance(model, settings, admission, clock)))
        backends = {f"instance-{number}": one for number, one in enumerate(instances)}
        routing = RouterSettings(affinity=affinity, life_s=settings.life_s)
        router = Router(backends, routing, clock)
        yield Several(router, instances)
        router.drain(DRAIN_S)


# The model of a load test: a checkpoint, or random weights of any size.


MakeModel = Callable[[], HstuRankModel]


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomModel:
    """`--random`: the sizes of an untrained model."""

    layers: int = 4
    dim: int = 128
    heads: int = 4
    items: int = 10_000
    max_len: int = 4096
    """The divisor of attention, and the number of distinct positions."""
    time_buckets: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "dim", "heads", "items", "max_len"):
            positive(name, getattr(self, name))
        if self.dim % self.heads:
            raise ConfigError(
                f"dim is {self.dim} and heads {self.heads}; give a dim that heads divides"
            )

    @property
    def config(self) -> HstuConfig:
        width = self.dim // self.heads
        return HstuConfig(
            blocks=self.layers,
            heads=self.heads,
            dim=self.dim,
            attention_dim=width,
            value_dim=width,
            max_len=self.max_len,
            time_buckets=self.time_buckets,
        )


def random_model(text: str) -> RandomModel:
    """Parse sizes such as `layers=4,dim=128`."""
    assignments = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in assignments if "=" not in part]
    if wrong:
        raise ConfigError(
            f"{wrong[0]!r} says nothing of a random model; write layers=4,dim=128,heads=4"
        )
    return build(RandomModel, asdict(RandomModel()), overrides=assignments)


def model_maker(
    checkpoint: Path | None, random: RandomModel, *, device: str, dtype: str
) -> MakeModel:
    """Makes equal models, one for each instance."""
    if checkpoint is not None:
        return lambda: HstuRankModel.from_checkpoint(checkpoint, device, dtype)
    return lambda: HstuRankModel.random(random.config, random.items, random.seed, device, dtype)


def measure_costs(
    model: HstuRankModel, longest: int, candidates: int, clock: Clock, short: int, chunk: int
) -> Costs:
    """Time the model at lengths up to the longest, prefixes in chunks as an instance makes them."""
    warm_up(model)
    lengths = lengths_up_to(longest)
    return calibrate(model, lengths, [candidates], clock, short=short, chunk=chunk)


SWITCH_S = 0.0005
"""Longest time that a computing thread holds the GIL while the driver waits; usually 5 ms."""
PRIORITY = 1
"""The lowest real-time priority: above everything that computes."""

Progress = Callable[[], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What the arms of a comparison share."""

    settings: LoadSettings
    models: Sequence[RankModel]
    """One for each instance."""
    costs: Costs
    clock: Clock


def run_arm(arm: Arm, bench: Bench, progress: Progress = lambda: None) -> tuple[Report, Run]:
    """Serve all requests in one arm, with cold instances."""
    serve, workload = bench.settings.serve, bench.settings.workload
    sent = list(legs(workload, visits(workload), arm.cap(serve)))
    with (
        gc_frozen(),
        open_arm(arm, serve, bench.models, bench.costs, bench.clock) as service,
        short_switch_interval(),
        prioritised_driver(),
    ):
        done = drive(service, sent, RealPace(bench.clock), progress=progress)
    return _report(f"{arm.letter} {arm.name}", done, bench.settings), done


@contextmanager
def short_switch_interval() -> Generator[None]:
    """Shorten the GIL's switch interval, so that the driver runs soon after it wakes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def prioritised_driver(*, with_new_threads: bool = False) -> Generator[bool]:
    """Let this thread run as soon as it wakes, where the system allows it; whether it does.

    Else, on a machine whose cores all compute, a thread that wakes may wait for the end of
    another's time slice, 3 ms and more: the driver would be late. Threads that it starts meanwhile
    have the same priority if `with_new_threads`.
    """
    if not hasattr(os, "sched_setscheduler"):
        yield False
        return
    alone = 0 if with_new_threads else os.SCHED_RESET_ON_FORK
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | alone, os.sched_param(PRIORITY))
    except OSError:
        yield False  # ordinary users do not have this permission
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, policy | alone, parameter)


def run_service(
    name: str, service: RankService, clock: Clock, settings: LoadSettings, progress: Progress
) -> tuple[Report, Run]:
    """Serve all requests by a service that runs elsewhere."""
    sent = list(legs(settings.workload, visits(settings.workload)))
    done = drive_service(service, sent, clock, progress)
    return _report(name, done, settings), done


def drive_service(
    service: RankService, sent: Sequence[Leg], clock: Clock, progress: Progress = lambda: None
) -> Run:
    """Send these legs to a service that runs elsewhere."""
    with ThreadPoolExecutor(SIGNAL_THREADS) as pool, prioritised_driver(with_new_threads=True):
        send = by_threads(service, pool)
        return drive(service, sent, RealPace(clock), send=send, progress=progress)


def _report(name: str, done: Run, settings: LoadSettings) -> Report:
    return report(
        name,
        done,
        target_ms=settings.serve.target_ms,
        seconds=settings.workload.seconds,
        warmup_s=settings.workload.warmup_s,
    )


# The search: the longest history, or the highest rate, at which the target is kept.


Try = Callable[[float, int], Report]
"""A run at a value, with a seed."""
OnSearchStep = Callable[["SearchStep"], None]


@dataclass(frozen=True, slots=True)
class SearchStep:
    """The runs at one value."""

    value: float
    reports: tuple[Report, ...]
    kept: bool
    """Whether most of the runs kept the target."""


@dataclass(frozen=True, slots=True)
class Found:
    """The end of a search."""

    value: float | None
    """The largest value that kept the target; None: not even the smallest did."""
    bounded: bool
    """Whether a larger value was tried and did not; else the limit of the search was met."""
    steps: tuple[SearchStep, ...]


def search(
    attempt: Try,
    start: float,
    *,
    low: float,
    high: float,
    step: float = 0.0,
    tolerance: float = TOLERANCE,
    seeds: Sequence[int] = (0, 1, 2),
    on_step: OnSearchStep = lambda step: None,
) -> Found:
    """The largest value from `low` to `high` that keeps the target, within `tolerance` of it.

    With a `step` only its multiples are tried. A value keeps the target when most of its seeds do.
    """
    check_tolerance(tolerance)
    if not low <= start <= high:
        raise ConfigError(f"the search starts at {start:g}; start between {low:g} and {high:g}")
    steps: list[SearchStep] = []

    def kept(value: float) -> bool:
        steps.append(_try(attempt, value, seeds))
        on_step(steps[-1])
        return steps[-1].kept

    good, bad = _bracket(kept, _round(start, step), _round(low, step), high, step)
    while good is not None and bad is not None:
        middle = _round((good * bad) ** 0.5, step)
        if bad / good <= 1 + tolerance or not good < middle < bad:
            break
        if kept(middle):
            good = middle
        else:
            bad = middle
    return Found(good, bad is not None, tuple(steps))


def _bracket(
    kept: Callable[[float], bool], start: float, low: float, high: float, step: float
) -> tuple[float | None, float | None]:
    """A value that keeps the target and a larger one that does not; either may be missing."""
    value = start
    if kept(value):
        while value < high:
            larger = min(_round(2 * value, step), high)
            if not kept(larger):
                return value, larger
            value = larger
        return value, None
    while value > low:
        smaller = max(_round(value / 2, step), low)
        if kept(smaller):
            return smaller, value
        value = smaller
    return None, value


def _try(attempt: Try, value: float, seeds: Sequence[int]) -> SearchStep:
    """Runs at one value, until most seeds agree."""
    enough = len(seeds) // 2 + 1
    reports: list[Report] = []
    for seed in seeds:
        reports.append(attempt(value, seed))
        kept = sum(report.keeps_target for report in reports)
        if kept >= enough or len(reports) - kept >= enough:
            break
    return SearchStep(value, tuple(reports), kept >= enough)


def _round(value: float, step: float) -> float:
    return max(step, round(value / step) * step) if step else value
