"""Where ranks that are threads meet for a collective, and learn who will come no more."""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from nestpipe.errors import RunError


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank brings to a collective."""

    name: str
    """Which collective and what for; the same on every rank, or they have parted ways."""
    given: object


class Meeting:
    """The place where all members meet, again and again; each brings a call and sees all of them.

    Members have their ranks in the whole. A meeting of a part hears of those that leave the whole.
    """

    def __init__(
        self, members: Sequence[int], timeout_s: float, whole: Meeting | None = None
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

    def part(self, members: Sequence[int]) -> Meeting:
        """A meeting of some of the members."""
        return Meeting(members, self._timeout_s, self)

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
