"""What the arms showed: are answers right, what did a kill do; a record of each, one sentence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nestpipe.bench.relay_service import Behind
from nestpipe.errors import RunError
from nestpipe.loadtest.report import Report
from nestpipe.serve.engine.rank_model import HstuRankModel
from nestpipe.serve.types import Answer, Path, RankItem, RankRequest, Scores

# Shapes: C candidates

EXACT = 1e-5
"""Largest difference of two scores, in standard deviations of the request's scores (float32)."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Answers that were looked at, and those that were not what they should be."""

    compared: int = 0
    wrong: int = 0
    worst: float = 0.0
    """Largest difference of a score, in standard deviations."""

    def __add__(self, other: Compared) -> Compared:
        worst = max(self.worst, other.worst)
        return Compared(self.compared + other.compared, self.wrong + other.wrong, worst)


class Reference:
    """The same weights, without anything kept: computes each ranking once and remembers it."""

    def __init__(self, model: HstuRankModel) -> None:
        self.model = model
        self._known: dict[tuple[int, int, int], Scores] = {}

    def compare(self, which: tuple[int, int], request: RankRequest, answer: Answer) -> Compared:
        """An answer with the scores of the events that it says it rests on.

        `which` names the request: the seed of its round, its number there.
        """
        whole = request.long.joined(request.short)
        used = answer.length_used
        if not 0 < used <= len(whole) or answer.version != self.model.version:
            return Compared(1, 1, float("inf"))
        key = (*which, used)
        if key not in self._known:
            item = RankItem(whole.last(used), request.candidates_C, time=request.time)
            self._known[key] = self.model.full([item])[0]
        worst = deviation(answer.scores_C, self._known[key])
        return Compared(1, int(not worst <= EXACT), worst)


def deviation(scores_C: Scores, right_C: Scores) -> float:
    """The largest difference, in standard deviations of what is right; inf where it is none."""
    if scores_C.shape != right_C.shape:
        return float("inf")
    largest, unit = float(np.abs(scores_C - right_C).max()), float(right_C.std())
    if largest == 0:
        return 0.0
    return largest / unit if np.isfinite(largest) and unit > 0 else float("inf")


# An instance that is killed while it has a ranking in hand.


AFTER = 0.4
UNTIL = 0.8
"""Between these parts of the arrivals it is killed, as soon as it has a ranking in hand."""
LOOK_S = 0.01
BACK_S = 120.0
"""How long an instance may take to be back."""


@dataclass(frozen=True, slots=True)
class Kill:
    """What was killed, and what followed."""

    instance: str
    in_hand: int
    """Rankings that it had when it was last asked."""
    retries: int | None
    """Rankings that the router asked for at another instance; None: nginx does not say."""
    back: bool
    """Whether it was started again."""


@contextmanager
def killed_under_load(
    service: Behind, name: str, seconds: float, *, tells: bool
) -> Generator[Callable[[], Kill]]:
    """Kill that instance while requests come; after the block, the function says what followed.

    `tells`: the router counts rankings that it had to ask for again.
    """
    ended = threading.Event()
    before = service.retries() if tells else 0.0
    with ThreadPoolExecutor(1) as pool:
        in_hand = pool.submit(_kill_when_busy, service, name, seconds, ended)

        def followed() -> Kill:
            retries = int(service.retries() - before) if tells else None
            return Kill(name, in_hand.result(), retries, _came_back(service, name))

        try:
            yield followed
        finally:
            ended.set()


def _kill_when_busy(service: Behind, name: str, seconds: float, ended: threading.Event) -> int:
    ended.wait(AFTER * seconds)
    in_hand = 0
    for _ in range(round((UNTIL - AFTER) * seconds / LOOK_S)):
        in_hand = int(service.instances[name].stats()["open_rankings"])
        if in_hand or ended.wait(LOOK_S):
            break
    service.started.kill(name)
    return in_hand


def _came_back(service: Behind, name: str) -> bool:
    with suppress(RunError):
        return bool(service.started.heard(rf"{name} is back", BACK_S))
    return False


FRONTS = {"builtin": "the built-in router", "nginx": "nginx"}


