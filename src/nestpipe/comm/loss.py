"""Who was lost: what a survivor can say when a collective fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from torch.distributed.distributed_c10d import Store

GRACE_S = 2.0
"""How long survivors wait for each other's reports."""


class LostPeers:
    """Survivors report to the store of the group; who does not report is lost.

    A backend says that a connection closed or a time ran out, not whose rank that was.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s

    def explain(self, call: str, error: RuntimeError) -> str:
        """One sentence: who failed in what, for whom it waited, what the backend said."""
        reports = self._exchange_reports(call)
        silent = [r for r in range(self._size) if r != self._rank and r not in reports]
        others = [f"rank {r} failed in {what}" for r, what in reports.items() if what != call]
        facts = [
            f"no sign of {_ranks(silent)}" if silent else "every peer reports a failure too",
            *others,
            f"the network said: {_first_sentence(error)}",
        ]
        return (
            f"rank {self._rank} waited in vain for its peers in {call}, at most "
            f"{self._timeout_s:g} s: {'; '.join(facts)}"
        )

    def _exchange_reports(self, call: str) -> dict[int, str]:
        """What the other survivors were in; waits a moment for them, unless all have told."""
        try:
            self._store.set(str(self._rank), call)
            peers = [r for r in range(self._size) if r != self._rank]
            give_up = time.monotonic() + min(GRACE_S, self._timeout_s / 2)
            while True:
                told = [r for r in peers if self._store.check([str(r)])]
                # Somebody is lost, so a single silent peer needs no more waiting for.
                if len(told) >= len(peers) - 1 or time.monotonic() > give_up:
                    return {r: self._store.get(str(r)).decode() for r in told}
                time.sleep(0.02)
        except RuntimeError:  # the store went down with the rank that held it
            return {}


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _first_sentence(error: RuntimeError) -> str:
    """Without the backend's source position and advice."""
    text = str(error).strip().splitlines()[0]
    return text.partition("] ")[2].partition(". ")[0] if text.startswith("[/") else text


def explain_sigterm(whereabouts: Callable[[], str]) -> None:
    """Let SIGTERM end the process with a line that says where it was.

    The process ends at once: other threads may be in a collective that never returns.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"{whereabouts()}; told to stop, as when a peer has failed\n".encode())
        os._exit(128 + signum)

    untouched = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if untouched and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)
