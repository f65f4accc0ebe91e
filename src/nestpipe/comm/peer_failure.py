"""When a collective fails or a signal comes: where this rank was, and which peers were lost."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch.distributed.distributed_c10d import Store

from nestpipe.errors import RunError

CULPRIT_FIRST_S = 1.0
"""Survivors exit this much later, so that the launcher sees and reports which rank failed first."""
GRACE_S = 2.0
"""How long survivors wait for each other's reports ..."""
ANSWER_S = GRACE_S + 3.0
"""... and for the store that holds them."""


class CollectiveState:
    """What the communicators of one process share, for all ranks and for subsets.

    When a collective of one has failed, the others start none.
    """

    def __init__(self, rank: int, lost: LostPeers) -> None:
        self.rank = rank
        self.op_label = OpLabel()
        self._lost = lost
        self._inside: dict[int, str] = {}
        """The collective that this rank is in, by thread: each network may have one."""
        self._last = "any collective"
        self._broken: str | None = None
        self._failing = threading.Lock()
        self._hang_up: list[Callable[[], None]] = []

    def on_failure(self, hang_up: Callable[[], None]) -> None:
        """Once a collective has failed, `hang_up` lets the peers know that no message will come.

        One of them may wait for this rank alone, in another collective than the one that failed.
        """
        self._hang_up.append(hang_up)

    @contextmanager
    def inside(self, collective: str, members: Sequence[int]) -> Iterator[None]:
        """Turn the backend's error about lost peers and timeouts into one sentence.

        `members` are the ranks that take part, by their numbers in the world.
        """
        call = self.op_label.name(collective)
        if self._broken is not None:
            raise RunError(f"rank {self.rank} cannot start {call} after it failed: {self._broken}")
        thread = threading.get_ident()
        self._inside[thread] = self._last = call
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            with self._failing:
                # Report the first failure: failures in other threads follow from it.
                if self._broken is None:
                    for hang_up in self._hang_up:
                        hang_up()
                    self._broken = self._lost.explain(call, error, members)
            time.sleep(CULPRIT_FIRST_S)
            raise RunError(self._broken) from error
        finally:
            self._inside.pop(thread, None)

    def sentence(self) -> str:
        """Which collective this rank is in, was in last, or failed in."""
        if self._broken is not None:
            return self._broken
        inside = " and ".join(list(self._inside.values()))
        where = f"was in {inside}" if inside else f"had left {self._last}"
        return f"rank {self.rank} {where}"


# The name of the work that a collective serves, so that a failure can name it.


class OpLabel:
    """The op that a rank's collectives serve: `with op_label("rows 3.1"): ...`.

    Each thread that issues collectives has a name of its own.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    @property
    def what(self) -> str:
        return getattr(self._of_thread, "what", "")

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Name the collectives inside; the name before comes back afterwards."""
        before, self._of_thread.what = self.what, what
        try:
            yield
        finally:
            self._of_thread.what = before

    def name(self, collective: str) -> str:
        """The name of a collective in messages: `rows 3.1` (all_to_all)."""
        return f"`{self.what}` ({collective})" if self.what else f"`{collective}`"


# Lost peers: what a survivor knows when a collective fails.


@dataclass(frozen=True, slots=True)
class _Report:
    """The report of a survivor: the failed collective, and the ranks it waited for there."""

    call: str
    part: list[int] | None
    """The ranks of the collective, unless it was of all: those need no list."""

    def encode(self) -> str:
        return json.dumps([self.call, self.part])

    @classmethod
    def decode(cls, data: bytes) -> _Report:
        return cls(*json.loads(data))


