"""Relay beside inline ranking, over HTTP: the same requests to services that differ in a setting.

Two instances of one thread each stand behind a router. For each front, the services of all arms
run side by side and take turns: round by round, every arm meets the same requests, alone.
Sizes are chosen first, from what the model's work takes here.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from nestpipe.bench.relay_service import (
    Behind,
    Compared,
    Kill,
    Reference,
    RelayReading,
    killed_under_load,
    serving,
)
from nestpipe.errors import ConfigError
from nestpipe.loadtest.driver import Record, Run, report
from nestpipe.loadtest.run import drive_service, measure_costs
from nestpipe.loadtest.settings import LoadSettings, WorkloadSettings
from nestpipe.loadtest.workload import Leg, legs, visits
from nestpipe.serve.engine.admission import Costs
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.types import Clock, History, RankItem, RankRequest, Signal

# Shapes: N events, C candidates

TARGET_MS = 100.0
"""Where neither target nor length is given."""
LEAST_TARGET_MS = 50.0
"""Below this the delays of the driver and of HTTP are too great a part of what is measured."""
INLINE_OVER_TARGET = 1.5
"""What an inline ranking takes at the length that is chosen, in targets."""
CLOSE = 0.9
"""A length that makes this much of the usual target is paired with the usual target."""
CAPPED_OVER_TARGET = 0.5
"""What an inline ranking takes at the cap: with a queue it must still be in time."""
USED = 0.06
"""Part of the time for which an instance computes: so that two prefixes seldom meet in one."""
CHUNK = 256
"""Events of a prefix that an instance computes at a time."""
SHORTEST, LONGEST, STEP = 256, 4096, 64
"""Lengths to choose from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedSizes:
    """What the user fixed; None: to be chosen."""

    length: int | None = None
    target_ms: float | None = None
    rate: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What is asked of the service, and what its work was predicted to take."""

    length: int
    cap: int
    """Events that the capped arm sends."""
    target_ms: float
    rate: float
    inline_ms: float
    capped_ms: float
    prefix_ms: float
    cached_ms: float


def measure(
    model: HstuRankModel, asked: AskedSizes, candidates: int, short: int, clock: Clock
) -> Costs:
    """Time the model as an instance does when it starts, up to lengths that may be chosen."""
    longest = asked.length
    if longest is None:
        enough_ms = INLINE_OVER_TARGET * (asked.target_ms or TARGET_MS)
        longest = SHORTEST
        while longest < LONGEST and _inline_ms(model, longest, candidates, clock) < enough_ms:
            longest *= 2
    return measure_costs(model, longest, candidates, clock, short, CHUNK)


def choose(costs: Costs, asked: AskedSizes, candidates: int, short: int, instances: int) -> Sizes:
    """A length at which inline ranking takes longer than the target, and a low rate."""

    def inline_ms(length: int) -> float:
        return costs.inline_ms(length, candidates)

    length, target_ms = asked.length, asked.target_ms
    if length is None:
        most_ms = INLINE_OVER_TARGET * (target_ms or TARGET_MS)
        length = _longest(most_ms, inline_ms, SHORTEST, LONGEST)
    if target_ms is None:
        target_ms = round(inline_ms(length) / INLINE_OVER_TARGET, 1)
        if asked.length is None and target_ms > CLOSE * TARGET_MS:
            target_ms = TARGET_MS
        _refuse_tight(target_ms, length, inline_ms(length))
    cap = _longest(CAPPED_OVER_TARGET * target_ms, inline_ms, STEP, length - 1)
    prefix_ms = costs.prefix_ms(length - short)
    cached_ms = costs.cached_ms(length - short, candidates)
    rate = asked.rate
    if rate is None:
        rate = round(USED * instances * 1e3 / max(prefix_ms + cached_ms, inline_ms(length)), 2)
    return Sizes(
        length=length,
        cap=cap,
        target_ms=target_ms,
        rate=rate,
        inline_ms=inline_ms(length),
        capped_ms=inline_ms(cap),
        prefix_ms=prefix_ms,
        cached_ms=cached_ms,
    )


def _longest(most_ms: float, inline_ms: Callable[[int], float], least: int, most: int) -> int:
    """The longest length, in steps, whose inline ranking takes at most so long."""
    fitting = [n for n in range(least, most + 1, STEP) if inline_ms(n) <= most_ms]
    return max(fitting, default=min(least, most))


def _refuse_tight(target_ms: float, length: int, inline_ms: float) -> None:
    if target_ms < LEAST_TARGET_MS:
        raise ConfigError(
            f"{length} events are ranked in {inline_ms:.0f} ms here, and a target that this misses "
            f"would be below {LEAST_TARGET_MS:g} ms; give a longer --length, a larger --random, or "
            "--target-ms itself"
        )


def _inline_ms(model: HstuRankModel, length: int, candidates: int, clock: Clock) -> float:
    """Time one inline ranking after a warm-up."""
    events_N, ids_C = np.arange(length), np.arange(candidates)
    item = RankItem(History(events_N, events_N), ids_C, time=length)
    model.full([item])
    start = clock.now()
    model.full([item])
    return (clock.now() - start) * 1e3


INSTANCES = 2
APART = 3.0
"""Mean time from a signal to its ranking, in targets: 60 % retrieval, 40 % pre-processing."""
WINDOW = 3.5
"""Time in which a prefix must be ready, in targets: a ranking can wait for it a little."""
LIFE = 10.0
"""How long a prefix waits for its ranking, in targets."""
GROWTH = 256
"""Events by which a history may grow in a run."""
KILL_RATE = 3.0
"""Requests per second while an instance is killed, over those of the other rounds."""
WARM = 4
"""Requests before the first round, which are not counted."""

Front = Literal["builtin", "nginx"]
Bar = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Shows progress: what is done, how many of it."""


