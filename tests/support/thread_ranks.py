"""Ranks as threads of one process, for tests: real collectives, no processes, no ports.

A rank that calls another collective than its peers, leaves early or fails does not hang the
others: they get a `RunError` that says so.
"""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from nestpipe.comm.communicator import (
    Communicator,
    LocalCommunicator,
    bytes_of_sum,
    bytes_to_others,
    check_agreement,
    check_exchange,
    decode,
    encode,
    own_subset,
)
from nestpipe.comm.peer_failure import OpLabel
from nestpipe.errors import RunError
from nestpipe.runtime import ThreadLanes
from nestpipe.schedule import Lane

T = TypeVar("T")


class _ThreadCommunicator:
    """One rank's side of a meeting; sums are made in the order of the ranks."""

    def __init__(
        self, meeting: ThreadRendezvous, world_rank: int, op_label: OpLabel | None = None
    ) -> None:
        self.rank = meeting.members.index(world_rank)
        self.size = len(meeting.members)
        self.op_label = op_label or OpLabel()
        self.separate_groups = False
        self._meeting = meeting
        self._world_rank = world_rank
        self._sent = 0
        self._subgroups: list[_ThreadCommunicator] = []

    @property
    def bytes_sent(self) -> int:
        """Bytes that went to other ranks so far, through subgroups too."""
        return self._sent + sum(part.bytes_sent for part in self._subgroups)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_splits: Sequence[int],
        sent_splits: Sequence[int],
    ) -> None:
        check_exchange(received, sent, received_splits, sent_splits, self.size)
        self._sent += bytes_to_others(sent, sent_splits, self.rank)
        pieces = sent.detach().clone().split(list(sent_splits))
        arriving = [given[self.rank] for given in self._all("all_to_all", pieces)]
        lengths = [len(piece) for piece in arriving]
        assert lengths == list(received_splits), (
            f"rank {self._world_rank} expected {list(received_splits)} rows of its peers in "
            f"{self.op_label.name('all_to_all')}, they sent {lengths}"
        )
        places = received.detach().split(lengths)
        for place, piece in zip(places, arriving, strict=True):
            place.copy_(piece)

    def all_reduce(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous(), "sums work in place on contiguous memory"
        self._sent += bytes_of_sum(tensor, self.size)
        first, *others = self._all("all_reduce", tensor.detach().clone())
        total = first.clone()
        for other in others:
            assert other.shape == total.shape, f"cannot sum {other.shape} and {total.shape}"
            total += other
        tensor.detach().copy_(total)

    def all_reduce_dense(self, tensor: Tensor) -> None:
        """Threads have one network."""
        self.all_reduce(tensor)

    def all_gather_values(self, value: object) -> list[object]:
        return [decode(data) for data in self._all("all_gather_values", encode(value))]

    def barrier(self) -> None:
        self._all("barrier", None)

    def subgroup(
        self, partition: Sequence[Sequence[int]]
    ) -> _ThreadCommunicator | LocalCommunicator:
        assert self._meeting.whole is None, "only the communicator of all ranks has subgroups"
        own = own_subset(partition, self.rank, self.size)
        if all(len(subset) == 1 for subset in partition):
            return LocalCommunicator(self.op_label)
        # Everyone offers a meeting; that of a part is the one its first rank offers.
        asked = [list(subset) for subset in partition]
        offers = self._all("subgroup", (asked, self._meeting.part(own)))
        check_agreement([asked for asked, _ in offers])
        if len(own) == 1:
            return LocalCommunicator(self.op_label)
        _, meeting = offers[own[0]]
        part = _ThreadCommunicator(meeting, self._world_rank, self.op_label)
        self._subgroups.append(part)
        return part

    def close(self) -> None:
        self._meeting.leave(self._world_rank, "has closed its communicator")

    def _all(self, collective: str, given: T) -> list[T]:
        """What every rank gives to the same collective, in rank order."""
        call = Call(self.op_label.name(collective), given)
        return [c.given for c in self._meeting.meet(self._world_rank, call)]  # pyright: ignore[reportReturnType]


def thread_communicators(ranks: int, *, timeout_s: float = 30.0) -> list[Communicator]:
    """One communicator per rank, each to be used by a thread of its own."""
    meeting = ThreadRendezvous(range(ranks), timeout_s)
    return [_ThreadCommunicator(meeting, rank) for rank in range(ranks)]


def run_ranks(
    ranks: int, function: Callable[[Communicator], T], *, timeout_s: float = 30.0
) -> list[T]:
    """Run `function` once per rank, each in a thread; its results in rank order.

    The first failure is raised here with its own traceback; it also ends the other ranks, as soon
    as they are in a collective.
    """
    meeting = ThreadRendezvous(range(ranks), timeout_s)
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}

    def be(rank: int) -> None:
        try:
            results[rank] = function(_ThreadCommunicator(meeting, rank))
            meeting.leave(rank, "has finished")
        except BaseException as failure:  # noqa: BLE001  raised again by the caller of run_ranks
            failure.add_note(f"on rank {rank} of {ranks}")
            failures[rank] = failure
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
        raise next(failures[rank] for rank in meeting.left if rank in failures)
    return [results[rank] for rank in range(ranks)]


