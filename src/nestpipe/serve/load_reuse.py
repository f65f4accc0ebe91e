"""How often a prefix is asked for again, and what host memory would take to still have it.

The store is the expander's: bytes-bounded, least recently used first out, each entry gone `ttl_s`
after its last use. One pass answers for every size and every TTL at once: an entry is still there
when it and all that was used since fit (its stack distance), and the TTL has not passed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Shapes: R requests

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as far as reuse is concerned."""

    time_s: float
    key: tuple[str, int]
    """The user, and which prefix of theirs."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """For every request, what a store would have needed to still have its prefix."""

    bytes_R: NDArray[np.float64]
    """Of memory; infinite at a first visit."""
    gaps_R: NDArray[np.float64]
    """Seconds since the last use; infinite at a first visit."""

    def share(self, num_bytes: float = NEVER, ttl_s: float = NEVER) -> float:
        """Share of requests that such a store would have served.

        Exact for stores that the largest prefix fits in, a lower bound for smaller ones.
        """
        if not len(self.bytes_R):
            return 0.0
        seen_R = np.isfinite(self.gaps_R)
        return float((seen_R & (self.bytes_R <= num_bytes) & (self.gaps_R <= ttl_s)).mean())

    def bytes_for(self, share: float, ttl_s: float = NEVER) -> float | None:
        """The smallest store that serves such a share of requests; None: no store does."""
        kept_R = np.sort(self.bytes_R[np.isfinite(self.gaps_R) & (self.gaps_R <= ttl_s)])
        place = int(np.ceil(share * len(self.bytes_R) - 1e-9))
        if place <= 0:
            return 0.0
        return float(kept_R[place - 1]) if place <= len(kept_R) else None


def reuse(asked: Sequence[Asked], progress: Callable[[], None] = lambda: None) -> Reuse:
    """Stack distances in bytes and gaps in time; `asked` is in the order of time."""
    recent = _Sums(len(asked))
    last: dict[tuple[str, int], int] = {}
    bytes_R = np.full(len(asked), NEVER)
    gaps_R = np.full(len(asked), NEVER)
    for number, one in enumerate(asked):
        before = last.get(one.key)
        if before is not None:
            bytes_R[number] = recent.above(before) + one.num_bytes
            gaps_R[number] = one.time_s - asked[before].time_s
            recent.add(before, -asked[before].num_bytes)
        recent.add(number, one.num_bytes)
        last[one.key] = number
        progress()
    return Reuse(bytes_R, gaps_R)


def share_by_replay(asked: Sequence[Asked], num_bytes: float, ttl_s: float = NEVER) -> float:
    """What `Reuse.share` says, by keeping the store itself: the slow twin, for one size."""
    store: OrderedDict[tuple[str, int], Asked] = OrderedDict()
    held = served = 0
    for one in asked:
        kept = store.pop(one.key, None)
        if kept is not None:
            served += one.time_s - kept.time_s <= ttl_s
            held -= kept.num_bytes
        store[one.key] = one
        held += one.num_bytes
        while held > num_bytes:
            held -= store.popitem(last=False)[1].num_bytes
    return served / len(asked) if asked else 0.0


class _Sums:
    """Numbers at places, and the sum of all above a place, both in log time (a Fenwick tree)."""

    def __init__(self, count: int) -> None:
        self._tree = [0] * (count + 1)
        self._total = 0

    def add(self, place: int, number: int) -> None:
        self._total += number
        place += 1
        while place < len(self._tree):
            self._tree[place] += number
            place += place & -place

    def above(self, place: int) -> int:
        """The sum of the numbers at all places after this one."""
        below, place = 0, place + 1
        while place > 0:
            below += self._tree[place]
            place -= place & -place
        return self._total - below
