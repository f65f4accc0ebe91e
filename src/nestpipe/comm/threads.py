"""Ranks as threads of one process, for tests: real collectives, no processes, no ports.

A rank that calls another collective than its peers, leaves early or fails does not hang the
others: they get a `RunError` that says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from nestpipe.comm.communicator import Communicator
from nestpipe.comm.doing import Doing
from nestpipe.comm.payload import (
    bytes_of_sum,
    bytes_to_others,
    check_exchange,
    decode,
    encode,
)
from nestpipe.errors import RunError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Call:
    """What one rank brings to a collective."""

    name: str
    """Which collective and what for; the same on every rank, or they have parted ways."""
    given: object


class _Meeting:
    """The place where all ranks meet, again and again; each brings a call and sees all of them."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._arrived: dict[int, _Call] = {}
        self._round = 0
        self._all: list[_Call] = []
        self._gone: dict[int, str] = {}
        """Ranks that will come no more, and why."""

    def meet(self, rank: int, call: _Call) -> list[_Call]:
        """Wait for all ranks, then return what each brought, in rank order."""
        with self._changed:
            this_round = self._round
            self._arrived[rank] = call
            if len(self._arrived) == self.size:
                # Nobody can be in this list any more: all have come here after reading it.
                self._all = [self._arrived[r] for r in range(self.size)]
                self._arrived, self._round = {}, this_round + 1
                self._changed.notify_all()
            else:
                self._changed.wait_for(
                    lambda: self._round > this_round or self._hopeless(), self._timeout_s
                )
            if self._round == this_round:
                raise RunError(self._why_not(rank, call))
            calls = self._all
        names = {r: c.name for r, c in enumerate(calls)}
        if len(set(names.values())) > 1:
            said = ", ".join(f"rank {r} is in {name}" for r, name in names.items())
            raise RunError(f"ranks are in different collectives: {said}; all must call the same")
        return calls

    def leave(self, rank: int, why: str) -> None:
        """Tell the others that this rank will not come any more."""
        with self._changed:
            self._gone.setdefault(rank, why)
            self._changed.notify_all()

    def _hopeless(self) -> bool:
        return any(rank not in self._arrived for rank in self._gone)

    def _why_not(self, rank: int, call: _Call) -> str:
        missing = [r for r in range(self.size) if r not in self._arrived]
        gone = [f"rank {r} {self._gone[r]}" for r in missing if r in self._gone]
        if gone:
            return f"rank {rank} cannot finish {call.name}: {', '.join(gone)}"
        late = ", ".join(f"rank {r}" for r in missing)
        return f"rank {rank} waited {self._timeout_s:g} s in {call.name} for {late}"


class _ThreadCommunicator:
    """One rank's side of the meeting; sums are made in the order of the ranks."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.rank = rank
        self.size = meeting.size
        self.doing = Doing()
        self.bytes_sent = 0
        self.hosts_apart = False
        self._meeting = meeting

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
    ) -> None:
        check_exchange(received, sent, received_splits, sent_splits, self.size)
        self.bytes_sent += bytes_to_others(sent, sent_splits, self.rank)
        pieces = sent.detach().clone().split(list(sent_splits))
        arriving = [given[self.rank] for given in self._all("all_to_all", pieces)]
        lengths = [len(piece) for piece in arriving]
        assert lengths == list(received_splits), (
            f"rank {self.rank} expected {list(received_splits)} rows of its peers in "
            f"{self.doing.name('all_to_all')}, they sent {lengths}"
        )
        places = received.detach().split(lengths)
        for place, piece in zip(places, arriving, strict=True):
            place.copy_(piece)

    def all_reduce(self, tensor: Tensor) -> None:
        self.bytes_sent += bytes_of_sum(tensor, self.size)
        first, *others = self._all("all_reduce", tensor.detach().clone())
        total = first.clone()
        for other in others:
            assert other.shape == total.shape, f"cannot sum {other.shape} and {total.shape}"
            total += other
        tensor.detach().copy_(total)

    def sum_apart(self, tensor: Tensor) -> None:
        """Threads have one network."""
        self.all_reduce(tensor)

    def all_gather_values(self, value: object) -> list[object]:
        return [decode(data) for data in self._all("all_gather_values", encode(value))]

    def barrier(self) -> None:
        self._all("barrier", None)

    def close(self) -> None:
        self._meeting.leave(self.rank, "has closed its communicator")

    def _all(self, collective: str, given: T) -> list[T]:
        """What every rank gives to the same collective, in rank order."""
        call = _Call(self.doing.name(collective), given)
        return [c.given for c in self._meeting.meet(self.rank, call)]  # pyright: ignore[reportReturnType]


def thread_communicators(ranks: int, *, timeout_s: float = 30.0) -> list[Communicator]:
    """One communicator per rank, each to be used by a thread of its own."""
    meeting = _Meeting(ranks, timeout_s)
    return [_ThreadCommunicator(meeting, rank) for rank in range(ranks)]


def run_ranks(
    ranks: int, function: Callable[[Communicator], T], *, timeout_s: float = 30.0
) -> list[T]:
    """Run `function` once per rank, each in a thread; its results in rank order.

    The first failure is raised here with its own traceback; it also ends the other ranks, as soon
    as they are in a collective.
    """
    meeting = _Meeting(ranks, timeout_s)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def be(rank: int) -> None:
        try:
            results[rank] = function(_ThreadCommunicator(meeting, rank))
            meeting.leave(rank, "has finished")
        except BaseException as failure:  # noqa: BLE001  raised again by the caller of run_ranks
            failure.add_note(f"on rank {rank} of {ranks}")
            failures.append(failure)
            meeting.leave(rank, f"failed with {type(failure).__name__}")

    threads = [
        threading.Thread(target=be, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(ranks)]
