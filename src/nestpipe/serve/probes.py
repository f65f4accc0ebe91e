"""`Probes`: measurements that are made between requests, on the thread that owns the model."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from nestpipe.serve.calibrate import Run
from nestpipe.serve.types import Clock, RankModel

_log = logging.getLogger(__name__)

SHARE = 0.05
"""Part of the thread's time that they take where requests leave it none."""

Probe = tuple[Callable[[], float], Future[float]]
Recalibrate = Callable[[RankModel, Run], None]
"""Measures a model that has become the current one, each reading through `Run`."""


class Probes:
    """Plain state, without threads: the caller holds a lock."""

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
        """Let nobody wait for what will not be measured."""
        while self._line:
            self._line.popleft()[1].cancel()

    def _run(self, act: Callable[[], float], future: Future[float]) -> None:
        """Without the lock."""
        start = self._clock.now()
        try:
            found = act()
        except Exception as error:  # noqa: BLE001  whoever asked hears of it
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