@dataclass(frozen=True, slots=True)
class RelayArm:
    """A way to have the same requests answered."""

    name: str
    service: str
    signals: bool = True
    """Whether the early leg is sent."""
    capped: bool = False
    """Whether only the newest events are sent."""


SERVICES: dict[str, dict[str, object]] = {
    "inline": {"relay": False, "host_mb": 0.0},
    "relay": {"host_mb": 0.0},
    "relay + host": {},
}
"""Settings in which they differ. Without relay nothing is predicted, so nothing is cut."""
ARMS = (
    RelayArm("inline full", "inline", signals=False),
    RelayArm("inline capped", "inline", signals=False, capped=True),
    RelayArm("relay", "relay"),
    RelayArm("relay + host", "relay + host"),
)
KILLED = replace(ARMS[-1], name="instance killed")


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayCase:
    """What is compared."""

    checkpoint: Path
    settings: LoadSettings
    """Requests and service, but for what the arms change."""
    cap: int
    """Events that the capped arm sends."""
    rounds: int
    fronts: tuple[Front, ...]

    def workload(self, number: int) -> WorkloadSettings:
        """Of a round: other arrivals in each. The one after the last is the kill's."""
        workload = self.settings.workload
        rate = workload.rate * (KILL_RATE if number == self.rounds else 1.0)
        return replace(workload, seed=workload.seed + number, rate=rate)

    @property
    def minutes(self) -> float:
        """Total time for which requests arrive."""
        rounds = self.rounds * len(ARMS) + 1
        return len(self.fronts) * rounds * self.settings.workload.seconds / 60


def sections(sizes: Sizes, seconds: float, candidates: int) -> dict[str, dict[str, object]]:
    """Settings of workload and service that follow from the sizes; the user may change them."""
    target_ms = sizes.target_ms
    workload: dict[str, object] = {
        "rate": sizes.rate,
        "seconds": seconds,
        "length": sizes.length,
        "most_length": sizes.length + GROWTH,
        "candidates": candidates,
        "retrieval_ms": 0.6 * APART * target_ms,
        "preprocess_ms": 0.4 * APART * target_ms,
    }
    serve: dict[str, object] = {
        "target_ms": target_ms,
        "window_ms": WINDOW * target_ms,
        "life_s": max(0.5, LIFE * target_ms / 1e3),
        "prefix_share": 1.0,
        "chunk": CHUNK,
        "cut_length": sizes.cap,
        "max_events": sizes.length + GROWTH,
        "max_candidates": 2 * candidates,
    }
    return {"workload": workload, "serve": serve}


