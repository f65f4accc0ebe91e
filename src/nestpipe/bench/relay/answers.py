"""Whether answers are right: each is compared with what a model in this process computes whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from nestpipe.bench.relay.service import Behind
from nestpipe.errors import RunError
from nestpipe.serve.model.ranker import HstuRankModel
from nestpipe.serve.types import Answer, RankItem, RankRequest, Scores

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