# Where ranks that are threads meet for a collective, and learn who will come no more.


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank brings to a collective."""

    name: str
    """Which collective and what for; the same on every rank, or they have parted ways."""
    given: object


class ThreadRendezvous:
    """The place where all members meet, again and again; each brings a call and sees all of them.

    Members have their ranks in the whole. A meeting of a part hears of those that leave the whole.
    """

    def __init__(
        self, members: Sequence[int], timeout_s: float, whole: ThreadRendezvous | None = None
    ) -> None:
        self.members = list(members)
        self.whole = whole
        self._timeout_s = timeout_s
        self._changed = whole._changed if whole else threading.Condition()
        self._arrived: dict[int, Call] = {}
        self._round = 0
        self._all: list[Call] = []
        self._gone: MutableMapping[int, str] = ChainMap({}, whole._gone) if whole else {}
        """Ranks that will come no more, and why."""

    @property
    def left(self) -> list[int]:
        """The ranks that have left, the first one first."""
        return list(self._gone)

    def part(self, members: Sequence[int]) -> ThreadRendezvous:
        """A meeting of some of the members."""
        return ThreadRendezvous(members, self._timeout_s, self)

    def meet(self, rank: int, call: Call) -> list[Call]:
        """Wait for all members, then return what each brought, in their order.

        A rank that waits in vain has failed: it is not waited for in any other meeting.
        """
        try:
            calls = self._meet(rank, call)
            _check_same(self.members, calls)
        except RunError:
            (self.whole or self).leave(rank, f"failed in {call.name}")
            raise
        return calls

    def leave(self, rank: int, why: str) -> None:
        """Tell the others that this rank will not come any more, nor to meetings of parts."""
        with self._changed:
            self._gone.setdefault(rank, why)
            self._changed.notify_all()

    def _meet(self, rank: int, call: Call) -> list[Call]:
        with self._changed:
            if rank in self._gone:
                raise RunError(f"rank {rank} cannot start {call.name}: it {self._gone[rank]}")
            this_round = self._round
            self._arrived[rank] = call
            if len(self._arrived) == len(self.members):
                # Nobody can be in this list any more: all have come here after reading it.
                self._all = [self._arrived[r] for r in self.members]
                self._arrived, self._round = {}, this_round + 1
                self._changed.notify_all()
            else:
                self._changed.wait_for(
                    lambda: self._round > this_round or self._hopeless(), self._timeout_s
                )
            if self._round == this_round:
                raise RunError(self._why_not(rank, call))
            return self._all

    def _hopeless(self) -> bool:
        return any(r in self._gone and r not in self._arrived for r in self.members)

    def _why_not(self, rank: int, call: Call) -> str:
        missing = [r for r in self.members if r not in self._arrived]
        gone = [f"rank {r} {self._gone[r]}" for r in missing if r in self._gone]
        if gone:
            return f"rank {rank} cannot finish {call.name}: {', '.join(gone)}"
        late = ", ".join(f"rank {r}" for r in missing)
        return f"rank {rank} waited {self._timeout_s:g} s in {call.name} for {late}"


def _check_same(members: Sequence[int], calls: Sequence[Call]) -> None:
    if len({call.name for call in calls}) > 1:
        pairs = zip(members, calls, strict=True)
        said = ", ".join(f"rank {r} is in {call.name}" for r, call in pairs)
        raise RunError(f"ranks are in different collectives: {said}; all must call the same")


def some_threads() -> ThreadLanes:
    """Threads for the lanes of the host; the issuing thread runs all other ops itself."""
    return ThreadLanes(inline=frozenset(Lane) - {Lane.LOADER, Lane.HOST, Lane.WRITE, Lane.KEYS})