def find_nginx() -> str | None:
    """The nginx of this machine, as `nestpipe serve` looks for it."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


def compare(case: RelayCase, reference: Reference, clock: Clock, bar: Bar) -> list[RelayReading]:
    """All arms behind every front, then an instance killed under load behind each."""
    readings: list[RelayReading] = []
    for front in case.fronts:
        with ExitStack() as stack:
            services: dict[str, Behind] = {}
            with bar(f"{front}: starting services", len(SERVICES)) as advance:
                for name, changes in SERVICES.items():
                    settings = asdict(case.settings.serve) | changes
                    started = serving(case.checkpoint, front, INSTANCES, settings)
                    services[name] = stack.enter_context(started)
                    advance()
            readings += _Bench(case, front, services, reference, clock, bar).run()
    return readings


@dataclass(frozen=True, slots=True)
class _Round:
    """What one arm did in one round."""

    run: Run
    compared: Compared


@dataclass(frozen=True, slots=True)
class _Bench:
    """One front with its services."""

    case: RelayCase
    front: Front
    services: Mapping[str, Behind]
    reference: Reference
    clock: Clock
    bar: Bar

    def run(self) -> list[RelayReading]:
        for arm in ARMS:
            self._warm(arm)
        done: dict[str, list[_Round]] = {arm.name: [] for arm in ARMS}
        for number in range(self.case.rounds):
            for arm in turned(ARMS, number):
                done[arm.name].append(self._round(arm, number))
        readings = [self._reading(arm, done[arm.name]) for arm in ARMS]
        return [*readings, self._killed()]

    def _warm(self, arm: RelayArm) -> None:
        service = self.services[arm.service]
        for leg in self._legs(arm, self.case.rounds + 1)[: 2 * WARM]:
            if isinstance(leg.message, Signal):
                service.prefetch(leg.message)
            else:
                service.rank(leg.message).result()

    def _legs(self, arm: RelayArm, number: int) -> list[Leg]:
        workload = self.case.workload(number)
        cap = self.case.cap if arm.capped else None
        sent = legs(workload, visits(workload), cap)
        return [leg for leg in sent if arm.signals or _is_ranking(leg)]

    def _round(self, arm: RelayArm, number: int) -> _Round:
        sent, service = self._legs(arm, number), self.services[arm.service]
        label = f"{self.front}, {arm.name}, round {number + 1} of {self.case.rounds}"
        with self.bar(label, _rankings(sent)) as advance:
            run = drive_service(service, sent, self.clock, advance)
        return _Round(run, self._compare(sent, run, number))

    def _compare(self, sent: Sequence[Leg], run: Run, number: int) -> Compared:
        seed = self.case.workload(number).seed
        asked = {one.visit.number: one.message for one in sent if _is_ranking(one)}
        total = Compared()
        with self.bar("comparing scores", len(asked)) as advance:
            for record in run.records:
                which = record.visit.number
                request = asked[which]
                assert isinstance(request, RankRequest), "signals have no scores"
                if record.answer is not None:
                    total += self.reference.compare((seed, which), request, record.answer)
                advance()
        return total

    def _killed(self) -> RelayReading:
        number, service = self.case.rounds, self.services[KILLED.service]
        sent = self._legs(KILLED, number)
        label = f"{self.front}, an instance is killed"
        with (
            self.bar(label, _rankings(sent)) as advance,
            killed_under_load(
                service,
                "instance-0",
                self.case.settings.workload.seconds,
                tells=self.front == "builtin",
            ) as what_followed,
        ):
            run = drive_service(service, sent, self.clock, advance)
        done = _Round(run, self._compare(sent, run, number))
        return self._reading(KILLED, [done], what_followed())

    def _reading(
        self, arm: RelayArm, rounds: Sequence[_Round], kill: Kill | None = None
    ) -> RelayReading:
        workload = self.case.settings.workload
        records: list[Record] = [record for one in rounds for record in one.run.records]
        counted: Counter[str] = Counter()
        for one in rounds:
            counted.update(one.run.counted)
        figures = report(
            arm.name,
            Run(records, dict(counted)),
            target_ms=self.case.settings.serve.target_ms,
            seconds=len(rounds) * workload.seconds,
            warmup_s=workload.warmup_s,
        )
        compared = sum((one.compared for one in rounds), Compared())
        return RelayReading(self.front, figures, compared, kill, _faults(records))


def _faults(records: Sequence[Record]) -> tuple[str, ...]:
    said = [str(record.error) for record in records if record.error is not None]
    return tuple(dict.fromkeys(said))


def turned(arms: Sequence[RelayArm], number: int) -> list[RelayArm]:
    """Another arm first in every round."""
    place = number % len(arms)
    return [*arms[place:], *arms[:place]]


def _rankings(sent: Sequence[Leg]) -> int:
    return sum(map(_is_ranking, sent))


def _is_ranking(leg: Leg) -> bool:
    return isinstance(leg.message, RankRequest)