@dataclass(frozen=True, slots=True)
class RelayReading:
    """One arm behind one front, all rounds together."""

    front: str
    told: Report
    scores: Compared
    kill: Kill | None = None
    faults: tuple[str, ...] = ()
    """Distinct error messages of lost requests."""

    @property
    def lost(self) -> int:
        """Requests that got no scores."""
        return self.told.sheds + self.told.errors + self.told.unanswered

    @property
    def p99_ms(self) -> float:
        return self.told.latency.p99_ms if self.told.latency else float("inf")

    @property
    def hits(self) -> dict[str, int]:
        """Answers by path."""
        found = {path: self.told.paths.get(str(path)) for path in Path}
        return {str(path): one.count if one else 0 for path, one in found.items()}

    @property
    def reloads(self) -> int | None:
        """Prefixes from host memory, mostly for the signal; None: a killed instance forgets."""
        return None if self.kill else int(self.told.counted.get("reloads", 0))

    @property
    def signals(self) -> dict[str, int]:
        """Signals by what became of them; none where none were sent."""
        return {} if set(self.told.outcomes) == {"lost"} else dict(self.told.outcomes)

    def as_json(self) -> dict[str, Any]:
        told, latency = self.told, self.told.latency
        return {
            "front": self.front,
            "arm": told.name,
            "target_ms": told.target_ms,
            "requests": told.requests,
            "p50_ms": latency.p50_ms if latency else None,
            "p99_ms": latency.p99_ms if latency else None,
            "within_target": told.compliant / told.requests if told.requests else None,
            "keeps_target": told.keeps_target,
            "signals": self.signals,
            "hits": self.hits,
            "reloads": self.reloads,
            "cuts": told.cuts,
            "lost": self.lost,
            "faults": list(self.faults),
            "wrong": self.scores.wrong,
            "compared": self.scores.compared,
            "worst_deviation": self.scores.worst,
            "length_asked": told.asked.mean,
            "length_used": told.used.mean,
            "driver_late_p99_ms": told.late_p99_ms,
            "valid": told.valid,
            "killed": asdict(self.kill) if self.kill else None,
        }


def is_sound(readings: Sequence[RelayReading]) -> bool:
    """Whether no request was lost and no score wrong."""
    return not any(one.lost or one.scores.wrong for one in readings)


def conclusion(readings: Sequence[RelayReading], length: int) -> str:
    """One sentence: what relay did, what the kill did, whether scores were right."""
    fronts = list(dict.fromkeys(one.front for one in readings))
    parts = [_of_front(front, [one for one in readings if one.front == front]) for front in fronts]
    killed = [one for one in readings if one.kill]
    lost, asked = sum(one.lost for one in killed), sum(one.told.requests for one in killed)
    wrong = sum(one.scores.wrong for one in readings)
    compared = sum(one.scores.compared for one in readings)
    late = "" if all(one.told.valid for one in readings) else _late(readings)
    return (
        f"At {length:,} events and a P99 target of {readings[0].told.target_ms:g} ms, "
        f"{'; '.join(parts)}; with an instance killed under load {lost} of {asked} requests were "
        f"lost; {wrong} of {compared} answers had a wrong score{late}."
    )


def _of_front(front: str, readings: Sequence[RelayReading]) -> str:
    arms = {one.told.name: one for one in readings}
    inline, relays = arms["inline full"], [arms["relay"], arms["relay + host"]]
    kept = [one for one in relays if one.told.keeps_target]
    best = min(kept or relays, key=lambda one: one.p99_ms)
    where = f"behind {FRONTS[front]}"
    figures = f"P99 {best.p99_ms:.0f} ms, inline {inline.p99_ms:.0f} ms"
    if not kept:
        in_time = best.p99_ms <= best.told.target_ms
        spoilt = f", {best.told.spoilt:.1%} cut, shed or lost" if in_time else ""
        return f"{where} relay misses it ({figures}{spoilt})"
    names = " and ".join(one.told.name for one in kept)
    keep = "keeps" if len(kept) == 1 else "keep"
    also = ", and so does inline ranking" if inline.told.keeps_target else " where inline cannot"
    return f"{where} {names} {keep} it{also} ({figures})"


def _late(readings: Sequence[RelayReading]) -> str:
    worst = max(one.told.late_p99_ms for one in readings)
    return (
        f"; but the driver was up to {worst:.1f} ms late at P99, so this shows nothing: run it on "
        "an idle machine"
    )