class LostPeers:
    """Survivors report to the store of the group; a rank that does not report is lost.

    A backend reports that a connection closed or a timeout expired, not which rank was lost.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._reported = False

    def explain(self, call: str, error: RuntimeError, members: Sequence[int]) -> str:
        """One sentence: which collective failed on which rank, whom it waited for, the backend's
        error.

        `members` are the ranks that take part in the collective; a rank outside that one of them
        waited for is named too, for it may be the one that was lost.
        """
        found: dict[int, _Report] = {}
        doubts: list[str] = []

        def ask() -> None:
            try:
                self._report(call, members)
                self._collect(members, found)
            except RuntimeError:
                doubts.append("the store of reports is gone, with the rank that held it")

        # Where the link to the store is cut, its calls wait for the network to give up: minutes.
        asking = threading.Thread(target=ask, name="nestpipe-lost-peers", daemon=True)
        asking.start()
        asking.join(ANSWER_S)
        if asking.is_alive():
            doubts.append("the store of reports does not answer")
        reports = dict(found)
        silent = sorted(self._waited_for(members, reports) - reports.keys())
        elsewhere = {r: of.call for r, of in sorted(reports.items()) if of.call != call}
        facts = [
            f"no sign of {_ranks(silent)}" if silent else "every peer reports a failure too",
            *(f"rank {r} failed in {what}" for r, what in elsewhere.items()),
            *doubts,
            f"the network said: {_first_sentence(error)}",
        ]
        return (
            f"rank {self._rank} lost its peers in {call}, after at most "
            f"{self._timeout_s:g} s: {'; '.join(facts)}"
        )

    def _report(self, call: str, members: Sequence[int]) -> None:
        """Report the first failure here; failures in other threads follow from it."""
        if not self._reported:
            part = None if len(members) == self._size else list(members)
            self._store.set(str(self._rank), _Report(call, part).encode())
            self._reported = True

    def _collect(self, members: Sequence[int], reports: dict[int, _Report]) -> None:
        """Fill in the reports of other survivors; waits a moment for those that are missing."""
        give_up = time.monotonic() + min(GRACE_S, self._timeout_s / 2)
        # Some rank is lost, so a single silent one among all ranks need not be waited for. In a
        # part it may live, and be about to report that it waited for a rank outside.
        spare = 1 if len(members) == self._size else 0
        while True:
            silent = self._waited_for(members, reports) - reports.keys()
            reported = [r for r in silent if self._store.check([str(r)])]
            reports.update({r: _Report.decode(self._store.get(str(r))) for r in reported})
            if reported:
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


def claim_kind(store: Store, kind: str) -> bool:
    """Whether this rank is the first to report an error of that kind."""
    try:
        return store.add(kind, 1) == 1
    except RuntimeError:
        return False  # the rank that held the store has ended, and has said why


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


LAUNCHER = "NESTPIPE_LAUNCHER"
"""The process that started the ranks."""


def end_with_launcher() -> None:
    """Let SIGTERM come when the process that started this rank is gone, however it ended.

    A launcher that is killed cannot stop its ranks: they would train on unnoticed.
    """
    of_torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
    launcher = int(os.environ.get(LAUNCHER, of_torchrun))
    if not launcher or not hasattr(os, "pidfd_open"):
        return
    try:
        opened = os.pidfd_open(launcher)
    except ProcessLookupError:  # it was gone before
        os.kill(os.getpid(), signal.SIGTERM)
    except OSError:  # the system has no such files
        return
    else:
        threading.Thread(target=_end_after, args=(opened,), name="launcher", daemon=True).start()


def _end_after(process: int) -> None:
    """`process` is a file that can be read when that process has ended."""
    ended = select.poll()
    ended.register(process, select.POLLIN)
    ended.poll()
    os.kill(os.getpid(), signal.SIGTERM)


# SIGTERM, SIGINT and SIGHUP while training: finish the batch, save, exit 0, within a stated time.
#
# A signal may reach ranks at different moments, or one rank alone. It only sets a flag. Ranks agree
# on the batch to stop at in the exchange of `counts`: a rank that wants to stop adds `STOP` to its
# number of samples, and every rank sees the same sum.

STOP = 1 << 40
"""Added to a rank's samples; more than a batch has."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The last one comes when a terminal closes."""
NO_SIGNAL = 0
AGAIN_S = 2.0
"""A launcher forwards signals that the terminal has sent as well; a later one is a new signal."""
MARKERS = "NESTPIPE_STOPPED"
"""Where a launcher looks for ranks that have saved and ended well after a signal."""


class StopRequest:
    """Whether a signal asked this process to stop, and how long it may take."""

    def __init__(self, grace_s: float) -> None:
        self.wanted = False
        self.describe: Callable[[], str] = lambda: "the run"
        """Where this rank is, for the sentence of one that takes too long."""
        self._grace_s = grace_s
        self._since: float | None = None
        self._timer: threading.Timer | None = None

    @contextmanager
    def on_signals(self) -> Generator[None]:
        """Inside, signals ask for a stop; other threads than the main one cannot be asked.

        Python calls handlers on its main thread alone, which may be in a collective that never
        returns. So a separate thread reads the signals and keeps the time.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        read_fd, wake_fd = os.pipe()
        os.set_blocking(wake_fd, False)
        thread = threading.Thread(
            target=self._read_signals, args=(read_fd,), name="signals", daemon=True
        )
        thread.start()
        before = {number: signal.signal(number, self._want) for number in _to_hear()}
        written_before = signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
        _handled_by.append(self)
        try:
            yield
        finally:
            _handled_by.remove(self)
            signal.set_wakeup_fd(written_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.write(wake_fd, bytes([NO_SIGNAL]))
            thread.join()
            os.close(wake_fd)
            os.close(read_fd)
            if self._timer is not None:
                self._timer.cancel()

    def _want(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True

    def _read_signals(self, read_fd: int) -> None:
        """Read the numbers of signals until the last one.

        The end of the pipe would not do: a forked child may keep it open.
        """
        while True:
            for number in os.read(read_fd, 64):
                if number == NO_SIGNAL:
                    return
                if number in SIGNALS:
                    self._stop_or_end(number)

    def _stop_or_end(self, number: int) -> None:
        now = time.monotonic()
        if self._since is None:
            self.wanted, self._since = True, now
            why = f"not saved in {self._grace_s:g} s"
            self._timer = threading.Timer(self._grace_s, self._end, (number, why))
            self._timer.daemon = True
            self._timer.start()
        elif now - self._since > AGAIN_S:
            self._end(number, "told to stop again")

    def _end(self, number: int, why: str) -> None:
        # Not print: the signal may have come in the middle of one. Other threads may be in a
        # collective that never returns.
        os.write(2, f"error: {self.describe()}; {why}\n".encode())
        os._exit(128 + number)


_handled_by: list[StopRequest] = []


def _to_hear() -> list[signal.Signals]:
    """All of them, but that `nohup` lets a process live on when its terminal closes."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (ignored and number == signal.SIGHUP)]


def _forget_in_child() -> None:
    """A forked child, such as a worker that reads data, ends by its signals and reports to no
    one."""
    if _handled_by:
        signal.set_wakeup_fd(-1)
        for number in _to_hear():
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget_in_child)


def mark_stopped(rank: int) -> None:
    """Tell the launcher that this rank has saved and ends well."""
    if folder := os.environ.get(MARKERS):
        (Path(folder) / f"stopped-{rank}").touch()
