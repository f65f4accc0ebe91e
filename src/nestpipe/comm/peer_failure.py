"""Who was lost: what a survivor can say when a collective fails."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

from torch.distributed.distributed_c10d import Store

GRACE_S = 2.0
"""How long survivors wait for each other's reports."""


@dataclass(frozen=True, slots=True)
class _Report:
    """What a survivor tells: the collective that failed, and for whom it waited there."""

    call: str
    part: list[int] | None
    """The ranks of the collective, unless it was of all: those need no list."""

    def encode(self) -> str:
        return json.dumps([self.call, self.part])

    @classmethod
    def decode(cls, data: bytes) -> _Report:
        return cls(*json.loads(data))


class LostPeers:
    """Survivors report to the store of the group; who does not report is lost.

    A backend says that a connection closed or a time ran out, not whose rank that was.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._reported = False

    def explain(self, call: str, error: RuntimeError, members: Sequence[int]) -> str:
        """One sentence: who failed in what, for whom it waited, what the backend said.

        `members` are the ranks that take part in the collective; a rank outside that one of them
        waited for is named too, for it may be the one that was lost.
        """
        reports: dict[int, _Report] = {}
        doubts = []
        try:
            self._report(call, members)
            self._collect(members, reports)
        except RuntimeError:
            doubts = ["the store of reports is gone, with the rank that held it"]
        silent = sorted(self._waited_for(members, reports) - reports.keys())
        elsewhere = {r: told.call for r, told in sorted(reports.items()) if told.call != call}
        facts = [
            f"no sign of {_ranks(silent)}" if silent else "every peer reports a failure too",
            *(f"rank {r} failed in {what}" for r, what in elsewhere.items()),
            *doubts,
            f"the network said: {_first_sentence(error)}",
        ]
        return (
            f"rank {self._rank} waited in vain for its peers in {call}, at most "
            f"{self._timeout_s:g} s: {'; '.join(facts)}"
        )

    def _report(self, call: str, members: Sequence[int]) -> None:
        """Tell what failed here first; what fails in other threads follows from it."""
        if not self._reported:
            part = None if len(members) == self._size else list(members)
            self._store.set(str(self._rank), _Report(call, part).encode())
            self._reported = True

    def _collect(self, members: Sequence[int], reports: dict[int, _Report]) -> None:
        """Fill in what the other survivors tell; waits a moment for them, unless all have told."""
        give_up = time.monotonic() + min(GRACE_S, self._timeout_s / 2)
        # Somebody is lost, so of all ranks a single silent one needs no more waiting for. In a part
        # it may live, and be about to tell that it waited for a rank outside.
        spare = 1 if len(members) == self._size else 0
        while True:
            silent = self._waited_for(members, reports) - reports.keys()
            told = [r for r in silent if self._store.check([str(r)])]
            reports.update({r: _Report.decode(self._store.get(str(r))) for r in told})
            if told:
                continue  # with those that they waited for
            if len(silent) <= spare or time.monotonic() > give_up:
                return
            time.sleep(0.02)

    def _waited_for(self, members: Sequence[int], reports: dict[int, _Report]) -> set[int]:
        """The peers in a collective, and those for whom the ones that reported waited in turn."""
        ranks = set(members)
        for report in reports.values():
            ranks.update(range(self._size) if report.part is None else report.part)
        return ranks - {self._rank}


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _first_sentence(error: RuntimeError) -> str:
    """Without the backend's source position and advice."""
    text = str(error).strip().splitlines()[0]
    return text.partition("] ")[2].partition(". ")[0] if text.startswith("[/") else text


def explain_sigterm(describe: Callable[[], str]) -> None:
    """Let SIGTERM end the process with a line that says where it was.

    The process ends at once: other threads may be in a collective that never returns.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"{describe()}; told to stop, as when a peer has failed\n".encode())
        os._exit(128 + signum)

    untouched = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if untouched and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)
