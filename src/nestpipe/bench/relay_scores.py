"""Whether answers are right: each is compared with what a model in this process computes whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nestpipe.serve.model import HstuRankModel
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
