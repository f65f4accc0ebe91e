"""SIGTERM and SIGINT while training: finish the batch, save, exit 0, within a stated time.

A signal may reach ranks at different moments, or one rank alone. It only sets a flag. Ranks agree
on the batch to stop at in the exchange of `counts`: a rank that wants to stop adds `STOP` to its
number of samples, and every rank sees the same sum.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

STOP = 1 << 40
"""Added to a rank's samples; more than a batch has."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
AGAIN_S = 2.0
"""A launcher passes on what the terminal has sent as well; a signal after this is another one."""
MARKERS = "NESTPIPE_STOPPED"
"""Where a launcher looks for ranks that have saved and ended well after a signal."""


class StopRequest:
    """Whether this process was told to stop, and until when it may take."""

    def __init__(self, grace_s: float) -> None:
        self.wanted = False
        self.describe: Callable[[], str] = lambda: "the run"
        """Where this rank is, for the sentence of one that takes too long."""
        self._grace_s = grace_s
        self._since = 0.0
        self._late: threading.Timer | None = None

    @contextmanager
    def on_signals(self) -> Generator[None]:
        """Inside, signals ask for a stop; other threads than the main one cannot be asked."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._late is not None:
                self._late.cancel()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.wanted and now - self._since > AGAIN_S:
            self._end(number, "told to stop again")
        if not self.wanted:
            self.wanted, self._since = True, now
            why = f"not saved in {self._grace_s:g} s"
            self._late = threading.Timer(self._grace_s, self._end, (number, why))
            self._late.daemon = True
            self._late.start()

    def _end(self, number: int, why: str) -> None:
        # Not print: the signal may have come in the middle of one. Other threads may be in a
        # collective that never returns.
        os.write(2, f"error: {self.describe()}; {why}\n".encode())
        os._exit(128 + number)


def mark_stopped(rank: int) -> None:
    """Tell the launcher that this rank has saved and ends well."""
    if folder := os.environ.get(MARKERS):
        (Path(folder) / f"stopped-{rank}").touch()
