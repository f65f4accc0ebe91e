"""What an instance needs before it can answer: a model, and what the model's work costs."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np

from nestpipe.serve.calibrate import Run, calibrate, lengths_up_to
from nestpipe.serve.model import HstuRankModel
from nestpipe.serve.settings import ServeSettings
from nestpipe.serve.trigger import Trigger
from nestpipe.serve.types import History, RankItem, RankModel, RealClock

SHORTEST = 64
SEEN = 4.0
"""Times are measured up to lengths that take so many times the target; then they are fitted."""


def load_model(checkpoint: str, device: str, dtype: str) -> HstuRankModel:
    """The ranker of a checkpoint, or of the latest in a folder."""
    return HstuRankModel.from_checkpoint(checkpoint, device, dtype)


class Calibration:
    """A trigger that knows what the model's work takes here, also after another took over."""

    def __init__(
        self, model: RankModel, settings: ServeSettings, kv_bytes: Callable[[int], int]
    ) -> None:
        self._settings = settings
        self._clock = RealClock()
        candidates = min(256, settings.most_candidates)
        # Two numbers, so that what a candidate costs can be told from what a ranking costs.
        self._counts = sorted({max(1, candidates // 4), candidates})
        longest = _longest_timed(model, candidates, settings)
        self._lengths = lengths_up_to(longest)
        costs = calibrate(model, self._lengths, self._counts, self._clock, chunk=settings.chunk)
        self.trigger = Trigger(settings, costs, kv_bytes, self._clock)

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
        self.trigger.renew(costs)


def _longest_timed(model: RankModel, candidates: int, settings: ServeSettings) -> int:
    """The first length, doubling, that clearly misses the target; not longer than accepted."""
    length = min(SHORTEST, settings.most_events)
    while length < settings.most_events:
        if _inline_ms(model, length, candidates) > SEEN * settings.target_ms:
            break
        length = min(2 * length, settings.most_events)
    return length


def _inline_ms(model: RankModel, length: int, candidates: int) -> float:
    events_N = np.arange(length, dtype=np.int64)
    ids_C = np.arange(candidates, dtype=np.int64)
    item = RankItem(History(events_N, events_N), ids_C, time=length)
    model.rank([item])
    start = perf_counter()
    model.rank([item])
    return (perf_counter() - start) * 1e3
